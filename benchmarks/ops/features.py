"""Operators on feature maps: sizes of an R50-FPN at 800 x 1333."""
from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from measure import bytes_of, clock, in_child, reset_peak, resident

from mmrepro import ops

# Smaller by this in height, width and number of boxes with --quick.
QUICK = 8


class Case(NamedTuple):
    """One call.

    leaves: tensors that get a gradient; empty for a forward only. run: the call, returns the
    output. peer: another CPU form in mmcv where no compiled kernel exists, and its name.
    """

    leaves: list[torch.Tensor]
    run: Callable[[], torch.Tensor]
    peer: Callable[[], torch.Tensor] | None = None
    peer_name: str = ''


class Sizes:
    """Tensors of a detector's sizes, or an eighth of them."""

    def __init__(self, quick: bool) -> None:
        self.by = QUICK if quick else 1
        self.random = torch.Generator().manual_seed(0)

    def count(self, number: int) -> int:
        return max(2, number // self.by)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.random)

    def feature(self, channels: int, height: int, width: int, batch: int = 1) -> torch.Tensor:
        return self.normal(batch, channels, self.count(height), self.count(width))

    def boxes(self, number: int, height: int, width: int, typical: float) -> torch.Tensor:
        """(K, 4) x1, y1, x2, y2 in an image, sizes around ``typical``."""
        number, limit = self.count(number), torch.tensor([width, height, width, height]) / self.by
        middle = self.uniform(number, 2) * limit[:2]
        size = typical / self.by * torch.exp(self.normal(number, 2) * 0.7)
        boxes = torch.cat((middle - size / 2, middle + size / 2), 1).clamp(min=0)
        return torch.minimum(boxes, limit - 1 + torch.tensor([0, 0, 1, 1]))

    def rois(self, number: int, typical: float = 64.) -> torch.Tensor:
        boxes = self.boxes(number, 800, 1344, typical)
        return torch.cat((torch.zeros(len(boxes), 1), boxes), 1)

    def turned(self, number: int) -> torch.Tensor:
        rois = self.rois(number)
        angle = self.uniform(len(rois), 1) * 6 - 3
        return torch.cat((rois[:, :1], (rois[:, 1:3] + rois[:, 3:]) / 2,
                          rois[:, 3:] - rois[:, 1:3], angle), 1)


def roi_align(s: Sizes, mode: str = 'avg', number: int = 512, stride: int = 8, bins: int = 7,
              ratio: int = 0) -> Case:
    from mmcv.ops import roi_align
    feature = s.feature(256, 800 // stride, 1344 // stride).requires_grad_()
    rois = s.rois(number)
    return Case([feature], lambda: roi_align(feature, rois, bins, 1 / stride, ratio, mode, True))


def mask_targets(s: Sizes) -> Case:
    from mmcv.ops import roi_align
    number = s.count(50)
    masks = (s.uniform(number, 1, s.count(800), s.count(1333)) > 0.5).float()
    rois = s.rois(50, 150)
    rois[:, 0] = torch.arange(number)
    return Case([], lambda: roi_align(masks, rois, 28, 1., 0, 'avg', True))


def roi_align_rotated(s: Sizes) -> Case:
    from mmcv.ops import roi_align_rotated
    feature, rois = s.feature(256, 100, 168).requires_grad_(), s.turned(512)
    return Case([feature], lambda: roi_align_rotated(feature, rois, 7, 1 / 8, 2, True))


def riroi_align_rotated(s: Sizes) -> Case:
    from mmcv.ops import riroi_align_rotated
    feature, rois = s.feature(256, 100, 168).requires_grad_(), s.turned(512)
    return Case([feature], lambda: riroi_align_rotated(feature, rois, (7, 7), 1 / 8, 2, 8))


def bezier_align(s: Sizes) -> Case:
    from mmcv.ops import bezier_align
    feature = s.feature(256, 100, 168).requires_grad_()
    boxes = s.boxes(64, 800, 1344, 150)
    x = torch.stack([boxes[:, 0] + (boxes[:, 2] - boxes[:, 0]) * i / 3 for i in range(4)], 1)
    upper = torch.stack((x, boxes[:, 1:2].expand_as(x)), -1)
    lower = torch.stack((x.flip(1), boxes[:, 3:].expand_as(x)), -1)
    rois = torch.cat((torch.zeros(len(boxes), 1), torch.cat((upper, lower), 1).flatten(1)), 1)
    return Case([feature], lambda: bezier_align(feature, rois, (8, 32), 1 / 8, 2, True))


def rotated_feature_align(s: Sizes) -> Case:
    from mmcv.ops import rotated_feature_align
    feature = s.feature(256, 100, 168).requires_grad_()
    boxes = s.uniform(1, *feature.shape[2:], 5) * 800
    return Case([feature], lambda: rotated_feature_align(feature, boxes, 1 / 8, 5))


def border_align(s: Sizes) -> Case:
    from mmcv.ops import border_align
    feature = s.feature(1024, 50, 84).requires_grad_()
    number = feature.shape[2] * feature.shape[3]
    corner = s.uniform(1, number, 2) * 40
    boxes = torch.cat((corner, corner + s.uniform(1, number, 2) * 10), 2)
    return Case([feature], lambda: border_align(feature, boxes, 10))


def roi_pool(s: Sizes) -> Case:
    from mmcv.ops import roi_pool
    feature, rois = s.feature(256, 100, 168).requires_grad_(), s.rois(512)
    return Case([feature], lambda: roi_pool(feature, rois, 7, 1 / 8))


def prroi_pool(s: Sizes) -> Case:
    from mmcv.ops import prroi_pool
    feature, rois = s.feature(256, 100, 168).requires_grad_(), s.rois(512).requires_grad_()
    return Case([feature, rois], lambda: prroi_pool(feature, rois, (7, 7), 1 / 8))


def deform_roi_pool(s: Sizes) -> Case:
    from mmcv.ops import deform_roi_pool
    feature, rois = s.feature(256, 100, 168).requires_grad_(), s.rois(512)
    offset = s.normal(len(rois), 2, 7, 7).requires_grad_()
    return Case([feature, offset], lambda: deform_roi_pool(feature, rois, offset, 7, 1 / 8, 2, 0.1))


def deform_conv(s: Sizes, channels: int = 256, height: int = 50, width: int = 84, groups: int = 1,
                deform_groups: int = 1, modulated: bool = False) -> Case:
    from mmcv.ops import deform_conv2d, modulated_deform_conv2d
    feature = s.feature(channels, height, width).requires_grad_()
    size = feature.shape[2:]
    offset = s.normal(1, deform_groups * 18, *size).requires_grad_()
    weight = (s.normal(channels, channels // groups, 3, 3) * 0.05).requires_grad_()
    if not modulated:
        return Case([feature, offset, weight], lambda: deform_conv2d(
            feature, offset, weight, 1, 1, 1, groups, deform_groups))
    mask = s.uniform(1, deform_groups * 9, *size).requires_grad_()
    bias = s.normal(channels).requires_grad_()
    return Case([feature, offset, mask, weight, bias], lambda: modulated_deform_conv2d(
        feature, offset, mask, weight, bias, 1, 1, 1, groups, deform_groups))


def ms_deform_attn(s: Sizes, encoder: bool = True) -> Case:
    from mmcv.ops.multi_scale_deform_attn import (
        MultiScaleDeformableAttnFunction,
        multi_scale_deformable_attn_pytorch,
    )
    shapes = torch.tensor([[s.count(h), s.count(w)]
                           for h, w in ((100, 168), (50, 84), (25, 42), (13, 21))])
    areas = shapes.prod(1)
    starts, keys = areas.cumsum(0) - areas, int(areas.sum())
    centers = torch.cat([torch.stack(torch.meshgrid(
        (torch.arange(h) + 0.5) / h, (torch.arange(w) + 0.5) / w, indexing='ij')[::-1], -1
    ).view(-1, 2) for h, w in shapes.tolist()])
    if not encoder:
        centers = s.uniform(s.count(900), 2)
    value = s.normal(1, keys, 8, 32).requires_grad_()
    step = s.normal(1, len(centers), 8, 4, 4, 2) * 2 / shapes.flip(1)[:, None]
    where = (centers[None, :, None, None, None] + step).requires_grad_()
    weights = s.uniform(1, len(centers), 8, 4, 4).requires_grad_()
    return Case([value, where, weights],
                lambda: MultiScaleDeformableAttnFunction.apply(value, shapes, starts, where,
                                                               weights, 64),
                lambda: multi_scale_deformable_attn_pytorch(value, shapes, where, weights),
                "mmcv's grid_sample form")


def carafe(s: Sizes) -> Case:
    from mmcv.ops import carafe
    feature = s.feature(256, 50, 84).requires_grad_()
    h, w = feature.shape[2:]
    masks = s.uniform(1, 25, 2 * h, 2 * w).requires_grad_()

    def unfolded() -> torch.Tensor:
        patches = torch.nn.functional.unfold(feature, 5, padding=2).view(256, 25, h * w)
        around = masks.view(25, h, 2, w, 2).permute(1, 3, 0, 2, 4).reshape(h * w, 25, 4)
        mixed = torch.bmm(patches.permute(2, 0, 1), around)
        return mixed.view(h, w, 256, 2, 2).permute(2, 0, 3, 1, 4).reshape(1, 256, 2 * h, 2 * w)

    return Case([feature, masks], lambda: carafe(feature, masks, 5, 1, 2), unfolded,
                "torch's unfold and bmm")


CASES: dict[str, Callable[[Sizes], Case]] = {
    'roi_align 7x7, 512 boxes': roi_align,
    'roi_align 7x7, sampling_ratio 2': lambda s: roi_align(s, ratio=2),
    'roi_align 14x14, 128 boxes': lambda s: roi_align(s, number=128, bins=14),
    'roi_align 7x7, stride 4': lambda s: roi_align(s, stride=4),
    'roi_align 7x7, stride 4, 16 boxes': lambda s: roi_align(s, number=16, stride=4),
    'roi_align max, sampling_ratio 2': lambda s: roi_align(s, mode='max', ratio=2),
    'roi_align max': lambda s: roi_align(s, mode='max'),
    'roi_align of 50 masks, 28x28': mask_targets,
    'roi_align_rotated': roi_align_rotated,
    'riroi_align_rotated': riroi_align_rotated,
    'bezier_align 8x32': bezier_align,
    'rotated_feature_align': rotated_feature_align,
    'border_align': border_align,
    'roi_pool': roi_pool,
    'prroi_pool': prroi_pool,
    'deform_roi_pool': deform_roi_pool,
    'deform_conv C4': deform_conv,
    'deform_conv C5': lambda s: deform_conv(s, 512, 25, 42),
    'deform_conv C4, 32 groups, 4 deformable': lambda s: deform_conv(s, groups=32, deform_groups=4),
    'modulated_deform_conv C3': lambda s: deform_conv(s, 128, 100, 168, modulated=True),
    'modulated_deform_conv P3': lambda s: deform_conv(s, 256, 100, 168, modulated=True),
    'ms_deform_attn encoder': ms_deform_attn,
    'ms_deform_attn decoder': lambda s: ms_deform_attn(s, encoder=False),
    'carafe x2': carafe,
}


def once(case: Case, run: Callable[[], torch.Tensor]) -> tuple[float, float]:
    """Seconds of one forward and one backward."""
    start = clock()
    out = run()
    forward = clock() - start
    if not case.leaves:
        return forward, 0.
    grad = torch.linspace(-1, 1, out.numel()).view_as(out)
    start = clock()
    torch.autograd.grad(out, case.leaves, grad)
    return forward, clock() - start


def timings(case: Case, repeats: int, seconds: float) -> dict[str, list[float]]:
    """Best seconds of each provider, taking turns."""
    providers = ['torch']
    if ops.provider() == 'compiled':
        providers.append('compiled')
    if case.peer:
        providers.append('peer')
    best: dict[str, list[float]] = {}
    begin = time.perf_counter()
    for turn in range(repeats):
        if turn > 1 and time.perf_counter() - begin > seconds:
            break
        for name in list(providers):
            with ops.using('compiled' if name == 'compiled' else 'torch'):
                try:
                    found = once(case, case.peer if name == 'peer' else case.run)
                except (RuntimeError, AssertionError) as error:
                    # mmcv has no CPU kernel for many of its operators and says so.
                    if name != 'compiled' or not re.search('CPU|device|implementation|CUDA',
                                                           str(error)):
                        raise
                    providers.remove(name)
                    continue
            best[name] = [min(a, b) for a, b in zip(best.get(name, found), found)]
    return best


def memory(name: str, quick: bool, provider: str) -> dict[str, float]:
    """Peak extra memory of one forward and one backward, in bytes and as a multiple."""
    # The same calls on small tensors load what has to be loaded, libraries included.
    with ops.using(provider):
        once(small := CASES[name](Sizes(True)), small.run)
        case = CASES[name](Sizes(quick))
        result = {}
        cells = [cell.cell_contents for cell in case.run.__closure__ or ()]
        inputs = bytes_of(*{id(t): t for t in cells if isinstance(t, torch.Tensor)}.values())
        reset_peak()
        before = resident('VmRSS')
        out = case.run()
        extra = resident('VmHWM') - before - bytes_of(out)
        result['forward'] = extra / (inputs + bytes_of(out))
        if case.leaves:
            grad = torch.linspace(-1, 1, out.numel()).view_as(out)
            reset_peak()
            before = resident('VmRSS')
            grads = torch.autograd.grad(out, case.leaves, grad)
            extra = resident('VmHWM') - before - bytes_of(*grads)
            result['backward'] = extra / (inputs + bytes_of(out, *grads))
    return result


def measured(only: str, quick: bool, repeats: int, seconds: float) -> Iterator[dict[str, Any]]:
    """What the page shows of every case whose name holds the regular expression ``only``."""
    for name, make in CASES.items():
        if not re.search(only, name):
            continue
        case = make(Sizes(quick))
        times = timings(case, repeats, seconds)
        peaks = {who: in_child(memory, name, quick, who)
                 for who in ('torch', 'compiled') if who in times}
        yield {'case': name, 'seconds': times, 'memory': peaks, 'peer': case.peer_name,
               'backward': bool(case.leaves)}
