"""NMS, overlaps, losses and the like: sizes of an R50-FPN at 800 x 1333.

Proposals before the RPN's NMS (training and testing), detections after the heads, anchors of
RetinaNet. What mmcv compiles for CUDA only is compared with plain torch, and 'agree' then says
nothing where the two compute different things.
"""
from __future__ import annotations

import re
import time
from typing import Any, Callable, Iterator, NamedTuple

import torch
import torch.nn.functional as F
from measure import bytes_of, clock, in_child, reset_peak, resident
from torch import Tensor

from mmrepro import ops

SIZE = (1333, 800)
STRIDES = (4, 8, 16, 32, 64)
# Cells of each level times three anchors: no level has more proposals than that.
ANCHORS = [3 * -(-800 // stride) * -(-1333 // stride) for stride in STRIDES]


class Case(NamedTuple):
    """One row: a name, its size in words, who is compared with, and both functions."""

    name: str
    size: str
    peer: str
    ours: Callable[[], object]
    theirs: Callable[[], object]
    inputs: tuple[Tensor, ...]


def boxes_at(count: int, side: float, crowded: bool, random: torch.Generator) -> Tensor:
    """Boxes of about ``side`` pixels: everywhere, or piled on fifteen objects."""
    objects = 15 if crowded else count
    centre = torch.rand(objects, 2, generator=random) * torch.tensor(SIZE)
    extent = side * torch.exp(torch.randn(objects, 2, generator=random) * 0.4)
    which = torch.randint(objects, (count,), generator=random) if crowded else torch.arange(count)
    noise = torch.randn(2, count, 2, generator=random)
    centre = centre[which] + noise[0] * extent[which] * (0.15 if crowded else 0)
    extent = extent[which] * torch.exp(noise[1] * (0.25 if crowded else 0))
    corners = torch.stack([centre - extent / 2, centre + extent / 2])
    return torch.cat([*torch.minimum(corners.clamp(min=0), torch.tensor(SIZE))], 1)


def detections(per_level: int, crowded: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Boxes, scores (all different, as ties would be broken differently) and levels."""
    random = torch.Generator().manual_seed(0)
    counts = [min(per_level, most) for most in ANCHORS]
    boxes = torch.cat([boxes_at(count, 8 * stride, crowded, random)
                       for count, stride in zip(counts, STRIDES)])
    levels = torch.repeat_interleave(torch.arange(len(STRIDES)), torch.tensor(counts))
    return boxes, torch.randperm(len(boxes), generator=random) / len(boxes), levels


def rotated(count: int, room: float) -> Tensor:
    random = torch.Generator().manual_seed(0)
    return torch.cat([torch.rand(count, 2, generator=random) * room,
                      torch.rand(count, 2, generator=random) * 60 + 4,
                      torch.rand(count, 1, generator=random) * 6 - 3], 1)


def under(provider: str, function: Callable, *args, **kwargs) -> Callable[[], object]:
    """``function`` with mmcv's operators answered by ``provider``."""
    def call() -> object:
        if ops.provider() != provider:
            ops.use(provider)
        return function(*args, **kwargs)

    return call


def both(name: str, size: str, function: Callable, *args, **kwargs) -> Case:
    """mmcv's Python function, with our operators behind it and with the compiled ones."""
    return Case(name, size, 'mmcv (C++)', under('torch', function, *args, **kwargs),
                under('compiled', function, *args, **kwargs), tuple(flat(args)))


def suppression() -> Iterator[Case]:
    from mmcv.ops import batched_nms, nms, nms_match, nms_rotated, soft_nms
    for crowded in (False, True):
        crowd = 'on 15 objects' if crowded else 'scattered'
        for per_level, use in ((2000, 'RPN, training'), (1000, 'RPN, testing')):
            boxes, scores, levels = detections(per_level, crowded)
            yield both('batched_nms', f'{use}: {len(boxes)} boxes, {crowd}', batched_nms, boxes,
                       scores, levels, {'type': 'nms', 'iou_threshold': 0.7})
        for count in (100, 1000, 2000):
            boxes, scores = (part[:count] for part in detections(2000, crowded)[:2])
            yield both('nms', f'one level: {count} boxes, {crowd}', nms, boxes, scores, 0.7)
        boxes, scores, _ = detections(400, crowded)
        classes = torch.arange(len(boxes)) % 80
        yield both('batched_nms', f'heads: {len(boxes)} boxes of 80 classes, {crowd}', batched_nms,
                   boxes, scores, classes, {'type': 'nms', 'iou_threshold': 0.5})
        for method in ('linear', 'gaussian'):
            yield both('soft_nms', f'{method}: {len(boxes)} boxes, {crowd}', soft_nms, boxes,
                       scores, 0.3, 0.5, 1e-3, method)
        yield both('nms_match', f'{len(boxes)} boxes, {crowd}', nms_match,
                   torch.cat([boxes, scores[:, None]], 1), 0.7)
    boxes = rotated(500, 800.)
    yield both('nms_rotated', '500 boxes', nms_rotated, boxes, torch.randperm(500) / 500, 0.1)


def overlaps() -> Iterator[Case]:
    from mmcv.ops import active_rotated_filter, bbox_overlaps, box_iou_quadri, box_iou_rotated
    boxes = detections(2000, True)[0]
    yield both('bbox_overlaps', f'{len(boxes)} x 50', bbox_overlaps, boxes, boxes[::180][:50])
    yield both('bbox_overlaps', '1000 x 1000', bbox_overlaps, boxes[:1000], boxes[1000:2000])
    yield both('bbox_overlaps', '4000 aligned', bbox_overlaps, boxes[:4000], boxes[4000:8000],
               aligned=True)
    for room, crowd in ((800., 'scattered'), (100., 'all in one place')):
        turned = rotated(600, room)
        yield both('box_iou_rotated', f'500 x 100, {crowd}', box_iou_rotated, turned[:500],
                   turned[500:])
    x, y, w, h, _ = turned.T
    quads = torch.stack([x, y, x + w, y, x + w, y + h, x, y + h], 1) + rotated(600, 800.)[:, 4:]
    yield both('box_iou_quadri', '500 x 100, all in one place', box_iou_quadri, quads[:500],
               quads[500:])
    indices = torch.stack([torch.randperm(72) for _ in range(8)], 1).add(1).int().view(8, 3, 3, 8)
    filters = torch.randn(64, 32, 8, 3, 3, requires_grad=True)
    yield both('active_rotated_filter', '64 x 32 x 8 x 3 x 3', active_rotated_filter,
               filters.detach(), indices)

    def backward() -> None:
        active_rotated_filter(filters, indices).sum().backward()

    yield both('active_rotated_filter', 'forward and backward', backward)._replace(
        inputs=(filters, indices))


def plain_focal_loss(scores: Tensor, target: Tensor) -> Tensor:
    """Sigmoid focal loss as MMDetection writes it in torch for the CPU."""
    wanted = F.one_hot(target, scores.shape[1] + 1)[:, :-1].type_as(scores)
    p = scores.sigmoid()
    pt = (1 - p) * wanted + p * (1 - wanted)
    factor = (0.25 * wanted + 0.75 * (1 - wanted)) * pt.pow(2.0)
    return (F.binary_cross_entropy_with_logits(scores, wanted, reduction='none') * factor).sum()


def without_peer() -> Iterator[Case]:
    """Operators that mmcv compiles for CUDA only, against plain torch."""
    from mmcv.ops import masked_conv2d, sigmoid_focal_loss
    from mmcv.ops.sync_bn import SyncBatchNormFunction
    scores = torch.randn(50000, 80, requires_grad=True)
    target = torch.where(torch.rand(50000) < 0.01, torch.randint(80, (50000,)), 80)

    def focal(function: Callable) -> Callable[[], None]:
        def call() -> None:
            function().backward()
            scores.grad = None
        return call

    yield Case('sigmoid_focal_loss', '50000 x 80, forward and backward', 'plain torch',
               under('torch', focal(lambda: sigmoid_focal_loss(scores, target, 2.0, 0.25, None,
                                                               'sum'))),
               focal(lambda: plain_focal_loss(scores, target)), (scores, target))
    feature, weight = torch.randn(1, 256, 50, 68), torch.randn(256, 256, 3, 3)
    bias = torch.zeros(256)
    mask = torch.rand(1, 50, 68) < 0.05
    yield Case('masked_conv2d', '256 channels, 50 x 68, 5 % of the places', 'F.conv2d everywhere',
               under('torch', masked_conv2d, feature, mask, weight, bias, 1),
               lambda: F.conv2d(feature, weight, bias, padding=1), (feature, mask, weight))
    images = torch.randn(2, 256, 50, 68, requires_grad=True)
    layer = torch.nn.BatchNorm2d(256)
    yield Case('sync_bn', '2 x 256 x 50 x 68, forward and backward', 'F.batch_norm',
               under('torch', lambda: SyncBatchNormFunction.apply(
                   images, layer.running_mean, layer.running_var, layer.weight, layer.bias, 0.1,
                   1e-5, None, 1, 'default').sum().backward()),
               lambda: layer(images).sum().backward(), (images,))


def least(functions: list[Callable], repeats: int, seconds: float) -> list[float]:
    """Milliseconds of each, the least of the rounds in which all take turns."""
    best = [float('inf')] * len(functions)
    for function in functions:
        function()
    begin = time.perf_counter()
    for turn in range(repeats):
        if turn > 1 and time.perf_counter() - begin > seconds:
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
    out = flat(function())
    gradients = [t.grad for t in inputs if t.grad is not None]
    extra = max(0, resident('VmHWM') - before - bytes_of(*out, *gradients))
    return {'mib': extra / 2**20, 'times': extra / bytes_of(*inputs, *out, *gradients)}


def agree(ours: object, theirs: object) -> str:
    """Whether both gave the same: 'bits', or the largest difference, or '-' for nothing given."""
    pairs = [(a, b) for a, b in zip(flat(ours), flat(theirs))]
    if not pairs:
        return '-'
    if any(a.shape != b.shape for a, b in pairs):
        return 'DIFFERENT'
    if all(torch.equal(a, b) for a, b in pairs):
        return 'bits'
    return f'{max((a.double() - b.double()).abs().max().item() for a, b in pairs):.0e}'


def flat(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for part in value for t in flat(part)] if isinstance(value, (list, tuple)) else []


def measured(only: str, quick: bool, repeats: int, seconds: float) -> Iterator[dict[str, Any]]:
    """What the page shows of every case whose name or size holds the expression ``only``."""
    torch.manual_seed(0)
    with_peer = (*suppression(), *overlaps()) if 'compiled' == ops.provider() else ()
    for case in (*with_peer, *without_peer()):
        if not re.search(only, f'{case.name} {case.size}'):
            continue
        same = agree(case.ours(), case.theirs())
        ours, theirs = least([case.ours, case.theirs], 1 if quick else repeats, seconds)
        peaks = [in_child(memory, call, case.inputs) for call in (case.ours, case.theirs)]
        yield {'operator': case.name, 'size': case.size, 'peer': case.peer, 'ours_ms': ours,
               'theirs_ms': theirs, 'ratio': ours / theirs, 'agree': same,
               'ours_memory': peaks[0], 'theirs_memory': peaks[1]}
