"""Train a detector twice in deterministic mode and compare every bit; then once without, for time.

The models are MMDetection's own configs with random weights; the images are synthetic. After every
iteration the losses, gradients and weights are hashed on the device. The hashes are copied to the
host at the end, so they add no synchronisation.
"""
from __future__ import annotations

import copy
import functools
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch

from .. import determinism, ops, seeds
from ..fingerprint.digest import tensor_digests
from .detector_inputs import images
from .row_group import Row, RowGroup, Settings, cell, has_compiled_kernels
from .zoo_configs import config_root, load, nodes

__all__ = ['DETECTORS', 'GROUP', 'Detector', 'DetectorRun', 'default', 'first_difference', 'train',
           'wait']

SEED = 7
# Iterations before the timing: the first ones choose kernels and fill the allocator.
WARM = 4
# Cells per side of SOLOv2's levels on a CPU; with its own a step there takes a minute.
SMALL_GRIDS = [10, 8, 6, 4, 2]


class Detector(NamedTuple):
    """A config relative to MMDetection's folder, and why it is in the list."""

    config: str
    why: str


DETECTORS: Dict[str, Detector] = {
    'Faster R-CNN': Detector('faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py', 'RoIAlign, NMS, topk'),
    'Mask R-CNN': Detector('mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py', 'RoIAlign of masks'),
    'Cascade R-CNN': Detector('cascade_rcnn/cascade-rcnn_r50_fpn_1x_coco.py',
                              'three heads on the same boxes'),
    'YOLOX': Detector('yolox/yolox_s_8xb8-300e_coco.py', 'SimOTA, max pooling'),
    'RTMDet-Ins': Detector('rtmdet/rtmdet-ins_tiny_8xb32-300e_coco.py',
                           'dynamic convolutions, bilinear resize'),
    'SOLOv2': Detector('solov2/solov2_r50_fpn_1x_coco.py', 'bilinear resize everywhere'),
    'Deformable DETR': Detector('deformable_detr/deformable-detr_r50_16xb2-50e_coco.py',
                                'deformable attention, cumsum'),
    'DINO': Detector('dino/dino-4scale_r50_8xb2-12e_coco.py', 'topk of queries, gather'),
    'Mask2Former': Detector('mask2former/mask2former_r50_8xb2-lsj-50e_coco.py', 'grid_sample'),
    'PointRend': Detector('point_rend/point-rend_r50-caffe_fpn_ms-1x_coco.py',
                          'grid_sample of features'),
    'DCNv2': Detector('dcnv2/faster-rcnn_r50-mdconv-c3-c5_fpn_1x_coco.py',
                      'modulated deformable convolution'),
    'CARAFE': Detector('carafe/mask-rcnn_r50_fpn-carafe_1x_coco.py', 'CARAFE in neck and head'),
    'HTC': Detector('htc/htc_r50_fpn_1x_coco.py', 'adaptive average pooling, semantic branch'),
}


class DetectorRun(NamedTuple):
    """The record of one run."""

    # per iteration, the subject of each digest: ('loss', name), ('gradient of', name) ...
    labels: List[List[Tuple[str, str]]]
    digests: List[torch.Tensor]  # per iteration, (labels,) int64
    losses: List[float]  # the total of each iteration
    seconds: float  # per iteration after the first few, the median


def default() -> Any:
    """A block without determinism, at the precision that both runs have: torch's own."""
    return determinism.deterministic(False)


def wait(device: str) -> None:
    """Wait for the device, so that times are those of finished work."""
    if device == 'cuda':
        torch.cuda.synchronize()


def _model(config: str, device: str, size: int, small: bool) -> Any:
    """The model with weights from the seed; ``small``: with fewer candidates, for a CPU."""
    from mmdet.registry import MODELS
    from mmengine.config import Config

    cfg = load(config, size) if small else Config.fromfile(f'{config_root()}/{config}')
    if small and 'num_grids' in cfg.model.get('mask_head', {}):
        cfg.model.mask_head.num_grids = SMALL_GRIDS
    for node in nodes(cfg.model):
        init = node.get('init_cfg')
        if isinstance(init, dict) and init.get('type') == 'Pretrained':
            node['init_cfg'] = None  # nothing is downloaded
        if 'batch_augments' in node:
            node['batch_augments'] = None  # they change the size of a batch
    seeds.seed_all(SEED, 'init')
    model = MODELS.build(copy.deepcopy(cfg.model))
    model.init_weights()
    return model.to(device).train()


