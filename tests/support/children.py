"""Processes of tests, benchmarks and matrices, and their results.

Importing MMDetection takes seconds, a step of a small configuration fractions of one: the parent
imports once, and every variant of a run is a forked :class:`Child`. Users' trainings in fresh
processes are started by :mod:`mmrepro.runs.launcher`.
"""
from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, Callable

import torch

LIMIT = 600  # seconds; a child that hangs is an error
GRACE = 30  # seconds that a child has to end after its result


class ChildFailed(RuntimeError):
    """A process ended with an error; the message has its traceback or output."""


def _run(connection: Any, function: Callable, args: tuple, kwargs: dict) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # MMEngine's datasets collect garbage: not among what the parent has imported
    try:
        connection.send((True, function(*args, **kwargs)))
    except BaseException:
        connection.send((False, traceback.format_exc()))
        raise


class Child:
    """A function running in a forked process; :meth:`result` waits for its return value."""

    def __init__(self, function: Callable, *args: Any, **kwargs: Any) -> None:
        context = multiprocessing.get_context('fork')
        self.receive, send = context.Pipe(duplex=False)
        self.process = context.Process(target=_run, args=(send, function, args, kwargs))
        self.process.start()
        send.close()

    def result(self, limit: float = LIMIT, grace: float = GRACE) -> Any:
        """
        Args:
            limit: seconds to wait for the return value.
            grace: seconds to wait for the end of the process, which is killed afterwards.

        Raises:
            TimeoutError: there is no result in time.
            ChildFailed: the function raised, or the process died.
        """
        try:
            if not self.receive.poll(limit):
                grace = 0
                raise TimeoutError(f'no result within {limit} s')
            succeeded, value = self.receive.recv()
        except EOFError:
            self.process.join()
            raise ChildFailed(f'the process died with exit code {self.process.exitcode}') from None
        finally:
            self.process.join(grace)
            self.process.kill()
            self.process.join()
            self.receive.close()
        if not succeeded:
            raise ChildFailed(value)
        return value


def finished(jobs: Mapping[str, tuple], at_once: int = 2,
             limit: float = LIMIT) -> Iterator[tuple[str, Any]]:
    """Run ``name -> (function, args, kwargs)`` in children, and yield results as they come.

    Args:
        at_once: children that run at a time.
        limit: seconds to wait for the next one that ends.

    Raises:
        TimeoutError: none of them ends in time.
        ChildFailed: as of :meth:`Child.result`.
    """
    waiting, running = iter(jobs.items()), {}
    while True:
        for name, (function, args, kwargs) in itertools.islice(waiting, at_once - len(running)):
            child = Child(function, *args, **kwargs)
            running[child.receive] = name, child
        if not running:
            return
        ended = multiprocessing.connection.wait(list(running), limit)
        for receive in ended:
            name, child = running.pop(receive)
            yield name, child.result()
        if not ended:
            names = ', '.join(name for name, child in running.values())
            for _, child in running.values():
                child.process.kill()
            raise TimeoutError(f'no result within {limit} s of any of {names}')


def run_all(jobs: Mapping[str, tuple], at_once: int = 2) -> dict[str, Any]:
    """Run ``name -> (function, args, kwargs)`` in children; return results in that order."""
    results = dict(finished(jobs, at_once))
    return {name: results[name] for name in jobs}


def printed_result(process: subprocess.Popen, limit: float = LIMIT) -> Any:
    """Return the result of a fresh process, whose outputs are pipes: JSON in its last line.

    Raises:
        ChildFailed: the process ended with an error.
    """
    output, errors = process.communicate(timeout=limit)
    if process.returncode:
        raise ChildFailed(f'exit code {process.returncode}:\n{(output + errors)[-4000:]}')
    return json.loads(output.splitlines()[-1])


def join_ranks(rank: int, ranks: int, port: int) -> None:
    """Make this process rank ``rank`` of a run on this machine, over loopback."""
    from mmrepro.runs.launcher import rank_variables
    os.environ.update(rank_variables(rank, ranks, port), GLOO_SOCKET_IFNAME='lo')


def silence_output() -> None:
    """Discard what this process writes to standard output (pycocotools prints tables)."""
    sys.stdout.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
