"""Train a detector twice in deterministic mode and compare every bit; then once without, for time.

The models are MMDetection's own configs with random weights; the images are synthetic. After every
iteration the losses, gradients and weights are hashed on the device. The hashes are copied to the
host at the end, so they add no synchronization.
"""
from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import torch

from mmrepro import determinism, ops, seeds
from mmrepro.fingerprint.digest import tensor_digests
from mmrepro.fingerprint.divergence import differing_names
from mmrepro.objects.walks import dicts
from mmrepro.ops import triton

from .atomic_kernels import atomic_kernels, recorded_kernels
from .detector_inputs import images
from .rows import Row, RowGroup, Settings, cell
from .timing import free_memory, timed
from .zoo_configs import load

SEED = 7
# Iterations before the timing: the first ones choose kernels and fill the allocator.
WARM = 4
# Cells per side of SOLOv2's levels on a CPU; with its own a step there takes a minute.
SMALL_GRIDS = [10, 8, 6, 4, 2]

# Configs relative to MMDetection's folder, and why each is in the list.
DETECTORS: dict[str, str] = {
    'Faster R-CNN': 'faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py',  # RoIAlign, NMS, topk
    'Mask R-CNN': 'mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py',  # RoIAlign of masks
    'Cascade R-CNN': 'cascade_rcnn/cascade-rcnn_r50_fpn_1x_coco.py',  # three heads, same boxes
    'YOLOX': 'yolox/yolox_s_8xb8-300e_coco.py',  # SimOTA, max pooling
    'RTMDet-Ins': 'rtmdet/rtmdet-ins_tiny_8xb32-300e_coco.py',  # dynamic convolutions, resize
    'SOLOv2': 'solov2/solov2_r50_fpn_1x_coco.py',  # bilinear resize everywhere
    'Deformable DETR': 'deformable_detr/deformable-detr_r50_16xb2-50e_coco.py',  # its attention
    'DINO': 'dino/dino-4scale_r50_8xb2-12e_coco.py',  # topk of queries, gather
    'Mask2Former': 'mask2former/mask2former_r50_8xb2-lsj-50e_coco.py',  # grid_sample
    'PointRend': 'point_rend/point-rend_r50-caffe_fpn_ms-1x_coco.py',  # grid_sample of features
    'DCNv2': 'dcnv2/faster-rcnn_r50-mdconv-c3-c5_fpn_1x_coco.py',  # modulated deformable conv
    'CARAFE': 'carafe/mask-rcnn_r50_fpn-carafe_1x_coco.py',  # CARAFE in neck and head
    'HTC': 'htc/htc_r50_fpn_1x_coco.py',  # adaptive average pooling, semantic branch
}


class DetectorRun(NamedTuple):
    """The record of one run."""

    # per iteration, the subject of each digest: ('loss', name), ('gradient of', name) ...
    labels: list[list[tuple[str, str]]]
    digests: list[torch.Tensor]  # per iteration, (labels,) int64
    losses: list[float]  # the total of each iteration
    times: list[float]  # milliseconds of the iterations for time, the shortest first
    kernels: Sequence[str] = ()  # that one more iteration started, on CUDA

    def quartiles(self) -> list[float]:
        """Return the quartiles of the times."""
        return [self.times[round((len(self.times) - 1) * share)] for share in (0.25, 0.5, 0.75)]

    def digest(self) -> str:
        """Digest all labels and digests, to compare with other processes and machines."""
        total = hashlib.sha256()
        for labels, digests in zip(self.labels, self.digests):
            total.update(repr(labels).encode())
            total.update(digests.contiguous().numpy().tobytes())
        return total.hexdigest()[:32]


def _model(config: str, device: str, size: int, small: bool) -> Any:
    """Return the model with weights from the seed; ``small``: with fewer candidates, for a CPU."""
    from mmdet.registry import MODELS
    cfg = load(config, size, small)
    if small and 'num_grids' in cfg.model.get('mask_head', {}):
        cfg.model.mask_head.num_grids = SMALL_GRIDS
    for node in dicts(cfg.model):
        if 'batch_augments' in node:
            node['batch_augments'] = None  # they change the size of a batch
    seeds.seed_all(SEED, 'init')
    model = MODELS.build(copy.deepcopy(cfg.model))
    model.init_weights()
    return model.to(device).train()


def train(config: str, device: str, size: int, iterations: int, small: bool,
          timed_iterations: int = 0) -> DetectorRun:
    """Train from the seed: ``iterations`` with digests, then more for time, without any.

    Exceptions of the model propagate.
    """
    from mmengine.optim import OptimWrapper
    model = _model(config, device, size, small)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    wrapper = OptimWrapper(torch.optim.AdamW(trained.values(), lr=1e-5),
                           clip_grad=dict(max_norm=1., error_if_nonfinite=False))
    grads: dict[str, torch.Tensor] = {}
    _keep_gradients(wrapper, trained, grads)
    labels: list[list[tuple[str, str]]] = []
    rows: list[torch.Tensor] = []
    losses: list[float] = []
    for step in range(iterations):
        logged, _ = _step(model, wrapper, device, size, step)
        losses.append(float(logged['loss']))
        row = [*_tagged('loss', logged), *_tagged('gradient of', grads),
               *_tagged('weight', trained)]
        labels.append([(kind, name) for kind, name, _ in row])
        rows.append(tensor_digests([tensor.to(device) for _, _, tensor in row]))
    del wrapper.step  # it refers to itself, which would keep the model
    grads.clear()
    warm = max(0, WARM - iterations) if timed_iterations > 2 else 0
    times = [_step(model, wrapper, device, size, iterations + step)[1]
             for step in range(warm + timed_iterations)][warm:]
    kernels = recorded_kernels(
        lambda: _step(model, wrapper, device, size, iterations)
    ) if device == 'cuda' and timed_iterations else ()
    return DetectorRun(labels, [row.cpu() for row in rows], losses, sorted(times), kernels)


