"""Run ``tools/gpu_check.py`` without the compiled packages that MMDetection imports.

    PYTHONPATH=site python dev/import_stubs.py --out DIR [options of gpu_check]

A machine without a network may have only torch, NumPy, OpenCV and packages of pure Python.
MMDetection's models import pycocotools, shapely, SciPy, matplotlib and Pillow. Those that are
missing are replaced by stubs. The check calls one of their functions, SciPy's assignment, which is
implemented here.
"""
from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

__all__ = ['PACKAGES', 'install', 'linear_sum_assignment']

PACKAGES = ('pycocotools', 'shapely', 'scipy', 'matplotlib', 'PIL')


def linear_sum_assignment(cost: Any, maximize: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and columns of the assignment of least cost, by shortest augmenting paths.

    Args:
        cost: (N, M), finite.

    Returns:
        Rows in ascending order and their columns, min(N, M) of each.

    Raises:
        ValueError: the matrix is not 2-D or not finite.
    """
    matrix = np.asarray(cost, dtype=np.float64)
    if matrix.ndim != 2 or not np.isfinite(matrix).all():
        raise ValueError(f'expected a finite matrix, got shape {matrix.shape}')
    matrix = -matrix if maximize else matrix
    if matrix.shape[0] > matrix.shape[1]:
        columns, rows = linear_sum_assignment(matrix.T)
        order = np.argsort(rows)
        return rows[order], columns[order]
    count, width = matrix.shape
    row_price, column_price = np.zeros(count), np.zeros(width)
    owner = np.full(width, -1)
    for row in range(count):
        _augment(matrix, row, row_price, column_price, owner)
    taken = np.flatnonzero(owner >= 0)
    order = np.argsort(owner[taken])
    return owner[taken][order], taken[order]


def _augment(matrix: np.ndarray, start: int, row_price: np.ndarray, column_price: np.ndarray,
             owner: np.ndarray) -> None:
    """Assign a column to ``start`` along the cheapest augmenting path (Dijkstra)."""
    width = len(owner)
    distance, before = np.full(width, np.inf), np.full(width, start)
    done = np.zeros(width, bool)
    row, here, visited = start, 0., [start]
    while True:
        step = here + matrix[row] - row_price[row] - column_price
        better = ~done & (step < distance)
        distance[better], before[better] = step[better], row
        column = int(np.argmin(np.where(done, np.inf, distance)))
        here, done[column] = distance[column], True
        if owner[column] < 0:
            break
        row = int(owner[column])
        visited.append(row)
    row_price[start] += here
    for row in visited[1:]:
        row_price[row] += here - distance[owner == row][0]
    column_price[done] -= here - distance[done]
    while True:
        row = int(before[column])
        column_of_row = np.flatnonzero(owner == row)
        owner[column] = row
        if row == start:
            return
        column = int(column_of_row[0])


class _Anything(type):
    """A class whose public attributes are classes of the same kind."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(f'type object {cls.__name__!r} has no attribute {name!r}')
        return _absent(f'{cls.__module__}.{cls.__name__}', name)


def _absent(owner: str, name: str) -> type:
    """Return a class to refer to and to derive from; creating an instance raises."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ModuleNotFoundError(f'{owner}.{name} is needed here, and '
                                  f'{owner.partition(".")[0]} is not installed')

    return _Anything(name, (), dict(__init__=refuse, __module__=owner))


class _Module(ModuleType):
    """A module with every public name; calling one raises."""

    __path__: list = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(f'module {self.__name__!r} has no attribute {name!r}')
        made = _absent(self.__name__, name)
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: tuple[str, ...]) -> None:
        self.packages = packages

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition('.')[0] not in self.packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin='stub', is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return _Module(spec.name, f'A stub; see {__file__}.')

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == 'scipy.optimize':
            module.linear_sum_assignment = linear_sum_assignment


def install() -> tuple[str, ...]:
    """Make missing packages importable, and return their names."""
    missing = tuple(name for name in PACKAGES
                    if name not in sys.modules and importlib.util.find_spec(name) is None)
    if missing and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder(missing))
    return missing


def run() -> int:
    """Install the stubs and run the check."""
    missing = install()
    if missing:
        print(f'stubs for {", ".join(missing)}', flush=True)
    # a checkout works without being installed, and is preferred to an installed mmrepro
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from dev.gpu_check.command import COMMAND, main
    from mmrepro import cli
    return cli.run(COMMAND, main=main)


if __name__ == '__main__':
    sys.exit(run())
