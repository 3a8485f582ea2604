"""Operators on feature maps: sizes of an R50-FPN at 800 x 1333."""
from __future__ import annotations

import inspect
import re
import time
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple

import torch
from measure import bytes_of, clock, in_child, reset_peak, resident

from dev.operator_check import cases_mmcv as catalogue
from dev.operator_check.operator_cases import Inputs, OperatorCall
from mmrepro import ops


class Scattered(Inputs):
    """Boxes all over the image, with more different sizes than in the check."""

    def boxes(self, number: int, height: int, width: int, size: float) -> torch.Tensor:
        number, limit = self.count(number), torch.tensor([width, height, width, height]) / self.by
        middle = self.uniform(number, 2) * limit[:2]
        extent = size / self.by * torch.exp(self.normal(number, 2) * 0.7)
        boxes = torch.cat((middle - extent / 2, middle + extent / 2), 1).clamp(min=0)
        return torch.minimum(boxes, limit - 1 + torch.tensor([0, 0, 1, 1]))

    def rois(self, number: int = 512, size: float = 64.) -> torch.Tensor:
        return super().rois(number, size)


class Peer(NamedTuple):
    """What is measured instead of mmcv's kernel if there is none for the CPU."""

    name: str
    run: Callable[..., torch.Tensor]


def mask_targets(s: Inputs) -> OperatorCall:
    from mmcv.ops import roi_align
    number = s.count(50)
    masks = (s.uniform(number, 1, s.count(800), s.count(1333)) > 0.5).float()
    rois = s.rois(50, 150)
    rois[:, 0] = torch.arange(number)
    return OperatorCall({}, dict(masks=masks, rois=rois),
                        lambda masks, rois: roi_align(masks, rois, 28, 1., 0, 'avg', True))


def pixel_centres(s: Inputs, shapes: torch.Tensor) -> torch.Tensor:
    """Return the queries of an encoder: one per pixel of each level."""
    return torch.cat([torch.stack(torch.meshgrid(
        (torch.arange(h) + 0.5) / h, (torch.arange(w) + 0.5) / w, indexing='ij')[::-1], -1
    ).view(-1, 2) for h, w in shapes.tolist()])


def random_centres(s: Inputs, shapes: torch.Tensor) -> torch.Tensor:
    """Return the queries of a decoder."""
    return s.uniform(s.count(900), 2)


