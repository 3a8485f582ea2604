"""One root seed for all ranks."""
from __future__ import annotations

import secrets
from datetime import timedelta
from typing import Any, Optional, Sequence, Union

from ..seeds import MAX_SEED
from .agreement import DEFAULT_TIMEOUT, AgreementError, settle

__all__ = ['broadcast_seed']


def _choose(requests: Sequence[Any]) -> int:
    for rank, request in enumerate(requests):
        if request != requests[0]:
            raise AgreementError(f'The ranks disagree, and every rank has stopped.\n  rank {rank}: '
                                 f'seed: rank 0 has {requests[0]}, rank {rank} has {request}')
    return secrets.randbelow(MAX_SEED + 1) if requests[0] is None else requests[0]


def broadcast_seed(seed: Optional[int],
                   timeout: Union[float, timedelta] = DEFAULT_TIMEOUT) -> int:
    """The seed that every rank uses: ``seed``, or one that rank 0 draws from the operating system.

    A collective operation; without a process group, a world of one. It uses the store of the
    process group and no tensors, so any backend will do, and it touches no generator.

    Args:
        seed: The same on all ranks.
        timeout: Seconds to wait for ranks that come late.

    Returns:
        int: in [0, 2**32), if ``seed`` is.

    Raises:
        AgreementError: on every rank, if they were given different seeds, or a rank is missing.
    """
    return settle('seed', seed, _choose, timeout)
