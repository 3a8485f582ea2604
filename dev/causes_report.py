"""The part of ``docs/explanation/causes.md`` on replaced code of MMDetection."""
from __future__ import annotations

from mmrepro.patches import CAUSES

__all__ = ['entries', 'entry']


def entry(number: str, affects: str, where: str, why: str, fix: str, details: str = '') -> str:
    """Return a cause as an entry of a Markdown definition list."""
    return '\n'.join((f'**{number}** · {affects} · {where}',
                      f':   {why}. {details}'.rstrip(), '',
                      f'    *mmrepro:* {fix}.', ''))


def entries() -> str:
    """Return all causes of the table of replacements, in its order."""
    found: list[str] = []
    for one in CAUSES:
        streams = ' (data)' if one.affects_data else ''
        found.append(entry(f'{one.id}{streams}', one.affects, one.where, one.why, one.fix,
                           one.details))
    return '\n'.join(found)
