"""Changes of a config that command lines and comparisons of runs ask for.

A training is reduced without changing its code path: fewer and smaller images. What needs torch is
imported late: the process may have to start again first.
"""
from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from mmengine.config import Config, ConfigDict

from ..config import imports_of, randomness_of
from ..errors import ConfigError, MissingDataError
from ..util.text import class_name, listed

SEED = 0  # of runs that are compared, where the config has none

# settings of CheckpointHook that decide what a checkpoint holds
IN_CHECKPOINTS = ('type', 'save_optimizer', 'save_param_scheduler')

TEST_TIME_AUGMENTATION = dict(
    type='DetTTAModel', tta_cfg=dict(nms=dict(type='nms', iou_threshold=0.5), max_per_img=100))
TEST_TIME_META_KEYS = ('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor', 'flip',
                       'flip_direction')


def import_mmrepro(cfg: Config) -> bool:
    """Let the config import mmrepro; return whether it did not."""
    imports = imports_of(cfg)
    if 'mmrepro' in imports:
        return False
    cfg.custom_imports = dict(imports=[*imports, 'mmrepro'], allow_failed_imports=False)
    return True


def virtual_ranks(cfg: Config) -> int | None:
    return randomness_of(cfg).virtual_ranks.ranks


def seed_of(cfg: Config) -> int | None:
    # MMDetection 2.x has `seed` at the top
    seed: int | None = (cfg.get('randomness') or {}).get('seed', cfg.get('seed'))
    return seed


def fix_seed(cfg: Config) -> bool:
    """Give the config a seed; return whether it had none, so that every run would draw another."""
    missing = seed_of(cfg) is None
    if missing:
        cfg.randomness = dict(cfg.get('randomness') or {}, seed=SEED)
    return missing


def prepare(cfg: Config, names: Sequence[str] = (), full: bool = False) -> list[str]:
    """Change a config in place into one for comparisons: small, unless ``full``.

    Args:
        names: variations of ``verify``; ``'validation'`` needs the data of the validation.

    Returns:
        The changes, as lines for a report.

    Raises:
        MissingDataError: a file that the config reads does not exist.
    """
    notes = []
    if import_mmrepro(cfg):
        notes.append('the config does not import mmrepro; here it does')
    if fix_seed(cfg):
        notes.append(f'the config has no seed, and every run would draw another one; here it is '
                     f'{SEED}')
    phases = ('train', 'val') if 'validation' in names and cfg.get('val_cfg') else ('train', )
    check_data(cfg, phases)
    if 'val' in phases:
        few_images(cfg, 'val', VAL_IMAGES)
    if full:
        notes.append('as the config is (--full)')
    else:
        longest = shrink(cfg)
        images = IMAGES * (virtual_ranks(cfg) or 1)
        whole = few_images(cfg, 'train', images)
        but = f' (all of {listed(whole)}: no argument `indices`)' if whole else ''
        side = f'longest side {min(longest, LONGEST)} of {longest} pixels, ' if longest else ''
        notes.append(f'reduced: {side}{images} images{but}, no weights to download '
                     '(--full: as the config is)')
    return [*notes, 'no checkpoints and no validation, but for what is varied; fingerprints']


def add_fingerprints(cfg: Any, level: str) -> None:
    """Add a FingerprintHook of this level; it replaces those of the config."""
    kept = [hook for hook in cfg.get('custom_hooks') or [] if not (
        isinstance(hook, Mapping) and class_name(hook.get('type')) == 'FingerprintHook')]
    cfg.custom_hooks = [*kept, dict(type='FingerprintHook', level=level)]


def without_checkpoints(cfg: Config) -> None:
    """Let the training write no checkpoints; what one would hold stays as the config has it."""
    cfg.setdefault('default_hooks', ConfigDict())
    given = cfg.default_hooks.get('checkpoint') or {}
    kept = {name: value for name, value in given.items() if name in IN_CHECKPOINTS}
    cfg.default_hooks.checkpoint = {
        'type': 'CheckpointHook', **kept, 'interval': -1, 'save_last': False}


