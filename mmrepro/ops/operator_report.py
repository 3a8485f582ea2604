"""The catalogue of operators, as text and as JSON."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .operator_table import TABLE
from .provider import choice

# Why two runs of such a compiled kernel may differ on CUDA.
_VARIES = {'atomics': 'adds floats with atomics, in the order in which threads arrive',
           'races': 'threads write to shared memory in the order in which they arrive'}


class CatalogueEntry(NamedTuple):
    """One operator of :func:`catalogue`."""

    operator: str
    provider: str  # 'torch', 'triton', 'compiled' or 'none'
    reason: str  # why this provider
    deterministic: bool  # whether it gives the same bits on every run on the requested device
    why: str
    users: str
    source: str


def catalogue(device: str = 'cpu', requested: str | None = None) -> list[CatalogueEntry]:
    """List all operators: the provider of each and why, and whether it is deterministic there.

    mmcv's compiled kernels are single-threaded loops on a CPU; on CUDA some add with atomics.

    Args:
        device: 'cpu' or 'cuda'.
        requested: one of :data:`mmrepro.ops.choice.PROVIDERS`, whose choices are shown; None: the
            current one.
    """
    entries = []
    for row in TABLE.values():
        who, reason = choice(row.name, device, requested)
        if who in ('torch', 'triton'):
            same, why = True, row.why
        elif who == 'none':
            same, why = False, 'not available here: raises when called'
        else:
            same, why = device == 'cpu', _VARIES.get(row.compiled, '')
            if same or not why:
                same, why = True, 'compiled kernel without atomics'
        entries.append(CatalogueEntry(row.name, who, reason, same, why, row.users,
                                      f'mmcv/ops/{row.source}'))
    return entries


def _verdict(entry: CatalogueEntry) -> str:
    if entry.provider == 'none':
        return '-'
    return 'yes' if entry.deterministic else 'NO'


def as_text(entries: Sequence[CatalogueEntry], device: str, requested: str) -> str:
    """Format a line per operator, and totals; ``requested`` is the provider that chose these."""
    lines = [('operator', 'provider', f'same bits on {device}', 'why this provider', 'used by'),
             *((e.operator, e.provider, _verdict(e), e.reason, e.users) for e in entries)]
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    table = '\n'.join('  '.join(
        [*(cell.ljust(width) for cell, width in zip(line, widths)), line[4]]) for line in lines)
    verdicts = [_verdict(e) for e in entries]
    return (f'{table}\n\n{len(entries)} operators, operators={requested!r}: '
            f'{verdicts.count("NO")} not deterministic on {device}, {verdicts.count("-")} not '
            'available (they import, and say what to install when called)')


def as_json(entries: Sequence[CatalogueEntry], device: str, requested: str) -> dict[str, Any]:
    """Return :func:`as_text` as a dict: provider, device, and a dict per operator."""
    return dict(provider=requested, device=device,
                operators=[entry._asdict() for entry in entries])
