"""Backbones and heads."""
from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, Optional

from .wrapping import around

__all__ = ['SeededMixture', 'initialised', 'seeded_mixture', 'without_loss_of_its_own']


class SeededMixture:
    """``sklearn.mixture`` whose ``GaussianMixture`` leaves the global NumPy generator alone.

    PAA and LAD give the initial means, weights and precisions, so the fit does not depend on the
    seed. Older versions of scikit-learn run k-means first all the same, and discard it.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self.GaussianMixture = functools.partial(module.GaussianMixture, random_state=0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def seeded_mixture(stock: Optional[ModuleType]) -> Optional[SeededMixture]:
    """The replacement for ``skm``, which is None without scikit-learn."""
    return None if stock is None else SeededMixture(stock)


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
