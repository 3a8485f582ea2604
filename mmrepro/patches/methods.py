"""Methods of datasets, transforms, backbones and heads."""
from __future__ import annotations

from typing import Any

from .. import seeds
from .wrapping import around


@around
def sorted_by_path(stock: Any, self: Any) -> list[dict[str, Any]]:
    """Sort the index by image path, as ``BaseSegDataset`` does."""
    return sorted(stock(self), key=lambda info: info['img_path'])


@around
def keyed_sentences(stock: Any, self: Any) -> None:
    """Leave each object a sentence, chosen by the root seed and the reference's id.

    Without an active root seed, or with a ``text_mode`` other than 'random', nothing changes.
    """
    stock(self)
    root = seeds.root()
    if self.text_mode != 'random' or root is None:
        return
    for ref_id, ref in self.refs.items():
        sentences = ref['sentences']
        if len(sentences) > 1:
            # 128 random bits: the bias of the modulo is below 2**-100
            chosen = seeds.derive(root, 'dataset', 'refcoco', ref_id).python % len(sentences)
            self.refs[ref_id] = dict(ref, sentences=[sentences[chosen]])


@around
def own_class_names(stock: Any, self: Any, results: dict[str, Any]) -> Any:
    """Give each sample its own copy of the class names, which the stock method writes to."""
    names = results['text'] if 'text' in results else self.label_map
    if names is not None:
        results['text'] = dict(names)
    return stock(self, results)


@around
def with_loss_attribute(stock: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Construct a head, and give it the ``loss_cls`` that inference asks for."""
    stock(self, *args, **kwargs)
    if not hasattr(self, 'loss_cls'):
        self.loss_cls = None


@around
def initialized(stock: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Construct a convolution that no ``init_weights`` knows, and initialize it.

    In the way of the ``Conv2d`` of MMDetection's ResNet; pretrained weights come later.
    """
    from mmengine.model import kaiming_init
    stock(self, *args, **kwargs)
    kaiming_init(self)
