"""Explain the errors that MMEngine, MMDetection and torch raise for a mistake in a config."""
from __future__ import annotations

import errno
import os
import re
import traceback
from collections.abc import Iterator, Mapping
from itertools import dropwhile
from typing import Any

from mmengine.evaluator import BaseMetric, Evaluator
from mmengine.registry import OPTIMIZERS, Registry
from mmengine.runner import BaseLoop, Runner

from ..data.data_errors import summary, where_raised
from ..distributed.unwrap import unwrap
from ..errors import ConfigError, MissingDataError, MMReproError, TrainingError
from ..facts.collect import flatten
from ..runs.config_edits import missing_file
from ..util.libraries import is_code_of_user
from ..util.text import class_name, did_you_mean, listed, shorten

_UNREGISTERED = re.compile(r'(\S+) is not in the [\w: ]+ registry')
# errors of MMEngine for a config: class, a pattern of the message, the fix
_MISTAKES = (
    (AssertionError, 'AmpOptim', 'there is none here: train without --amp, with '
     "optim_wrapper.type='OptimWrapper'"),
    (AttributeError, "'(float|int)' object has no attribute 'backward'", 'the model has returned '
     "no loss: MMEngine adds up the tensors with 'loss' in their name"),
    (RuntimeError, 'does not require grad and does not have a grad_fn', 'the loss depends on no '
     'parameter that is trained: look for frozen_stages, requires_grad and detach()'),
)
# method of the runner that builds a part -> key of the config
_BUILDERS = dict(
    build_model='model', build_optim_wrapper='optim_wrapper',
    build_param_scheduler='param_scheduler', build_train_loop='train_cfg',
    build_val_loop='val_cfg', build_test_loop='test_cfg',
    build_evaluator='val_evaluator', build_visualizer='visualizer',
    register_default_hooks='default_hooks', register_custom_hooks='custom_hooks')
# part of a run -> key of the config, for what its own code raises when it is used
_PARTS = ((BaseLoop, 'train_cfg'), ((BaseMetric, Evaluator), 'val_evaluator'))
# methods of the runner that raise an error where an argument is missing
_OF_ARGUMENTS = ('__init__', 'train', 'val', 'test')
# messages that say no more than that a number of a class is too large
_CLASSES = re.compile('num_classes|out of bounds|out of range|device-side assert')
# messages of torch where the output of a layer does not fit the next one
_SHAPES = re.compile('expected input|size of tensor|cannot be multiplied|should contain|'
                     'normalized_shape|must match|invalid for input of size')
# errors of torch's store, which not all versions export
_OF_A_RENDEZVOUS = ('DistNetworkError', 'DistStoreError')
# of a disk, whatever was to be written: no setting is wrong
_OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def explained(cfg: Any, error: Exception, runner: Any = None) -> MMReproError | None:
    """Return the error in words of the config; None where the traceback is needed.

    Args:
        cfg: the config.
        error: what building or training has raised.
        runner: None if it could not be built.
    """
    missing = _missing_data(cfg, error)
    if missing is not None:
        return missing
    if isinstance(error, OSError) and (error.errno in _OF_A_DISK or _is_of_work_dir(cfg, error)):
        file = error.filename or f'a file of the run, whose work_dir is {cfg.get("work_dir")},'
        return TrainingError(f'{file} cannot be written or read: {error.strerror} '
                             f'({where_raised(error)})')
    if isinstance(error, FileNotFoundError) and _frames(error)[-1:] and (
            _frames(error)[-1].f_code.co_name == 'collect_results_cpu'):
        return TrainingError(
            'the ranks exchange the results of an evaluation in files, and the folder of rank 0 is '
            f'not on this machine ({summary(error)}). Start all ranks in one shared folder, or '
            "give collect_device='gpu' to the metrics (val_evaluator, test_evaluator), which "
            'exchanges them over the network, on CPUs as well')
    if type(error).__name__ in _OF_A_RENDEZVOUS and any(
            frame.f_code.co_name == 'init_process_group'
            for frame, _ in traceback.walk_tb(error.__traceback__)):
        return _of_rendezvous(error)
    text = str(error.args[0]) if error.args else ''
    unregistered = _UNREGISTERED.search(text)
    if isinstance(error, KeyError) and unregistered:
        registry = next((frame.f_locals['registry'] for frame in reversed(_frames(error))
                         if isinstance(frame.f_locals.get('registry'), Registry)), None)
        return _unregistered(unregistered[0], unregistered[1], registry)
    for kind, pattern, meaning in _MISTAKES:
        if isinstance(error, kind) and re.search(pattern, text):
            first = ' '.join(text.partition('. ')[0].split()[-40:])
            return ConfigError(f'{first}; {meaning}')
    key = _being_built(error) or _part_in_use(error)
    if key is not None:
        return _of_setting(cfg, key, error)
    if any(frame.f_code.co_name == 'pretty_text' for frame in _frames(error)):
        return _not_text(cfg)
    return (_of_runner(cfg, error) or _of_package(cfg, error) or _of_hook(cfg, error)
            or _of_classes(runner, error) or _of_shapes(runner, error))


