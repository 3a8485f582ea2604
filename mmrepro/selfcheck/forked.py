"""A copy of the process that computes, answers and ends: what it changes, nothing else sees."""
from __future__ import annotations

import contextvars
import gc
import json
import logging
import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Callable, NoReturn

import torch
import torch.distributed as dist

from ..distributed.scheduler import current


class CopyFailed(Exception):
    """There is no copy, or it has no answer; the text completes "the copy ..."."""


def is_possible(model: torch.nn.Module) -> bool:
    """Whether a copy of this process can train the model as this process does.

    Devices do not survive a fork, and a copy cannot meet the other ranks.
    """
    on_cpu = all(tensor.device.type == 'cpu' for tensor in (*model.parameters(), *model.buffers()))
    alone = current() is None and not (dist.is_available() and dist.is_initialized())
    return sys.platform == 'linux' and on_cpu and alone and not torch.cuda.is_initialized()


class Copy:
    """A copy of this process, made by ``os.fork``.

    Attributes:
        inside: whether this is the copy, which has to call :meth:`answer`.

    Raises:
        CopyFailed: no process can be made, for lack of memory or at a limit of the system.
    """

    def __init__(self) -> None:
        try:
            self._read, self._write = os.pipe()
        except OSError as error:
            raise CopyFailed(f'could not be made: {error.strerror}') from error
        self._unread = b''
        try:
            with warnings.catch_warnings():
                # of other threads, which the copy does not have: it is given a limited time
                warnings.simplefilter('ignore', DeprecationWarning)
                self._process = os.fork()
        except OSError as error:
            os.close(self._read)
            os.close(self._write)
            raise CopyFailed(f'could not be made: {error.strerror}') from error
        self.inside = self._process == 0
        if self.inside:
            # the copy ends soon, and a collection would copy the memory that both share
            gc.disable()
        os.close(self._read if self.inside else self._write)

    def answer(self, answers: Callable[[], Iterable[Any]]) -> NoReturn:
        """Send answers, which JSON can hold, and end the copy. Logs nothing."""
        logging.disable(logging.CRITICAL)

        def send() -> None:
            try:
                for value in answers():
                    self._send(dict(answer=value))
            except Exception as error:  # of a step of the user
                self._send(dict(error=f'{type(error).__name__}: {error}'))

        try:
            if torch.get_num_threads() == 1:
                send()
            else:  # the threads of OpenMP are gone, and belong to the thread that has used them
                thread = threading.Thread(target=contextvars.copy_context().run, args=[send])
                thread.start()
                thread.join()
        finally:
            os._exit(0)  # not the way out of the training

    def _send(self, content: Any) -> None:
        line = json.dumps(content).encode() + b'\n'
        while line:
            line = line[os.write(self._write, line):]

    def next(self, seconds: float) -> Any:
        """Return the next answer.

        Raises:
            CopyFailed: an error in the copy, its end, or no answer for so many seconds.
        """
        end = time.monotonic() + seconds
        while b'\n' not in self._unread:
            poll = select.poll()  # select() knows no file whose number is above 1,023
            poll.register(self._read, select.POLLIN)
            if not poll.poll(max(0, end - time.monotonic()) * 1000):
                raise CopyFailed(f'did not answer for {seconds:.0f} s')
            received = os.read(self._read, 1 << 16)
            if not received:
                raise CopyFailed(self._ended())
            self._unread += received
        line, _, self._unread = self._unread.partition(b'\n')
        content = json.loads(line)
        if 'error' in content:
            raise CopyFailed(f'ended with {content["error"]}')
        return content['answer']

    def _ended(self) -> str:
        code = self._wait()
        if code is None:
            return 'ended'
        return f'was ended by signal {-code}' if code < 0 else f'ended with exit code {code}'

    def __enter__(self) -> Copy:
        return self

    def __exit__(self, *error: Any) -> None:
        """End the copy, where it has not ended by itself."""
        if self.inside:
            return
        os.close(self._read)
        if self._process:
            with suppress(ProcessLookupError):
                os.kill(self._process, signal.SIGKILL)
            self._wait()

    def _wait(self) -> int | None:
        """Return the exit code; None where code of the user ignores or awaits all children."""
        process, self._process = self._process, 0
        with suppress(ChildProcessError):
            return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        return None
