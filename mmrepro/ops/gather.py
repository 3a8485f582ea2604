"""The primitive: read rows at weighted places, and its transpose.

Nearly every operator here is a sparse matrix times a dense one. The dense side is a feature map as
*rows*, one pixel per row and channels within the row; the sparse side is a list of *taps*, (bag,
row, weight). :func:`read` makes ``bag[b] = sum of weight * row``; :func:`spread` makes the
transpose, ``row[r] = sum of weight * bag``; :func:`dots` gives ``<bag, row>`` per tap, which is the
gradient of the weights.

All three give the same bits on every run, for any number of threads, on CPU and on CUDA: a bag is
summed by one thread in the order of its taps, and ``spread`` is the same sum again after a stable
sort of the taps by row. Nothing is added with atomics.

Rows that :func:`rows_of` makes end with one row of zeros. A tap that lies outside of the map points
there, so that nothing that was not read (a NaN next door, say) can reach the result.
"""
from __future__ import annotations

from typing import List, Optional, Tuple, Union

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ['COMPUTE', 'Sink', 'Source', 'add_rows', 'bags', 'chunk_rows', 'chunk_taps',
           'compute_dtype', 'cut', 'dots', 'equal', 'keep', 'put_rows', 'put_some', 'read',
           'rows_of', 'single', 'spread', 'spread_onto', 'tap_budget', 'through']

# Sums are made in at least float32: half and bfloat16 lose taps that are small beside the sum.
COMPUTE = {torch.float64: torch.float64, torch.float32: torch.float32,
           torch.float16: torch.float32, torch.bfloat16: torch.float32}

# Bytes that the taps of one chunk may take while they are made and sorted, per byte of input and
# output: together with the rows it keeps the extra memory under twice theirs.
CHUNK_SHARE = 0.5
# Taps per chunk below which the calls cost more than the memory is worth; a GPU is fed in larger
# bites. Where chunks are made of whole bags and rows, as everywhere here, the size of a chunk does
# not show in the bits unless the text of the operator says so.
CHUNK_TAPS = {'cpu': 1 << 18, 'cuda': 1 << 22}
# Elements to compare or mask at once: what stays in a CPU's cache, and what is worth a GPU's calls.
CHUNK_ELEMENTS = {'cpu': 1 << 18, 'cuda': 1 << 22}
# What a tap costs at its peak: row, weight, sorted row, permutation, permuted weight and source.
TAP_BYTES = 48


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which sums over ``tensor`` are made."""
    return COMPUTE[tensor.dtype]


def single(value: float) -> float:
    """``value`` as mmcv's C++ receives it: a float32, whatever the dtype of the tensors."""
    return torch.tensor(value, dtype=torch.float32).item()


def rows_of(feature: Tensor) -> Tensor:
    """(N, C, H, W) as (N*H*W + 1, C) rows in compute precision; the last row is zero."""
    n, c, h, w = feature.shape
    rows = feature.new_empty((n * h * w + 1, c), dtype=compute_dtype(feature))
    for i in range(n):
        # A 2-D transpose has a blocked kernel; the 4-D permutation is several times slower.
        rows[i * h * w:(i + 1) * h * w].copy_(feature[i].reshape(c, h * w).t())
    rows[-1].zero_()
    return rows


class Source:
    """Rows of a feature map for several reads: those that the taps touch, or all of them.

    Few boxes on a large map touch little of it; then only those pixels are turned into rows. The
    sums are the same either way, in the same order.
    """

    def __init__(self, feature: Tensor) -> None:
        self._feature = feature
        self._rows: Optional[Tensor] = None

    def read(self, index: Tensor, weight: Tensor, offsets: Optional[Tensor] = None) -> Tensor:
        """:func:`read` of taps whose index counts pixels of the map."""
        rows, index = self.rows(index)
        return read(rows, index, weight, offsets)

    def rows(self, index: Tensor) -> Tuple[Tensor, Tensor]:
        """Rows, and the index into them."""
        if self._rows is None and _few(self._feature, index):
            used, index = _compact(index, _pixels(self._feature))
            return self._pick(used), index
        if self._rows is None:
            self._rows = rows_of(self._feature)
        return self._rows, index

    def _pick(self, used: Tensor) -> Tensor:
        n, c, h, w = self._feature.shape
        rows = self._feature.new_empty((len(used) + 1, c), dtype=compute_dtype(self._feature))
        for i, (part, pixels) in enumerate(_by_image(used, n, h * w)):
            if len(pixels):
                columns = self._feature[i].reshape(c, h * w).index_select(1, pixels)
                rows[part].copy_(columns.t())
        rows[-1].zero_()
        return rows