def _is_of_work_dir(cfg: Any, error: OSError) -> bool:
    """Whether the work directory refuses a file that its permissions allow, as NFS does to root."""
    folder, file = cfg.get('work_dir'), error.filename
    return isinstance(error, PermissionError) and isinstance(file, str) and bool(folder) and (
        os.path.abspath(file).startswith(os.path.join(os.path.abspath(folder), '')))


def _of_rendezvous(error: Exception) -> TrainingError:
    """Say where the ranks were to meet, and which this one is."""
    names = ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')
    given = ', '.join(f'{name}={os.environ.get(name)}' for name in names)
    return TrainingError(
        f'the ranks have not found each other: {summary(error)} ({given}). Every rank has to be '
        'started, with one WORLD_SIZE, a RANK of its own below it, and the address and a free port '
        'of the machine of rank 0; env_cfg.dist_cfg.timeout is how many seconds they wait')


def _of_shapes(runner: Any, error: Exception) -> ConfigError | None:
    """Explain an error of shapes: name the layer of a library that its input does not fit."""
    if (runner is None or not isinstance(error, RuntimeError) or not _SHAPES.search(str(error))
            or not _is_in_library(error)):
        return None
    names = {id(module): name for name, module in unwrap(runner.model).named_modules()}
    owners = (frame.f_locals.get('self') for frame in reversed(_frames(error)))
    owner = next((module for module in owners if names.get(id(module))), None)
    if owner is None:
        return None
    return ConfigError(f'model.{names[id(owner)]} ({type(owner).__name__}) does not fit what the '
                       f'layer before it returns: {summary(error)} ({where_raised(error)})')


def _of_classes(runner: Any, error: Exception) -> TrainingError | None:
    text = str(error.args[0]) if error.args else ''
    found = ''
    if runner is not None and _CLASSES.search(text):
        found = ' and '.join(_other_classes(runner))
    if found:
        return TrainingError(f'{found}: {summary(error)} ({where_raised(error)})')
    return None


def _frames(error: BaseException) -> list[Any]:
    """Return the frames from the runner on; first those of an error that this one has replaced."""
    replaced = [] if error.__context__ is None else _frames(error.__context__)
    own = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return [*replaced, *dropwhile(
        lambda frame: not isinstance(frame.f_locals.get('self'), Runner), own)]


def _is_in_library(error: BaseException) -> bool:
    """Whether no code of the user is between the runner and what has raised."""
    return not any(is_code_of_user(frame.f_globals.get('__name__', ''), frame.f_code.co_filename)
                   for frame in _frames(error))


def _part_in_use(error: Exception) -> str | None:
    """Return the key of the part of the run whose own code has raised; None for no part."""
    frames = _frames(error)
    if not frames or not _is_in_library(error):
        return None
    owner = frames[-1].f_locals.get('self')
    return next((key for cls, key in _PARTS if isinstance(owner, cls)), None)


def _of_runner(cfg: Any, error: Exception) -> ConfigError | None:
    """Explain an error of the runner itself about its arguments."""
    frames = _frames(error)
    if not frames or frames[-1].f_code.co_name not in _OF_ARGUMENTS or (
            frames[-1].f_globals.get('__name__') != Runner.__module__):
        return None
    text, _, values = ' '.join(str(error).split()).partition(', but got ')
    missing = [key for key in cfg if re.search(rf'\b{key}\b', text) and cfg[key] is None]
    if missing:
        return ConfigError(f'{text}; None: {listed(missing)}')
    return ConfigError(shorten(f'{text}, but got {values}', 300) if values else text)


def _of_package(cfg: Any, error: Exception) -> ConfigError | None:
    """Return which part of the config needs a package that is not installed."""
    if not isinstance(error, ImportError) or not _is_in_library(error):
        return None
    classes = {type(frame.f_locals['self']).__name__ for frame in _frames(error)
               if 'self' in frame.f_locals}
    named = [f'{name}={leaf!r}' for name, leaf in flatten(cfg.to_dict()).items()
             if isinstance(leaf, str) and name.endswith('.type') and class_name(leaf) in classes]
    # the innermost part: a visualizer has backends
    return ConfigError(f'{max(named, key=len)}: {summary(error)}') if named else None


