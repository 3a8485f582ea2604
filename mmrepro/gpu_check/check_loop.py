"""Run the rows of the check, in order, under a limit of time."""
from __future__ import annotations

import functools
import gc
import os
import re
import time
import traceback
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

import torch

from .. import ops
from ..ops import triton
from . import cases_mmcv, cases_torch, detectors, hardware, operator_check
from .operator_cases import OperatorCase

__all__ = ['Budget', 'fused_cases', 'run_check', 'run_row']

GROUPS = ('mmcv', 'triton', 'torch', 'detectors')
# Share of the time for operators; detectors have the rest.
_OPERATORS = 0.35
# Pixels of images: as in a usual schedule on a GPU, or few.
_SIZE, _QUICK_SIZE = 640, 128

Row = Dict[str, Any]
Tell = Callable[[str, str, Dict[str, Any]], None]


class Budget:
    """A limit of time for rows.

    Args:
        seconds: in total.
        clock: replaces the monotonic clock in tests.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self._longest = 0.

    @property
    def left(self) -> float:
        """Seconds until the end; negative after it."""
        return self._end - self._clock()

    def part(self, share: float) -> Budget:
        """A separate budget of this share of what is left."""
        return Budget(max(0., self.left) * share, self._clock)

    def allows(self) -> bool:
        """Whether there is time for a row as long as the longest so far."""
        return self.left > self._longest

    def spent(self, seconds: float) -> None:
        """Record the time of a row."""
        self._longest = max(self._longest, seconds)


def run_row(run: Callable[[], Row], budget: Budget, device: str) -> Row:
    """Run one row; an exception is recorded as its result and does not end the check."""
    if not budget.allows():
        return dict(left_out='no time left')
    start = time.monotonic()
    try:
        row = run()
    except Exception as error:  # noqa: BLE001  any exception is the result of its row
        text = str(error).strip()
        row = dict(error_text=f'{type(error).__name__}: {text.splitlines()[0] if text else ""}',
                   traceback=[line.strip() for line in traceback.format_tb(error.__traceback__)[-3:]
                              for line in line.strip().splitlines()[1:]])
        del error
    gc.collect()
    if device == 'cuda':
        torch.cuda.empty_cache()
    row['seconds'] = round(time.monotonic() - start, 1)
    budget.spent(row['seconds'])
    return row


def run_check(device: str, seconds: float, quick: bool = False, only: str = '',
              iterations: Optional[int] = None, size: Optional[int] = None, command: str = '',
              tell: Tell = lambda group, name, result: None) -> Dict[str, Any]:
    """Run all rows.

    Args:
        device: 'cuda' or 'cpu'.
        seconds: limit of time.
        quick: small inputs, few repetitions, two iterations.
        only: regular expression that selects rows by "group/name".
        iterations: of a detector; None: 20, or 2 if ``quick``.
        size: pixels of an image; None: 640, or 128 if ``quick``.
        command: recorded in the result.
        tell: called after every row with its group, its name and the result so far.

    Returns:
        The contents of gpu_check.json.
    """
    # before CUDA starts, because cuBLAS reads it once; it stays set in the runs by default
    os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
    ops.install()
    from mmdet.utils import register_all_modules
    from mmengine.logging import MMLogger

    result: Dict[str, Any] = dict(command=command, machine=hardware.describe(device), summary={},
                                  **{group: {} for group in GROUPS})
    result['summary'] = _summary(result)
    compiled = operator_check.has_compiled_kernels()
    register_all_modules(init_default_scope=True)
    MMLogger.get_instance('mmengine', log_level='ERROR')  # else a line per initialised weight
    budget = Budget(seconds)
    part = budget.part(_OPERATORS)
    size = size or (_QUICK_SIZE if quick else _SIZE)
    iterations = iterations or (2 if quick else 20)
    for group, name, run in (*_operator_rows(device, quick, compiled), *_detector_rows(
            device, size, iterations, quick, compiled, budget)):
        if re.search(only, f'{group}/{name}'):
            result[group][name] = run_row(run, budget if group == 'detectors' else part, device)
            result['summary'] = _summary(result)
            tell(group, name, result)
    return result


def fused_cases(device: str) -> Dict[str, OperatorCase]:
    """The cases of mmcv's operators that have a Triton kernel; none if that does not run here."""
    if triton.requirement() or not triton.runs_on(device):
        return {}
    return {name: case for name, case in cases_mmcv.CASES.items()
            if any(operator in triton.FUSED for operator in case.covers)}


def _operator_rows(device: str, quick: bool, compiled: bool
                   ) -> Iterator[Tuple[str, str, Callable[[], Row]]]:
    times, seconds = (4, .2) if quick else (50, 1.5)
    kernel = 'compiled' if compiled else None
    for group, cases, provider, against in (
            ('mmcv', cases_mmcv.CASES, 'torch', kernel),
            ('triton', fused_cases(device), 'triton', kernel or 'torch'),
            ('torch', cases_torch.CASES, 'torch', 'flags')):
        for name, case in cases.items():
            yield group, name, functools.partial(operator_check.check, case, device, quick, times,
                                                 seconds, provider, against)


def _detector_rows(device: str, size: int, iterations: int, quick: bool, compiled: bool,
                   budget: Budget) -> Iterator[Tuple[str, str, Callable[[], Row]]]:
    for name, detector in detectors.DETECTORS.items():
        yield 'detectors', name, functools.partial(
            detectors.check, detector, device, size, iterations, quick or device == 'cpu',
            compiled, budget.allows)


def _summary(result: Dict[str, Any]) -> Dict[str, Any]:
    rows = [row for group in GROUPS for row in result[group].values()]
    judged = [row for row in rows if 'equal' in row]
    good = [row for row in judged if row['equal'] and row.get('agrees', True)
            and row.get('finite', True)]
    return dict(equal=len(good), unequal=len(judged) - len(good),
                failed=sum('error_text' in row for row in rows),
                left_out=sum('left_out' in row for row in rows),
                seconds=round(sum(row.get('seconds', 0.) for row in rows), 1))