class Sink:
    """The transpose of :class:`Source`: adds spreads to ``grad`` (N, C, H, W)."""

    def __init__(self, grad: Tensor) -> None:
        self._grad = grad
        self._total: Optional[Tensor] = None

    def spread(self, source: Tensor, index: Tensor, weight: Tensor,
               bag_of: Optional[Tensor] = None) -> None:
        """:func:`spread` of taps whose index counts pixels of the map."""
        n, c, h, w = self._grad.shape
        if self._total is None and _few(self._grad, index) and self._grad.is_contiguous():
            used, index = _compact(index, _pixels(self._grad))
            rows = spread(source, index, weight, len(used), bag_of).to(self._grad.dtype)
            for i, (part, pixels) in enumerate(_by_image(used, n, h * w)):
                if len(pixels):
                    # No pixel occurs twice, so nothing is added twice here.
                    image = self._grad[i].view(c, h * w)
                    image.index_add_(1, pixels, rows[part].t().contiguous())
            return
        part = spread(source, index, weight, _pixels(self._grad), bag_of)
        self._total = part if self._total is None else self._total.add_(part)

    def close(self) -> None:
        """Write what has been held back."""
        if self._total is not None:
            add_rows(self._grad, self._total)


def _pixels(feature: Tensor) -> int:
    return feature.shape[0] * feature.shape[2] * feature.shape[3]


def _few(feature: Tensor, index: Tensor) -> bool:
    # Picking a pixel costs a few times its share of turning the whole map.
    return index.numel() * 4 < _pixels(feature)


def _compact(index: Tensor, pixels: int) -> Tuple[Tensor, Tensor]:
    """The pixels that taps touch, in order, and the index into them; nowhere stays past the end."""
    flags = torch.zeros(pixels + 1, dtype=torch.bool, device=index.device)
    flat = index.reshape(-1).to(torch.int64)
    flags.index_fill_(0, flat, True)
    flags[pixels:] = False
    used = flags.nonzero().squeeze(1)
    position = flags.cumsum(0) - 1
    position[pixels:] = len(used)
    return used, position.index_select(0, flat).to(index.dtype).view(index.shape)


def _by_image(used: Tensor, images: int, size: int) -> List[Tuple[slice, Tensor]]:
    """Where the pixels of each image stand in ``used``, and which pixels they are."""
    edges = torch.arange(images + 1, device=used.device) * size
    bounds = torch.searchsorted(used, edges).tolist()
    return [(slice(a, b), used[a:b] - i * size)
            for i, (a, b) in enumerate(zip(bounds, bounds[1:]))]


def put_rows(out: Tensor, rows: Tensor) -> None:
    """Write (K*P, C) rows into ``out`` of shape (K, C, ...) with P places."""
    k, c = out.shape[:2]
    places = out[0, 0].numel() if k and c else 0
    if places:
        source = rows.view(k, places, c).transpose(1, 2)
        out.copy_(source.reshape(out.shape) if out.dim() != 3 else source)


def put_some(out: Tensor, which: Tensor, rows: Tensor) -> None:
    """:func:`put_rows` into the items ``which`` of ``out``; none may occur twice."""
    piece = torch.empty_like(out[:len(which)])
    put_rows(piece, rows)
    out.index_copy_(0, which, piece)


def add_rows(out: Tensor, rows: Tensor) -> None:
    """Add (N*H*W, C) rows to ``out`` of shape (N, C, H, W)."""
    n, c, h, w = out.shape
    for i in range(n):
        part = rows[i * h * w:(i + 1) * h * w].t().reshape(c, h, w)
        out[i].add_(part.to(out.dtype))


