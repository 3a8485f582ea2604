"""All ranks agree before the first step, or all ranks stop and say why.

The ranks talk through the key-value store that made the process group, not through tensors: that
works with every backend, needs no device, and tells by name which rank did not come. Rank 0
collects and decides. Whoever gives up waiting decides too; the store keeps the first decision, so
that no rank goes on while another has stopped.
"""
from __future__ import annotations

import importlib.metadata
import itertools
import json
import platform
import sys
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Union

import torch
import torch.distributed as dist

from .. import determinism, ops
from ..seeds import SCHEME
from ..version import __version__
from .presence import RankEnded, of_run
from .store import round_store
from .waiting import wait_in_store

__all__ = ['DEFAULT_TIMEOUT', 'AgreementError', 'check_agreement', 'group_store',
           'package_version', 'settle', 'start_fields']

DEFAULT_TIMEOUT = 300.0  # seconds
MAX_LINES = 20  # of differences in one message

# module: names of the distributions that may have brought it
PACKAGES = {
    'torch': ('torch', ),
    'numpy': ('numpy', ),
    'mmengine': ('mmengine', 'mmengine-lite', 'onedl-mmengine'),
    'mmcv': ('mmcv', 'mmcv-lite', 'onedl-mmcv'),
    'mmdet': ('mmdet', 'onedl-mmdetection'),
}

Timeout = Union[float, timedelta]


class AgreementError(RuntimeError):
    """Ranks differ in something that has to be equal, or a rank did not come."""


def check_agreement(fields: Mapping[str, Any], timeout: Timeout = DEFAULT_TIMEOUT) -> None:
    """Compare ``fields`` between all ranks. A collective operation.

    Args:
        fields: Strings, numbers, booleans, None, and lists of them. Of a string of several lines,
            the message shows the first line that differs.
        timeout: Seconds to wait for ranks that come late.

    Raises:
        AgreementError: on every rank, with the same message: rank, field and both values, or the
            ranks that did not come in time.
        TypeError: a field of another type; names it.
    """
    settle('agreement', dict(fields), _compare, timeout)


def start_fields(config_text: str,
                 randomness: Mapping[str, Any],
                 operators: Optional[Mapping[str, str]] = None,
                 **extra: Any) -> Dict[str, Any]:
    """What all ranks must have in common at the start. Call it after ``determinism.enable``.

    Args:
        config_text: The effective config, for example ``cfg.pretty_text``.
        randomness: The effective values, the seed included.
        operators: Who provides mmcv's operators, as :func:`operator_fields`; None: who does now.
        extra: More fields.

    Returns:
        dict: randomness, config, versions, operator provider, environment and flags.
    """
    operators = operator_fields() if operators is None else operators
    fields: Dict[str, Any] = {'scheme': SCHEME}
    for name, value in randomness.items():
        # a row for each stream that has a root of its own, and none where no stream has
        value = ', '.join(value) if isinstance(value, tuple) else value
        parts = value if isinstance(value, Mapping) else {'': value}
        fields.update((f'randomness.{name}.{part}'.rstrip('.'), one) for part, one in parts.items())
    fields['config'] = config_text
    fields.update({**operators, **_operator_versions(operators)})
    fields.update((f'version.{name}', value) for name, value in _versions().items())
    fields.update(determinism.snapshot())
    fields.update(extra)
    return fields


def operator_fields() -> Dict[str, str]:
    """'operators': who provides mmcv's operators, and 'operators.NAME' where one has another.

    Bits depend on it: the forms of one operator round at different points.
    """
    if 'mmcv._ext' not in sys.modules:
        return {'operators': 'mmcv is not in use'}
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    base = 'compiled' if ops.provider() == 'compiled' else 'torch'
    return {'operators': base, **{
        f'operators.{name}': who for name, who in ops.exceptions(device).items()}}


def _operator_versions(operators: Mapping[str, str]) -> Dict[str, str]:
    found = {}
    if 'triton' in operators.values():
        found['version.triton'] = ops.triton.version()
    if 'compiled' in operators.values() and 'mmcv._ext' in sys.modules:
        extension = sys.modules['mmcv._ext']
        found['version.mmcv_build'] = (f'{extension.get_compiler_version()}, CUDA '
                                       f'{extension.get_compiling_cuda_version()}')
    return found


def late_fields() -> Dict[str, str]:
    """Those of :func:`start_fields` that are known once the model has imported mmcv's operators."""
    operators = operator_fields()
    return {**operators, **_operator_versions(operators)}


def _versions() -> Dict[str, Optional[str]]:
    found = {'mmrepro': __version__, 'python': platform.python_version(),
             'cuda': torch.version.cuda}
    found.update((module, package_version(module, names)) for module, names in PACKAGES.items())
    return found


def package_version(module: str, names: Sequence[str]) -> Optional[str]:
    """Of the imported module if there is one: what is imported need not be what is installed."""
    loaded = getattr(sys.modules.get(module), '__version__', None)
    if loaded is not None:
        return str(loaded)
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


# -------------------------------------------------------------------------------- comparing


def _compare(ranks: Sequence[Mapping[str, Any]]) -> None:
    lines = [line for rank in range(1, len(ranks)) for line in _differences(ranks, rank)]
    if not lines:
        return
    left_out = len(lines) - MAX_LINES
    if left_out > 0:
        lines[MAX_LINES:] = [f'  and {left_out} more']
    raise AgreementError('\n'.join(['The ranks disagree, and every rank has stopped.', *lines]))


