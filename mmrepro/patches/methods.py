"""Methods of datasets, transforms, backbones, heads, assigners and metrics, and orders of sets.

Lists that are made of sets follow from the content; metrics and files of predictions follow from
the predictions alone. Generators of other packages follow the global ones, and drawing pictures
leaves those alone.
"""
from __future__ import annotations

import functools
import inspect
import io
import pickle
import random
import sys
from collections.abc import Iterable, Iterator, MutableSet
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any, Callable

import numpy as np
import torch
from mmengine.fileio import put
from torch import Tensor

from .. import seeds
from ..ops import aten
from ..seeds import isolate_rng
from ..util.scoped import replaced
from .replacements import around


@around
def keep_generators(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the stock function and put the global CPU generators back."""
    with isolate_rng(accelerators=False):
        return stock(*args, **kwargs)


@around
def seeded_pipeline(stock: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a pipeline of albumentations with generators seeded from the global NumPy generator.

    A pipeline that the user seeded keeps its own stream. Before 1.4.21, pipelines draw from
    Python's global generator. ``set_random_seed`` gives all transforms the *same* seed, so that
    they would be applied together or not at all, and newer versions mix the worker's seed in.
    """
    if getattr(self, 'seed', None) is None and hasattr(self, 'set_random_state'):
        words = np.random.randint(0, 2**32, size=8, dtype=np.uint64).tolist()
        numpy_generator = np.random.Generator(np.random.PCG64(words[:4]))
        python_generator = random.Random(sum(word << 32 * i for i, word in enumerate(words[4:])))
        self.set_random_state(numpy_generator, python_generator)
    return stock(self, *args, **kwargs)


def seeded_mixture(stock: ModuleType | None) -> SimpleNamespace | None:
    """Return ``sklearn.mixture`` with a ``GaussianMixture`` that leaves the global generator alone.

    PAA and LAD give the initial means, weights and precisions, so the fit does not depend on the
    seed; older versions of scikit-learn run k-means first all the same, and discard the result.
    MMDetection has None in place of the module where scikit-learn is missing.
    """
    if stock is None:
        return None
    mixture = functools.partial(stock.GaussianMixture, random_state=0)
    return SimpleNamespace(**{**vars(stock), 'GaussianMixture': mixture})


@contextmanager
def _seeded_random_noise() -> Iterator[None]:
    # scikit-image calls the argument `rng` since 0.21, `seed` before
    import skimage.util
    stock = skimage.util.random_noise
    name = 'rng' if 'rng' in inspect.signature(stock).parameters else 'seed'
    with replaced(skimage.util, random_noise=functools.partial(stock, **{name: _draw_seed()})):
        yield


@contextmanager
def _seeded_numba() -> Iterator[None]:
    # The released package shuffles with NumPy, its development version with compiled code.
    if 'numba' in sys.modules:
        _numba_seeder()(_draw_seed())
    yield


# corruption of the ``imagecorruptions`` package -> seeds the generator that it draws from
_FOREIGN = {
    'impulse_noise': _seeded_random_noise,  # skimage.util.random_noise: default_rng(None)
    'glass_blur': _seeded_numba,  # np.random inside njit is a generator of Numba's own
}


@around
def seeded_corruption(stock: Callable[..., Any], self: Any, results: dict[str, Any]) -> Any:
    """Corrupt with generators of other packages seeded from the global NumPy generator."""
    with _FOREIGN.get(self.corruption, nullcontext)():
        return stock(self, results)


def _draw_seed() -> int:
    return int(np.random.randint(0, 2**32, dtype=np.uint64))


@functools.cache
def _numba_seeder() -> Any:
    import numba

    def seed(value: int) -> None:
        np.random.seed(value)

    return numba.njit(seed)


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


@around
def stopped_once(stock: Any, self: Any, runner: Any) -> None:
    """Stop a profiler and write its trace, unless it was stopped before."""
    if not self._closed:
        stock(self, runner)


@around
def on_device_of_priors(stock: Any, self: Any, pred_instances: Any, *args: Any,
                        **kwargs: Any) -> Any:
    """Assign points, and make new tensors on their device instead of the CPU."""
    with pred_instances.priors.device:
        return stock(self, pred_instances, *args, **kwargs)


@around
def matching_at_once(stock: Callable[..., Any], self: Any, cost: Tensor, pairwise_ious: Tensor,
                     num_gt: int, valid_mask: Tensor) -> Any:
    """Match candidates to objects as SimOTA and its relatives do, without a loop over the objects.

    Where mmrepro's ``topk`` is installed, equal costs go by index, whatever k is: so the k best of
    each object are the first k of one ``topk``. Elsewhere the stock method runs.
    """
    if cost.device.type not in aten.installed() or not num_gt or not len(cost):
        return stock(self, cost, pairwise_ious, num_gt, valid_mask)
    # the two classes have different names for it
    candidates = getattr(self, 'candidate_topk', None) or self.topk
    topk_ious, _ = torch.topk(pairwise_ious, min(candidates, len(pairwise_ious)), dim=0)
    wanted = torch.clamp(topk_ious.sum(0).int(), min=1)
    best = torch.topk(cost, int(wanted.max()), dim=0, largest=False)[1]
    taken = torch.arange(len(best), device=cost.device)[:, None] < wanted
    objects = torch.arange(num_gt, device=cost.device)
    matching = torch.zeros_like(cost, dtype=torch.uint8)
    matching[best, objects.expand_as(best)] = taken.to(torch.uint8)
    # a candidate of several objects belongs to the object with the lowest cost
    cheapest = torch.min(cost, dim=1)[1][:, None] == objects
    matching = torch.where(matching.sum(1, keepdim=True) > 1, cheapest.to(torch.uint8), matching)
    chosen = matching.sum(1) > 0
    valid_mask.masked_scatter_(valid_mask.clone(), chosen)
    rows = chosen.nonzero()[:, 0]
    matched = matching.index_select(0, rows)
    return ((matching * pairwise_ious).sum(1).index_select(0, rows), matched.argmax(1))


class OrderedSet(MutableSet[Any]):
    """Drop-in for ``set`` whose order follows from the operations, never from hashes.

    A one-dimensional tensor is taken as its numbers. (``set`` takes it as 0-d tensors, which hash
    by address, so that no two are ever equal.)

    >>> list(OrderedSet('hash') - OrderedSet('s'))
    ['h', 'a']
    >>> list(OrderedSet(torch.tensor([5, 3, 4])) - OrderedSet(torch.tensor([3])))
    [5, 4]
    """

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self._items = dict.fromkeys(items.tolist() if isinstance(items, torch.Tensor) else items)

    def __contains__(self, item: object) -> bool:
        return item in self._items

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f'{type(self).__name__}({list(self)})'

    def add(self, value: Any) -> None:
        """Append ``value`` unless it is already there."""
        self._items[value] = None

    def discard(self, value: Any) -> None:
        """Remove ``value`` if it is there."""
        self._items.pop(value, None)


def ordered_set(stock: type) -> type:
    """Return the replacement for the name ``set`` in a module."""
    return OrderedSet


@around
def sorted_names(stock: Any, self: Any) -> list[str]:
    """Return the stock names sorted: an order that depends on the names alone."""
    return sorted(stock(self))


class _StableNumPy:
    """NumPy, whose ``argsort`` leaves ties in their order, on every CPU."""

    argsort = staticmethod(functools.partial(np.argsort, kind='stable'))

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def stable_numpy(stock: Any) -> Any:
    """Return the replacement for the name ``np`` in a module."""
    return _StableNumPy()


def as_many_parts_anywhere(stock: ModuleType) -> SimpleNamespace:
    """Return ``multiprocessing`` for panoptic quality: ``nproc`` parts, whatever the machine.

    A process of the pool may compute several of them.
    """
    return SimpleNamespace(cpu_count=lambda: sys.maxsize,
                           Pool=lambda processes: stock.Pool(min(processes, stock.cpu_count())))


def added_by_size(stock: Callable[[list[dict[str, Any]]], Any]) -> Any:
    """Return a static method that adds the figures of images up in the order of their size."""
    return staticmethod(lambda results: stock(
        sorted(results, key=lambda image: [float(image[name]) for name in sorted(image)])))


class _ByContent(pickle.Pickler):
    """Writes equal bytes for equal values, whichever parts are one object."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)  # the protocol of MMEngine
        self.fast = True  # a memo would tell one object from two equal ones

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        content = io.BytesIO()
        # torch's way to pickle a tensor has addresses in it, the format of its files has none
        torch.save(value.detach().cpu().clone(), content)
        return torch.storage._load_from_bytes, (content.getvalue(), )


@around
def dump_by_content(stock: Any, results: Any, path: str) -> None:
    """Write predictions into a pickle file of equal bytes for equal predictions."""
    content = io.BytesIO()
    _ByContent(content).dump(results)
    put(content.getvalue(), path)