def unfolded_carafe(feature: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    _, c, h, w = feature.shape
    patches = torch.nn.functional.unfold(feature, 5, padding=2).view(c, 25, h * w)
    around = masks.view(25, h, 2, w, 2).permute(1, 3, 0, 2, 4).reshape(h * w, 25, 4)
    mixed = torch.bmm(patches.permute(2, 0, 1), around)
    return mixed.view(h, w, c, 2, 2).permute(2, 0, 3, 1, 4).reshape(1, c, 2 * h, 2 * w)


def sampled_attention(value: torch.Tensor, where: torch.Tensor, weights: torch.Tensor,
                      shapes: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    from mmcv.ops.multi_scale_deform_attn import multi_scale_deformable_attn_pytorch
    stock = inspect.unwrap(multi_scale_deformable_attn_pytorch)
    return stock(value, shapes, where, weights)


def case(make: Callable[..., OperatorCall], *args: Any, **kwargs: Any
         ) -> Callable[[Inputs], OperatorCall]:
    return lambda s: make(s, *args, **kwargs)


roi_align, deform_conv = catalogue.roi_align, catalogue.deform_conv

CASES: dict[str, Callable[[Inputs], OperatorCall]] = {
    'roi_align 7x7, 512 boxes': roi_align,
    'roi_align 7x7, sampling_ratio 2': case(roi_align, ratio=2),
    'roi_align 14x14, 128 boxes': case(roi_align, number=128, bins=14),
    'roi_align 7x7, stride 4': case(roi_align, stride=4),
    'roi_align 7x7, stride 4, 16 boxes': case(roi_align, number=16, stride=4),
    'roi_align of 50 masks, 28x28': mask_targets,
    'roi_pool': catalogue.roi_pool,
    'deform_roi_pool': catalogue.deform_roi_pool,
    'deform_conv C4': deform_conv,
    'deform_conv C5': case(deform_conv, channels=512, height=25, width=42),
    'deform_conv C4, 32 groups, 4 deformable': case(deform_conv, groups=32, deform_groups=4),
    'modulated_deform_conv C3': case(deform_conv, True, 128, 100, 168),
    'modulated_deform_conv P3': case(deform_conv, True, 256, 100, 168),
    'ms_deform_attn encoder': case(catalogue.ms_deform_attn, pixel_centres),
    'ms_deform_attn decoder': case(catalogue.ms_deform_attn, random_centres),
    'carafe x2': catalogue.carafe,
}
PEERS = {
    'ms_deform_attn encoder': Peer("mmcv's grid_sample form", sampled_attention),
    'ms_deform_attn decoder': Peer("mmcv's grid_sample form", sampled_attention),
    'carafe x2': Peer("torch's unfold and bmm", unfolded_carafe),
}


def once(call: OperatorCall) -> tuple[float, float]:
    """Seconds of one forward and one backward."""
    start = clock()
    out = call.run(**call.leaves, **call.fixed)
    forward = clock() - start
    if not call.leaves:
        return forward, 0.
    grad = torch.linspace(-1, 1, out.numel()).view_as(out)
    start = clock()
    torch.autograd.grad(out, list(call.leaves.values()), grad)
    return forward, clock() - start


def timings(name: str, call: OperatorCall, repeats: int, seconds: float) -> dict[str, list[float]]:
    """Least seconds of each provider; they are called alternately."""
    calls = {'torch': call}
    if ops.provider() == 'compiled':
        calls['compiled'] = call
    if name in PEERS:
        calls['peer'] = call._replace(run=PEERS[name].run)
    best: dict[str, list[float]] = {}
    begin = time.perf_counter()
    for repetition in range(repeats):
        if repetition > 1 and time.perf_counter() - begin > seconds:
            break
        for who in list(calls):
            with ops.using('compiled' if who == 'compiled' else 'torch'):
                try:
                    found = once(calls[who])
                except (RuntimeError, AssertionError) as error:
                    # mmcv has no CPU kernel for many of its operators, and says so
                    if who != 'compiled' or not re.search('CPU|device|implementation|CUDA',
                                                          str(error)):
                        raise
                    del calls[who]
                    continue
            best[who] = [min(a, b) for a, b in zip(best.get(who, found), found)]
    return best


def memory(name: str, quick: bool, provider: str) -> dict[str, float]:
    """Peak extra memory of one forward and one backward, as a multiple of inputs and outputs."""
    with ops.using(provider):
        once(CASES[name](Scattered(True)).to('cpu'))  # loads the libraries
        call = CASES[name](Scattered(quick)).to('cpu')
        result = {}
        inputs = bytes_of(*call.leaves.values(), *call.fixed.values())
        reset_peak()
        before = resident('VmRSS')
        out = call.run(**call.leaves, **call.fixed)
        extra = resident('VmHWM') - before - bytes_of(out)
        result['forward'] = extra / (inputs + bytes_of(out))
        if call.leaves:
            grad = torch.linspace(-1, 1, out.numel()).view_as(out)
            reset_peak()
            before = resident('VmRSS')
            grads = torch.autograd.grad(out, list(call.leaves.values()), grad)
            extra = resident('VmHWM') - before - bytes_of(*grads)
            result['backward'] = extra / (inputs + bytes_of(out, *grads))
    return result


def measured(only: str, quick: bool, repeats: int, seconds: float) -> Iterator[dict[str, Any]]:
    """A row of the report for every case whose name matches the regular expression ``only``."""
    for name, make in CASES.items():
        if not re.search(only, name):
            continue
        call = make(Scattered(quick)).to('cpu')
        times = timings(name, call, repeats, seconds)
        peaks = {who: in_child(memory, name, quick, who)
                 for who in ('torch', 'compiled') if who in times}
        yield {'case': name, 'seconds': times, 'memory': peaks,
               'peer': PEERS[name].name if name in PEERS else '', 'backward': bool(call.leaves)}
