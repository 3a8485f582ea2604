"""What a campaign has shown, as a table and as JSON."""
from __future__ import annotations

from typing import Any, Dict, List

from .kinds import KINDS

__all__ = ['table']


def table(outcome: Dict[str, Any]) -> str:
    """A Markdown table, one row per kind of interruption."""
    lines = ['| interruption | times | exit codes | iterations done again (most) | '
             'seconds to the end (most) |', '|---|---|---|---|---|']
    for kind in KINDS:
        kills = [kill for kill in outcome['kills'] if kill['kind'] == kind]
        if kills:
            lines.append(_row(kind, kills))
    half = sum(kill['half_written'] > 0 for kill in outcome['kills'])
    lines += ['', f'{len(outcome["kills"])} interruptions of {outcome["runs"]} runs of '
              f'{outcome["iterations_of_a_run"]} iterations, {outcome["settings"]["ranks"]} '
              f'rank(s); {half} left a half-written checkpoint behind; '
              f'{outcome["compared"]} records compared: '
              f'{"all bits equal" if outcome["equal"] else "DIFFERENT"}']
    return '\n'.join([*lines, *outcome['problems']])


def _row(kind: str, kills: List[Dict[str, Any]]) -> str:
    codes = sorted({code for kill in kills for code in kill['codes']})
    again = [kill['done'] - kill['resumed'] for kill in kills if kill['resumed'] is not None]
    seconds = max(kill['seconds'] for kill in kills)
    forced = sum(bool(kill['ended_by_us']) for kill in kills)
    return (f'| {kind} | {len(kills)} | {", ".join(map(str, codes))} | {max(again, default=0)} | '
            f'{seconds:.1f}{f" ({forced} ended from outside)" if forced else ""} |')
