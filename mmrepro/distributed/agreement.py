"""All ranks agree before the first step, or all ranks stop and say why.

Ranks agree by a collective operation over the CPU: every rank gets the values of all ranks, and
comes to the same decision. If a rank does not come, the operation fails when its timeout has
passed, see :mod:`.lost_ranks`.
"""
from __future__ import annotations

import functools
import itertools
import json
import platform
import secrets
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Callable

import torch
import torch.distributed as dist
from mmengine.dist import get_world_size
from torch.distributed import distributed_c10d as c10d

from .. import determinism, libraries, ops
from ..errors import AgreementError
from ..seeds import MAX_SEED, SCHEME
from ..version import __version__
from .at_exit import leave_at_exit
from .virtual.scheduler import current

MAX_LINES = 20  # of differences in one message

# modules whose versions change bits
MODULES = ('torch', 'numpy', 'mmengine', 'mmcv', 'mmdet')


def check_agreement(fields: Mapping[str, Any]) -> None:
    """Compare ``fields`` between all ranks. A collective operation.

    Args:
        fields: Strings, numbers, booleans, None, and lists of them. Of a string of several lines,
            the message shows the first line that differs.

    Raises:
        AgreementError: on every rank, with the same message: rank, field and both values.
        TypeError: a field of another type; names it.
    """
    for name, value in fields.items():
        try:
            json.dumps(value)
        except TypeError as error:
            raise TypeError(f'{name}={value!r} cannot be compared between ranks: expected strings, '
                            'numbers, booleans, None, or lists of them') from error
    agree('agreement', dict(fields), _compare)


def check_files(what: str, files: Mapping[str, str]) -> None:
    """Compare digests of files between all ranks, of those that both of two ranks have.

    A collective operation.

    Raises:
        AgreementError: on every rank, with the same message: file, rank and machine.
    """
    agree(f'agreement on {what}', (platform.node(), dict(files)),
          functools.partial(_compare_files, what))


def _compare_files(what: str, ranks: Sequence[tuple[str, Mapping[str, str]]]) -> None:
    node, first = ranks[0]
    lines = [f'  {name}: rank {rank} on {other} has {files[name]}, rank 0 on {node} has '
             f'{first[name]}' for rank, (other, files) in enumerate(ranks)
             for name in sorted(first) if files.get(name, first[name]) != first[name]]
    if len(lines) > MAX_LINES:
        lines[MAX_LINES:] = [f'  and {len(lines) - MAX_LINES} more']
    if lines:
        raise AgreementError('\n'.join(
            [f'The ranks have different {what}, and every rank has stopped.', *lines]))


def randomness_fields(randomness: Mapping[str, Any]) -> dict[str, Any]:
    """Return a field for each key, and for each key of a section, as ``randomness.a.b``."""
    # a field for each stream that has a root of its own, and none where no stream has
    return {f'randomness.{name}.{key}'.rstrip('.'):
            ', '.join(part) if isinstance(part, (list, tuple)) else part
            for name, value in randomness.items()
            for key, part in (value if isinstance(value, Mapping) else {'': value}).items()}


def start_fields(config_text: str, randomness: Mapping[str, Any]) -> dict[str, Any]:
    """Return what all ranks must have in common at the start, after ``determinism.enable``.

    Args:
        config_text: The effective config, for example ``cfg.pretty_text``.
        randomness: The effective values, the seed included.

    Returns:
        dict: randomness, config, versions, operator provider, environment and flags.
    """
    fields = {'scheme': SCHEME, **randomness_fields(randomness), 'config': config_text}
    fields.update(late_fields())
    fields.update({'version.mmrepro': __version__, 'version.python': platform.python_version(),
                   'version.cuda': torch.version.cuda})
    fields.update((f'version.{module}', libraries.version_of(module)) for module in MODULES)
    fields.update(determinism.snapshot())
    if fields.get('randomness.numerics.cpu') is not None:
        # lists what this CPU has above the level, which ranks on other machines may not have
        del fields['env.NPY_DISABLE_CPU_FEATURES']
    return fields


def operator_fields() -> dict[str, str]:
    """Return the provider of mmcv's operators, and 'operators.NAME' where an operator has another.

    Bits depend on the provider: the implementations of an operator round at different points.
    """
    if 'mmcv._ext' not in sys.modules:
        return {'operators': 'mmcv is not in use'}
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    base = 'compiled' if ops.provider() == 'compiled' else 'torch'
    return {'operators': base, **{
        f'operators.{name}': who for name, who in ops.exceptions(device).items()}}


