"""Backbones and heads."""
from __future__ import annotations

from typing import Any

from .wrapping import around

__all__ = ['initialised', 'without_loss_of_its_own']


@around
def without_loss_of_its_own(stock: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """The replacement for the constructor of a head that has no ``loss_cls`` to be asked for."""
    stock(self, *args, **kwargs)
    if not hasattr(self, 'loss_cls'):
        self.loss_cls = None


@around
def initialised(stock: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """The replacement for the constructor of a convolution that no ``init_weights`` knows.

    As MMDetection's ResNet initialises its ``Conv2d``; pretrained weights come later.
    """
    from mmengine.model import kaiming_init
    stock(self, *args, **kwargs)
    kaiming_init(self)
