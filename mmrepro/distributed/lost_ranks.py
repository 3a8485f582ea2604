"""The end of processes that others wait for: say which rank has failed, and end without a crash.

gloo notices the end of a process by its sockets and raises, without a name. So a process that ends
with an error leaves the reason in the store of the process group, which the launcher or rank 0
keeps; and processes that have lost a connection look there for up to :data:`WITHIN`. A process that
has left no reason was killed, if it ran on this machine and is gone.

A process that ends without an error ends the threads of gloo before the interpreter shuts down. A
thread of gloo needs the GIL to release a tensor. If the interpreter is already shutting down, the
process aborts with 'terminate called without an active exception' (PyTorch #179291, #190489). The
threads are joined once nothing refers to their process group. So process groups are destroyed at
exit, and references to them (a model in a global variable, garbage that was not collected) are
dropped first. After an error nothing is destroyed: a collective operation may still be pending, and
joining would wait for the other ranks.
"""
from __future__ import annotations

import atexit
import itertools
import json
import os
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Callable
from weakref import WeakKeyDictionary

import torch.distributed as dist
from mmengine.dist import get_world_size
from torch.distributed import distributed_c10d as c10d

from ..errors import Preempted, RankEnded

WITHIN = timedelta(seconds=5)  # time for the reasons of all ranks to arrive
_blocks = itertools.count(1)  # numbers of the blocks that a process enters: the same on all ranks


@contextmanager
def naming_lost_ranks(name: str, failed: Callable[[], str] = str) -> Iterator[None]:
    """Raise errors that name the ranks which have ended, in a block that all processes run.

    Args:
        name: Of this process in the messages of other processes, 'rank 3'.
        failed: Called after an error: a more exact name of what has failed, or ''.

    Raises:
        RankEnded: this process has lost another process; names it and its error.
    """
    if get_world_size() == 1 or c10d._get_default_store() is None:
        yield
        return
    block = _Block(f'mmrepro/block{next(_blocks)}')
    try:
        block.enter(name)
        yield
    except (Exception, KeyboardInterrupt) as error:
        _Block.failed = True
        if isinstance(error, (RankEnded, KeyboardInterrupt)):
            raise
        if not _is_lost_connection(error):
            block.leave(f'{failed() or name} has ended with {type(error).__name__}: {error}')
            raise
        raise RankEnded(f'{block.lost()}\n{error}') from error
    except SystemExit as error:
        if error.code and not isinstance(error, Preempted):  # all ranks leave together then
            block.leave(f'{failed() or name} has ended with SystemExit: {error}')
        raise


def _is_lost_connection(error: BaseException) -> bool:
    # NCCL and the store have classes; gloo names the file of its own that raised
    kinds = tuple(getattr(dist, name) for name in ('DistError', 'DistBackendError')
                  if hasattr(dist, name))
    return isinstance(error, kinds) or (isinstance(error, RuntimeError) and 'gloo' in str(error))


class _Block:
    """The keys of a block in the store: which process runs each rank, and how it has ended."""

    failed = False  # whether the block entered last has failed

    def __init__(self, prefix: str) -> None:
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._store = dist.PrefixStore(prefix, c10d._get_default_store())

    def enter(self, name: str) -> None:
        _Block.failed = False
        self._store.set(f'process{self._rank}', json.dumps(
            dict(name=name, pid=os.getpid(), host=socket.gethostname(), pids=_pid_namespace())))

    def leave(self, reason: str) -> None:
        """Publish why this process has ended."""
        with suppress(RuntimeError):  # the store may have gone with the process that kept it
            self._store.set(f'ended{self._rank}', reason)
            self._store.check([f'ended{self._rank}'])  # `set` does not wait until it is there

    def lost(self) -> str:
        """Wait for the reasons of other processes; return which have ended, and how."""
        try:
            self._store.set(f'ended{self._rank}', '')
            keys = [f'ended{rank}' for rank in range(self._world)]
            with suppress(RuntimeError):  # killed processes give no reason
                self._store.wait(keys, WITHIN)
            reasons = {rank: self._store.get(key).decode() if self._store.check([key]) else None
                       for rank, key in enumerate(keys)}
            text = '; '.join(filter(None, reasons.values())) or '; '.join(
                self._how_ended(rank) for rank, reason in reasons.items() if reason is None)
            self._let_others_read(reasons)
        except RuntimeError:
            return ('rank 0 has ended, and with it the store of the process group; its own output '
                    'says why')
        return text or 'a connection between the ranks was lost, and all ranks have noticed'

    def _how_ended(self, rank: int) -> str:
        """Return how a rank ended that left no reason."""
        key = f'process{rank}'
        if not self._store.check([key]):
            return f'rank {rank} has not come'
        process: dict[str, Any] = json.loads(self._store.get(key))
        where = f'process {process["pid"]} on {process["host"]}'
        here = (process['host'], process['pids']) == (socket.gethostname(), _pid_namespace())
        if here and not _runs(process['pid']):
            return f'{process["name"]} was killed or has crashed ({where})'
        return (f'{process["name"]} has not answered within {WITHIN.total_seconds():g} s '
                f'({where}): killed, ended, or still computing')

    def _let_others_read(self, reasons: dict[int, str | None]) -> None:
        """Let rank 0, which may keep the store, wait until processes like this have read it."""
        self._store.set(f'read{self._rank}', '')
        if self._rank == 0:
            with suppress(RuntimeError):
                self._store.wait([f'read{rank}' for rank, reason in reasons.items()
                                  if reason == ''], WITHIN)


def _pid_namespace() -> str:
    """Return where the numbers of this process count: containers may share the name of a host.

    '' where it is not known.
    """
    with suppress(OSError), open('/proc/sys/kernel/random/boot_id') as file:
        return f'{file.read().strip()} {os.readlink("/proc/self/ns/pid")}'
    return ''


def _runs(pid: int) -> bool:
    """Whether a process of this machine runs; a zombie does not."""
    try:
        with open(f'/proc/{pid}/stat') as file:
            return file.read().rpartition(')')[2].split()[0] not in ('Z', 'X')
    except FileNotFoundError:
        return not os.path.isdir('/proc/self')  # without /proc, nothing is known
    except ProcessLookupError:
        return False


_holders: WeakKeyDictionary[Any, tuple[str, ...]] = WeakKeyDictionary()


def let_go_at_exit(holder: Any, *attributes: str) -> None:
    """Drop these attributes, which refer to process groups, before the groups are destroyed."""
    _holders[holder] = attributes


def leave_at_exit(groups: Callable[[], Iterable[Any]]) -> None:
    """Destroy the groups that ``groups()`` returns at exit; an item None stands for all."""
    atexit.register(_leave, groups)


def _leave(groups: Callable[[], Iterable[Any]]) -> None:
    if getattr(sys, 'last_value', None) is not None or _Block.failed:
        return
    for holder, attributes in list(_holders.items()):
        for name in attributes:
            vars(holder).pop(name, None)
    for group in groups():
        if dist.is_initialized() and (group is None or group in c10d._world.pg_map):
            dist.destroy_process_group(group)
