"""Sigmoid and softmax focal loss, forward and backward.

Formulas of mmcv 2.1.0 (csrc/common/cuda/*focal_loss_cuda_kernel.cuh), which implements them for
CUDA only; here they run on any device. Half precision is computed in float32 and rounded once:
mmcv's half kernel returns NaN for confident predictions, as its logarithm underflows.
"""
from __future__ import annotations

from typing import Callable

import torch
from torch import Tensor

from ..contract import describe, require, require_tensor

# Elements of a temporary, by device. On a CPU too few for torch to use several threads: at the end
# of a thread's part exp and log take another code path, with different bits.
_TILE = {'cpu': (1 << 15) - 1, 'cuda': 1 << 24}
# mmcv's FLT_MIN: the least probability to take a logarithm of.
_LEAST = torch.finfo(torch.float32).tiny

# Loss or derivative by the logits, given gamma and alpha.
Part = Callable[[Tensor, float, float], Tensor]


def _check(operator: str, scores: Tensor, target: Tensor, weight: Tensor, out: Tensor,
           out_shape: tuple[int, ...]) -> None:
    require_tensor(operator, 'input', scores, (None, None))
    require_tensor(operator, 'target', target, (len(scores),), (torch.long,))
    require(tuple(out.shape) == out_shape and out.dtype == scores.dtype, operator,
            f'the result must be {out_shape} of the dtype of input {describe(scores)}, '
            f'got {describe(out)}')
    require(weight.numel() == 0 or weight.shape == scores.shape[1:], operator,
            f'one weight per class: weight {describe(weight)}, input {describe(scores)}')


def _check_labels(operator: str, target: Tensor, least: int | None, most: int) -> None:
    if target.numel() == 0:
        return
    low, high = torch.stack(target.aminmax()).tolist()
    require(high <= most and (least is None or low >= least), operator,
            f'target label must be smaller or equal than {most}'
            + (f' and at least {least}' if least is not None else '')
            + f', got {low} to {high} in {describe(target)}')


def _working(tensor: Tensor) -> Tensor:
    """Return scores in at least float32, contiguous: torch rounds strided inputs differently."""
    low = tensor.dtype in (torch.float16, torch.bfloat16)
    return (tensor.float() if low else tensor).contiguous()


def _power(base: Tensor, exponent: float) -> Tensor:
    """Compute ``base ** exponent`` in place; the usual exponent, 2, is a product."""
    return base.mul_(base) if exponent == 2 else base.pow_(exponent)


def _log(probability: Tensor) -> Tensor:
    return probability.clamp(min=_LEAST).log_()


def _put_column(result: Tensor, column: Tensor, values: Tensor) -> Tensor:
    """Put (N, 1) ``values`` into the (N, 1) ``column`` of each row of ``result``, and return it."""
    if result.is_cuda:  # there `scatter_` sorts, and torch 2.0 refuses it
        classes = torch.arange(result.shape[1], device=result.device)
        return torch.where(classes == column, values, result)
    return result.scatter_(1, column, values)


def _absent(scores: Tensor, gamma: float, alpha: float) -> Tensor:
    """Compute the loss of entries whose class is not the target's."""
    p = scores.sigmoid()
    log = _log(1 - p)
    return _power(p, gamma).mul_(log).mul_(alpha - 1)


def _present(scores: Tensor, gamma: float, alpha: float) -> Tensor:
    """Compute the loss of entries whose class is the target's."""
    p = scores.sigmoid()
    return _log(p).mul_(_power(1 - p, gamma)).mul_(-alpha)


def _absent_slope(scores: Tensor, gamma: float, alpha: float) -> Tensor:
    p = scores.sigmoid()
    rest = 1 - p
    slope = _log(rest).mul_(rest).mul_(gamma).sub_(p)
    return slope.mul_(_power(p, gamma)).mul_(alpha - 1)


def _present_slope(scores: Tensor, gamma: float, alpha: float) -> Tensor:
    p = scores.sigmoid()
    rest = 1 - p
    slope = rest - _log(p).mul_(p).mul_(gamma)
    return slope.mul_(_power(rest, gamma)).mul_(-alpha)


