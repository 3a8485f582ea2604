"""Logs of trainings without mmrepro: of MMEngine, and of MMDetection 2.x on mmcv 1.x.

The formats are those of MMEngine 0.10 (``Runner._log_env``, ``utils/dl_utils/collect_env.py``), of
mmcv 1.7 (``utils/env.py``, ``TextLoggerHook`` in ``runner/hooks/logger/text.py``,
``runner/checkpoint.py``) and of MMDetection 2.28 (``tools/train.py``, ``utils/collect_env.py``);
``stock_runs.ini`` has the tables of what they say and of how 2.x calls its settings.
"""
from __future__ import annotations

import os
import re
from collections.abc import Mapping
from configparser import RawConfigParser
from pathlib import Path
from typing import Any

from ..errors import FingerprintError
from ..facts.collect import settings_of
from ..util.files import parse_json
from ..util.text import listed

MMCV_LOG = '.log.json'  # of TextLoggerHook
DECIMALS = 5  # TextLoggerHook rounds what it writes
_TRAINED = re.compile(r'(?:Epoch(?:\(train\))? +\[\d+\]\[\d+/(\d+)\]|Iter(?:\(train\))? +\[)')

_TABLES = RawConfigParser(delimiters=('=', ))
setattr(_TABLES, 'optionxform', str)  # noqa: B010  names are case-sensitive
_TABLES.read(Path(__file__).with_suffix('.ini'), 'utf-8')
_RECORDED = {name: re.compile(pattern, re.MULTILINE)
             for name, pattern in _TABLES['recorded'].items()}
_RENAMED = tuple((re.compile(rf'config\.{old}'), f'config.{new}')
                 for new, old in _TABLES['renamed'].items())
_IN_PIPELINE = tuple((re.compile(old), new) for new, old in _TABLES['in pipeline'].items())
NEVER = ('no log holds initial weights, data, changes of the code, environment variables and the '
         'number of threads: what differs in these cannot be known')

# settings that decide a result in either dialect
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
                    ) -> tuple[tuple[dict[str, Any], dict[str, Any]], list[str]]:
    """Return common settings that decide a result, and notes on settings of one config only."""
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
    return ({name: a[name] for name in both}, {name: b[name] for name in both}), notes


def unknown(facts: Mapping[str, Any]) -> list[str]:
    """Return the facts that a run without a manifest could have recorded and did not."""
    return [text for name, text in _TABLES['asked'].items() if facts.get(name) is None]


def _renamed(name: str, table: tuple[tuple[re.Pattern[str], str], ...]) -> str:
    return next((pattern.sub(new, name, count=1) for pattern, new in table if pattern.match(name)),
                name)


def _by_type(name: str, facts: Mapping[str, Any]) -> str:
    """Return ``pipeline.Resize.scale`` for ``pipeline[2].scale``; a model keeps its numbers."""
    def typed(item: re.Match[str]) -> str:
        kind = facts.get(f'{name[:item.end()]}.type')
        return f'.{kind}' if kind else item[0]

    return name if name.startswith('config.model.') else re.sub(r'\[\d+\]', typed, name)


def _last_name(name: str, value: Any) -> Any:
    """Return the last part of a path: 3.x has it below data_root, 2.x has all of it."""
    path = isinstance(value, str) and name.endswith(('ann_file', 'img_prefix', 'data_prefix.img'))
    return os.path.basename(value.rstrip('/')) if path else value
