"""What surrounds a training and must not matter, changed for one run: files, folder, load, CPU.

Functions that a training calls before it reads its config are named by ``Training.prepare``.
"""
from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from ..determinism.cpu_level import cpu_instructions, level_variables

# on a host with AVX2 only: other kernels of training. What loads data stays at AVX2, because
# batches are promised to be the same on CPUs with AVX2 and no others.
LESS_THAN_AVX2 = {'ATEN_CPU_CAPABILITY': 'default', 'MKL_ENABLE_INSTRUCTIONS': 'SSE4_2',
                  'MKL_CBWR': 'COMPATIBLE', 'ONEDNN_MAX_CPU_ISA': 'SSE41'}

MOST_BURNERS = 16  # processes
# ends with the process that started it and whose id it is given, however that ends
BURN = 'import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    sum(range(100000))'


def instruction_sets() -> dict[str, str]:
    """Variables that take instruction sets from the libraries; none where that cannot be done."""
    if platform.machine() not in ('x86_64', 'AMD64'):
        return {}
    if 'AVX512' in cpu_instructions():
        return level_variables('avx2', os.environ)
    return dict(LESS_THAN_AVX2)


def linked_folder(path: str, original: str) -> str:
    """A folder with links to everything in ``original``: relative paths lead to the same files."""
    os.makedirs(path, exist_ok=True)
    for name in os.listdir(original):
        link = os.path.join(path, name)
        if not os.path.lexists(link):
            os.symlink(os.path.join(os.path.abspath(original), name), link)
    return path


class _Reversed:
    """``os.scandir`` in the opposite order."""

    def __init__(self, entries: Any) -> None:
        with entries:
            self._entries = iter(list(entries)[::-1])

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Reversed:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


def reverse_listings() -> None:
    """Let this process see files in the opposite order: another disk may list them so."""
    scandir, listdir = os.scandir, os.listdir
    os.scandir = lambda *args: _Reversed(scandir(*args))  # os.walk, glob and pathlib call it
    os.listdir = lambda *args: listdir(*args)[::-1]


def burn_other_cores() -> None:
    """Keep the other cores busy until this process ends: threads and workers get other turns."""
    for _ in range(min(MOST_BURNERS, max(1, (os.cpu_count() or 1) - 1))):
        subprocess.Popen([sys.executable, '-I', '-S', '-c', BURN, str(os.getpid())])
