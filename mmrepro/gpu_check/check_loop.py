"""Run the rows of the check, in order, under a limit of time."""
from __future__ import annotations

import gc
import os
import re
import time
import traceback
from collections.abc import Mapping
from typing import Any, Callable

import torch

from .. import ops
from . import detectors, hardware
from .row_group import Row, RowGroup, Settings

# Share of the time for operators; detectors have the rest.
_OPERATORS = 0.35


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


def error_line(error: BaseException) -> str:
    """Type and first line of an error."""
    return f'{type(error).__name__}: {"".join(str(error).strip().splitlines()[:1])}'


def run_row(run: Callable[[], Row], budget: Budget, device: str) -> Row:
    """Run one row; an exception is recorded as its result and does not end the check."""
    if not budget.allows():
        return dict(left_out='no time left')
    start = time.monotonic()
    try:
        row = run()
    except Exception as error:  # noqa: BLE001  any exception is the result of its row
        row = dict(error_text=error_line(error),
                   traceback=[line.strip() for line in traceback.format_tb(error.__traceback__)[-3:]
                              for line in line.strip().splitlines()[1:]])
        del error
    gc.collect()
    if device == 'cuda':
        torch.cuda.empty_cache()
    row['seconds'] = round(time.monotonic() - start, 1)
    budget.spent(row['seconds'])
    return row


def run_check(settings: Settings, seconds: float, only: str, command: str,
              operators: Mapping[str, RowGroup], tell: Callable[[str, str, dict[str, Any]], None],
              against: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Run all rows.

    Args:
        seconds: limit of time.
        only: regular expression that selects rows by "group/name".
        command: recorded in the result.
        operators: groups to run before the detectors, by name.
        tell: called after every row with its group, its name and the result so far.
        against: the result of another process or machine, to compare digests with.

    Returns:
        The contents of gpu_check.json.
    """
    # before CUDA starts, because cuBLAS reads it once; it stays set in the runs by default
    os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
    ops.install()
    from mmdet.utils import register_all_modules
    from mmengine.logging import MMLogger

    groups = {**operators, 'detectors': detectors.GROUP}
    result: dict[str, Any] = dict(command=command, machine=hardware.describe(settings.device),
                                  summary=_summary([]), **{group: {} for group in groups})
    register_all_modules(init_default_scope=True)
    MMLogger.get_instance('mmengine', log_level='ERROR')  # else a line per initialised weight
    budget = Budget(seconds)
    part = budget.part(_OPERATORS)
    for group, name, run in _in_order(groups, settings, budget):
        if re.search(only, f'{group}/{name}'):
            row = run_row(run, part if group in operators else budget, settings.device)
            result[group][name] = row
            compare_digests(row, group, name, result['machine'], against)
            result['summary'] = _summary([row for g in groups for row in result[g].values()])
            tell(group, name, result)
    return result


def _in_order(groups: Mapping[str, RowGroup], settings: Settings, budget: Budget
              ) -> list[tuple[str, str, Callable[[], Row]]]:
    """All rows: of each group those that matter most, then the others; detectors come last."""
    ranked = []
    for number, (group, kind) in enumerate(groups.items()):
        rows = kind.rows(settings, budget.allows)
        order = {name: place for place, name in enumerate(dict.fromkeys((*kind.first, *rows)))}
        last = group == 'detectors'
        ranked += [((last, name not in kind.first, number, order[name]), (group, name, run))
                   for name, run in rows.items()]
    return [row for _, row in sorted(ranked, key=lambda one: one[0])]


def compare_digests(row: Row, group: str, name: str, machine: Mapping[str, Any],
                    against: Mapping[str, Any] | None) -> None:
    """Note in ``row`` whether its digest is that of the same row of ``against``.

    On another machine or with other versions bits may differ: that is noted, not judged.
    """
    other = (against or {}).get(group, {}).get(name, {})
    if 'digest' not in row or 'digest' not in other:
        return
    row['other_process'] = row['digest'] == other['digest']
    if against['machine'] != machine:
        row['other_machine'] = row.pop('other_process')
    elif not row['other_process']:
        row['equal'] = False


def _summary(rows: list[Row]) -> dict[str, Any]:
    judged = [row for row in rows if 'equal' in row]
    good = [row for row in judged if row['equal'] and row.get('agrees', True)
            and row.get('finite', True)]
    return dict(equal=len(good), unequal=len(judged) - len(good),
                failed=sum('error_text' in row for row in rows),
                left_out=sum('left_out' in row for row in rows),
                seconds=round(sum(row.get('seconds', 0.) for row in rows), 1))
