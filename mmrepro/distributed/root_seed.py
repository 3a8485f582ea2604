"""One root seed for all ranks."""
from __future__ import annotations

import secrets

from ..seeds import MAX_SEED
from .agreement import agree, check_agreement


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
    check_agreement(dict(seed=seed))
    drawn: int = agree('seed', secrets.randbelow(MAX_SEED + 1), lambda ranks: ranks[0])
    return drawn if seed is None else seed
