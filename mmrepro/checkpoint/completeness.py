"""Check that a run can continue from the content of a checkpoint, and that it can be read again."""
from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from mmengine.logging import HistoryBuffer
from mmengine.runner.checkpoint import get_state_dict
from torch import nn

from ..errors import CheckpointError, ConfigError
from ..facts.collect import read_settings, settings_of
from ..facts.compatibility import inexact
from ..objects.digests import local_part
from ..seeds import MAX_SEED
from ..util.files import SCALAR, Rule, mismatch, or_none
from ..util.text import qualified_name, shorten
from .safe_loading import ADDING, safe_load

# what MMEngine's ``Runner.resume`` reads; a run without it is a different run
PARTS = {
    'message_hub': 'no message hub (the best score, the logged values)',
    'optimizer': 'no optimizer (its momenta, its learning rates)',
    'param_schedulers': 'no schedules (the course of the learning rate)',
}
_OF_RANK = {'attributes?': {str: {str: object}}, 'gradients?': {str: torch.Tensor},
            'buffers?': {str: torch.Tensor},
            'order?': {'states?': [{str: {str: object}}], 'draws?': {str: [int]}}}
# what mmrepro reads, see docs/reference/checkpoints.md
_SHAPE = {
    'meta': {
        'epoch': int, 'iter': int, 'mmrepro?': {
            'facts?': {'world_size?': int, str: SCALAR}, 'schedules?': bool},
        'place?': Rule(lambda value: mismatch(value, [int]) is None and len(value) == 2,
                       '[epoch, batches]'),
        'seed?': Rule(lambda value: value is None or isinstance(value, int)
                      and 0 <= value <= MAX_SEED, f'None, or an integer from 0 to {MAX_SEED}')},
    'state_dict?': {str: object},
    'message_hub?': {'runtime_info': {str: object}},
    'mmrepro?': {
        **_OF_RANK, 'ranks?': {int: _OF_RANK}, 'counts?': {str: int}, 'parts?': {str: str},
        'left_out?': {str: str}, 'passes?': int,
        'metrics?': or_none(dict), 'validated?': or_none(int)}}


def stock_facts(meta: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings that stock MMEngine keeps as text of a config file."""
    text = meta.get('cfg')
    return settings_of(read_settings(text)) if isinstance(text, str) and text.strip() else {}


def has_schedules(meta: Mapping[str, Any]) -> bool:
    """Whether the run that wrote a checkpoint with this ``meta`` had ``param_scheduler``."""
    written_by = meta.get('mmrepro', {})
    if 'schedules' in written_by:
        return written_by['schedules']
    facts = written_by.get('facts') or stock_facts(meta)
    return any(name.startswith('config.param_scheduler') and value not in (None, '[]', '{}')
               for name, value in facts.items())


def damage(content: Any) -> str | None:
    """Return why a checkpoint's ``content`` cannot be used at all, or None."""
    meta = content.get('meta') if isinstance(content, Mapping) else None
    if not isinstance(meta, Mapping) or not {'epoch', 'iter'} <= {*meta}:
        return 'is no checkpoint of a run: it has no meta with epoch and iter'
    problem = mismatch(content, _SHAPE)
    try:
        if not problem and not meta.get('mmrepro'):
            stock_facts(meta)
    except ConfigError as error:
        problem = f'meta.cfg is {error}'
    return problem and f'is damaged: {problem}'


def lacks(content: Any) -> str | None:
    """Return why a run cannot continue from a checkpoint's ``content``, or None."""
    problem = damage(content)
    if problem is not None:
        return problem
    meta = content['meta']
    wanted = [part for part in PARTS if part != 'param_schedulers' or has_schedules(meta)]
    missing = [PARTS[part] for part in wanted if part not in content]
    return f'holds {" and ".join(missing)}' if missing else None


def left_out(model: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights and buffers that a ``state_dict`` has under none of their names.

    Hooks may reduce what is written to what is trained.
    """
    written = {name.removeprefix('module.') for name in state_dict}
    weights = {name: value for name, value in get_state_dict(model).items()
               if isinstance(value, torch.Tensor) and not nn.parameter.is_lazy(value)}
    memory = {local_part(value).data_ptr() for name, value in weights.items() if name in written}
    return {name: value for name, value in weights.items()
            if name not in written and local_part(value).data_ptr() not in memory}


def is_weights(content: Any) -> bool:
    """Whether a file holds weights and nothing else that a training writes."""
    if not isinstance(content, Mapping):
        return False
    return not {'message_hub', 'optimizer', 'mmrepro'} & {*content}


def judge(path: str, content: Any, strict: bool) -> list[str]:
    """Return lines for the log about a file that the user named to resume from.

    Raises:
        CheckpointError: no run has written it.
        ResumeError: ``strict``, and a run could not continue exactly.
    """
    problem = lacks(content)
    if problem is None:
        return []
    if damage(content) or 'message_hub' not in content:
        raise CheckpointError(f'{path} {problem}. Weights are loaded with load_from=..., '
                              'resume=False')
    return [inexact(f'{path} {problem}: it can be loaded, not resumed. ', strict,
                    'Begin a new run from these weights: load_from=..., resume=False; or name a '
                    'checkpoint that has all of it')]


def check_readable(checkpoint: Mapping[str, Any]) -> None:
    """Fail when a checkpoint is saved, not when it is resumed and too late to mend.

    Raises:
        CheckpointError: names a value that :func:`mmrepro.checkpoint.files.load` refuses.
    """
    skeleton = _without_tensors(checkpoint)
    if _loads(skeleton):
        return
    where, value = _culprit('checkpoint', skeleton)
    raise CheckpointError(
        f'{where} is a {qualified_name(type(value))} '
        f'({shorten(repr(value))}): no run could resume from this checkpoint, which has to be '
        'data only. Save it as numbers, strings, tensors, arrays, lists and dicts; or, if you '
        f'trust it: {ADDING}, in a module that the config imports')


def _without_tensors(value: Any) -> Any:
    # plain containers only: what a class of its own makes of its contents has to be tried
    if isinstance(value, torch.Tensor) or type(value) is HistoryBuffer:  # large, and data only
        return None
    if type(value) in (dict, OrderedDict):  # a state dict has its metadata in an attribute
        found = type(value)((key, _without_tensors(item)) for key, item in value.items())
        for name, content in getattr(value, '__dict__', {}).items():
            setattr(found, name, content)
        return found
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(item) for item in value)
    return value


def _loads(value: Any) -> bool:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    try:
        safe_load(file)
    except pickle.UnpicklingError:
        return False
    return True


def _culprit(where: str, value: Any) -> tuple[str, Any]:
    """Return the path and value of the innermost part that does not load."""
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, (list, tuple)):
        parts = enumerate(value)
    for key, part in parts:
        if not _loads(part):
            return _culprit(f'{where}[{key!r}]', part)
    return where, value
