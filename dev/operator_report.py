"""The table of mmcv's operators as Markdown, for docs/results/operators.md."""
from __future__ import annotations

import itertools
from collections.abc import Mapping

from mmrepro.ops.operator_table import TABLE

__all__ = ['as_markdown']

# Whether a kind of compiled kernel gives the same bits on every run.
_COMPILED = {'atomics': '**no**: atomics', 'ordered': 'yes', 'host': 'yes, on the CPU'}


def as_markdown(reached: Mapping[str, list[str]] | None = None) -> str:
    """Format the tables.

    ``reached`` has, by operator, the folders of the model zoo whose sweep called it (``dev.zoo``).
    """
    families = [list(rows) for _, rows in itertools.groupby(TABLE.values(), lambda row: (
        row.target.partition(':')[0], *row[2:]))]
    ours = [rows for rows in families if rows[0].target]
    reasons = {why: number for number, why in enumerate(
        dict.fromkeys(rows[0].why for rows in ours), 1)}
    rows: list[str] = []
    users: dict[str, list[str]] = {}
    for family in ours:
        names, one = [f'`{row.name}`' for row in family], family[0]
        folders = {folder for row in family for folder in (reached or {}).get(row.name, ())}
        rows.append(f'| {"<br>".join(names)} | yes, {reasons[one.why]} '
                    f'| {_COMPILED[one.compiled]} | {len(folders) or ""} |')
        users.setdefault(one.users, []).extend(names)
    missing = [f'- {family[0].users}, `{family[0].source}`: '
               + ', '.join(f'`{row.name}`' for row in family)
               for family in families if not family[0].target]
    return '\n'.join((
        '', '| operator | mmrepro | mmcv on CUDA | folders |', '|---|---|---|--:|', *rows, '',
        "Why mmrepro's form gives the same bits every time:", '',
        *(f'{number}. {why}' for why, number in reasons.items()), '',
        '### Who uses them', '',
        *(f'- {", ".join(names)}: {detectors}' for detectors, names in users.items()), '',
        '### Without an implementation', '',
        'No config of MMDetection builds them. They import, and when called say that a compiled '
        'mmcv has them.', '', *missing, ''))
