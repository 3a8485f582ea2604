"""The table of ``docs/causes.md`` on what mmrepro replaces inside MMDetection and MMEngine."""
from __future__ import annotations

from typing import List

from mmrepro.patches import CAUSES

__all__ = ['table_markdown']


def table_markdown() -> str:
    """The table of causes, a row each, and below it the details that fit no cell."""
    lines: List[str] = ['| | Cause | Where | Affects | What mmrepro does | Data |',
                        '|---|---|---|---|---|---|']
    lines += [f'| {one.id} | {one.why} | {one.where} | {one.affects} | {one.fix} | '
              f'{"yes" if one.affects_data else ""} |'.replace('|  |', '| |') for one in CAUSES]
    lines += ['', *(f'- {one.id}: {one.details}' for one in CAUSES if one.details)]
    return '\n'.join(lines)
