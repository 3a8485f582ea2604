"""One root seed for all ranks."""
from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from ..errors import AgreementError
from ..seeds import MAX_SEED
from .agreement import agree


def _choose(ranks: Sequence[Any]) -> Any:
    """Return the common seed; without one, the seed that rank 0 has drawn."""
    (first, drawn), *others = ranks
    for rank, (seed, _) in enumerate(others, 1):
        if seed != first:
            raise AgreementError(f'The ranks disagree, and every rank has stopped.\n  rank {rank}: '
                                 f'seed: rank 0 has {first}, rank {rank} has {seed}')
    return drawn if first is None else first


def broadcast_seed(seed: int | None) -> int:
    """Return the seed that every rank uses: ``seed``, or one that rank 0 draws from the system.

    A collective operation; without a process group, a world of one. It touches no generator.

    Args:
        seed: The same on all ranks.

    Returns:
        int: in [0, 2**32), if ``seed`` is.

    Raises:
        AgreementError: on every rank, if they were given different seeds.
    """
    chosen: int = agree('seed', [seed, secrets.randbelow(MAX_SEED + 1)], _choose)
    return chosen