def only_fingerprints(cfg: Config, level: str, validate: bool = False) -> None:
    """Let the training write fingerprints of this level, and neither checkpoints nor metrics."""
    add_fingerprints(cfg, level)
    without_checkpoints(cfg)
    for phase in ('test', ) if validate else ('val', 'test'):
        for key in ('cfg', 'dataloader', 'evaluator'):
            cfg[f'{phase}_{key}'] = None


def scale_learning_rate(cfg: Config) -> None:
    """Scale the learning rate by the batch size, as MMEngine does with ``auto_scale_lr``."""
    scale = cfg.get('auto_scale_lr') or {}
    if 'base_batch_size' not in scale:
        raise ConfigError('--auto-scale-lr needs auto_scale_lr = dict(base_batch_size=...) in the '
                          'config, the batch size that its learning rate was chosen for')
    cfg.auto_scale_lr.enable = True


def augment_test(cfg: Config) -> None:
    """Wrap model and pipeline for test-time augmentation, with flips if the config names none."""
    if 'tta_model' not in cfg:
        warnings.warn('the config has no tta_model; MMDetection\'s default is used', stacklevel=2)
        cfg.tta_model = deepcopy(TEST_TIME_AUGMENTATION)
    data = cfg.test_dataloader.dataset
    if 'tta_pipeline' not in cfg:
        warnings.warn('the config has no tta_pipeline; flips are used', stacklevel=2)
        flips: list[dict[str, Any]] = [dict(type='RandomFlip', prob=p) for p in (1.0, 0.0)]
        pack = dict(type='PackDetInputs', meta_keys=TEST_TIME_META_KEYS)
        augment = dict(type='TestTimeAug', transforms=[flips, [pack]])
        cfg.tta_pipeline = [*deepcopy(innermost(data)[0].pipeline[:-1]), augment]
    cfg.model = ConfigDict(**cfg.tta_model, module=cfg.model)
    data.pipeline = cfg.tta_pipeline


LONGEST = 256  # pixels of the longer side of an image
IMAGES = 8
VAL_IMAGES = 4
MAX_BATCH = 2
STEP = 32  # sizes stay multiples: strides of backbones, padding

# keys of transforms and preprocessors whose value is a size, or a list of sizes, in pixels
SIZES = ('scale', 'scales', 'img_scale', 'img_scales', 'size', 'crop_size', 'random_size_range',
         'image_size')


def shrink(cfg: Any) -> int:
    """Shrink the images of pipelines and preprocessor; return the longest side before."""
    nodes = [cfg.get('train_dataloader'), cfg.get('val_dataloader'), cfg.get('custom_hooks'),
             cfg.model.get('data_preprocessor')]
    sizes = [size for node in nodes if node for size in _sizes(node)]
    longest = max((max(size) for _, _, size in sizes), default=0)
    if longest > LONGEST:
        for node, key, size in sizes:
            node[key] = type(size)(max(STEP, round(side * LONGEST / longest / STEP) * STEP)
                                   for side in size)
    random_weights(cfg._cfg_dict)
    cfg.train_dataloader.batch_size = min(cfg.train_dataloader.get('batch_size', 1), MAX_BATCH)
    return longest


def random_weights(settings: Any) -> None:
    """Let the models of a config begin from random weights, so that none are downloaded.

    Weights in a file on this disk stay: the training depends on them.
    """
    from ..objects.walks import dicts
    for node in dicts(settings):
        start = node.get('init_cfg')
        inits = start if isinstance(start, list) else [start]
        drawn = [init for init in inits if not (
            isinstance(init, dict) and 'checkpoint' in init and not _is_here(init['checkpoint']))]
        if drawn != inits:
            node['init_cfg'] = drawn or None
        if isinstance(node.get('pretrained'), (str, bool)) and not _is_here(node['pretrained']):
            node['pretrained'] = None if isinstance(node['pretrained'], str) else False
        if 'teacher_ckpt' in node and not _is_here(node['teacher_ckpt']):
            node['teacher_ckpt'] = None
        if 'load_from' in node and 'model' in node and not _is_here(node['load_from']):
            node['load_from'] = None


