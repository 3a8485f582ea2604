"""The primitive of the operators: a weighted sum of gathered rows, and its transpose.

Nearly every operator here is a sparse matrix times a dense one. The dense factor is a feature map
as *rows*: one row per pixel, channels within the row. The sparse factor is a list of *taps*, (bag,
row, weight). :func:`gather_sum` computes ``bag[b] = sum of weight * row``, :func:`scatter_sum` its
transpose ``row[r] = sum of weight * bag``, and :func:`dots` the product ``<bag, row>`` of every
tap, which is the gradient of the weights.

All three give the same bits on every run, for any number of threads, on CPU and on CUDA. One thread
sums a bag in the order of its taps, and ``scatter_sum`` computes the same sum after a stable sort
of the taps by row. There are no atomic additions.

The last row of :func:`rows_of` is zero: the padding row. Taps outside the map have its index (the
*padding index*), so a NaN in a pixel that is not read cannot reach the result.
"""
from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

# Sums are computed in at least float32: half precision loses terms that are small beside the sum.
COMPUTE = {torch.float64: torch.float64, torch.float32: torch.float32,
           torch.float16: torch.float32, torch.bfloat16: torch.float32}

# Bytes for the taps of one chunk per byte of input and output. Together with the rows this keeps
# the extra memory below twice the size of input and output.
CHUNK_SHARE = 0.5
# Taps per chunk, or elements to compare; smaller chunks cost more in calls than they save. A chunk
# consists of whole bags, so its size does not affect the bits unless the operator's docstring says
# so.
CHUNK_TAPS = {'cpu': 1 << 18, 'cuda': 1 << 22}
# Taps of padding that one thread of a GPU sums up, for nothing.
_PADDING_BAG = 64
# Peak bytes per tap: row, weight, sorted row, permutation, permuted weight and source.
TAP_BYTES = 48


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which ``tensor`` is summed."""
    return COMPUTE[tensor.dtype]


def single(value: float) -> float:
    """Return ``value`` as mmcv's C++ receives it: a float32, whatever the dtype of the tensors."""
    return torch.tensor(value, dtype=torch.float32).item()


def rows_of(feature: Tensor) -> Tensor:
    """Convert (N, C, H, W) to (N*H*W + 1, C) rows in compute precision; the last row is zero."""
    n, c, h, w = feature.shape
    rows = feature.new_empty((n * h * w + 1, c), dtype=compute_dtype(feature))
    if feature.is_cuda:
        rows[:-1].view(n, h, w, c).copy_(feature.permute(0, 2, 3, 1))
    for i in range(0 if feature.is_cuda else n):
        # A 2-D transpose has a blocked kernel; the 4-D permutation is several times slower.
        rows[i * h * w:(i + 1) * h * w].copy_(feature[i].reshape(c, h * w).t())
    rows[-1].zero_()
    return rows