def _differences(ranks: Sequence[Mapping[str, Any]], rank: int) -> Iterator[str]:
    first, other = ranks[0], ranks[rank]
    for name in sorted({*first, *other}):
        here, there = first.get(name, '(nothing)'), other.get(name, '(nothing)')
        if json.dumps(here) == json.dumps(there):  # 1, 1.0 and True are equal to Python
            continue
        where = name
        if isinstance(here, str) and isinstance(there, str) and '\n' in here + there:
            number, here, there = _first_line(here, there)
            where = f'{name}, line {number}'
        yield f'  rank {rank}: {where}: rank 0 has {here!r}, rank {rank} has {there!r}'


def _first_line(here: str, there: str) -> tuple:
    pairs = itertools.zip_longest(here.split('\n'), there.split('\n'), fillvalue='(end)')
    return next((number, a, b) for number, (a, b) in enumerate(pairs, 1) if a != b)


# -------------------------------------------------------------------------------- the store


def settle(topic: str,
           value: Any,
           decide: Callable[[List[Any]], Any],
           timeout: Timeout = DEFAULT_TIMEOUT,
           last: bool = False) -> Any:
    """Rank 0 decides from the values of all ranks; every rank gets the decision.

    A collective operation: each rank calls it with the same ``topic``, in the same order per topic.
    Without a process group, a world of one.

    Args:
        topic: A name.
        value: Of this rank; what JSON can hold.
        decide: The values in order of rank -> the decision (what JSON can hold), or raises
            :class:`AgreementError`, which is then raised on every rank.
        timeout: Seconds to wait for ranks that come late.
        last: The ranks end after this: rank 0 waits until all have read the decision.

    Raises:
        AgreementError: see above; or ranks are missing, or the store is.
        TypeError: ``value`` has parts that JSON cannot hold; names them.
    """
    text = _encode(value)
    if not (dist.is_available() and dist.is_initialized()):
        return decide([json.loads(text)])
    timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    rank, world = dist.get_rank(), dist.get_world_size()
    store = group_store('be compared. Use gloo or nccl.')
    presence = of_run()
    try:
        with presence.using_store() if presence is not None else nullcontext():
            store = round_store(store, topic, world)
            store.set(f'rank{rank}', text)
            if rank == 0:
                verdict = _preside(store, topic, world, decide, timeout, last)
            else:
                verdict = _follow(store, rank, world, timeout)
            if presence is not None:
                presence.connect()
    except RankEnded as error:  # rank 0, which would decide
        raise AgreementError(f'{error}. Rank {rank} waits for it: the ranks compare their '
                             f'{topic}') from error
    except RuntimeError as error:  # a dead store: its process has ended, of an error of its own
        raise AgreementError(f'rank {rank} has lost the store of the process group while the ranks '
                             f'compared their {topic}; the process that holds it has stopped '
                             f'({error})') from error
    if 'error' in verdict:
        raise AgreementError(verdict['error'])
    return verdict['value']


def _encode(value: Any) -> str:
    parts = value.items() if isinstance(value, dict) else [('value', value)]
    for name, part in parts:
        try:
            json.dumps(part)
        except (TypeError, ValueError) as error:
            raise TypeError(f'{name}={part!r} cannot be compared between ranks: expected strings, '
                            'numbers, booleans, None, or lists of them') from error
    return json.dumps(value)


def group_store(purpose: str) -> dist.Store:
    """The store of the process group.

    Raises:
        AgreementError: there is none; ``purpose`` says what the ranks cannot do, and what to use.
    """
    store = dist.distributed_c10d._get_default_store()
    if store is None:
        raise AgreementError('the process group was made without a store (backend mpi): the ranks '
                             f'cannot {purpose}')
    return store


def _preside(store: dist.Store, topic: str, world: int, decide: Callable, timeout: timedelta,
             last: bool) -> Dict[str, Any]:
    names = {f'rank{rank}': rank for rank in range(world)}
    try:
        if _wait(store, names, timeout):
            verdict = {'value': decide([json.loads(store.get(name)) for name in names])}
        else:
            verdict = _missing(store, world, timeout)
    except RankEnded as error:
        waiting = [rank for name, rank in names.items() if store.check([name])]
        verdict = {'error': f'Every rank has stopped: {error}. The ranks compare their {topic}, '
                            f'and these wait for it: {", ".join(map(str, waiting))}'}
    except AgreementError as error:
        verdict = {'error': str(error)}
    verdict = _publish(store, verdict)
    if last or 'error' in verdict:
        # this process may hold the store; let the ranks that came read it before this one ends
        present = [rank for rank in range(1, world) if store.check([f'rank{rank}'])]
        try:
            _wait(store, {f'read{rank}': rank for rank in present}, timeout)
        except RankEnded:
            pass  # it need not read it any more
    return verdict


def _follow(store: dist.Store, rank: int, world: int, timeout: timedelta) -> Dict[str, Any]:
    if _wait(store, {'verdict': 0}, timeout):
        verdict = json.loads(store.get('verdict'))
    else:
        verdict = _publish(store, _missing(store, world, timeout))
    store.set(f'read{rank}', '')
    return verdict


def _publish(store: dist.Store, verdict: Dict[str, Any]) -> Dict[str, Any]:
    """Only the first verdict counts; returns that one."""
    return json.loads(store.compare_set('verdict', '', json.dumps(verdict)))


def _missing(store: dist.Store, world: int, timeout: timedelta) -> Dict[str, Any]:
    missing = [rank for rank in range(world) if not store.check([f'rank{rank}'])]
    names = ', '.join(map(str, missing)) if missing else 'unknown (rank 0 came late)'
    return {'error': f'Every rank has stopped: of {world} ranks, these did not come within '
                     f'{timeout.total_seconds():g} s: {names}'}


def _wait(store: dist.Store, names: Mapping[str, int], timeout: timedelta) -> bool:
    try:
        wait_in_store(store, names, timeout, of_run())
    except TimeoutError:
        return False
    return True