def late_fields() -> dict[str, Any]:
    """Return fields that are known once the model has imported mmcv's operators."""
    fields: dict[str, Any] = dict(operator_fields())
    if 'triton' in fields.values():
        fields['version.triton'] = ops.triton.version()
    if 'compiled' in fields.values() and 'mmcv._ext' in sys.modules:
        extension = sys.modules['mmcv._ext']
        fields['version.mmcv_build'] = (f'{extension.get_compiler_version()}, CUDA '
                                        f'{extension.get_compiling_cuda_version()}')
    return fields


# -------------------------------------------------------------------------------- comparing


def _compare(ranks: Sequence[Mapping[str, Any]]) -> None:
    lines = [line for rank in range(1, len(ranks)) for line in _differences(ranks, rank)]
    if len(lines) > MAX_LINES:
        lines[MAX_LINES:] = [f'  and {len(lines) - MAX_LINES} more']
    if lines:
        raise AgreementError('\n'.join(
            ['The ranks disagree, and every rank has stopped.', *lines]))


def _differences(ranks: Sequence[Mapping[str, Any]], rank: int) -> Iterator[str]:
    for name in sorted({*ranks[0], *ranks[rank]}):
        here, there = (ranks[number].get(name, '(nothing)') for number in (0, rank))
        if json.dumps(here) == json.dumps(there):  # 1, 1.0 and True are equal to Python
            continue
        where = name
        if isinstance(here, str) and isinstance(there, str) and '\n' in here + there:
            lines = itertools.zip_longest(here.split('\n'), there.split('\n'), fillvalue='(end)')
            number, (here, there) = next(
                (number, pair) for number, pair in enumerate(lines, 1) if pair[0] != pair[1])
            where = f'{name}, line {number}'
        yield f'  rank {rank}: {where}: rank 0 has {here!r}, rank {rank} has {there!r}'


# -------------------------------------------------------------------------------- collectives

_control_groups: Any = weakref.WeakKeyDictionary()  # process group -> its control group


def default_timeout() -> timedelta | None:
    """Return the timeout of the default process group.

    None where it is not known (MPI, old versions of torch): torch's own then, 30 minutes for gloo.
    """
    default: Any = dist.group.WORLD
    device, *_ = getattr(default, '_device_types', ()) or (torch.device('cpu'), )
    options = getattr(default._get_backend(device), 'options', None)
    return getattr(options, '_timeout', None)


def _control_group() -> Any:
    """Return the group in which processes agree: of gloo, beside the one that tensors travel over.

    So a rank that comes to another collective operation of the program cannot be mistaken for one
    that agrees. The first call in a process group is a collective operation. None stands for the
    default group, where there is no store (MPI). Its timeout is that of the default group.
    """
    if c10d._get_default_store() is None:
        return None
    default: Any = dist.group.WORLD
    if default not in _control_groups:
        leave_at_exit(_take_control_groups)
        _control_groups[default] = dist.new_group(backend='gloo', timeout=default_timeout())
    return _control_groups[default]


def _take_control_groups() -> list[Any]:
    groups = list(_control_groups.values())
    _control_groups.clear()
    return groups


def agree(topic: str, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
    """Decide from the values of all ranks; every rank gets the same decision.

    A collective operation, cheap enough for every iteration. Without a process group, a world of
    one.

    Args:
        topic: A short name, the same on all ranks.
        value: Of this rank; what pickle can hold.
        decide: The values in order of rank -> the decision, or raises :class:`AgreementError`.
            Called on every rank; must depend on nothing but the values.

    Raises:
        AgreementError: ``decide`` raised it, or ranks have come to different topics.
        RuntimeError: a rank has ended, or has not come in time.
    """
    if get_world_size() == 1:
        return decide([value])
    received: list[Any] = [None] * get_world_size()
    if current() is not None:
        group: Any = dist.group.WORLD
        received = group.objects((topic, value), 'an agreement')
    else:
        dist.all_gather_object(received, (topic, value), group=_control_group())
    topics, values = zip(*received)
    if len(set(topics)) > 1:
        raise AgreementError('The ranks have come to different points of their programs, and every '
                             'rank has stopped.' + ''.join(
                                 f'\n  rank {rank} is at: {at}' for rank, at in enumerate(topics)))
    return decide(list(values))


def broadcast_seed(seed: int | None) -> int:
    """Return the seed that every rank uses: ``seed``, or one that rank 0 draws from the system.

    A collective operation; without a process group, a world of one. It touches no generator.

    Returns:
        int: in [0, 2**32), if ``seed`` is.

    Raises:
        AgreementError: on every rank, if they were given different seeds.
    """
    check_agreement(dict(seed=seed))
    drawn: int = agree('seed', secrets.randbelow(MAX_SEED + 1), lambda ranks: ranks[0])
    return drawn if seed is None else seed
