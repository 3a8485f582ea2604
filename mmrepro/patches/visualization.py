"""Drawing, which must not move the generators that training uses."""
from __future__ import annotations

from ..seeds import isolate_rng
from .wrapping import around

__all__ = ['keep_generators']


@around
def keep_generators(stock, *args, **kwargs):
    """Run the stock function and put the global CPU generators back."""
    with isolate_rng(accelerators=False):
        return stock(*args, **kwargs)
