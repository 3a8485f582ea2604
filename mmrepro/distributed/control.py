"""Exchange small values between the processes of a run, on the host, beside its tensors.

A run that has gloo uses gloo, which notices the end of a process at once. A run that has NCCL only
uses the store of the process group: gloo would need a network of its own between the nodes. MPI has
no store.
"""
from __future__ import annotations

import os
import pickle
import socket
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Callable

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..errors import ConnectionFailed
from .lost_ranks import leave_at_exit

CONNECT = timedelta(seconds=30)  # for the connections of a group of gloo, once all ranks are here
UNKNOWN = timedelta(minutes=30)  # torch's timeout, where that of the group is not known
CHUNK = 1 << 25  # bytes of large values that are in the store at once

Finish = Callable[[], list[int]]


def default_timeout() -> timedelta | None:
    """Return the timeout of the default process group.

    None where it is not known (MPI, old versions of torch): torch's own then, 30 minutes for gloo.
    """
    default: Any = dist.group.WORLD
    device, *_ = getattr(default, '_device_types', ()) or (torch.device('cpu'), )
    options = getattr(default._get_backend(device), 'options', None)
    return getattr(options, '_timeout', None)


@contextmanager
def naming_gloo_network() -> Iterator[None]:
    """Let an error of connecting over gloo name this host, its address, and what to set.

    Raises:
        ConnectionFailed: for an error of gloo inside the block.
    """
    try:
        yield
    except RuntimeError as error:
        if 'gloo' not in str(error).lower():  # of the store: the address of rank 0
            raise
        host, interface = socket.gethostname(), os.environ.get('GLOO_SOCKET_IFNAME')
        try:
            address = socket.gethostbyname(host)
        except OSError as problem:
            address = f'no address ({problem})'
        said = f'GLOO_SOCKET_IFNAME={interface}' if interface else (
            f'GLOO_SOCKET_IFNAME is not set, so gloo takes the address of the name {host}')
        raise ConnectionFailed(
            f'gloo cannot connect the ranks: this is {host}, whose address is {address}; {said}. '
            'Other machines cannot reach an address that begins with 127, which Debian and Ubuntu '
            'write into /etc/hosts. Set GLOO_SOCKET_IFNAME on every node to the interface that '
            f'leads to the others (`ip -brief address` lists them). gloo says: {error}') from error


class GlooControl:
    """Collective operations of a group of gloo beside that of the run's tensors.

    So a rank that comes to another collective operation of the program cannot be mistaken for one
    that agrees. ``group`` None stands for the default group, where there is no store (MPI).
    """

    def __init__(self, group: Any) -> None:
        self.group = group

    def all_objects(self, value: Any) -> list[Any]:
        received: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(received, value, group=self.group)
        return received

    def gather(self, value: Any) -> list[Any] | None:
        received = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(value, received, group=self.group)
        return received

    def begin_max(self, values: list[int]) -> Finish:
        array = np.array(values, np.int8)  # torch takes longer to write and read a few numbers
        work = dist.all_reduce(torch.from_numpy(array), dist.ReduceOp.MAX, group=self.group,
                               async_op=True)

        def finish() -> list[int]:
            work.wait()
            return list(map(int, array.tolist()))

        return finish


class StoreControl:
    """The same operations through a store: rank 0 collects the values and hands them out."""

    def __init__(self, store: Any, timeout: timedelta | None) -> None:
        self._store: Any = dist.PrefixStore('mmrepro/control', store)
        self._timeout = timeout or UNKNOWN
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._count = 0  # exchanges that have begun, the same on all ranks

    def _take(self, key: str, last: bool) -> bytes:
        """Wait for a value, and delete it if this rank is the ``last`` that reads it."""
        self._store.wait([key], self._timeout)
        value: bytes = self._store.get(key)
        if last:
            self._store.delete_key(key)
        return value

    def _begin(self, value: bytes, together: bool) -> Callable[[], list[bytes]]:
        """Begin an exchange; return the function that ends it.

        If ``together``, rank 0, which may keep the store, waits until all ranks have the values.
        """
        number, self._count = self._count, self._count + 1
        self._store.set(f'{number}/{self._rank}', value)

        def finish() -> list[bytes]:
            if self._rank > 0:
                values: list[bytes] = pickle.loads(self._take(f'{number}/all', False))
                if self._store.add(f'{number}/read', 1) == self._world - 1:
                    self._store.delete_key(f'{number}/all')
                    self._store.delete_key(f'{number}/read')
                    if together:
                        self._store.set(f'{number}/done', '')
                return values
            values = [self._take(f'{number}/{rank}', True) for rank in range(self._world)]
            self._store.set(f'{number}/all', pickle.dumps(values))
            if together:
                self._take(f'{number}/done', True)
            return values

        return finish

    def all_objects(self, value: Any) -> list[Any]:
        return [pickle.loads(part) for part in self._begin(pickle.dumps(value), True)()]

    def gather(self, value: Any) -> list[Any] | None:
        content = pickle.dumps(value)
        sizes = self.all_objects(len(content))
        number = self._count
        if self._rank == 0:
            parts = [b''.join(self._receive(f'{number}/{rank}', size))
                     for rank, size in enumerate(sizes) if rank > 0]
            return [value, *map(pickle.loads, parts)]
        for start in range(0, len(content), CHUNK):  # rank 0 reads when it has come to this rank
            key = f'{number}/{self._rank}/{start}'
            self._store.set(key, content[start:start + CHUNK])
            self._take(f'{key}/read', True)
        return None

    def _receive(self, prefix: str, size: int) -> Iterator[bytes]:
        for start in range(0, size, CHUNK):
            yield self._take(f'{prefix}/{start}', True)
            self._store.set(f'{prefix}/{start}/read', '')

    def begin_max(self, values: list[int]) -> Finish:
        finish = self._begin(bytes(value + 128 for value in values), False)
        return lambda: [max(column) - 128 for column in zip(*finish())]


_controls: Any = weakref.WeakKeyDictionary()  # process group -> its control


def control() -> GlooControl | StoreControl:
    """Return the control channel of the default group; the first call is collective.

    Its timeout is that of the default group.

    Raises:
        ConnectionFailed: gloo cannot connect the ranks within :data:`CONNECT`.
    """
    store = c10d._get_default_store()
    if store is None:
        return GlooControl(None)
    default: Any = dist.group.WORLD
    if default not in _controls:
        if _has_gloo(default):
            leave_at_exit(_take_groups)
            _controls[default] = GlooControl(_gloo_group(store))
        else:
            _controls[default] = StoreControl(store, default_timeout())
    found: GlooControl | StoreControl = _controls[default]
    return found


def _has_gloo(group: Any) -> bool:
    return 'gloo' in c10d.get_backend_config(group)


def _gloo_group(store: Any) -> Any:
    timeout = default_timeout()
    # a rank may come late, and may wait for long in an operation; connecting takes no time
    come = dist.PrefixStore('mmrepro/connecting', store)
    come.set(str(dist.get_rank()), '')
    come.wait(list(map(str, range(dist.get_world_size()))), timeout or UNKNOWN)
    change = getattr(c10d, '_set_pg_timeout', None)
    with naming_gloo_network():
        group = dist.new_group(
            backend='gloo', timeout=timeout if change is None else min(CONNECT, timeout or CONNECT))
    if change is not None:
        change(timeout or UNKNOWN, group)
    return group


def _take_groups() -> list[Any]:
    groups = [value.group for value in _controls.values() if isinstance(value, GlooControl)]
    _controls.clear()
    return groups