def _step(model: Any, wrapper: Any, device: str, size: int, step: int
          ) -> tuple[dict[str, torch.Tensor], float]:
    """Train one step; return what it logged, and its milliseconds."""
    seeds.seed_all(SEED, 'step', step)
    batch = images(size, 2)
    return timed(lambda: model.train_step(batch, wrapper), device)


def _keep_gradients(wrapper: Any, trained: dict[str, torch.nn.Parameter],
                    grads: dict[str, torch.Tensor]) -> None:
    """Copy each step's gradients before they are clipped and cleared."""
    step = wrapper.step

    def remembered(**kwargs: Any) -> None:
        grads.clear()
        grads.update((name, p.grad.detach().clone()) for name, p in trained.items()
                     if p.grad is not None)
        step(**kwargs)

    wrapper.step = remembered


def _tagged(kind: str, tensors: dict[str, Any]) -> list[tuple[str, str, torch.Tensor]]:
    return [(kind, name, tensor.detach()) for name, tensor in tensors.items()
            if isinstance(tensor, torch.Tensor)]


def first_difference(first: DetectorRun, second: DetectorRun) -> str:
    """Return the first difference of two runs: iteration, kind and name; '' for the same bits.

    Within an iteration losses come first. Of several gradients the last parameter of the model is
    named, because the backward pass computes it first.
    """
    for step, labels in enumerate(first.labels):
        for kind in dict.fromkeys(kind for kind, _ in labels):
            digests = [{name: digest for (of_kind, name), digest in zip(
                run.labels[step], run.digests[step].tolist()) if of_kind == kind}
                for run in (first, second)]
            names = differing_names(*digests)
            if names:
                more = f' and {len(names) - 1} of {len(digests[0])} others' if names[1:] else ''
                return (f'iteration {step + 1}: {kind} '
                        f'{names[-1] if kind == "gradient of" else names[0]}{more}')
    return ''


def _check(config: str, provider: str, settings: Settings,
           time_is_left: Callable[[], bool]) -> Row:
    """Run one row; without time for it, the run without determinism is left out."""
    device, iterations = settings.device, settings.iterations
    timed_iterations = max(2, iterations // 2)

    def run(count: int, for_time: int = 0) -> tuple[DetectorRun, float | None]:
        """Train, and return the largest amount of memory in GiB."""
        free_memory(device)
        if device == 'cuda':
            torch.cuda.reset_peak_memory_stats()
        result = train(config, device, settings.size, count,
                       settings.quick or device == 'cpu', for_time)
        return result, round(torch.cuda.max_memory_allocated() / 2 ** 30, 2) \
            if device == 'cuda' else None

    row: Row = dict(config=config, operators=provider, size=settings.size,
                    iterations=iterations)
    with determinism.deterministic(), ops.using(provider):
        row['precision'] = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        first, row['peak_gib'] = run(iterations, timed_iterations)
        second, _ = run(iterations)
    row['difference'] = first_difference(first, second)
    row['equal'] = not row['difference']
    row['digest'] = first.digest()
    row['kernels'] = len(first.kernels)
    row['atomic_kernels'] = atomic_kernels(first.kernels)
    row['loss'] = [first.losses[0], first.losses[-1]]
    row['finite'] = all(abs(loss) < float('inf') for loss in first.losses)
    row['quartiles'] = first.quartiles()
    row['ms'] = row['quartiles'][1]
    if time_is_left():
        compiled = ops.is_compiled()
        # without determinism, at the precision that both runs have: torch's own
        with determinism.deterministic(False), ops.using('compiled' if compiled else 'torch'):
            plain, row['default_peak_gib'] = run(0, timed_iterations)
        row['default'] = 'compiled mmcv' if compiled else 'operators of mmrepro'
        row['default_quartiles'] = plain.quartiles()
        row['default_ms'] = row['default_quartiles'][1]
        row['ratio'] = row['ms'] / row['default_ms']
    return row


def _providers(device: str) -> list[str]:
    """Return what deterministic mode chooses, then the others that differ from it here."""
    lacks = device == 'cpu' or triton.requirement()
    # on a CPU, and without compiled kernels, 'auto' is 'torch' until a GPU has run the kernels
    same = not ops.is_compiled() or device == 'cpu'
    if same and not triton.SEEN_ON_GPU:
        return ['auto', *([] if lacks else ['triton'])]
    return ['auto', 'torch', *([] if lacks else ['triton'])]


def _rows(settings: Settings, time_is_left: Callable[[], bool]) -> dict[str, Callable[[], Row]]:
    return {name if provider == 'auto' else f'{name}, {provider}':
            functools.partial(_check, config, provider, settings, time_is_left)
            for provider in _providers(settings.device) for name, config in DETECTORS.items()}


GROUP = RowGroup(
    'Detectors', 'detector',
    (('iterations', cell('iterations')), ('pixels', cell('size')), ('ms', cell('ms', '.1f')),
     ('default', cell('default')), ('ms', cell('default_ms', '.1f')),
     ('ratio', cell('ratio', '.2f')), ('GiB', cell('peak_gib', '.2f')),
     ('GiB', cell('default_peak_gib', '.2f')),
     ('atomics', lambda row: ', '.join(dict.fromkeys(row.get('atomic_kernels', {}).values())))),
    _rows)
