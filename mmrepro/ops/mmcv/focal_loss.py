"""Sigmoid focal loss, forward and backward.

Formulas of mmcv 2.1.0 (csrc/common/cuda/sigmoid_focal_loss_cuda_kernel.cuh), which implements them
for CUDA only; here they run on any device. Half precision is computed in float32 and rounded once:
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


def _check(operator: str, scores: Tensor, target: Tensor, weight: Tensor, out: Tensor) -> None:
    require_tensor(operator, 'input', scores, (None, None))
    require_tensor(operator, 'target', target, (len(scores),), (torch.long,))
    require(out.shape == scores.shape and out.dtype == scores.dtype, operator,
            f'the result must be like input {describe(scores)}, got {describe(out)}')
    require(weight.numel() == 0 or weight.shape == scores.shape[1:], operator,
            f'one weight per class: weight {describe(weight)}, input {describe(scores)}')


def _check_labels(operator: str, target: Tensor, least: int | None, most: int) -> None:
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
             weight: Tensor, out: Tensor, gamma: float, alpha: float, checks_labels: bool) -> None:
    """Fill ``out`` (N, C): ``present`` for each row's class, ``absent`` for the others."""
    _check(operator, scores, target, weight, out)
    classes = scores.shape[1]
    if scores.numel() == 0:
        return
    weighted = weight.numel() > 0
    if checks_labels:
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
             float(gamma), float(alpha), checks_labels=True)


def sigmoid_focal_loss_backward(input: Tensor, target: Tensor, weight: Tensor, grad_input: Tensor,
                                gamma: float, alpha: float) -> None:
    """Write the derivative of :func:`sigmoid_focal_loss_forward` to ``grad_input`` (N, C).

    The forward has checked the labels, for which the host waits.
    """
    _sigmoid('sigmoid_focal_loss_backward', _absent_slope, _present_slope, input, target, weight,
             grad_input, float(gamma), float(alpha), checks_labels=False)
