"""Text sampling of MM-Grounding-DINO."""
from __future__ import annotations

from .wrapping import around

__all__ = ['own_class_names']


@around
def own_class_names(stock, self, results: dict) -> dict:
    """Give each sample its own copy of the class names, which the stock method writes to."""
    names = results['text'] if 'text' in results else self.label_map
    if names is not None:
        results['text'] = dict(names)
    return stock(self, results)
