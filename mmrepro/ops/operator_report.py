"""The catalogue of operators: who provides each, and whether it is deterministic."""
from __future__ import annotations

from typing import NamedTuple

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
            varies = '' if device == 'cpu' else _VARIES.get(row.compiled, '')
            same, why = not varies, varies or 'compiled kernel without atomics'
        entries.append(CatalogueEntry(row.name, who, reason, same, why, row.users,
                                      f'mmcv/ops/{row.source}'))
    return entries