class Source:
    """Rows of a feature map (N, C, H, W) to gather from.

    Few boxes touch few pixels of a large map; then only those pixels are converted to rows. The
    sums and their order are the same either way.
    """

    def __init__(self, feature: Tensor) -> None:
        self._feature = feature
        self._rows: Tensor | None = None

    def rows(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows that ``index``, of pixels of the map, needs, and the index into them."""
        if self._rows is None and not _few(self._feature, index):
            self._rows = rows_of(self._feature)
        if self._rows is not None:
            return self._rows, index
        image, pixel, index = _compact(self._feature, index)
        rows = self._feature.new_empty((len(image) + 1, self._feature.shape[1]),
                                       dtype=compute_dtype(self._feature))
        rows[-1].zero_()
        rows[:-1].copy_(self._feature.flatten(2)[image, :, pixel])
        return rows, index


class Sink:
    """The transpose of :class:`Source`: adds scattered sums to ``grad`` (N, C, H, W)."""

    def __init__(self, grad: Tensor) -> None:
        self._grad = grad
        self._total: Tensor | None = None

    def scatter_sum(self, source: Tensor, index: Tensor, weight: Tensor,
                    bag_of: Tensor | None = None, padded: bool = True) -> None:
        """Call :func:`scatter_sum` for taps; ``index`` counts pixels of the map."""
        if self._total is None and self._grad.is_contiguous() and _few(self._grad, index):
            image, pixel, index = _compact(self._grad, index)
            rows = scatter_sum(source, index, weight, len(image), bag_of, padded)
            # no pixel occurs twice, so nothing is added twice here
            torch.ops.aten.index_put_(
                self._grad.flatten(2), [image, None, pixel], rows.to(self._grad.dtype), True)
            return
        rows = scatter_sum(source, index, weight, _pixels(self._grad), bag_of, padded)
        self._total = rows if self._total is None else self._total.add_(rows)

    def close(self) -> None:
        """Add the accumulated rows to ``grad``. Call it once, after the last sum."""
        if self._total is not None:
            add_rows(self._grad, self._total)


def _pixels(feature: Tensor) -> int:
    return feature.shape[0] * feature.shape[2] * feature.shape[3]


def _few(feature: Tensor, index: Tensor) -> bool:
    # Converting single pixels costs several times their share of converting the whole map.
    return index.numel() * 4 < _pixels(feature)


def _compact(feature: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pixels that taps touch, in order, and the index into them; padding is last.

    A pixel comes as its image and its position there.
    """
    pixels = _pixels(feature)
    flags = torch.zeros(pixels + 1, dtype=torch.bool, device=index.device)
    flat = index.reshape(-1).to(torch.int64)
    flags.index_fill_(0, flat, True)
    flags[pixels:] = False
    used = flags.nonzero().squeeze(1)
    position = flags.cumsum(0) - 1
    position[pixels:] = len(used)
    size = feature.shape[2] * feature.shape[3]
    image = torch.div(used, size, rounding_mode='floor')
    return (image, used - image * size,
            position.index_select(0, flat).to(index.dtype).view(index.shape))


def put_rows(out: Tensor, rows: Tensor) -> None:
    """Write (K*P, C) rows into ``out`` of shape (K, C, ...) with P positions."""
    if out.numel():
        k, c = out.shape[:2]
        out.copy_(rows.view(k, -1, c).transpose(1, 2).reshape(out.shape))


def add_rows(out: Tensor, rows: Tensor) -> None:
    """Add (N*H*W, C) rows to ``out`` of shape (N, C, H, W)."""
    n, c, h, w = out.shape
    if out.is_cuda:
        out.add_(rows.view(n, h, w, c).permute(0, 3, 1, 2).to(out.dtype))
        return
    for i in range(n):
        part = rows[i * h * w:(i + 1) * h * w].t().reshape(c, h, w)
        out[i].add_(part.to(out.dtype))


def bags(feature: Tensor) -> Tensor:
    """Convert (K, C, ...) to (K*P, C) rows in compute precision: the inverse of :func:`put_rows`.

    Integers keep their dtype. With K = 1 the result may be a view that is not contiguous.
    """
    rows = feature.flatten(2).transpose(1, 2).to(COMPUTE.get(feature.dtype, feature.dtype))
    return rows.reshape(-1, feature.shape[1])


def gather_sum(rows: Tensor, index: Tensor, weight: Tensor,
               offsets: Tensor | None = None) -> Tensor:
    """Compute ``out[b] = sum of weight * rows[index]`` over the taps of bag b, in order; (B, C).

    Args:
        rows: (R, C), contiguous.
        index: int32 or int64, (B, T) for T taps in every bag, else (E,).
        weight: as ``index``, dtype of ``rows``.
        offsets: with (E,) taps, (B + 1,) of the dtype of ``index``: where each bag begins.
    """
    if index.numel() == 0:
        bag_count = index.shape[0] if offsets is None else offsets.numel() - 1
        return rows.new_zeros((bag_count, rows.shape[1]))
    with torch.no_grad():
        return F.embedding_bag(index, rows.contiguous(), offsets, mode='sum',
                               per_sample_weights=weight, include_last_offset=offsets is not None)


def scatter_sum(source: Tensor, index: Tensor, weight: Tensor, size: int,
                bag_of: Tensor | None = None, padded: bool = True) -> Tensor:
    """Compute ``out[r] = sum of weight * source[bag]`` over the taps with index r, in their order.

    The transpose of :func:`gather_sum`.

    Args:
        source: (B, C), contiguous.
        index, weight: the taps, as in :func:`gather_sum`. Taps with an index of ``size`` or above
            (padding) are ignored.
        size: rows of the result, (size, C).
        bag_of: (E,) the bag of each tap, where ``index`` is not (B, T).
        padded: whether there may be padding.
    """
    if index.numel() == 0:
        return source.new_zeros((size, source.shape[1]))
    row, order = torch.sort(index.reshape(-1), stable=True)
    starts = torch.searchsorted(row, torch.arange(size + 1, dtype=row.dtype, device=row.device))
    sorted_weight = weight.reshape(-1).index_select(0, order)
    if bag_of is not None:
        bag = bag_of.index_select(0, order)
    elif index.shape[1] & (index.shape[1] - 1):
        bag = torch.div(order, index.shape[1], rounding_mode='floor')
    else:  # a shift is several times faster than a division
        bag = order >> (index.shape[1].bit_length() - 1)
    if padded and row.is_cuda:
        # reading where the padding begins would make the host wait: sum it in short bags instead
        beyond = torch.arange(1, len(row) // _PADDING_BAG + 2, device=row.device) * _PADDING_BAG
        starts = torch.cat((starts, (starts[-1] + beyond).clamp_(max=len(row))))
    elif padded:  # padding was sorted after the last start
        last = int(starts[-1])
        bag, sorted_weight = bag[:last], sorted_weight[:last]
    return gather_sum(source, bag.to(row.dtype), sorted_weight, starts.to(row.dtype))[:size]


def scatter_sum_onto(total: Tensor, source: Tensor, index: Tensor, weight: Tensor) -> None:
    """Add :func:`scatter_sum` to ``total``, limited to the band of rows that the taps touch.

    ``index`` is (B, T); indices past the end of ``total`` are ignored.
    """
    if index.numel() == 0:
        return
    inside = index < len(total)
    low, high = torch.stack((index.amin(), index.masked_fill(~inside, -1).amax())).tolist()
    if high >= low:
        band = (index - low).clamp_(max=high + 1 - low)
        total[low:high + 1] += scatter_sum(source, band, weight, high + 1 - low)


def dots(grad: Tensor, rows: Tensor, index: Tensor, bag_of: Tensor | None = None) -> Tensor:
    """Return ``<grad[bag], rows[index]>`` per tap: the gradient of :func:`gather_sum`'s weights.

    ``grad`` (B, C) and ``rows`` (R, C) are contiguous. ``index`` is (B, T), or (E,) together with
    ``bag_of`` (E,). The result has its shape, and the dtype of ``rows``.
    """
    if index.numel() == 0:
        return rows.new_zeros(index.shape)
    flat = index.reshape(-1)
    if bag_of is None:
        bag_of = torch.arange(index.shape[0], dtype=flat.dtype, device=flat.device)
        bag_of = bag_of.repeat_interleave(index.shape[1], output_size=flat.numel())
    # mode 0 is 'sum'; the offsets are unused once every tap knows its bag.
    out: Tensor = torch.ops.aten._embedding_bag_per_sample_weights_backward(
        grad, rows, flat, flat.new_zeros(1), bag_of.to(flat.dtype), 0, -1)
    return out.view(index.shape)


def chunk_by_cost(costs: list[int], budget: int,
                  widths: list[int] | None = None) -> list[tuple[int, int]]:
    """Split items of known cost, in order, into runs that cost at most ``budget`` each.

    An item above the budget is a run of its own. The result depends on the arguments only, never
    on threads or free memory.

    ``widths`` are given where the items of a run are padded to the widest of them; the padded area
    of a run stays within the budget too.

    >>> chunk_by_cost([1, 1, 5, 1, 1], 2)
    [(0, 2), (2, 3), (3, 5)]
    >>> chunk_by_cost([0, 0, 0, 0], 8, widths=[1, 1, 4, 4])
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


def slices(count: int, step: int) -> Iterator[slice]:
    """Yield slices of ``step`` items, at least one, that cover ``count`` items in order."""
    step = max(1, step)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def chunk_taps(device: torch.device) -> int:
    """Return the largest number of taps, or of elements to compare, to process at once."""
    return CHUNK_TAPS['cpu' if device.type == 'cpu' else 'cuda']


def tap_budget(*tensors: Tensor) -> int:
    """Return how many taps to hold at once, given the tensors that the caller holds anyway."""
    owned = sum(t.numel() * t.element_size() for t in tensors)
    return max(chunk_taps(tensors[0].device) // 4, int(owned * CHUNK_SHARE) // TAP_BYTES)
