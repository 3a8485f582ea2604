"""What trainings without mmrepro wrote down: MMEngine's, and those of MMDetection 2.x on mmcv 1.x.

The formats are those of MMEngine 0.10 (``Runner._log_env``, ``utils/dl_utils/collect_env.py``), of
mmcv 1.7 (``utils/env.py``, ``TextLoggerHook`` in ``runner/hooks/logger/text.py``,
``runner/checkpoint.py``) and of MMDetection 2.28 (``tools/train.py``, ``utils/collect_env.py``).
"""
from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from ..errors import FingerprintError
from ..facts.collect import settings_of
from ..reading import parse_json
from ..text import listed

MMCV_LOG = '.log.json'  # of TextLoggerHook
DECIMALS = 5  # TextLoggerHook rounds what it writes
_TRAINED = re.compile(r'(?:Epoch(?:\(train\))? +\[\d+\]\[\d+/(\d+)\]|Iter(?:\(train\))? +\[)')

# fact -> where a log, the first line of a .log.json or the meta of a checkpoint has its value
_RECORDED = {name: re.compile(pattern, re.MULTILINE) for name, pattern in {
    'version.python': r'^ *Python: (\S+)',
    'version.torch': r'^ *PyTorch: (\S+)',
    'version.torchvision': r'^ *TorchVision: (\S+)',
    'version.cuda': r'^ *- CUDA Runtime (\S+)',
    'version.cudnn': r'^ *- CuDNN (\S+)',
    'version.cv2': r'^ *OpenCV: (\S+)',
    'version.mmengine': r'^ *(?:MMEngine|mmengine_version): (\S+)',
    'version.mmcv': r'^ *(?:MMCV|mmcv_version): (\S+)',
    'version.mmdet': r'^ *(?:MMDetection|mmdet_version): ([\d.]+)',
    'operators.compiler': r'^ *MMCV Compiler: (.+)',
    'operators.cuda': r'^ *MMCV CUDA Compiler: (.+)',
    'hardware.gpu': r'^ *(?:GPU [\d,]+: (.+)|CUDA available: (?=False))',
    'hardware.cpu_instructions': r'^ *- CPU capability usage: (\S+)',
    'world_size': r'^(?: *GPU number: (\d+)|gpu_ids = (?:range\(0, (\d+)\)|\[\d+\]))',
    'torch.backends.cudnn.benchmark': r'^ *cudnn_benchmark(?:: | = )(True|False)',
    'randomness.seed': r'(?:^ *seed: |Set random seed to )(\d{1,19})\b',
    'randomness.deterministic': r'(?:^ *|, )deterministic: (True|False)',
    'randomness.diff_rank_seed': r'^ *diff_rank_seed: (True|False)',
}.items()}
# what decides a result and may be unknown
_ASKED = {'randomness.seed': 'the seed', 'version.torch': 'the environment',
          'version.mmcv': 'the version of MMCV', 'version.mmdet': 'the version of MMDetection',
          'world_size': 'the number of GPUs', 'config.train_dataloader.num_workers':
          'the number of workers', 'config.train_dataloader.batch_size': 'the batch size'}
NEVER = ('no log holds initial weights, data, changes of the code, environment variables and the '
         'number of threads: what differs in these cannot be known')

