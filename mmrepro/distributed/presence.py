"""Which ranks of a run have ended, and how: known within seconds, in every process.

Waiting for a rank that has ended is an error that names it, instead of a wait until some time has
run out. A rank that is only slow counts as present: see :mod:`mmrepro.distributed.connections`.
"""
from __future__ import annotations

import atexit
import json
import logging
import multiprocessing.util
import os
import socket
import sys
import threading
import weakref
from contextlib import contextmanager
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .connections import Connection, Hub, connect, own_addresses
from .store import round_prefix
from .virtual.scheduler import RankStopped, current

__all__ = ['Ending', 'Presence', 'RankEnded', 'of_run', 'of_virtual_ranks']

_logger = logging.getLogger('mmrepro')

LEAVE_WITHIN = 30.0  # seconds that process 0 waits for the others to be done with its store
HUB = 'hub'  # the key in the store: where process 0 listens


class RankEnded(RuntimeError):
    """A rank that others wait for has ended; names it, and says how it ended."""


class Ending(NamedTuple):
    """How a rank has ended."""
    how: str
    failed: bool

    @staticmethod
    def of(error: Optional[BaseException]) -> Ending:
        """The ending of a rank whose program has returned, or raised ``error``."""
        if error is None:
            return Ending('has ended', False)
        if isinstance(error, RankStopped):
            return Ending('was stopped with another one of its process', False)
        if isinstance(error, SystemExit):
            return Ending('has ended' + (f' with exit code {error.code}' if error.code else ''),
                          False)
        return Ending(f'has ended with {type(error).__name__}: {error}', True)


