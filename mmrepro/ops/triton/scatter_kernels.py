"""Scattered sums with 64-bit integers: the same bits in any order, without a sort.

:func:`scatter_sum` is :func:`mmrepro.ops.gather.scatter_sum` for float32. Every product is
converted to a multiple of one power of two, and the multiples are added with integer atomics.
Integer addition is associative, so the order in which a GPU executes the atomics cannot change the
result.

The power of two comes from the largest finite weight, the largest finite source and the number of
taps, so that a sum cannot overflow. One tap is off by less than ``taps * 2 ** -58`` times the
product of these two largest values: with the four million taps of a layer of Deformable DETR, by
``2 ** -36``; a float32 sum is off by up to ``2 ** -24`` of its largest partial sum for every
addition. Infinities and NaN are recorded beside the sum, by kind, and give what a float sum gives.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import well_aligned

# Numbers that a program looks through for the largest; taps and channels of a program that adds;
# sums that a program converts back.
_LOOK, _TAPS, _CHANNELS, _SUMS = 1024, 32, 64, 1024

# Kinds of products without a multiple, a bit each.
_PLUS, _MINUS, _NAN = (tl.constexpr(1 << bit) for bit in range(3))
_INFINITY = tl.constexpr(0x7F800000)  # the bits of a float32


@triton.jit(do_not_specialize=['count'])
def _peak_kernel(values, peak, count, LOOK: tl.constexpr):
    """Find the largest finite magnitude, as the bits of a float32, ordered as the values."""
    at = tl.program_id(0).to(tl.int64) * LOOK + tl.arange(0, LOOK)
    value = tl.load(values + at, mask=at < count, other=0.)
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(peak, tl.max(tl.where(bits < _INFINITY, bits, 0), 0), sem='relaxed')


@triton.jit
def _shift(peaks, spare):
    """Return the exponent of the unit: ``2 ** spare`` of the largest multiples fit 62 bits."""
    # |x| < 2 ** (exponent - 126), for subnormal numbers too
    weight, source = tl.load(peaks) >> 23, tl.load(peaks + 1) >> 23
    # a finite product is below 2 ** 128, and 0 or at least 2 ** -149
    return 62 - tl.minimum(tl.maximum(weight + source - 2 * 126, -149), 128) - spare


@triton.jit
def _times_power(value, exponent):
    """Return ``value * 2 ** exponent`` for exponents in [-250, 250], by normal powers of two."""
    half = exponent // 2
    return (value * ((127 + half) << 23).to(tl.float32, bitcast=True)
            * ((127 + exponent - half) << 23).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=['taps', 'per_bag', 'size', 'channels', 'spare'])
def _add_kernel(source_of, row_of, weight_of, peaks, total, kinds, taps, per_bag, size, channels,
                spare, TAPS: tl.constexpr, CHANNELS: tl.constexpr):
    """Add the products of some taps, for some channels."""
    tap = tl.program_id(0).to(tl.int64) * TAPS + tl.arange(0, TAPS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    exists = tap < taps
    row = tl.load(row_of + tap, mask=exists, other=0).to(tl.int64)
    exists = exists & (row < size)  # rows beyond are padding
    weight = tl.load(weight_of + tap, mask=exists, other=0.)
    bag = tap // per_bag
    here = exists[:, None] & (channel < channels)[None, :]
    source = tl.load(source_of + bag[:, None] * channels + channel[None, :], mask=here, other=0.)
    product = source * weight[:, None]
    finite = tl.abs(product) < float('inf')  # false for NaN
    multiple = _times_power(tl.where(finite, product, 0.), _shift(peaks, spare))
    at = row[:, None] * channels + channel[None, :]
    tl.atomic_add(total + at, multiple.to(tl.int64), mask=here, sem='relaxed')
    kind = tl.where(product == float('inf'), _PLUS,
                    tl.where(product == float('-inf'), _MINUS, _NAN))
    tl.atomic_or(kinds + at, kind, mask=here & (finite == 0), sem='relaxed')


@triton.jit(do_not_specialize=['count', 'spare'])
def _convert_kernel(total, kinds, peaks, result, count, spare, SUMS: tl.constexpr):
    """Convert multiples back to float32, rounded once."""
    at = tl.program_id(0).to(tl.int64) * SUMS + tl.arange(0, SUMS)
    value = tl.load(total + at, mask=at < count, other=0).to(tl.float32)
    value = _times_power(value, -_shift(peaks, spare))
    kind = tl.load(kinds + at, mask=at < count, other=0)
    value = tl.where(kind == 0, value,
                     tl.where(kind == _PLUS, float('inf'),
                              tl.where(kind == _MINUS, float('-inf'), float('nan'))))
    tl.store(result + at, value, mask=at < count)


def scatter_sum(source: Tensor, index: Tensor, weight: Tensor, size: int) -> Tensor:
    """Compute ``out[r] = sum of weight * source[bag]`` over the taps with index r, in any order.

    Arguments are those of :func:`mmrepro.ops.gather.scatter_sum`, (B, T) taps in float32.

    Raises:
        TypeError: ``source`` or ``weight`` are not float32.
    """
    if source.dtype != torch.float32 or weight.dtype != torch.float32:
        raise TypeError('scatter_sum in fixed point: source and weight must be torch.float32, not '
                        f'{source.dtype} and {weight.dtype}')
    taps, channels = index.numel(), source.shape[1]
    if taps == 0 or size * channels == 0:
        return source.new_zeros((size, channels))
    source, index, weight = well_aligned(source, index, weight)
    with torch.cuda.device_of(source):
        count = size * channels
        # one call for all buffers that begin with 0: sums, kinds (half as wide), and two peaks
        total, kinds, peaks = torch.zeros(
            count + (count + 1) // 2 + 1, dtype=torch.int64, device=source.device).split(
                (count, (count + 1) // 2, 1))
        kinds, peaks = kinds.view(torch.int32), peaks.view(torch.int32)
        for number, values in enumerate((weight, source)):
            _peak_kernel[(triton.cdiv(values.numel(), _LOOK), )](
                values, peaks[number:], values.numel(), LOOK=_LOOK)
        spare = max(1, taps - 1).bit_length() + 1  # a sum of `taps` products, and roundings
        block = min(_CHANNELS, triton.next_power_of_2(channels))
        _add_kernel[(triton.cdiv(taps, _TAPS), triton.cdiv(channels, block))](
            source, index, weight, peaks, total, kinds, taps, index.shape[1], size, channels, spare,
            TAPS=_TAPS, CHANNELS=block, enable_fp_fusion=False)
        result = torch.empty((size, channels), dtype=torch.float32, device=source.device)
        _convert_kernel[(triton.cdiv(count, _SUMS), )](
            total, kinds, peaks, result, count, spare, SUMS=_SUMS)
    return result