# names in MMDetection 2.x -> in 3.x, as regular expressions; the first that matches counts
_RENAMED = tuple((re.compile(rf'config\.{old}'), f'config.{new}') for old, new in {
    r'data\.(?:train_dataloader\.)?samples_per_gpu': 'train_dataloader.batch_size',
    r'data\.(?:train_dataloader\.)?workers_per_gpu': 'train_dataloader.num_workers',
    r'data\.train_dataloader\.': 'train_dataloader.',
    r'data\.(train|val|test)(?=[.\[])': r'\1_dataloader.dataset',
    r'optimizer\.paramwise_cfg': 'optim_wrapper.paramwise_cfg',
    r'optimizer\.': 'optim_wrapper.optimizer.',
    r'optimizer_config\.grad_clip': 'optim_wrapper.clip_grad',
    r'fp16\.': 'optim_wrapper.',
    r'runner\.(max_\w+)': r'train_cfg.\1',
    r'total_epochs': 'train_cfg.max_epochs',
    r'lr_config\.step': 'param_scheduler.MultiStepLR.milestones',
    r'lr_config\.gamma': 'param_scheduler.MultiStepLR.gamma',
    r'lr_config\.warmup_iters': 'param_scheduler.LinearLR.end',
    r'lr_config\.warmup_ratio': 'param_scheduler.LinearLR.start_factor',
    r'(train|test)_cfg(?=[.\[])': r'model.\1_cfg',  # up to 2.2
    r'evaluation': 'val_evaluator',
    r'checkpoint_config': 'default_hooks.checkpoint',
    r'log_config': 'default_hooks.logger',
    r'cudnn_benchmark': 'env_cfg.cudnn_benchmark',
}.items())
_IN_PIPELINE = tuple((re.compile(old), new) for old, new in {
    r'.*\.Normalize\.(mean|std)$': r'config.model.data_preprocessor.\1',
    r'.*\.Normalize\.to_rgb$': 'config.model.data_preprocessor.bgr_to_rgb',
    r'.*\.Pad\.size_divisor$': 'config.model.data_preprocessor.pad_size_divisor',
    r'(.*)\.(Resize\.img_scale|RandomResize\.scale|RandomChoiceResize\.scales)': r'\1.Resize.scale',
    r'(.*)\.flip_ratio$': r'\1.prob',
    r'(.*)\.img_prefix$': r'\1.data_prefix.img',
}.items())
# what decides a result in either dialect
_DECISIVE = tuple(f'config.{part}' for part in (
    'model.', 'train_dataloader.', 'train_cfg.', 'optim_wrapper.', 'param_scheduler', 'lr_config.',
    'auto_scale_lr.', 'custom_hooks', 'load_from', 'fp16'))


def recorded(text: str) -> dict[str, Any]:
    """Return the facts in a log, or in lines ``key: value``.

    >>> recorded('GPU 0,1: TITAN V\\nSet random seed to 7, deterministic: False')
    {'hardware.gpu': 'TITAN V', 'randomness.seed': 7, 'randomness.deterministic': False}
    """
    facts: dict[str, Any] = {}
    for name, pattern in _RECORDED.items():
        match = pattern.search(text)
        if match:
            value = next(filter(None, match.groups()), '1' if name == 'world_size' else 'None')
            facts[name] = int(value) if value.isdecimal() and len(value) < 20 else {
                'True': True, 'False': False, 'None': None}.get(value, value)
    if 'version.torch' in facts:  # off where nobody sets it
        facts.setdefault('torch.backends.cudnn.benchmark', False)
    return facts


def lines_of_meta(meta: Mapping[str, Any]) -> str:
    """Return the meta of a checkpoint or a first line as text for :func:`recorded`."""
    return '\n'.join(str(value) if key in ('env_info', 'config', 'cfg') else f'{key}: {value}'
                     for key, value in meta.items())


def text_log(log: str) -> str:
    """Return the text log that belongs to a log in JSON, '' without one."""
    start = os.path.dirname(os.path.dirname(os.path.abspath(log)))
    path = (log[:-len('.json')] if log.endswith(MMCV_LOG) else
            os.path.join(start, f'{os.path.basename(start)}.log'))
    if not os.path.isfile(path):
        return ''
    with open(path, encoding='utf-8', errors='replace') as file:
        return file.read()


def head_of(log: str) -> dict[str, Any]:
    """Return the first line of mmcv's log: environment, config, seed; {} without one."""
    with open(log, 'rb') as file:
        head = re.match(rb'{"(env_info|config|seed|exp_name)":.*', file.readline())
    return parse_json(f'{log}, line 1', head[0], FingerprintError, {str: object}) if head else {}