class Presence:
    """The ranks of a run, as one of its processes knows them.

    Args:
        shares: The ranks of each process.
        mine: The number of this process.
        store: Gives the store of the process group, or None when there is none any more. (Whoever
            keeps a store keeps its port.)

    All processes make one, in the same order if they make several.
    """

    def __init__(self, shares: Sequence[Sequence[int]], mine: int,
                 store: Callable[[], Optional[dist.Store]]) -> None:
        self._shares, self._mine = [list(share) for share in shares], mine
        self._group_store = store
        self._prefix = round_prefix(store(), 'presence', len(shares))
        self._count(1)
        self.ended: Dict[int, Ending] = {}
        self._changed = threading.Condition()
        self._using = 0  # blocks of this process that use the store
        self._closed = False
        self._hub: Optional[Hub] = None
        self._others: Dict[int, Connection] = {}  # process 0: those that have come
        self._to_hub: Optional[Connection] = None
        self._unreachable = False
        self._name = f'process {os.getpid()} on {socket.gethostname()}'
        self._names = {mine: self._name}
        if mine == 0:
            self._hub = Hub(self._greet, self._hear, self._lost)
            where = dict(addresses=own_addresses(_address_of(store())), port=self._hub.port,
                         token=self._hub.token, process=self._name)
            self._store().set(HUB, json.dumps(where))

    # ---------------------------------------------------------------------------- asking

    def known(self, rank: int) -> bool:
        """Whether this process would hear of the end of ``rank``."""
        process = self._process_of(rank)
        return process == self._mine or (process in self._others if self._hub is not None
                                         else self._to_hub is not None)

    def ended_of(self, ranks: Iterable[int]) -> Dict[int, Ending]:
        """Those of ``ranks`` that have ended."""
        with self._changed:
            return {rank: self.ended[rank] for rank in ranks if rank in self.ended}

    def lost(self, processes: Iterable[int], within: float = 0.) -> List[int]:
        """Ranks because of which one of these processes will not take part in anything any more.

        Of each process the ranks that failed, or all that it has, if they have ended.
        """
        def look() -> List[int]:
            found: List[int] = []
            for number in processes:
                ended = [rank for rank in self._shares[number] if rank in self.ended]
                failed = [rank for rank in ended if self.ended[rank].failed]
                found += failed or (ended if len(ended) == len(self._shares[number]) else [])
            return found

        with self._changed:
            return self._changed.wait_for(look, within)

    @contextmanager
    def using_store(self) -> Iterator[None]:
        """A block that uses the store of the process group: process 0 ends after it.

        Raises:
            RankEnded: process 0 has ended, and maybe the store with it.
        """
        with self._changed:
            if self._mine and self._shares[0][0] in self.ended and all(
                    rank in self.ended for rank in self._shares[0]):
                raise RankEnded(self.text_of(self._shares[0][:1]))
            self._using += 1
        try:
            yield
        finally:
            with self._changed:
                self._using -= 1
                self._changed.notify_all()

    def text_of(self, ranks: Iterable[int]) -> str:
        """'rank 1 has ended ...' of ranks that have."""
        return '; '.join(f'rank {rank} {self.ended[rank].how}' for rank in ranks)

    def _store(self) -> Optional[dist.Store]:
        store = self._group_store()
        return None if store is None else dist.PrefixStore(self._prefix, store)

    def _count(self, more: int) -> int:
        """Processes that have come and may connect."""
        store = self._store()
        return 1 if store is None else store.add('coming', more)

    def _process_of(self, rank: int) -> int:
        return next(number for number, share in enumerate(self._shares) if rank in share)

    # ---------------------------------------------------------------------------- telling

    def end(self, rank: int, ending: Ending) -> None:
        """A rank of this process has ended."""
        if rank in self.ended:
            return
        self._flush()
        self._tell({rank: ending})

    def close(self, ending: Ending) -> None:
        """All ranks of this process have ended. Process 0 waits until nobody uses its store."""
        if self._closed:
            return
        self._closed = True
        self._flush()
        self._tell({rank: ending for rank in self._shares[self._mine]})
        if self._hub is not None:
            coming = self._count(0) - 1
            with self._changed:
                self._changed.wait_for(
                    lambda: not self._others and len(self._names) > coming, LEAVE_WITHIN)
            self._hub.close()
        elif self._to_hub is not None:
            self._to_hub.close()

    def _flush(self) -> None:
        # `set` does not wait for an answer, and what this process has set counts
        store = self._store()
        if store is None:
            return
        try:
            with self.using_store():
                store.check([HUB])
        except RuntimeError:
            pass  # the store has ended; nobody reads it any more

    def _note(self, endings: Dict[int, Ending]) -> Dict[int, Ending]:
        """Remember, and wake whoever waits. The first ending of a rank counts; returns the new."""
        with self._changed:
            new = {rank: one for rank, one in endings.items() if rank not in self.ended}
            self.ended.update(new)
            self._changed.notify_all()
        failed = [rank for rank, one in new.items()
                  if one.failed and rank not in self._shares[self._mine]]
        if failed and not self._closed:  # this rank may wait where it cannot say so itself
            _logger.error('%s', self.text_of(failed))
        return new

    def _tell(self, endings: Dict[int, Ending]) -> None:
        """Remember, and let the other processes know."""
        new = self._note(endings)
        others = [self._to_hub] if self._hub is None else list(self._others.values())
        for other in filter(None, others if new else ()):
            other.send(_message(new))

    # ---------------------------------------------------------------------------- process 0

    def _greet(self, first: Dict[str, Any], connection: Connection) -> int:
        process = first['number']
        with self._changed:
            self._others[process] = connection
            self._names[process] = first['process']
            self._changed.notify_all()
            known = dict(self.ended)
        if known:
            connection.send(_message(known))
        return process

    def _hear(self, process: int, message: Dict[str, Any]) -> None:
        if 'ended' in message:
            self._tell(_endings(message))
        elif 'left' in message:
            self._forget(process)

    def _forget(self, process: int) -> None:
        with self._changed:
            self._others.pop(process, None)
            self._changed.notify_all()

    def _lost(self, process: int) -> None:
        self._forget(process)
        self._tell(self._killed(process))

    def _killed(self, process: int) -> Dict[int, Ending]:
        how = f'was killed or has crashed ({self._names[process]})'
        return {rank: Ending(how, True) for rank in self._shares[process]}

    # ---------------------------------------------------------------------------- the others

    def connect(self) -> None:
        """Connect to process 0 if that has not happened yet and process 0 has come."""
        if self._mine == 0 or self._to_hub is not None or self._unreachable:
            return
        store = self._store()
        if store is None or not store.check([HUB]):
            return
        where = json.loads(store.get(HUB))
        self._names[0] = where['process']
        try:
            connection = connect(where['addresses'], where['port'])
        except OSError as error:
            self._unreachable = True
            self._count(-1)
            _logger.warning('no connection to rank 0 (%s): when a rank is killed, this one may '
                            'wait for it until the time of an operation has run out', error)
            return
        connection.send(dict(token=where['token'], number=self._mine, process=self._name))
        self._to_hub = connection
        with self._changed:
            known = dict(self.ended)
        if known:
            connection.send(_message(known))
        threading.Thread(target=self._listen, args=(connection, ), name='mmrepro connection',
                         daemon=True).start()

    def _listen(self, hub: Connection) -> None:
        while True:
            messages = hub.receive()
            for message in messages or ():
                self._note(_endings(message))
            if messages is None:
                self._note(self._killed(0))
                return
            if all(rank in self.ended for rank in self._shares[0]):
                with self._changed:
                    self._changed.wait_for(lambda: not self._using)
                hub.send(dict(left=True))


