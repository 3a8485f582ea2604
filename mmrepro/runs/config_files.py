"""Read configs and change them from the command line; an error is a single line."""
from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Iterable, Mapping
from traceback import walk_tb
from typing import Any

from mmengine.config import Config, DictAction
from mmengine.utils import import_modules_from_strings

from ..config import RandomnessConfig
from ..errors import ConfigError, RandomnessError
from ..util.text import nearest, not_a, shorten, similarity

# MMEngine imports pkg_resources for every base of another package
warnings.filterwarnings('ignore', message='pkg_resources is deprecated')

ADD = '+'  # before the key of an option: add the key, whatever it resembles

# top-level keys that MMEngine, MMDetection and mmrepro read
TOP_LEVEL = (
    'randomness', 'custom_imports', 'env_cfg', 'resume', 'load_from', 'model', 'work_dir',
    'train_dataloader', 'val_dataloader', 'test_dataloader', 'train_cfg', 'val_cfg', 'test_cfg',
    'auto_scale_lr', 'optim_wrapper', 'param_scheduler', 'val_evaluator', 'test_evaluator',
    'default_hooks', 'custom_hooks', 'data_preprocessor', 'launcher', 'log_processor', 'log_level',
    'visualizer', 'default_scope', 'experiment_name', 'runner_type', 'model_wrapper_cfg',
    'find_unused_parameters', 'sync_bn', 'compile')
# keys that are read rarely: a similar variable of a config is no mistake
RARE = ('tta_model', 'tta_pipeline', 'broadcast_buffers', 'detect_anomalous_params', 'strategy',
        'activation_checkpointing', 'efficient_conv_bn_eval', 'seed', 'deterministic',
        'diff_seed')
# files that execute a config: their frames do not say where the config is wrong
MACHINERY = ('/mmengine/', '/importlib/', '/ast.py', '<frozen ', os.path.abspath(__file__))
# least similarity: of keys, of the words in them, of keys with joined words
SIMILAR, SIMILAR_WORD, SAME_BUT_JOINED = 0.8, 0.6, 0.9


def shipped(path: str) -> str:
    """Return the absolute path of a file in configs/ or tools/, installed or in a checkout.

    Raises:
        FileNotFoundError: the file does not exist; names both paths.
    """
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    paths = [os.path.join(package, '.mim', path), os.path.join(os.path.dirname(package), path)]
    for candidate in paths:
        if os.path.exists(candidate):
            return candidate
    raise FileNotFoundError(f'{path} was not found: neither {paths[0]} nor {paths[1]} exists')


def find_config(name: str) -> str:
    """Return the path of a config: ``name``, or ``package::path`` of an OpenMMLab package.

    Raises:
        ConfigError: there is no such file; the message has similar names.
    """
    if '::' not in name:
        if not os.path.isfile(name):
            raise ConfigError(not_a('config', name) + ('' if os.path.exists(name) else _near(name)))
        return name
    package, _, relative = name.partition('::')
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f'{name}: the package {package!r} is not installed')
    folder = os.path.join(list(spec.submodule_search_locations)[0], '.mim', 'configs')
    path = os.path.join(folder, relative if relative.endswith('.py') else f'{relative}.py')
    if not os.path.isfile(path):
        raise ConfigError(f'{name}: no such config in {folder}{_near(path)}')
    return path


def _near(path: str) -> str:
    folder = os.path.dirname(path) or '.'
    names = os.listdir(folder) if os.path.isdir(folder) else []
    near = nearest(os.path.basename(path), names, most=3)
    return f'; near: {", ".join(near)}' if near else ''


def read_config(path: str, options: Mapping[str, Any] | None = None,
                imports: bool = True) -> Config:
    """Read a config and apply the changes of a command line.

    Args:
        options: dotted key -> value, as for :func:`merge_options`.
        imports: import the modules in ``custom_imports``.

    Raises:
        ConfigError: the file is no config, or an option does not fit it; names file and line.
    """
    try:
        cfg = Config.fromfile(path, import_custom_modules=False)
    except Exception as error:  # a config is a program: it may raise anything
        raise ConfigError(_reason(path, error)) from error
    if imports:
        import_modules(cfg)
    merge_options(cfg, options or {})
    return cfg


def config_of(path: str, options: Mapping[str, Any] | None = None, imports: bool = True) -> Config:
    """Find and read the config of a training."""
    cfg = read_config(find_config(path), options, imports)
    if 'model' not in cfg:
        raise ConfigError(f'{path}: has no model, so it is not the config of a training')
    return cfg


def import_modules(cfg: Config) -> None:
    """Import the modules in ``custom_imports`` of a config that is not in pure Python."""
    if cfg.get('custom_imports') and not Config._is_lazy_import(cfg.filename):
        try:
            import_modules_from_strings(**cfg.custom_imports)
        except Exception as error:  # a module may raise anything
            raise ConfigError(_reason(cfg.filename, error)) from error