def bags(feature: Tensor) -> Tensor:
    """(K, C, ...) as (K*P, C) rows in compute precision: :func:`put_rows` backwards.

    Integers stay what they are. The rows of a single one (K = 1) may be a view with other strides.
    """
    k, c = feature.shape[:2]
    places = feature.reshape(k, c, feature[0, 0].numel() if k and c else 0).transpose(1, 2)
    return places.to(COMPUTE.get(feature.dtype, feature.dtype)).reshape(-1, c)


def read(rows: Tensor, index: Tensor, weight: Tensor, offsets: Optional[Tensor] = None) -> Tensor:
    """``out[b] = sum over the taps of b of weight * rows[index]``, taps in their order.

    Args:
        rows: (R, C), contiguous.
        index: int32 or int64, (B, T) for T taps in every bag, else (E,).
        weight: as ``index``, dtype of ``rows``.
        offsets: with (E,) taps, (B + 1,) of the dtype of ``index``: where each bag begins.

    Returns:
        (B, C).
    """
    if index.numel() == 0:
        bag_count = index.shape[0] if offsets is None else offsets.numel() - 1
        return rows.new_zeros((bag_count, rows.shape[1]))
    with torch.no_grad():
        return F.embedding_bag(index, rows.contiguous(), offsets, mode='sum',
                               per_sample_weights=weight,
                               include_last_offset=offsets is not None)


def spread(source: Tensor, index: Tensor, weight: Tensor, size: int,
           bag_of: Optional[Tensor] = None) -> Tensor:
    """The transpose of :func:`read`: ``out[r] = sum over taps with index r of weight * source``.

    The taps of a row are added in the order in which they stand in ``index``.

    Args:
        source: (B, C), contiguous.
        index, weight: the taps, as in :func:`read`. Taps that point at ``size`` or beyond (the
            row of zeros) are left out.
        size: rows to make.
        bag_of: (E,) the bag of each tap, where ``index`` is not (B, T).

    Returns:
        (size, C).
    """
    if index.numel() == 0:
        return source.new_zeros((size, source.shape[1]))
    row, order = torch.sort(index.reshape(-1), stable=True)
    starts = torch.searchsorted(row, torch.arange(size + 1, dtype=row.dtype, device=row.device))
    sorted_weight = weight.reshape(-1).index_select(0, order)
    if bag_of is not None:
        bag = bag_of.index_select(0, order)
    else:
        bag = _quotient(order, index.shape[1])
    # Bags are cut by their starts, so what lies past the last start is not read.
    last = int(starts[-1])
    return read(source, bag[:last].to(row.dtype), sorted_weight[:last], starts.to(row.dtype))


def spread_onto(total: Tensor, source: Tensor, index: Tensor, weight: Tensor) -> None:
    """Add :func:`spread` to ``total``, working on the band of rows that the taps touch.

    Args:
        index: (B, T); what points past ``total`` is left out.
    """
    if index.numel() == 0:
        return
    inside = index < len(total)
    low, high = torch.stack((index.amin(), index.masked_fill(~inside, -1).amax())).tolist()
    if high >= low:
        band = (index - low).clamp_(max=high + 1 - low)
        total[low:high + 1] += spread(source, band, weight, high + 1 - low)


def _quotient(value: Tensor, divisor: int) -> Tensor:
    """``value // divisor`` for what is not negative; a shift is several times faster."""
    if divisor & (divisor - 1) == 0:
        return value >> (divisor.bit_length() - 1)
    return torch.div(value, divisor, rounding_mode='floor')


