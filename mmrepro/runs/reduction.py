"""Reduce a training without changing its code path: fewer and smaller images.

What needs torch is imported late: the process may have to start again first.
"""
from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import MissingDataError
from ..util.text import class_name

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
    from ..objects.nested import dicts
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
    registries, name = [DATASETS], class_name(kind)
    for registry in registries:
        registries += registry.children.values()
    found = kind if callable(kind) else next(
        (registry.module_dict[name] for registry in registries if name in registry.module_dict),
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
