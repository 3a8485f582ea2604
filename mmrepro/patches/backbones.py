"""Backbones that leave weights uninitialised."""
from __future__ import annotations

from typing import Any

from .wrapping import around

__all__ = ['initialised']


@around
def initialised(stock: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """The replacement for the constructor of a convolution that no ``init_weights`` knows.

    As MMDetection's ResNet initialises its ``Conv2d``; pretrained weights come later.
    """
    from mmengine.model import kaiming_init
    stock(self, *args, **kwargs)
    kaiming_init(self)