def _sigmoid(operator: str, absent: Part, present: Part, scores: Tensor, target: Tensor,
             weight: Tensor, out: Tensor, gamma: float, alpha: float) -> None:
    """Fill ``out`` (N, C): ``present`` for each row's class, ``absent`` for the others."""
    _check(operator, scores, target, weight, out, tuple(scores.shape))
    classes = scores.shape[1]
    if scores.numel() == 0:
        return
    weighted = weight.numel() > 0
    # mmcv reads weight[target] unchecked: a background label would read past its end
    _check_labels(operator, target, 0 if weighted else None, classes - weighted)
    step = max(1, _TILE[scores.device.type] // classes)
    for part in zip(scores.detach().split(step), target.split(step), out.split(step)):
        values, labels = _working(part[0]), part[1][:, None]
        result = absent(values, gamma, alpha)
        own = (labels >= 0) & (labels < classes)
        column = labels.clamp(0, classes - 1)
        mine = torch.where(own, present(values.gather(1, column), gamma, alpha),
                           result.gather(1, column))
        result = _put_column(result, column, mine)
        if weighted:
            result *= _working(weight)[part[1]][:, None]
        part[2].copy_(result)


def sigmoid_focal_loss_forward(input: Tensor, target: Tensor, weight: Tensor, output: Tensor,
                               gamma: float, alpha: float) -> None:
    """Write ``-a (1 - p)^gamma log p`` per class to ``output`` (N, C).

    p is the probability of the right answer, and a its weight: ``sigmoid(input)`` and alpha for the
    target's class, one minus them for the others.

    Args:
        input: (N, C) logits.
        target: (N,) int64; C or a negative label stands for the background.
        weight: (C,) factors by the target's class, or empty.

    Raises:
        RuntimeError: shapes or dtypes do not match; a label is above C, or has no weight.
    """
    _sigmoid('sigmoid_focal_loss_forward', _absent, _present, input, target, weight, output,
             float(gamma), float(alpha))


def sigmoid_focal_loss_backward(input: Tensor, target: Tensor, weight: Tensor, grad_input: Tensor,
                                gamma: float, alpha: float) -> None:
    """Write the derivative of :func:`sigmoid_focal_loss_forward` to ``grad_input`` (N, C)."""
    _sigmoid('sigmoid_focal_loss_backward', _absent_slope, _present_slope, input, target, weight,
             grad_input, float(gamma), float(alpha))


def _own(operator: str, softmax: Tensor, target: Tensor, weight: Tensor,
         out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return of each row: probability of its class, factor, column of the class; (N,) each."""
    _check(operator, softmax, target, weight, out, (len(softmax),))
    classes = softmax.shape[1]
    require(classes > 0 or len(softmax) == 0, operator, f'no classes: {describe(softmax)}')
    # mmcv also accepts C, and reads the first class of the next row
    _check_labels(operator, target, None, classes - 1)
    column = target.clamp(min=0)
    factor = (target >= 0).to(_working(softmax).dtype)
    if weight.numel():
        factor = factor * _working(weight)[column]
    return _working(softmax.detach().gather(1, column[:, None])[:, 0]), factor, column


def softmax_focal_loss_forward(input: Tensor, target: Tensor, weight: Tensor, output: Tensor,
                               gamma: float, alpha: float) -> None:
    """Write ``-alpha (1 - p)^gamma log p`` of each row's class to ``output`` (N,).

    ``input`` (N, C) is the softmax itself. Rows whose ``target`` is negative have no loss;
    ``weight`` is as in :func:`sigmoid_focal_loss_forward`. Raises RuntimeError if shapes or dtypes
    do not match, or a label is not below C.
    """
    p, factor, _ = _own('softmax_focal_loss_forward', input, target, weight, output)
    loss = _power(1 - p, float(gamma)).mul_(-float(alpha)).mul_(_log(p))
    output.copy_(torch.where(factor == 0, 0, loss * factor))


def softmax_focal_loss_backward(input: Tensor, target: Tensor, weight: Tensor, buff: Tensor,
                                grad_input: Tensor, gamma: float, alpha: float) -> None:
    """Write the derivative by the logits to ``grad_input`` (N, C).

    ``buff`` (N,) receives ``alpha (gamma (1 - p)^(gamma - 1) p log p - (1 - p)^gamma)`` per row.
    """
    operator = 'softmax_focal_loss_backward'
    gamma, alpha = float(gamma), float(alpha)
    p, factor, column = _own(operator, input, target, weight, buff)
    require(grad_input.shape == input.shape, operator,
            f'grad_input {describe(grad_input)} does not match input {describe(input)}')
    rest = 1 - p
    row = rest.pow(gamma - 1).mul_(p).mul_(gamma).mul_(_log(p)).sub_(_power(rest, gamma))
    row = torch.where(factor == 0, 0, row.mul_(alpha) * factor)
    buff.copy_(row)
    if grad_input.numel() == 0:
        return
    step = max(1, _TILE[input.device.type] // max(1, input.shape[1]))
    parts = (tensor.split(step) for tensor in (input.detach(), row, column, grad_input))
    for softmax, slope, label, out in zip(*parts):
        result = -_working(softmax)
        label = label[:, None]
        result = _put_column(result, label, 1 - _working(softmax).gather(1, label))
        out.copy_(result.mul_(slope[:, None]))
