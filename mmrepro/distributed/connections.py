"""Connections between the processes of a run that say when one of them ends.

Process 0 listens, every other process connects to it and stays connected. The operating system
closes the connection of a process that ends, however it ends, so a rank that is only busy is never
taken for one that has ended. A machine that disappears is found by TCP's own probes.

Messages are JSON, one per line. Nothing here waits for a message: a thread reads, and calls back.
"""
from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import threading
import weakref
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

__all__ = ['Connection', 'Hub', 'connect', 'own_addresses']

Message = Dict[str, Any]

CONNECT_TIMEOUT = 10.0  # seconds
LONGEST = 1 << 16  # bytes of a message

# A machine that does not answer for IDLE + INTERVAL * COUNT seconds is gone.
PROBES: Tuple[Tuple[str, int], ...] = (
    ('TCP_KEEPIDLE', 15), ('TCP_KEEPINTVL', 5), ('TCP_KEEPCNT', 4))

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    # a worker of a data loader outlives a killed process by seconds, and would keep it connected
    for one in list(_open):
        one.close()


if hasattr(os, 'register_at_fork'):  # where processes can be forked
    os.register_at_fork(after_in_child=_close_in_child)


def _probed(one: socket.socket) -> socket.socket:
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in PROBES:
        if hasattr(socket, name):  # not on every system
            one.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    _open.add(one)
    return one


class Connection:
    """One end of a connection."""

    def __init__(self, own: socket.socket) -> None:
        self.socket = _probed(own)
        self._rest = b''
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Also to a process that has ended: whoever reads finds that out."""
        with self._lock:
            try:
                self.socket.sendall(json.dumps(message).encode() + b'\n')
            except OSError:
                pass

    def receive(self) -> Optional[List[Message]]:
        """Messages that have come, at least a part of one; None: the other end is closed.

        Raises:
            ValueError: what has come is no message.
        """
        try:
            read = self.socket.recv(4096)
        except OSError:
            return None
        if not read:
            return None
        *lines, self._rest = (self._rest + read).split(b'\n')
        if len(self._rest) > LONGEST:
            raise ValueError('a message without an end')
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        try:
            self.socket.shutdown(socket.SHUT_RDWR)  # also ends a thread that reads
        except OSError:
            pass  # the other end is closed
        self.socket.close()


def own_addresses(towards: Optional[Tuple[str, int]]) -> List[str]:
    """Addresses of this machine: the one by which it reaches ``towards``, then its name."""
    found: List[str] = []
    try:
        known = [] if towards is None else socket.getaddrinfo(*towards, type=socket.SOCK_DGRAM)
    except OSError:  # the name is not known here; the others may know that of this machine
        known = []
    for family, kind, _, _, address in known:
        with socket.socket(family, kind) as one:
            try:
                one.connect(address)  # sends nothing
            except OSError:
                continue
            found.append(one.getsockname()[0])
    return list(dict.fromkeys([*found, socket.gethostname()]))


def connect(addresses: Sequence[str], port: int) -> Connection:
    """Raises OSError when no address can be reached."""
    problems = []
    for address in addresses:
        try:
            own = socket.create_connection((address, port), timeout=CONNECT_TIMEOUT)
        except OSError as error:
            problems.append(f'{address}: {error}')
            continue
        own.settimeout(None)
        return Connection(own)
    raise OSError('; '.join(problems))


class Hub:
    """The end of process 0.

    Args:
        greeting: Called with the first message of a connection; returns a name for it.
        message: Called with the name and each further message.
        ended: Called with the name when the connection is closed.

    A connection must say ``token`` first. All calls come from one thread.
    """

    def __init__(self, greeting: Callable[[Message, Connection], Any],
                 message: Callable[[Any, Message], None], ended: Callable[[Any], None]) -> None:
        self._greeting, self._message, self._ended = greeting, message, ended
        self.token = secrets.token_hex(16)
        both = socket.has_dualstack_ipv6()
        self._listener = socket.create_server(
            ('', 0), family=socket.AF_INET6 if both else socket.AF_INET, backlog=1024,
            dualstack_ipv6=both)
        _open.add(self._listener)
        self.port = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._waker, self._woken = socket.socketpair()
        _open.update((self._waker, self._woken))
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._names: Dict[Connection, Any] = {}
        self._thread = threading.Thread(target=self._run, name='mmrepro connections', daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._waker.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.fileobj is self._woken:
                        return
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._read(key.data)
        finally:
            for key in list(self._selector.get_map().values()):
                (key.data or key.fileobj).close()
            self._selector.close()

    def _accept(self) -> None:
        try:
            own, _ = self._listener.accept()
        except OSError:  # it has gone already
            return
        connection = Connection(own)
        self._selector.register(own, selectors.EVENT_READ, connection)

    def _check(self, first: Any) -> None:
        said = first.get('token') if isinstance(first, dict) else None
        if not (isinstance(said, str) and secrets.compare_digest(said, self.token)):
            raise ValueError('not the token of this run')

    def _read(self, connection: Connection) -> None:
        try:
            messages = connection.receive()
            if messages and connection not in self._names:
                self._check(messages[0])
        except ValueError:  # somebody else has found the port
            messages = None
        if messages and connection not in self._names:
            self._names[connection] = self._greeting(messages.pop(0), connection)
        for message in messages or ():
            self._message(self._names[connection], message)
        if messages is None:
            self._selector.unregister(connection.socket)
            connection.close()
            if connection in self._names:
                self._ended(self._names.pop(connection))
