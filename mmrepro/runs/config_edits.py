"""Changes of a config that command lines and comparisons of runs ask for."""
from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from mmengine.config import Config, ConfigDict

from ..config import randomness_of
from ..errors import ConfigError
from ..util.text import class_name, listed
from . import reduction

SEED = 0  # of runs that are compared, where the config has none

# settings of CheckpointHook that decide what a checkpoint holds
IN_CHECKPOINTS = ('type', 'save_optimizer', 'save_param_scheduler')

TEST_TIME_AUGMENTATION = dict(
    type='DetTTAModel', tta_cfg=dict(nms=dict(type='nms', iou_threshold=0.5), max_per_img=100))
TEST_TIME_META_KEYS = ('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor', 'flip',
                       'flip_direction')


def imports_of(cfg: Config) -> list[str]:
    """Return the modules in ``custom_imports``; MMEngine takes a single name as well."""
    given = (cfg.get('custom_imports') or {}).get('imports') or []
    return [given] if isinstance(given, str) else list(given)


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
    return (cfg.get('randomness') or {}).get('seed', cfg.get('seed'))


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
        What was changed, as lines for a report.

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
    reduction.check_data(cfg, phases)
    if 'val' in phases:
        reduction.few_images(cfg, 'val', reduction.VAL_IMAGES)
    if full:
        notes.append('as the config is (--full)')
    else:
        longest = reduction.shrink(cfg)
        images = reduction.IMAGES * (virtual_ranks(cfg) or 1)
        whole = reduction.few_images(cfg, 'train', images)
        but = f' (all of {listed(whole)}: no argument `indices`)' if whole else ''
        notes.append(f'reduced: longest side {min(longest, reduction.LONGEST)} of {longest} '
                     f'pixels, {images} images{but}, no weights to download '
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
    cfg.default_hooks.checkpoint = dict(
        dict(type='CheckpointHook') | kept, interval=-1, save_last=False)


def without_evaluation(cfg: Config, phases: Sequence[str] = ('val', 'test')) -> None:
    """Let the training neither validate nor test."""
    for phase in phases:
        for key in ('cfg', 'dataloader', 'evaluator'):
            cfg[f'{phase}_{key}'] = None


def only_fingerprints(cfg: Config, level: str, validate: bool = False) -> None:
    """Let the training write fingerprints of this level, and neither checkpoints nor metrics."""
    add_fingerprints(cfg, level)
    without_evaluation(cfg, ('test', ) if validate else ('val', 'test'))
    without_checkpoints(cfg)


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
        cfg.tta_pipeline = [*deepcopy(reduction.innermost(data)[0].pipeline[:-1]), augment]
    cfg.model = ConfigDict(**cfg.tta_model, module=cfg.model)
    data.pipeline = cfg.tta_pipeline
