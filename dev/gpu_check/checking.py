"""Run the rows of the check, in order, within a time limit."""
from __future__ import annotations

import functools
import os
import re
import time
import traceback
from collections.abc import Mapping
from typing import Any, Callable

from mmrepro import ops
from mmrepro.determinism import tables
from mmrepro.verbs.doctor import machine

from . import detectors
from .rows import Row, RowGroup, Settings
from .timing import free_memory

# Share of the time for operators; detectors have the rest.
_OPERATORS = 0.35


class Budget:
    """A time limit for rows."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self._longest: dict[str, float] = {}

    @property
    def left(self) -> float:
        """Seconds until the end; negative after it."""
        return self._end - self._clock()

    def part(self, share: float) -> Budget:
        """Return a separate budget of this share of what is left."""
        return Budget(max(0., self.left) * share, self._clock)

    def allows(self, group: str) -> bool:
        """Whether there is time for a row as long as the longest of its group so far."""
        return self.left > self._longest.get(group, 0.)

    def spent(self, seconds: float, group: str) -> None:
        """Record the time of a row."""
        self._longest[group] = max(self._longest.get(group, 0.), seconds)


def error_line(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    return f'{type(error).__name__}: {"".join(str(error).strip().splitlines()[:1])}'


def run_row(run: Callable[[], Row], budget: Budget, device: str, group: str = '') -> Row:
    """Run one row; an exception is recorded as its result and does not end the check."""
    if not budget.allows(group):
        return dict(left_out='no time left')
    start = time.monotonic()
    try:
        row = run()
    except Exception as error:  # noqa: BLE001  any exception is the result of its row
        row = dict(error_text=error_line(error),
                   traceback=[line.strip() for line in traceback.format_tb(error.__traceback__)[-3:]
                              for line in line.strip().splitlines()[1:]])
    free_memory(device)
    row['seconds'] = round(time.monotonic() - start, 1)
    budget.spent(row['seconds'], group)
    return row


def check(settings: Settings, seconds: float = 450., only: str = '', command: str = '',
          operators: Mapping[str, RowGroup] | None = None,
          on_row: Callable[[str, str, dict[str, Any]], None] = lambda group, name, result: None,
          against: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Run all rows, and find out which of them give the same bits every time.

    Args:
        seconds: the time limit; rows that no longer fit are left out.
        only: a regular expression that selects rows by "group/name".
        command: the command line, recorded in the result.
        operators: groups to run before the detectors, by name.
        on_row: called after every row with its group, its name and the result so far.
        against: the result of another process or machine, to compare digests with.

    Returns:
        The contents of gpu_check.json: ``command``, ``machine``, ``summary``, and for every group
        the result of each row by name.
    """
    # before CUDA starts, because cuBLAS reads it once; it stays set in the runs by default
    os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', tables.CUBLAS_WORKSPACE)
    ops.install()
    from mmdet.utils import register_all_modules
    from mmengine.logging import MMLogger

    operators = operators or {}
    groups = {**operators, 'detectors': detectors.GROUP}
    result: dict[str, Any] = dict(command=command, machine=machine(settings.device),
                                  summary={}, **{group: {} for group in groups})
    register_all_modules(init_default_scope=True)
    MMLogger.get_instance('mmengine', log_level='ERROR')  # else a line per initialized weight
    budget = Budget(seconds)
    part = budget.part(_OPERATORS)
    chosen = [(group, name, run) for group, name, run in _in_order(groups, settings, budget)
              if re.search(only, f'{group}/{name}')]
    for group, name, run in chosen:
        row = run_row(run, part if group in operators else budget, settings.device, group)
        result[group][name] = row
        compare_digests(row, group, name, result['machine'], against)
        result['summary'] = _summary([row for g in groups for row in result[g].values()],
                                     len(chosen))
        on_row(group, name, result)
    return result


def _in_order(groups: Mapping[str, RowGroup], settings: Settings, budget: Budget
              ) -> list[tuple[str, str, Callable[[], Row]]]:
    """Order all rows: those that matter most, then the other operators, then the detectors."""
    ranked = []
    for group, kind in groups.items():
        rows = kind.rows(settings, functools.partial(budget.allows, group))
        ranked += [((group == 'detectors', name not in kind.first), (group, name, rows[name]))
                   for name in dict.fromkeys((*kind.first, *rows)) if name in rows]
    return [row for _, row in sorted(ranked, key=lambda pair: pair[0])]


def compare_digests(row: Row, group: str, name: str, machine: Mapping[str, Any],
                    against: Mapping[str, Any] | None) -> None:
    """Note in ``row`` whether its digest is that of the same row of ``against``.

    On another machine or with other versions bits may differ: that is noted, not judged.
    """
    reference = (against or {}).get(group, {}).get(name, {})
    if against is None or 'digest' not in row or 'digest' not in reference:
        return
    same = row['digest'] == reference['digest']
    if against['machine'] != machine:
        row['other_machine'] = same
        return
    row['other_process'] = same
    if not same:
        row['equal'] = False


def _summary(rows: list[Row], chosen: int) -> dict[str, Any]:
    judged = [row for row in rows if 'equal' in row]
    same = [row for row in judged if row['equal']]
    good = [row for row in same if row.get('agrees', True) and row.get('finite', True)]
    left_out = sum('left_out' in row for row in rows)
    return dict(rows=chosen, ran=len(rows) - left_out, left_out=left_out,
                equal=len(good), unequal=len(judged) - len(same), wrong=len(same) - len(good),
                failed=sum('error_text' in row for row in rows),
                seconds=round(sum(row.get('seconds', 0.) for row in rows), 1))