def _of_hook(cfg: Any, error: Exception) -> ConfigError | None:
    """Explain an error of a library's hook about its settings."""
    found = next((frame.f_locals for frame in _frames(error)
                  if frame.f_code.co_name == 'call_hook' and 'hook' in frame.f_locals), None)
    if found is None or not _is_in_library(error):
        return None
    name = type(found['hook']).__name__
    hooks = {**{f'default_hooks.{key}': value for key, value in (
        cfg.get('default_hooks') or {}).items()},
        **{f'custom_hooks[{number}]': value for number, value in enumerate(
            cfg.get('custom_hooks') or ())}}
    keys = [key for key, value in hooks.items()
            if isinstance(value, Mapping) and class_name(value.get('type')) == name]
    if len(keys) != 1:
        return None
    metrics: Mapping[str, Any] = next((frame.f_locals['metrics'] for frame in _frames(error)
                    if isinstance(frame.f_locals.get('metrics'), Mapping)), {})
    known = ''
    if isinstance(error, KeyError) and metrics:
        known = f'; the validation has {listed([*metrics], 10)}'
    return _of_value(keys[0], hooks[keys[0]], error, known)


def _not_text(cfg: Any) -> ConfigError | None:
    """Return which values no file can hold: MMEngine writes the config into the work directory."""
    named = [*_objects(cfg.to_dict(), '')]
    if not named:
        return None
    return ConfigError(f'{listed(named, 3)}: MMEngine cannot write this into the config file of '
                       'the run. Register the function or class, and give dict(type=NAME)')


def _objects(value: Any, name: str) -> Iterator[str]:
    """Yield the settings whose text is no Python, such as a function's."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _objects(part, f'{name}.{key}' if name else str(key))
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            yield from _objects(part, f'{name}[{number}]')
    elif repr(value).startswith('<'):
        yield f'{name}={value!r}'


def _missing_data(cfg: Any, error: Exception) -> MMReproError | None:
    inner: BaseException | None = error
    while isinstance(inner, FileNotFoundError):  # some versions of MMEngine raise it again
        missing = isinstance(inner.filename, str) and missing_file(cfg, inner.filename)
        if missing:
            return MissingDataError(f'{missing}. Get the dataset, or change data_root with '
                                    '--cfg-options')
        inner = inner.__cause__ or inner.__context__
    return None


def _being_built(error: Exception) -> str | None:
    """Return the key of the part of the run whose building has raised; None for no part."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        name = frame.f_code.co_name
        if name in _BUILDERS and isinstance(frame.f_locals.get('self'), Runner):
            return _BUILDERS[name]
    return None


def _of_setting(cfg: Any, key: str, error: Exception) -> ConfigError:
    value = cfg.get(key)
    optimizer = value.get('optimizer') if isinstance(value, Mapping) else None
    name = optimizer.get('type') if isinstance(optimizer, Mapping) else None
    # MMEngine looks at the signature of what it has not found
    if key == 'optim_wrapper' and isinstance(name, str) and OPTIMIZERS.get(name) is None:
        return _unregistered(f'{name} is not in the optimizer registry', name, OPTIMIZERS)
    return _of_value(key, value, error)


def _of_value(key: str, value: Any, error: Exception, more: str = '') -> ConfigError:
    text = str(error)
    named = [f'{name}={leaf!r}' for name, leaf in flatten({key: value}).items()
             if isinstance(leaf, str) and repr(leaf) in text
             or f"'{name.rpartition('.')[2]}'" in text
             or isinstance(error, ZeroDivisionError) and leaf == 0 and leaf is not False]
    shown = named[0] if len(named) == 1 else f'{key} = {shorten(repr(value), 200)}'
    what = re.sub(r' in <\S+ object at 0x\w+>$', '', summary(error))  # added by MMEngine
    return ConfigError(f'{shown}: {what}{more} ({where_raised(error)})')


def _unregistered(what: str, name: str, registry: Registry | None) -> ConfigError:
    """Return an error that suggests a name of the registry or its parents."""
    names: list[str] = []
    while registry is not None:
        names += registry.module_dict
        registry = registry.parent
    near = did_you_mean(name, names)
    advice = f'{near} If not,' if near else '; correct the name, or'
    return ConfigError(f'{what}{advice} import the module that registers it: custom_imports = '
                       'dict(imports=[...], allow_failed_imports=False)')


def _other_classes(runner: Any) -> Iterator[str]:
    """Yield a text for each part of the model with another number of classes than the data."""
    loops = (getattr(runner, f'_{stage}_loop', None) for stage in ('train', 'test'))
    loaders = (getattr(loop, 'dataloader', None) for loop in loops)
    metas = (getattr(getattr(loader, 'dataset', None), 'metainfo', None) for loader in loaders)
    classes = next((meta['classes'] for meta in metas if meta and 'classes' in meta), None)
    if classes is None:
        return
    for name, module in runner.model.named_modules():
        count = getattr(module, 'num_classes', None)
        if isinstance(count, int) and count != len(classes) and not name.endswith('rpn_head'):
            yield f'model.{name}.num_classes is {count}, and the dataset has {len(classes)} classes'