def _is_here(path: Any) -> bool:
    """Whether weights are in a file on this disk."""
    return isinstance(path, str) and os.path.isfile(os.path.expanduser(path))


def _sizes(node: Any, within: str = '') -> Iterator[tuple[Any, Any, Any]]:
    """Yield (container, key, pair of sides) for every size in the config."""
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in list(items):
        named = key in SIZES if isinstance(key, str) else within in SIZES
        if named and _is_pair(value):
            yield node, key, value
        elif isinstance(value, (dict, list, tuple)) and not isinstance(value, str):
            if named and isinstance(value, tuple) and any(map(_is_pair, value)):
                value = node[key] = list(value)  # a tuple cannot be edited in place
            yield from _sizes(value, key if isinstance(key, str) else within)


def _is_pair(value: Any) -> bool:
    return (isinstance(value, (list, tuple)) and len(value) == 2
            and all(isinstance(side, int) and side >= 64 for side in value))


def innermost(dataset: Any) -> list[Any]:
    """Return the datasets that read files, inside of the wrappers of a dataset config."""
    if isinstance(dataset.get('datasets'), (list, tuple)):
        return [inner for part in dataset['datasets'] for inner in innermost(part)]
    return innermost(dataset['dataset']) if 'dataset' in dataset else [dataset]


def few_images(cfg: Any, phase: str, count: int) -> list[str]:
    """Keep the first ``count`` images of every dataset of 'train' or 'val'.

    Returns:
        Names of the classes that have no argument ``indices``: their datasets stay whole.
    """
    datasets = innermost(cfg[f'{phase}_dataloader']['dataset'])
    whole = [dataset for dataset in datasets if not _takes_indices(dataset.get('type'))]
    for dataset in datasets:
        if dataset not in whole:
            dataset['indices'] = count
    return [class_name(dataset['type']) for dataset in whole]


def _takes_indices(kind: Any) -> bool:
    """Whether a dataset's ``type`` has the argument, as those of MMEngine and MMDetection have."""
    from mmengine.dataset import BaseDataset
    from mmengine.registry import DATASETS

    from ..objects.walks import registries
    name, tables = class_name(kind), [registry.module_dict for registry in registries(DATASETS)]
    found = kind if callable(kind) else next(
        (table[name] for table in tables if name in table),
        BaseDataset)  # of a package that is not imported yet
    arguments = inspect.signature(found).parameters
    return 'indices' in arguments or any(
        argument.kind is argument.VAR_KEYWORD for argument in arguments.values())


def check_data(cfg: Any, phases: Sequence[str]) -> None:
    """Check that the files of all datasets exist."""
    for _, message in _missing(cfg, phases):
        raise MissingDataError(
            f'{message}. Get the dataset, or change data_root with --cfg-options; or take the '
            'demonstration dataset instead, which works for configs made for COCO: --demo-data')


def missing_file(cfg: Any, path: str) -> str:
    """Return a message if ``path`` does not exist and a loader of the config reads it, else ''."""
    return next((message for missing, message in _missing(cfg, ('train', 'val', 'test'))
                 if os.path.abspath(missing) == os.path.abspath(path)), '')


def _missing(cfg: Any, phases: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the files that loaders of the config read and that do not exist, with a message."""
    for phase in phases:
        for path in _files(cfg, phase):
            if not os.path.exists(path):
                yield path, f'{path} does not exist, and {phase}_dataloader of the config reads it'


def _files(cfg: Any, phase: str) -> Iterator[str]:
    """Yield the annotation files and image folders that a loader of the config reads."""
    loader = cfg.get(f'{phase}_dataloader')
    data = loader.get('dataset') if isinstance(loader, dict) else None
    for dataset in innermost(data) if isinstance(data, dict) else ():
        root = dataset.get('data_root') or ''
        prefix = dataset.get('data_prefix') or {}
        names = [dataset.get('ann_file') or '',
                 *(prefix.values() if isinstance(prefix, dict) else [prefix])]
        for name in filter(None, names):
            path = os.path.join(root, name)
            if '://' not in path:
                yield path