# ------------------------------------------------------------------------ of this process

_of_processes: Optional[Tuple[Any, Presence]] = None  # with a weak reference to the process group
_of_virtual_ranks: Optional[Presence] = None


def of_run() -> Optional[Presence]:
    """The presence of the ranks that ``torch.distributed`` has now; None for one process.

    The first call in a process group is a collective operation.
    """
    global _of_processes
    if current() is not None:
        return _of_virtual_ranks
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    group = c10d._world.default_pg
    if _of_processes is None or _of_processes[0]() is not group:
        _leave()
        if c10d._get_default_store() is None:
            return None
        there = weakref.ref(group)

        def store() -> Optional[dist.Store]:
            same = dist.is_initialized() and there() is c10d._world.default_pg
            return c10d._get_default_store() if same else None

        presence = Presence([[rank] for rank in range(dist.get_world_size())], dist.get_rank(),
                            store)
        _of_processes = there, presence
        atexit.register(_leave)
        # processes that multiprocessing forks end without what atexit has
        multiprocessing.util.Finalize(None, _leave, exitpriority=0)
    return _of_processes[1]


def _leave() -> None:
    global _of_processes
    if _of_processes is not None:
        presence, _of_processes = _of_processes[1], None
        presence.close(Ending.of(getattr(sys, 'last_value', None)))


@contextmanager
def of_virtual_ranks(shares: Sequence[Sequence[int]], mine: int) -> Iterator[Optional[Presence]]:
    """In this block, virtual ranks run, of which each process has a share. For a process group."""
    global _of_virtual_ranks
    store = c10d._get_default_store() if len(shares) > 1 else None
    if store is None:
        yield None
        return
    presence = _of_virtual_ranks = Presence(shares, mine, lambda: store)
    try:
        yield presence
    except BaseException as error:
        presence.close(Ending.of(error))
        raise
    else:
        presence.close(Ending.of(None))
    finally:
        _of_virtual_ranks = None


def _forget_in_child() -> None:
    global _of_processes, _of_virtual_ranks
    _of_processes = _of_virtual_ranks = None


if hasattr(os, 'register_at_fork'):
    os.register_at_fork(after_in_child=_forget_in_child)


def _message(endings: Dict[int, Ending]) -> Dict[str, Any]:
    return dict(ended={str(rank): list(one) for rank, one in endings.items()})


def _endings(message: Dict[str, Any]) -> Dict[int, Ending]:
    return {int(rank): Ending(*one) for rank, one in message['ended'].items()}


def _address_of(store: dist.Store) -> Any:
    """Where the store is, or else where rank 0 is; None if neither is known."""
    while hasattr(store, 'underlying_store'):
        store = store.underlying_store
    host = getattr(store, 'host', None) or os.environ.get('MASTER_ADDR')
    port = getattr(store, 'port', None) or int(os.environ.get('MASTER_PORT', 0))
    return (host, port) if host and port else None
