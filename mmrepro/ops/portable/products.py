"""Products of matrices and vectors without MKL.

float32 goes to oneDNN, and so do 16-bit floating-point numbers, which are rounded once at the end.
Integers stay with torch, whose sums are exact. Other numbers (float64, complex) are added up
element by element. The first argument of every kernel is torch's own kernel of the operator.
"""
from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor

SHORT = (torch.float16, torch.bfloat16)
# Multiplications of one matrix product in a batch below which a pass over the batch for each
# element of the common dimension takes less time than a call for each product.
_SMALL = 20_000
_BAGS = 1 << 18  # numbers at once in gradients of embedding bags

Stock = Callable[..., Tensor]


def _is_exact(*tensors: Tensor) -> bool:
    return not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)


def _dense(matrix: Tensor) -> Tensor:
    """Return a matrix whose rows or columns are contiguous, without conjugation or sign bits."""
    matrix = matrix.resolve_conj().resolve_neg()
    return matrix if matrix.is_contiguous() or matrix.t().is_contiguous() else matrix.contiguous()


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of two matrices, (m, k) and (k, n)."""
    if a.dtype in SHORT:
        return product(a.float(), b.float()).to(a.dtype)
    if not (a.numel() and b.numel()):
        return a.new_zeros(a.shape[0], b.shape[1])
    if a.dtype != torch.float32:
        return _summed(a[None], b[None])[0]
    result: Tensor = torch.ops.mkldnn._linear_pointwise(
        _dense(a), _dense(b.t()), None, 'none', [], '')
    return result


def _summed(a: Tensor, b: Tensor) -> Tensor:
    """Return products of a batch, adding up along the common dimension in ascending order."""
    result = a[:, :, :1] * b[:, :1]
    for index in range(1, a.shape[2]):
        result += a[:, :, index, None] * b[:, index, None]
    return result


def products(a: Tensor, b: Tensor) -> Tensor:
    """Return the products of two batches of matrices, (b, m, k) and (b, k, n)."""
    if a.dtype in SHORT:
        return products(a.float(), b.float()).to(a.dtype)
    count, rows, common = a.shape
    if not (a.numel() and b.numel()):
        return a.new_zeros(count, rows, b.shape[2])
    if a.dtype != torch.float32 or count > 1 and rows * common * b.shape[2] < _SMALL:
        return _summed(a, b)
    return torch.stack([product(left, right) for left, right in zip(a, b)])


def _added(term: Tensor, result: Tensor, beta: Any, alpha: Any) -> Tensor:
    """Return ``beta * term + alpha * result``; a term whose factor is 0 is not read."""
    result = result if alpha == 1 else result * alpha
    if beta == 0:
        return result + torch.zeros((), dtype=term.dtype).expand(term.shape)
    return result + (term if beta == 1 else term * beta)


def _fits(a: Tensor, b: Tensor, dimensions: tuple[int, ...]) -> bool:
    """Whether these are factors to compute here; of others, torch's message is the known one."""
    wide = b[:, None] if b.dim() == 1 else b
    return (not _is_exact(a, b) and a.dtype == b.dtype and (a.dim(), b.dim()) == dimensions
            and a.shape[-1] == wide.shape[-2] and a.shape[:-2] == wide.shape[:-2])


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    if b.dim() == 1:
        return product(a, b[:, None])[:, 0]
    return products(a, b) if b.dim() == 3 else product(a, b)


def _plain(*dimensions: int) -> Callable[..., Tensor]:
    """Return the kernel of ``a @ b`` with this number of dimensions each."""
    def kernel(stock: Stock, a: Tensor, b: Tensor) -> Tensor:
        return _multiply(a, b) if _fits(a, b, dimensions) else stock(a, b)

    return kernel


def _with_term(*dimensions: int, over_batch: bool = False) -> Callable[..., Tensor]:
    """Return the kernel of ``beta * term + alpha * (a @ b)``, or of the sum over the batch."""
    def kernel(stock: Stock, term: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1,
               alpha: Any = 1) -> Tensor:
        if not _fits(a, b, dimensions) or term.dtype != a.dtype:
            return stock(term, a, b, beta=beta, alpha=alpha)
        if (a.dtype == torch.float32 and beta == 1 and alpha == 1 and a.numel() and b.numel()
                and b.dim() == 2 and term.shape == b.shape[1:]):
            result: Tensor = torch.ops.mkldnn._linear_pointwise(
                _dense(a), _dense(b.t()), term.contiguous(), 'none', [], '')
            return result
        result = _multiply(a, b)
        return _added(term, result.sum(0) if over_batch else result, beta, alpha)

    return kernel


mm, mv, bmm = _plain(2, 2), _plain(2, 1), _plain(3, 3)
addmm, addmv, baddbmm = _with_term(2, 2), _with_term(2, 1), _with_term(3, 3)
addbmm = _with_term(3, 3, over_batch=True)


def dot(stock: Stock, a: Tensor, b: Tensor) -> Tensor:
    """Return the scalar product of two vectors."""
    if _is_exact(a, b) or a.dtype != b.dtype or a.dim() != 1 or a.shape != b.shape:
        return stock(a, b)
    return (a * b).sum()


def vdot(stock: Stock, a: Tensor, b: Tensor) -> Tensor:
    """Return the scalar product of two vectors, the first one conjugated."""
    return dot(stock, a.conj() if a.is_complex() else a, b)


def gradient_of_bag_weights(stock: Stock, grad: Tensor, weight: Tensor, indices: Tensor,
                            offsets: Tensor, offset2bag: Tensor, mode: int,
                            padding_idx: int = -1) -> Tensor:
    """Return the gradient of the weights of an embedding bag, one for each of ``indices`` (N,).

    It is the scalar product of the bag's gradient (B, D) and the row of ``weight`` (R, D).
    """
    if not len(offset2bag):
        ends = torch.cat([offsets, offsets.new_tensor([len(indices)])])[:len(grad) + 1]
        offset2bag = torch.repeat_interleave(ends.diff(), output_size=len(indices))
    result = grad.new_empty(len(indices))
    rows = max(1, _BAGS // max(1, grad.shape[1]))
    for part, bags, at in zip(result.split(rows), offset2bag.split(rows), indices.split(rows)):
        part.copy_((grad[bags] * weight[at]).sum(1))
    return result.masked_fill_(indices == padding_idx, 0)