def as_mmengine(path: str, rows: list[Any], notes: list[str]) -> list[dict[str, Any]]:
    """Return lines of mmcv's log as MMEngine writes them: iterations counted over all epochs.

    mmcv counts them within an epoch; how many an epoch has is in the text log only.
    """
    rows = [row for row in rows if row and {'mode', 'epoch', 'iter'} <= row.keys()]
    trained = _TRAINED.search(text_log(path))
    by_epoch = trained[1] is not None if trained else 'IterBased' not in str(head_of(path))
    length = int(trained[1]) if trained and trained[1] else max(
        (row['iter'] for row in rows if row['mode'] == 'train'), default=0)
    if not trained and by_epoch:
        notes.append(f'{path[:-len(".json")]} is missing: iterations are counted as if an epoch '
                     f'had {length}, the last that was logged')
    result, last = [], 0
    for row in rows:
        if row['mode'] == 'train':
            last = row['iter'] + (row['epoch'] - 1) * length * by_epoch
            result.append({**row, 'iter': last})
        else:
            result.append({'step': row['epoch'] if by_epoch else last, **{
                f'coco/{name}' if re.match('(bbox|segm)_mAP', name) else name: value
                for name, value in row.items() if name not in ('iter', 'lr')}})
    return result


def config_text(log: str) -> tuple[str, bytes] | None:
    """Return the config of the training that wrote a log, and where it stands."""
    head = head_of(log)
    if 'config' in head:
        return f'{log}, line 1', str(head['config']).encode()
    path = os.path.join(os.path.dirname(log), str(head.get('exp_name', 'config.py')))
    if not os.path.isfile(path):
        return None
    with open(path, 'rb') as file:
        return path, file.read()


def facts_of(settings: Mapping[str, Any]) -> tuple[bool, dict[str, Any]]:
    """Return whether a config is of MMDetection 2.x, and its settings under the names of 3.x."""
    flat, old = settings_of(settings), 'data' in settings and 'train_dataloader' not in settings
    if flat.get('config.lr_config.policy') == 'step':
        flat.setdefault('config.lr_config.gamma', 0.1)
    return old, {_renamed(name, _RENAMED) if old else name: flat[name] for name in flat}


def across_dialects(a: Mapping[str, Any], b: Mapping[str, Any]
                    ) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return what decides a result and both configs have, and notes on what only one has."""
    a, b = ({_renamed(_by_type(name, run), _IN_PIPELINE): _last_name(name, value)
             for name, value in run.items() if not name.startswith('config.')
             or name.startswith(_DECISIVE)} for run in (a, b))
    notes = []
    for letter, run, other in (('A', a, b), ('B', b, a)):
        alone = [*dict.fromkeys('.'.join(name.split('.')[1:4]) for name in run
                                if name.startswith('config.') and name not in other)]
        notes += [f'{letter}: without a counterpart in the other dialect, not compared: '
                  f'{listed(alone, 6)}'] if alone else []
    both = [name for name in a if name in b]
    return {name: a[name] for name in both}, {name: b[name] for name in both}, notes


def unknown(facts: Mapping[str, Any]) -> list[str]:
    """Return what a run without a manifest could have recorded and did not."""
    return [text for name, text in _ASKED.items() if facts.get(name) is None]


def _renamed(name: str, table: tuple[tuple[re.Pattern, str], ...]) -> str:
    return next((pattern.sub(new, name, count=1) for pattern, new in table if pattern.match(name)),
                name)


def _by_type(name: str, facts: Mapping[str, Any]) -> str:
    """Return ``pipeline.Resize.scale`` for ``pipeline[2].scale``; a model keeps its numbers."""
    def typed(item: re.Match) -> str:
        kind = facts.get(f'{name[:item.end()]}.type')
        return f'.{kind}' if kind else item[0]

    return name if name.startswith('config.model.') else re.sub(r'\[\d+\]', typed, name)


def _last_name(name: str, value: Any) -> Any:
    """Return the last part of a path: 3.x has it below data_root, 2.x has all of it."""
    path = isinstance(value, str) and name.endswith(('ann_file', 'img_prefix', 'data_prefix.img'))
    return os.path.basename(value.rstrip('/')) if path else value
