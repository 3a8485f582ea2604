"""Conditions around a training that must not matter: order of files, folder, load, CPU.

``Training.prepare`` names functions that a training calls before it reads its config.
"""
from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from ..determinism.cpu_level import cpu_instructions, level_variables

# other kernels of training on a host with AVX2 only. Data loading stays at AVX2, because the same
# batches are promised on CPUs with AVX2 only.
LESS_THAN_AVX2 = {'ATEN_CPU_CAPABILITY': 'default', 'MKL_ENABLE_INSTRUCTIONS': 'SSE4_2',
                  'MKL_CBWR': 'COMPATIBLE', 'ONEDNN_MAX_CPU_ISA': 'SSE41'}

MOST_BURNERS = 16  # processes
# ends when the process that started it, whose id is the argument, has ended
BURN = 'import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    sum(range(100000))'


def instruction_sets() -> dict[str, str]:
    """Return the variables that disable instruction sets of libraries; {} on other CPUs."""
    if platform.machine() not in ('x86_64', 'AMD64'):
        return {}
    if 'AVX512' in cpu_instructions():
        return level_variables('avx2', os.environ)
    return dict(LESS_THAN_AVX2)


def linked_folder(path: str, original: str) -> str:
    """Make a folder with links to everything in ``original``, so that relative paths work."""
    os.makedirs(path, exist_ok=True)
    for link in filter(os.path.islink, (os.path.join(path, name) for name in os.listdir(path))):
        os.remove(link)  # of an earlier call, perhaps from another folder
    for name in os.listdir(original):
        link = os.path.join(path, name)
        if not os.path.lexists(link):
            os.symlink(os.path.join(os.path.abspath(original), name), link)
    return path


class _Reversed(contextlib.ExitStack):
    """``os.scandir`` in the opposite order, a context that can be closed."""

    def __init__(self, entries: Any) -> None:
        super().__init__()
        with entries:
            self._entries = iter(list(entries)[::-1])

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._entries)


def reverse_listings() -> None:
    """Reverse the order in which this process lists files; the order differs between disks."""
    scandir, listdir = os.scandir, os.listdir
    # os.walk, glob and pathlib call scandir
    module: Any = os
    module.scandir = lambda *args, **kwargs: _Reversed(scandir(*args, **kwargs))
    module.listdir = lambda *args, **kwargs: listdir(*args, **kwargs)[::-1]


def burn_other_cores() -> None:
    """Keep the other cores busy until this process ends, which changes the timing of threads."""
    for _ in range(min(MOST_BURNERS, max(1, (os.cpu_count() or 1) - 1))):
        subprocess.Popen([sys.executable, '-I', '-S', '-c', BURN, str(os.getpid())])
