"""What MMEngine, MMDetection and torch raise for a mistake in a config, in one line."""
from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from mmengine.runner import Runner

from ..data.data_errors import summary, where_raised
from ..errors import ConfigError, MissingDataError, MMReproError, TrainingError
from ..facts.collect import flatten
from ..runs.reduction import missing_file
from ..util.text import did_you_mean, shorten

# what MMEngine raises for a config: class, a pattern of its message, what to do
_MISTAKES = (
    (KeyError, r'is not in the \S+ registry', 'correct the name, or import the module that '
     'registers it: custom_imports = dict(imports=[...], allow_failed_imports=False)'),
    (AssertionError, 'AmpOptim', 'there is none here: train without --amp, with '
     "optim_wrapper.type='OptimWrapper'"),
    (RuntimeError, 'each data_itement in list of batch', 'the samples of a batch are no data '
     'samples: end the pipeline with PackDetInputs, or give the loader a collate_fn'),
)
# method of the runner that builds a part -> key of the config
_BUILDERS = dict(
    build_model='model', build_optim_wrapper='optim_wrapper',
    build_param_scheduler='param_scheduler', build_train_loop='train_cfg',
    build_val_loop='val_cfg', build_test_loop='test_cfg',
    build_evaluator='val_evaluator', build_visualizer='visualizer',
    register_default_hooks='default_hooks', register_custom_hooks='custom_hooks')
# messages that say no more than that a number of a class is too large
_CLASSES = re.compile('num_classes|out of bounds|out of range|device-side assert')


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
    text = str(error.args[0]) if error.args else ''
    for kind, pattern, meaning in _MISTAKES:
        if isinstance(error, kind) and re.search(pattern, text):
            first = ' '.join(text.partition('. ')[0].split()[-40:])
            return ConfigError(f'{first}; {meaning}')
    key = _being_built(error)
    if key is not None:
        return _of_setting(cfg, key, error)
    found = ''
    if runner is not None and _CLASSES.search(text):
        found = ' and '.join(_other_classes(runner))
    if found:
        return TrainingError(f'{found}: {summary(error)} ({where_raised(error)})')
    return None


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
    if key == 'optim_wrapper' and isinstance(optimizer, Mapping):
        unknown = _unknown_optimizer(optimizer.get('type'))
        if unknown:
            return ConfigError(f'optim_wrapper.optimizer.{unknown}')
    text = str(error)
    named = [f'{name}={leaf!r}' for name, leaf in flatten({key: value}).items()
             if isinstance(leaf, str) and repr(leaf) in text
             or f"'{name.rpartition('.')[2]}'" in text]
    shown = named[0] if len(named) == 1 else f'{key} = {shorten(repr(value), 200)}'
    return ConfigError(f'{shown}: {summary(error)} ({where_raised(error)})')


def _unknown_optimizer(name: Any) -> str:
    from mmengine.registry import OPTIMIZERS

    if not isinstance(name, str) or OPTIMIZERS.get(name) is not None:
        return ''
    return f'type={name!r} is not in the optimizer registry{did_you_mean(name, _names(OPTIMIZERS))}'


def _names(registry: Any) -> list[str]:
    """Return what a registry and its parents hold."""
    found: list[str] = []
    while registry is not None:
        found += registry.module_dict
        registry = registry.parent
    return found


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
