"""What a detector computes for an image: outputs of modules, detections, and their differences."""
from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from .. import seeds
from ..digests import state_digest
from ..errors import ConfigError
from ..nested import tensors
from ..runs.startup import build_runner
from ..text import not_a

Outputs = dict[tuple[str, int], torch.Tensor]  # path of a module, number of its output -> numbers
IOU = 0.5  # boxes that overlap by more are the same object


def detector(cfg: Any, checkpoint: str) -> Any:
    """Return a runner whose model is as in ``runner.test()``; no dataset is built."""
    runner = build_runner(cfg)
    runner.call_hook('before_run')
    runner.load_checkpoint(checkpoint)
    runner.model.eval()
    return runner


def batch_of(runner: Any, images: Sequence[str]) -> Any:
    """Return arguments of ``model.forward``: images after the config's test pipeline, padded."""
    from mmcv.transforms import Compose
    from mmdet.utils import get_test_pipeline_cfg
    pipeline, packed = Compose(get_test_pipeline_cfg(runner.cfg)), []
    for path in images:
        if not os.path.isfile(path):
            raise ConfigError(not_a('image', path))
        seeds.seed_all(runner.repro.root, 'test', 'image')  # as independent_predictions has it
        packed.append(pipeline(dict(img_path=path, img_id=0)))
    return runner.model.data_preprocessor(
        {key: [sample[key] for sample in packed] for key in packed[0]}, False)


def predict(runner: Any, data: Any) -> tuple[Any, Outputs]:
    """Return the detections in the first image, and all outputs of modules in their order."""
    outputs: Outputs = {}

    def keep(path: str, module: Any, args: Any, result: Any) -> None:
        for tensor in filter(torch.is_floating_point, tensors(result)):
            # an operator may write to it later
            outputs[path, sum(path == other for other, _ in outputs)] = tensor.clone()

    handles = [module.register_forward_hook(partial(keep, path))
               for path, module in runner.model.named_modules()]
    seeds.seed_all(runner.repro.root, 'test', 'image')
    with torch.no_grad():
        samples = runner.model(**data, mode='predict')
    for handle in handles:
        handle.remove()
    return samples[0].pred_instances.cpu(), outputs


class DetectionDifference(NamedTuple):
    """How detections B differ from detections A of an image."""
    same_bits: bool
    boxes: float  # largest difference of a coordinate in pixels, of objects in both
    scores: float
    appear: int  # in B only; this and the rest count scores from the threshold on
    vanish: int
    relabeled: int
    threshold: float

    def text(self) -> str:
        return 'same bits' if self.same_bits else (
            f'boxes differ by up to {self.boxes:.3g} pixels, scores by up to {self.scores:.3g}; of '
            f'scores from {self.threshold:g}, {self.appear} appear, {self.vanish} vanish, '
            f'{self.relabeled} have another label')


def compare_detections(a: Any, b: Any, threshold: float) -> DetectionDifference:
    """Compare detections with ``bboxes``, ``scores`` and ``labels``; partners of a label first."""
    from mmdet.structures.bbox import bbox_overlaps
    # boxes without an area overlap nothing
    near = bbox_overlaps(a.bboxes, b.bboxes).maximum((a.bboxes[:, None] == b.bboxes).all(-1))
    alike = a.labels[:, None] == b.labels
    partners: dict[int, int] = {}
    for n in (near + alike).flatten().argsort(descending=True, stable=True).tolist():
        i, j = divmod(n, len(b.bboxes))
        if near[i, j] > IOU and i not in partners and j not in partners.values():
            partners[i] = j
    of_a, of_b = list(partners), list(partners.values())
    shown_a, shown_b = a.scores >= threshold, b.scores >= threshold
    both = shown_a[of_a] & shown_b[of_b]
    boxes, scores = (float((x[of_a] - y[of_b]).abs().max()) if of_a else 0.
                     for x, y in ((a.bboxes, b.bboxes), (a.scores, b.scores)))
    return DetectionDifference(
        state_digest(tensors(a)) == state_digest(tensors(b)), boxes, scores,
        int(shown_b.sum() - both.sum()), int(shown_a.sum() - both.sum()),
        int((both & ~alike[of_a, of_b]).sum()), threshold)
