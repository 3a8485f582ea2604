"""The row of a planted fault, and what plants are made of.

A plant runs in the process that trains, before anything is built, and changes what it likes there.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable

import torch

FROM = 3  # the iteration from which on most faults show
SEQUENTIAL = dict(worker_seed='mmengine')  # streams that every draw moves on


@dataclass(frozen=True)
class Fault:
    plant: Callable[[str], None]  # called with the name of the run, 'A' or 'B'
    expect: dict[str, Any]  # attributes of the diagnosis; `mentions` are parts of its text
    runs: str = 'B'  # 'AB': both runs have the fault, as runs of the same code do
    randomness: dict[str, Any] = field(default_factory=dict)  # changes for both runs
    env: dict[str, str] = field(default_factory=dict)  # of run B
    ranks: int = 1  # of both runs
    resume_at: int | None = None  # of run B
    fast: bool = False  # runs in every run of the tests
    model: str | None = None  # a detector of tests/support/demo_runs.py, not the tiny network
    validate_at: int | None = None  # of run B


FAULTS = {}


def fault(iteration=FROM, **row):
    """Register a plant under its name; what is no field of a fault is expected."""
    fields = {name: row.pop(name) for name in Fault.__dataclass_fields__ if name in row}

    def register(plant):
        FAULTS[plant.__name__] = Fault(plant, dict(row, iteration=iteration), **fields)
        return plant
    return register


def replaced(owner, name, since=FROM, per_iteration=1):
    """Decorator: the function replaces a method, from an iteration on.

    Its first argument is the original. ``per_iteration``: calls of the method in an iteration.
    """
    def decorate(function):
        original, calls = getattr(owner, name), [0]

        def method(*args, **kwargs):
            calls[0] += 1
            if calls[0] <= since * per_iteration:
                return original(*args, **kwargs)
            return function(original, *args, **kwargs)

        setattr(owner, name, method)
        return function
    return decorate


def planted(owner, name, since=FROM, **row):
    """Register a function that replaces a method: its own name is that of the fault."""
    def register(function):
        def plant(run):
            replaced(owner, name, since)(function)

        plant.__name__ = function.__name__
        fault(**row)(plant)
        return function
    return register


# the same functions, computed by other operators: they replace torch's own kernels
NATIVE = {
    'index_add': lambda x, dim, index, source: x + source,  # indices are 0, 1, ... here
    'relu': lambda x: torch.clamp(x, min=0),
    'threshold_backward': lambda grad, x, limit: grad * (x > limit),
}
_libraries = []


def noisy_kernel(operator, since=FROM):
    """Let torch's own CPU kernel return a different result, from an iteration on.

    Nothing above the kernel can tell, as with atomic additions on a device.
    """
    calls = [0]

    def kernel(*args):
        found = NATIVE[operator](*args)
        calls[0] += 1
        if calls[0] > since:
            found.view(-1)[0] += 1e-5
        return found

    library = torch.library.Library('aten', 'IMPL')
    library.impl(operator, kernel, 'CPU')
    _libraries.append(library)