def dots(grad: Tensor, rows: Tensor, index: Tensor, bag_of: Optional[Tensor] = None) -> Tensor:
    """``<grad[bag], rows[index]>`` per tap: what :func:`read`'s weights get as gradient.

    Args:
        grad: (B, C), contiguous.
        rows: (R, C), contiguous.
        index: (B, T), or (E,) together with ``bag_of`` (E,).

    Returns:
        The shape of ``index``, dtype of ``rows``.
    """
    if index.numel() == 0:
        return rows.new_zeros(index.shape)
    flat = index.reshape(-1)
    if bag_of is None:
        bag_of = torch.arange(index.shape[0], dtype=flat.dtype, device=flat.device)
        bag_of = bag_of.repeat_interleave(index.shape[1], output_size=flat.numel())
    # mode 0 is 'sum'; the offsets are unused once every tap knows its bag.
    out = torch.ops.aten._embedding_bag_per_sample_weights_backward(
        grad, rows, flat, flat.new_zeros(1), bag_of.to(flat.dtype), 0, -1)
    return out.view(index.shape)


def equal(a: Tensor, b: Tensor) -> Tensor:
    """``a == b`` as bool; on a CPU by NumPy, which makes booleans several times faster."""
    return a == b if a.is_cuda else torch.from_numpy(np.equal(a.numpy(), b.numpy()))


def keep(values: Tensor, owner: Tensor, who: Union[int, Tensor], out: Tensor) -> None:
    """Write ``values`` where ``owner == who``, else 0, to the beginning of ``out``.

    Exact for infinities and NaN too, as a product with a mask is not, and several times faster
    than torch.where.

    Args:
        values, owner: (B, C). who: a number or (B, 1). out: (at least B, C), dtype of values.
    """
    bits = torch.int64 if values.dtype == torch.float64 else torch.int32
    step = chunk_rows(values.device, values.shape[1])
    if not isinstance(who, Tensor):
        who = owner.new_full((1, 1), who)
    for a in range(0, len(values), step):
        part = slice(a, min(a + step, len(values)))
        mask = equal(owner[part], who if len(who) == 1 else who[part])
        # a byte of -1 is a word of ones
        word = mask.view(torch.int8).neg_().to(bits)
        torch.bitwise_and(word, values[part].view(bits), out=out[part].view(bits))


def through(values: Tensor, dtype: torch.dtype) -> Tensor:
    """What is left of ``values`` after they were stored as ``dtype``."""
    return values.to(dtype).to(values.dtype)


def cut(costs: List[int], budget: int, widths: Optional[List[int]] = None) -> List[Tuple[int, int]]:
    """Split items of known cost, in order, into runs that cost at most ``budget`` together.

    An item above the budget gets a run of its own. The answer depends on the arguments alone,
    never on threads or on free memory, so neither do the sums that follow it.

    Args:
        costs: of each item.
        budget: of a run.
        widths: of each item where the items of a run are padded to the widest of them; the padded
            area of a run stays within the budget too.

    >>> cut([1, 1, 5, 1, 1], 2)
    [(0, 2), (2, 3), (3, 5)]
    >>> cut([0, 0, 0, 0], 8, widths=[1, 1, 4, 4])
    [(0, 2), (2, 4)]
    """
    widths = widths or [0] * len(costs)
    runs, start, total, widest = [], 0, 0, 0
    for i, (cost, width) in enumerate(zip(costs, widths)):
        padded = (i + 1 - start) * max(widest, width)
        if i > start and (total + cost > budget or padded > budget):
            runs.append((start, i))
            start, total, widest = i, 0, 0
        total, widest = total + cost, max(widest, width)
    if start < len(costs):
        runs.append((start, len(costs)))
    return runs


def chunk_taps(device: torch.device) -> int:
    """Taps to work on at once where nothing else limits them."""
    return CHUNK_TAPS['cpu' if device.type == 'cpu' else 'cuda']


def chunk_rows(device: torch.device, width: int) -> int:
    """Rows of ``width`` elements to compare or mask at once; at least one."""
    return max(1, CHUNK_ELEMENTS['cpu' if device.type == 'cpu' else 'cuda'] // max(1, width))


def tap_budget(*tensors: Tensor) -> int:
    """Taps to hold at once, given the tensors that the caller owns anyway."""
    owned = sum(t.numel() * t.element_size() for t in tensors)
    return max(chunk_taps(tensors[0].device) // 4, int(owned * CHUNK_SHARE) // TAP_BYTES)
