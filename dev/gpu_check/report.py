"""The report of the check: what is said of each row, and the tables."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmrepro.errors import DIFFERENT, DONE, NOTHING_TO_COMPARE
from mmrepro.report.report import Report, Table

from . import detectors
from .rows import Row, RowGroup

# What is said of comparisons that are reported and not judged, and of those that are.
_COMPARED = {'other_process': {True: 'also in another process'},
             'other_machine': {True: 'also on the other machine',
                               False: 'different bits on the other machine'},
             'fewer_multiprocessors': {True: 'also on fewer multiprocessors',
                                       False: 'different bits on fewer multiprocessors'}}


def verdict(row: Row) -> str:
    """Return the result of a row in a few words."""
    if 'error_text' in row:
        return f'failed: {row["error_text"]}'
    if 'left_out' in row:
        return f'left out: {row["left_out"]}'
    if 'refused' in row:
        return 'refused by name' if row['refused'] else 'ran (torch refuses it on CUDA)'
    if row.get('difference'):
        return f'DIFFERS, {row["difference"]}'
    if row.get('differs'):
        return f'DIFFERS: {", ".join(row["differs"])}'
    if row.get('other_process') is False:
        return 'DIFFERS from the other process'
    if row.get('disagrees'):
        return f'equal, but WRONG: {", ".join(row["disagrees"])}'
    if row.get('finite') is False:
        return 'equal, but not finite'
    return ', '.join(['equal', *(words[row[key]] for key, words in _COMPARED.items()
                                 if row.get(key) is not None)])


def report_of(result: dict[str, Any], operators: Mapping[str, RowGroup]) -> Report:
    """Report a check, also an unfinished one; a group without rows has no table."""
    summary = {'wrong': 0, **result['summary']}
    if summary['unequal'] or summary['wrong'] or summary['failed']:
        code = DIFFERENT
    elif summary['ran']:
        code = DONE
    else:
        code = NOTHING_TO_COMPARE
    said = ('{ran} of {rows} rows ran: {equal} gave equal bits, {unequal} did not, {wrong} gave '
            'equal bits that are wrong or not finite, {failed} failed; {seconds:.0f} seconds.')
    return Report(
        f'Does training repeat on this {result["machine"]["device"].upper()}?',
        said.format_map(summary), code,
        [Table((group.subject, 'bits', *(heading for heading, _ in group.columns)),
               [(name, verdict(row), *(text(row) for _, text in group.columns))
                for name, row in result[key].items()], group.title)
         for key, group in dict(detectors=detectors.GROUP, **operators).items() if result.get(key)],
        ['machine: ' + ', '.join(f'{key} {value}' for key, value in result['machine'].items()),
         f'command: {result["command"]}',
         'ms: median of a forward and a backward (an iteration, for detectors) in deterministic '
         'mode, then by default; ratio: the former over the latter. error: of small inputs against '
         'float64 on a CPU, relative, in the 2-norm'], data=result)
