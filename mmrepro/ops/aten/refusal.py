"""A kernel that refuses, for operators that torch does not refuse in deterministic mode."""
from __future__ import annotations

from typing import Any


def refuse(operator: str, *args: Any, **kwargs: Any) -> None:
    """Raise RuntimeError, which names ``operator``."""
    raise RuntimeError(
        f'aten::{operator} is refused on CUDA by deterministic mode: torch adds there in the order '
        'in which threads arrive, and mmrepro does not replace it. Call it on a CPU, as in '
        'x.cpu(), or set deterministic=False.')