def _reason(path: str, error: BaseException) -> str:
    """Return file, line and error in one line."""
    frames = list(walk_tb(error.__traceback__))
    # MMEngine's frames know the name of a base, and of a file that it parses as text
    files = [frame.f_locals['filename'] for frame, _ in frames
             if frame.f_globals.get('__name__') == 'mmengine.config.config'
             and isinstance(frame.f_locals.get('filename'), str)]
    file = files[-1] if files else path
    if isinstance(error, SyntaxError):
        return f'{file}, line {error.lineno}: {error.msg}' if error.lineno else f'{file}: {error}'
    if isinstance(error, ImportError):  # MMEngine repeats it with the whole sys.path
        while error.__context__ is not None:
            error = error.__context__
        frames = list(walk_tb(error.__traceback__))
    where = next((f'{code.co_filename}, line {line}: ' for code, line in (
        (frame.f_code, line) for frame, line in reversed(frames))
        if not any(part in code.co_filename for part in MACHINERY)), f'{file}: ')
    text = (str(error).splitlines() or [''])[0]
    hint = ' (its folder must be on PYTHONPATH)' if isinstance(error, ModuleNotFoundError) else ''
    return f'{where}{type(error).__name__}: {text}{hint}'


def without_mark(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without the mark :data:`ADD`."""
    return {key[len(ADD):] if key.startswith(ADD) else key: value
            for key, value in options.items()}


def setting(text: str) -> tuple[Any, ...]:
    """Return key and value of ``KEY=VALUE``; the value is read as MMEngine reads it.

    >>> setting('train_cfg.max_epochs=3')
    ('train_cfg.max_epochs', 3)
    """
    key, equals, value = text.partition('=')
    if not equals or not key:
        raise ConfigError(f'{text!r} must be KEY=VALUE')
    try:
        return key, DictAction._parse_iterable(value)
    except AssertionError as error:
        raise ConfigError(f'{text!r}: the brackets of the value are not balanced') from error
    except RecursionError as error:  # a comma inside of other brackets than ( ) and [ ] of a list
        raise ConfigError(f'{text!r}: the value is not a number, a word or a list of them; what '
                          'has dict(...) in it belongs into the config') from error


def merge_options(cfg: Config, options: Mapping[str, Any]) -> None:
    """Change settings of a config in place, as ``--cfg-options`` asks.

    A key may be new where its parent is a dict: training code reads more keys than a config has.
    But a key that resembles an existing one is a typing error, and a top-level key that nothing
    reads has no effect. ``+`` before the key adds it all the same.

    Args:
        options: dotted key -> value; an index of a list is a key.

    Raises:
        ConfigError: names the key and the nearest existing one.
    """
    for key in options:
        if not key.startswith(ADD):
            _check_key(cfg, key, options[key])
    plain = without_mark(options)
    if not plain:
        return
    try:
        cfg.merge_from_dict(plain)
    except (TypeError, KeyError) as error:
        raise ConfigError(f'{", ".join(plain)}: {shorten(error.args[0], 200)}') from error
    if any(key.partition('.')[0] == 'randomness' for key in plain):
        try:
            RandomnessConfig.parse(cfg.get('randomness'))
        except RandomnessError as error:
            raise ConfigError(str(error)) from error


def _check_key(cfg: Config, key: str, value: Any) -> None:
    node: Any = cfg
    done: list[str] = []
    for part in key.split('.'):
        where = '.'.join(done)
        if isinstance(node, (list, tuple)):
            if not (part.isdecimal() and int(part) < len(node)):
                allowed = f'an index from 0 to {len(node) - 1}' if node else 'nothing: it is empty'
                raise ConfigError(f'{key}={value}: {where} is a list, and {part!r} is not in it; '
                                  f'allowed is {allowed}')
            node = node[int(part)]
        elif isinstance(node, (dict, Config)):
            if part not in node:
                # the parser of `randomness` knows its keys; _delete_ and the like are MMEngine's
                known = where == 'randomness' if done else part in (*TOP_LEVEL, *RARE)
                near = _nearest(part, node, () if done else TOP_LEVEL)
                if not known and not part.startswith('_') and (near or not done):
                    raise ConfigError(_unknown(key, value, where, part, near))
                return
            node = node[part]
        else:
            raise ConfigError(f'{key}={value}: {where} is {shorten(repr(node))}, which has no '
                              f'keys; give {where} a value')
        done.append(part)


def _unknown(key: str, value: Any, where: str, part: str, near: str) -> str:
    text = f'{key}={value}: {where or "the config"} has no key {part!r}'
    if not where:
        text += ', and MMEngine reads none of that name'
    if near:
        text += f'; did you mean {".".join(filter(None, [where, near]))}?'
    return f'{text} ({ADD}{key}={value} adds it)'


def _nearest(key: str, *known: Iterable[str]) -> str:
    """Return the name of which ``key`` is a misspelling, or ''."""
    names = dict.fromkeys(name for names in known for name in names if isinstance(name, str))
    return next((near for near in nearest(key, names, 3, SIMILAR)
                 if _is_misspelt(key, near)), '')


def _is_misspelt(key: str, near: str) -> bool:
    """Whether all words of two similar keys are similar: not ``save_best`` and ``save_last``."""
    words = [name.lower().split('_') for name in (key, near)]
    if len(words[0]) != len(words[1]):
        return similarity(key.lower(), near.lower()) >= SAME_BUT_JOINED
    return all(similarity(a, b) >= SIMILAR_WORD for a, b in zip(*words))