def train(detector: Detector, device: str, size: int, iterations: int, small: bool,
          digest: bool = True, number: int = 2) -> DetectorRun:
    """Train some iterations from the seed. Exceptions of the model propagate."""
    from mmengine.optim import OptimWrapper
    model = _model(detector.config, device, size, small)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    wrapper = OptimWrapper(torch.optim.AdamW(trained.values(), lr=1e-5),
                           clip_grad=dict(max_norm=1., error_if_nonfinite=False))
    grads: Dict[str, torch.Tensor] = {}
    if digest:
        _keep_gradients(wrapper, trained, grads)
    labels, rows, losses, durations = [], [], [], []
    for step in range(iterations):
        seeds.seed_all(SEED, 'step', step)
        batch = images(size, 2, number)
        wait(device)
        start = time.perf_counter()
        logged = model.train_step(batch, wrapper)
        wait(device)
        durations.append(time.perf_counter() - start)
        losses.append(float(logged['loss']))
        if digest:
            row = [*_tagged('loss', logged), *_tagged('gradient of', grads),
                   *_tagged('weight', trained)]
            labels.append([(kind, name) for kind, name, _ in row])
            rows.append(tensor_digests([tensor.to(device) for _, _, tensor in row]))
    late = sorted(durations[min(WARM, iterations // 2):])
    return DetectorRun(labels, [row.cpu() for row in rows], losses, late[len(late) // 2])


def _keep_gradients(wrapper: Any, trained: Dict[str, torch.nn.Parameter],
                    grads: Dict[str, torch.Tensor]) -> None:
    """Copy each step's gradients before they are clipped and cleared."""
    step = wrapper.step

    def remembered(**kwargs: Any) -> None:
        grads.clear()
        grads.update((name, p.grad.detach().clone()) for name, p in trained.items()
                     if p.grad is not None)
        step(**kwargs)

    wrapper.step = remembered


def _tagged(kind: str, tensors: Dict[str, Any]) -> List[Tuple[str, str, torch.Tensor]]:
    return [(kind, name, tensor.detach()) for name, tensor in tensors.items()
            if isinstance(tensor, torch.Tensor)]


def first_difference(one: DetectorRun, other: DetectorRun) -> str:
    """The first difference of two runs: iteration, kind and name; '' for the same bits.

    Within an iteration losses come first. Of several gradients the last parameter of the model is
    named, because the backward pass computes it first.
    """
    for step, labels in enumerate(one.labels):
        where = f'iteration {step + 1}'
        if labels != other.labels[step]:
            extra = sorted({' '.join(one) for one in set(labels) ^ set(other.labels[step])})
            return f'{where}: only one run has {", ".join(extra[:5])}'
        unequal = (one.digests[step] != other.digests[step]).tolist()
        for kind in dict.fromkeys(kind for kind, _ in labels):
            off = [name for (k, name), bad in zip(labels, unequal) if bad and k == kind]
            if off:
                first = off[-1] if kind == 'gradient of' else off[0]
                total = sum(k == kind for k, _ in labels)
                more = f' and {len(off) - 1} of {total} others' if len(off) > 1 else ''
                return f'{where}: {kind} {first}{more}'
    return ''


def _peak(device: str) -> Optional[float]:
    if device != 'cuda':
        return None
    peak = torch.cuda.max_memory_allocated() / 2 ** 30
    torch.cuda.reset_peak_memory_stats()
    return round(peak, 2)


def _check(detector: Detector, settings: Settings, time_is_left: Callable[[], bool]) -> Row:
    """One row; without time for it, the run without determinism is left out."""
    device, size, iterations = settings.device, settings.size, settings.iterations
    small = settings.quick or device == 'cpu'
    row: Row = dict(config=detector.config, size=size, iterations=iterations)
    with determinism.deterministic(), ops.using('torch'):
        _peak(device)
        one = train(detector, device, size, iterations, small)
        row['peak_gib'] = _peak(device)
        other = train(detector, device, size, iterations, small)
    row['difference'] = first_difference(one, other)
    row['equal'] = not row['difference']
    row['loss'] = [one.losses[0], one.losses[-1]]
    row['finite'] = all(abs(loss) < float('inf') for loss in one.losses)
    row['ms'] = min(one.seconds, other.seconds) * 1e3
    if time_is_left():
        compiled = has_compiled_kernels()
        with default(), ops.using('compiled' if compiled else 'torch'):
            _peak(device)
            plain = train(detector, device, size, max(2, iterations // 2), small, digest=False)
            row['default'] = 'compiled mmcv' if compiled else 'operators of mmrepro'
            row['default_ms'] = plain.seconds * 1e3
            row['default_peak_gib'] = _peak(device)
            row['ratio'] = row['ms'] / row['default_ms']
    return row


GROUP = RowGroup(
    'Detectors', 'detector',
    (('iterations', cell('iterations')), ('pixels', cell('size')), ('ms', cell('ms', '.1f')),
     ('default', cell('default')), ('ms', cell('default_ms', '.1f')),
     ('ratio', cell('ratio', '.2f')), ('GiB', cell('peak_gib', '.2f')),
     ('GiB', cell('default_peak_gib', '.2f'))),
    lambda settings, time_is_left: {
        name: functools.partial(_check, detector, settings, time_is_left)
        for name, detector in DETECTORS.items()})
