"""All ranks agree before the first step, or all ranks stop and say why.

Ranks agree by a collective operation over the CPU: every rank gets the values of all ranks, and
comes to the same decision. If a rank does not come, the operation fails when its timeout has
passed, see :mod:`.lost_ranks`. :mod:`.control` has what values travel over.
"""
from __future__ import annotations

import functools
import itertools
import json
import platform
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable

import torch
import torch.distributed as dist
from mmengine.dist import get_world_size

from .. import determinism, ops
from ..errors import AgreementError
from ..seeds import MAX_SEED, SCHEME
from ..util import libraries
from ..version import __version__
from .control import Finish, control
from .scheduler import current

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
    """Compare digests of files between all ranks; only files that both of two ranks have count.

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
    _refuse(f'The ranks have different {what}, and every rank has stopped.', lines)


def randomness_fields(randomness: Mapping[str, Any]) -> dict[str, Any]:
    """Return a field for each key, and for each key of a section, as ``randomness.a.b``."""
    # a field for each stream that has a root of its own, and none where no stream has
    return {f'randomness.{name}.{key}'.rstrip('.'):
            ', '.join(part) if isinstance(part, (list, tuple)) else part
            for name, value in randomness.items()
            for key, part in (value if isinstance(value, Mapping) else {'': value}).items()}


def start_fields(config_text: str, randomness: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields in which all ranks must agree at the start, after ``determinism.enable``.

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
        f'operators.{name}': who for name, who in ops.other_providers(device).items()}}


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
    _refuse('The ranks disagree, and every rank has stopped.', lines)


def _refuse(head: str, lines: list[str]) -> None:
    """Raise AgreementError with lines on what differs, if there are any."""
    if len(lines) > MAX_LINES:
        lines[MAX_LINES:] = [f'  and {len(lines) - MAX_LINES} more']
    if lines:
        raise AgreementError('\n'.join([head, *lines]))


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

def agree(topic: str, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
    """Decide from the values of all ranks; every rank gets the same decision.

    A collective operation, which pickles: not for every iteration. Without a process group, a
    world of one.

    Args:
        topic: A short name, the same on all ranks.
        value: The value of this rank, which pickle can hold.
        decide: The values in order of rank -> the decision, or raises :class:`AgreementError`.
            Called on every rank; must depend on nothing but the values.

    Raises:
        AgreementError: ``decide`` raised it, or ranks have come to different topics.
        RuntimeError: a rank has ended, or has not come in time.
    """
    if get_world_size() == 1:
        return decide([value])
    if current() is not None:
        group: Any = dist.group.WORLD
        received = group.objects((topic, value), 'an agreement')
    else:
        received = control().all_objects((topic, value))
    topics, values = zip(*received)
    if len(set(topics)) > 1:
        raise AgreementError('The ranks have come to different points of their programs, and every '
                             'rank has stopped.' + ''.join(
                                 f'\n  rank {rank} is at: {at}' for rank, at in enumerate(topics)))
    return decide(list(values))


def gather_objects(value: Any, to_all: bool) -> list[Any] | None:
    """Gather large values of all ranks, on rank 0 or on all ranks; None on the others.

    A collective operation on the host, except on virtual ranks that exchange over NCCL.
    """
    if current() is None:
        return control().all_objects(value) if to_all else control().gather(value)
    received: list[Any] = [None] * get_world_size()
    if to_all:
        dist.all_gather_object(received, value)
        return received
    is_first = dist.get_rank() == 0
    dist.gather_object(value, received if is_first else None)
    return received if is_first else None


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


# -------------------------------------------------------------------------------- in a loop

WITHIN = 2.  # seconds between two exchanges of a flag
LONGEST = 6  # power of two of the iterations between them: a step may suddenly take longer


class RepeatedFlag:
    """Whether a flag is up on any rank, asked in every iteration and exchanged in few of them.

    An exchange begins in one iteration and ends in the next, so it takes place beside a step. All
    ranks exchange in the same iterations: each proposes a power of two from the time that its
    iterations take, and the smallest counts until the next exchange.

    Args:
        interval: iterations between two exchanges; None: as many as take about :data:`WITHIN`.
    """

    def __init__(self, interval: int | None = None) -> None:
        self._alone = get_world_size() == 1  # to ask torch in each iteration takes up to 0.1 ms
        self._fixed = interval
        self._power = 0  # of two: iterations between two exchanges
        self._rest = 0  # iterations before the next exchange begins
        self._time: float | None = None  # when the last one began
        self._begin_max: Callable[[list[int]], Finish] | None = None  # of the control in use
        self._finish: Finish | None = None  # of an exchange under way
        self._up = False

    def up(self, mine: bool) -> bool:
        """Return whether the flag is up on any rank, at the same iteration on every rank.

        To be called in the same iterations on all ranks.

        Raises:
            RuntimeError: a rank has ended, or has not come in time.
        """
        if self._rest:  # most iterations
            self._rest -= 1
            return self._up
        if self._alone:
            return mine
        if self._finish is not None:
            self._end(self._finish)
        if self._rest:
            self._rest -= 1
        elif not self._up:
            self._begin(mine)
        return self._up

    @property
    def _interval(self) -> int:
        return 1 << self._power if self._fixed is None else self._fixed

    def _end(self, finish: Finish) -> None:
        self._finish = None
        up, power = finish()
        self._up, self._power = bool(up), -power
        self._rest = self._interval - 1

    def _begin(self, mine: bool) -> None:
        now, power = time.monotonic(), 0
        if self._time is not None:
            seconds = (now - self._time) / self._interval
            # at most twice as many as before: the first iterations say little
            while power <= min(self._power, LONGEST - 1) and seconds * (2 << power) <= WITHIN:
                power += 1
        self._time = now
        if self._begin_max is None:
            self._begin_max = _begin_max_of_virtual_ranks if current() else control().begin_max
        self._finish = self._begin_max([int(mine), -power])


def _begin_max_of_virtual_ranks(values: list[int]) -> Finish:
    tensor = torch.tensor(values, dtype=torch.int8)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist
