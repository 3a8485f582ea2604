"""The groups of rows beside the detectors: operators, compiled code, processes."""
from __future__ import annotations

import functools
import importlib.util
import shutil
from typing import Any, Callable

from dev.gpu_check.rows import Row, RowGroup, Settings, cell
from mmrepro import ops
from mmrepro.ops import triton
from mmrepro.ops.provider import choice_of

from . import cases_compiled, cases_mmcv, cases_scatter, cases_selection, cases_torch, processes
from .checking import check
from .operator_cases import OperatorCase

__all__ = ['GROUPS', 'fused_cases', 'scatter_cases']

COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ('runs', cell('times')), ('error', cell('error', '.1e')), ('ms', cell('ms', '.2f')),
    ('default', lambda row: row.get('default_error', row.get('default', ''))),
    ('ms', cell('default_ms', '.2f')), ('ratio', cell('ratio', '.2f')),
    ('default repeats', lambda row: {True: 'yes', False: 'no'}.get(row.get('default_equal'), '')))


# Those that most detectors reach, or that torch and mmcv have out of order: if time runs out, the
# others are left out.
FIRST = ('grid sample', 'grid sample, 3-D', 'scatter_add', 'index_put', 'topk', 'RoIAlign',
         'MSDeformAttn', 'DCNv2', 'DCNv1', 'NMS', 'bilinear resize', 'CARAFE',
         'focal loss, sigmoid', 'max pool', 'cumsum')


def fused_cases(device: str) -> dict[str, OperatorCase]:
    """The cases that have a Triton kernel; none if Triton does not run here."""
    if triton.requirement() or not triton.runs_on(device):
        return {}
    kernels = {*triton.FUSED, triton.WRITES}
    return {name: case for name, case in {**cases_mmcv.CASES, **cases_torch.CASES}.items()
            if kernels & set(case.covers)}


def scatter_cases(device: str) -> dict[str, OperatorCase]:
    """Scattered sums: sorted, and in fixed point where Triton runs."""
    fixed = not triton.requirement() and triton.runs_on(device)
    return {**cases_scatter.SORTED, **(cases_scatter.FIXED if fixed else {})}


def chosen_cases(device: str) -> dict[str, OperatorCase]:
    """The cases that deterministic mode leaves to kernels of a compiled mmcv; none on a CPU."""
    if device == 'cpu' or not ops.is_compiled():
        return {}
    return {name: case for name, case in cases_mmcv.CASES.items()
            if any(choice_of(operator, device, 'auto').provider == 'compiled'
                   for operator in case.covers)}


def compiled_cases(device: str) -> dict[str, OperatorCase]:
    """Return the cases of compiled code; none where inductor has no compiler."""
    compiler = shutil.which('g++') if device == 'cpu' else importlib.util.find_spec('triton')
    return cases_compiled.CASES if compiler else {}


def _group(title: str, cases_on: Callable[[str], dict[str, OperatorCase]], provider: str,
           against: str | None, first: tuple[str, ...] = FIRST) -> RowGroup:
    """Rows of the cases for a device; mmcv's compiled kernels, if any, replace ``against``."""

    def rows(settings: Settings, time_is_left: Any) -> dict[str, Callable[[], Row]]:
        times, seconds = (4, .2) if settings.quick else (50, 1.5)
        other = 'compiled' if against != 'flags' and ops.is_compiled() else against
        return {name: functools.partial(check, case, settings.device, settings.quick, times,
                                        seconds, provider, other)
                for name, case in cases_on(settings.device).items()}

    return RowGroup(title, 'operator', COLUMNS, rows, first)


GROUPS: dict[str, RowGroup] = {
    'mmcv': _group('Operators of mmcv', lambda device: cases_mmcv.CASES, 'torch', None),
    'auto': _group('Operators of mmcv as deterministic mode chooses them', chosen_cases, 'auto',
                   'torch'),
    'triton': _group('Operators of mmcv, kernels in Triton', fused_cases, 'triton', 'torch'),
    'scatter': _group('Scattered sums', scatter_cases, 'torch', None),
    'torch': _group("torch's own operators", lambda device: {
        **cases_torch.CASES, **cases_selection.CASES}, 'torch', 'flags'),
    'compiled': _group('Compiled code', compiled_cases, 'torch', 'flags', ()),
    'processes': RowGroup(
        'Virtual ranks on two processes', 'what', (), lambda settings, time_is_left: {
            'collective operations': functools.partial(processes.row, settings.device)}),
}
