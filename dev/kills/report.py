"""The report of a campaign of interruptions."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmrepro.errors import DIFFERENT, DONE
from mmrepro.report.report import Report, Table

from .kinds import KINDS

__all__ = ['NOT_VERIFIED', 'campaign_report']

# exit code where all bits are equal, and those of a run that was spoiled on purpose as well
NOT_VERIFIED = 4
HEADER = ('interruption', 'times', 'exit codes', 'iterations done again (most)',
          'seconds to the end (most)')


def campaign_report(outcome: Mapping[str, Any]) -> Report:
    """Report the outcome of a campaign (``Campaign.outcome()``), with a row for each kind."""
    rows = [_row(kind, kills) for kind in KINDS
            if (kills := [kill for kill in outcome['kills'] if kill['kind'] == kind])]
    control = outcome['control']
    lines = [_sentence(outcome), *outcome['problems']]
    if control is not None:
        lines.append(control['text'])
    if not outcome['equal']:
        code = DIFFERENT
    elif control is None or control['iteration'] is None:
        code = NOT_VERIFIED
    else:
        code = DONE
    return Report('', '\n'.join(lines), code, [Table(HEADER, rows)], data=dict(outcome))


def _row(kind: str, kills: list[Mapping[str, Any]]) -> tuple[str, ...]:
    codes = sorted({code for kill in kills for code in kill['codes']})
    repeated = max((kill['done'] - kill['resumed'] for kill in kills
                    if kill['resumed'] is not None), default=0)
    seconds = f'{max(kill["seconds"] for kill in kills):.1f}'
    forced = sum(bool(kill['ended_by_us']) for kill in kills)
    if forced:
        seconds += f' ({forced} ended from outside)'
    return kind, str(len(kills)), ', '.join(map(str, codes)), str(repeated), seconds


def _sentence(outcome: Mapping[str, Any]) -> str:
    settings = outcome['settings']
    ranks = f'{settings["ranks"]} rank(s)'
    if settings['processes']:
        processes = ', '.join(map(str, settings['processes']))
        ranks = f'{settings["ranks"]} virtual ranks on {processes} processes'
    half = sum(kill['half_written'] > 0 for kill in outcome['kills'])
    verdict = 'all bits equal' if outcome['equal'] else 'DIFFERENT'
    return (f'{len(outcome["kills"])} interruptions of {outcome["runs"]} runs of '
            f'{outcome["iterations_of_a_run"]} iterations, {ranks}; {half} left a half-written '
            f'checkpoint behind; {outcome["compared"]} records compared: {verdict}')
