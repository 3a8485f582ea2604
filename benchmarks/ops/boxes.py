"""NMS, losses and the like: sizes of an R50-FPN at 800 x 1333.

Proposals before the RPN's NMS (training and testing), detections after the heads, anchors of
RetinaNet. Operators that mmcv compiles for CUDA only are compared with plain torch; 'agree' is then
meaningless where the two compute different things.
"""
from __future__ import annotations

import re
import time
from collections.abc import Iterator
from inspect import getfullargspec
from typing import Any, Callable, NamedTuple

import torch
import torch.nn.functional as F
from measure import bytes_of, clock, in_child, reset_peak, resident
from mmengine.utils import misc
from torch import Tensor

from dev.operator_check import cases_mmcv as catalogue
from dev.operator_check.operator_cases import Inputs, OperatorCall, tensors_of
from mmrepro import ops

SIZE = (1333, 800)
# provider -> how MMEngine looks at signatures; mmrepro has replaced its function
LOOKS = {'torch': misc.getfullargspec, 'compiled': getfullargspec}
STRIDES = (4, 8, 16, 32, 64)
# Cells of each level times three anchors: no level has more proposals than that.
ANCHORS = [3 * -(-800 // stride) * -(-1333 // stride) for stride in STRIDES]


class Detections(Inputs):
    """Boxes all over the image, or ``crowded`` around fifteen objects; all scores differ.

    mmcv breaks ties differently, so ties would not agree.
    """

    def __init__(self, crowded: bool) -> None:
        super().__init__(False)
        self.crowded = crowded

    def boxes(self, number: int, height: int, width: int, size: float) -> Tensor:
        limit, objects = torch.tensor([width, height]), 15 if self.crowded else number
        centre = self.uniform(objects, 2) * limit
        extent = size * torch.exp(self.normal(objects, 2) * 0.4)
        which = torch.arange(number)
        if self.crowded:
            which = torch.randint(objects, (number,), generator=self.random)
        noise = self.normal(2, number, 2)
        centre = centre[which] + noise[0] * extent[which] * (0.15 if self.crowded else 0)
        extent = extent[which] * torch.exp(noise[1] * (0.25 if self.crowded else 0))
        corners = torch.stack([centre - extent / 2, centre + extent / 2])
        return torch.cat([*torch.minimum(corners.clamp(min=0), limit)], 1)

    def scores(self, number: int) -> Tensor:
        return torch.randperm(number, generator=self.random) / number


def scored(s: Inputs, per_level: int) -> dict[str, Tensor]:
    """At most ``per_level`` boxes of each level, and their scores."""
    counts = [min(per_level, most) for most in ANCHORS]
    boxes = torch.cat([s.boxes(count, *SIZE[::-1], 8 * stride)
                       for count, stride in zip(counts, STRIDES)])
    return dict(boxes=boxes, scores=s.scores(len(boxes)))


def batched_nms(s: Inputs, per_level: int, classes: int, threshold: float) -> OperatorCall:
    """Suppress boxes of ``classes`` classes; 0: their levels are the classes, as in the RPN."""
    from mmcv.ops import batched_nms
    tensors = scored(s, per_level)
    levels = torch.repeat_interleave(torch.arange(len(STRIDES)), torch.tensor(
        [min(per_level, most) for most in ANCHORS]))
    tensors['labels'] = torch.arange(len(levels)) % classes if classes else levels
    return OperatorCall({}, tensors, lambda boxes, scores, labels: batched_nms(
        boxes, scores, labels, {'type': 'nms', 'iou_threshold': threshold}))


class Case(NamedTuple):
    """One row: the operator, its size in words, and the call.

    ``peer`` is called with the same tensors and compared with; without one mmcv's C++ is.
    """

    name: str
    size: str
    call: OperatorCall
    peer_name: str = 'mmcv (C++)'
    peer: Any = None

    def ours(self) -> Callable[[], object]:
        return under('torch', self.call)

    def theirs(self) -> Callable[[], object]:
        if self.peer is None:
            return under('compiled', self.call)
        return under('torch', self.call._replace(run=self.peer))


def under(provider: str, call: OperatorCall) -> Callable[[], object]:
    """A function that runs the call, and its backward if it has leaves, with ``provider``."""
    def run() -> object:
        if ops.provider() != provider:
            ops.use(provider)
            # mmcv's own operators are called as stock calls them
            misc.getfullargspec = LOOKS[provider]
        out = call.run(**call.leaves, **call.fixed)
        if not call.leaves:
            return out
        return torch.autograd.grad(out.sum(), list(call.leaves.values()))

    return run


def suppression() -> Iterator[Case]:
    for crowded in (False, True):
        def inputs(crowded: bool = crowded) -> Detections:
            return Detections(crowded)

        crowd = 'on 15 objects' if crowded else 'scattered'
        for per_level, use in ((2000, 'RPN, training'), (1000, 'RPN, testing')):
            call = batched_nms(inputs(), per_level, 0, 0.7)
            yield Case('batched_nms', f'{use}: {len(call.fixed["boxes"])} boxes, {crowd}', call)
        for count in (100, 1000, 2000):
            first = {name: t[:count] for name, t in scored(inputs(), 2000).items()}
            yield Case('nms', f'one level: {count} boxes, {crowd}', catalogue.nms(
                inputs(), count, lambda s, n, first=first: first, 0.7))
        call = batched_nms(inputs(), 400, 80, 0.5)
        size = f'{len(call.fixed["boxes"])} boxes'
        yield Case('batched_nms', f'heads: {size} of 80 classes, {crowd}', call)
        for method in ('linear', 'gaussian'):
            yield Case('soft_nms', f'{method}: {size}, {crowd}',
                       catalogue.soft_nms(inputs(), 400, scored, method))
        yield Case('nms_match', f'{size}, {crowd}', catalogue.nms_match(inputs(), 400, scored, 0.7))


def plain_focal_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Sigmoid focal loss as MMDetection writes it in torch for the CPU."""
    wanted = F.one_hot(labels, logits.shape[1] + 1)[:, :-1].type_as(logits)
    p = logits.sigmoid()
    pt = (1 - p) * wanted + p * (1 - wanted)
    factor = (0.25 * wanted + 0.75 * (1 - wanted)) * pt.pow(2.0)
    loss = F.binary_cross_entropy_with_logits(logits, wanted, reduction='none') * factor
    return loss.sum() / len(logits)


def without_kernel() -> Iterator[Case]:
    """Operators that mmcv compiles for CUDA only, against plain torch."""
    inputs = Detections(False)
    yield Case('sigmoid_focal_loss', '50000 x 80, forward and backward',
               catalogue.focal_loss(inputs, 50000).to('cpu'), 'plain torch',
               plain_focal_loss)
    yield Case('masked_conv2d', '256 channels, 50 x 68, 5 % of the places',
               catalogue.masked_conv(inputs, 50, 68, 0.05), 'F.conv2d everywhere',
               lambda feature, mask, weight, bias: F.conv2d(feature, weight, bias, padding=1))
    yield Case('sync_bn', '2 x 256 x 50 x 68, forward and backward',
               catalogue.sync_bn(inputs, 50, 68).to('cpu'), 'F.batch_norm',
               lambda feature, weight, bias, mean, var: F.batch_norm(
                   feature, mean.clone(), var.clone(), weight, bias, training=True))


def least(functions: list[Callable], repeats: int, seconds: float) -> list[float]:
    """Milliseconds of each, the least of rounds in which all run once."""
    best = [float('inf')] * len(functions)
    for function in functions:
        function()
    begin = time.perf_counter()
    for repetition in range(repeats):
        if repetition > 1 and time.perf_counter() - begin > seconds:
            break
        for index, function in enumerate(functions):
            function()
            start = clock()
            function()
            best[index] = min(best[index], clock() - start)
    return [1e3 * value for value in best]


def memory(function: Callable, inputs: tuple[Tensor, ...]) -> dict[str, float]:
    """Peak extra memory of a call in MiB, and as a multiple of inputs and outputs."""
    function()  # a fresh child has not touched the code of the libraries yet
    reset_peak()
    before = resident('VmRSS')
    out = tensors_of(function())
    extra = max(0, resident('VmHWM') - before - bytes_of(*out))
    return {'mib': extra / 2**20, 'times': extra / bytes_of(*inputs, *out)}


def agree(ours: object, theirs: object) -> str:
    """Whether both gave the same: 'bits', or the largest difference, or '-' for nothing given."""
    pairs = [(a, b) for a, b in zip(tensors_of(ours), tensors_of(theirs))]
    if not pairs:
        return '-'
    if any(a.shape != b.shape for a, b in pairs):
        return 'DIFFERENT'
    if all(torch.equal(a, b) for a, b in pairs):
        return 'bits'
    return f'{max((a.double() - b.double()).abs().max().item() for a, b in pairs):.0e}'


def measured(only: str, quick: bool, repeats: int, seconds: float) -> Iterator[dict[str, Any]]:
    """A row of the report for every case whose name or size matches the expression ``only``."""
    with_kernel = suppression() if ops.provider() == 'compiled' else ()
    for case in (*with_kernel, *without_kernel()):
        if not re.search(only, f'{case.name} {case.size}'):
            continue
        pair = [case.ours(), case.theirs()]
        same = agree(*(function() for function in pair))
        ours, theirs = least(pair, 1 if quick else repeats, seconds)
        inputs = (*case.call.leaves.values(), *case.call.fixed.values())
        peaks = [in_child(memory, function, inputs) for function in pair]
        yield {'operator': case.name, 'size': case.size, 'peer': case.peer_name, 'ours_ms': ours,
               'theirs_ms': theirs, 'ratio': ours / theirs, 'agree': same,
               'ours_memory': peaks[0], 'theirs_memory': peaks[1]}
