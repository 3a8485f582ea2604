"""Whether the predictions for an image depend on its batch, and in which module that begins."""
from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .. import seeds
from ..errors import DIFFERENT, DONE
from ..objects.digests import state_digest
from ..objects.nested import tensors
from ..report.report import Report
from ..report.table import Table
from ..runs.startup import build_runner
from ..util.text import listed, page
from .compare_modules import compare_tensors, first_apart, recorded_outputs

IOU = 0.5  # boxes that overlap by more are the same object
VISIBLE = 1e-4  # relative difference: no rounding of one operator
PADDED, IN_BATCH = 'padded as in the batch, still alone', 'with the other images, padded the same'


def alone_and_in_batch(cfg: Any, checkpoint: str, image: str, others: Sequence[str],
                       threshold: float) -> Report:
    """Predict an image alone and in a batch, without a dataset; ``threshold`` is of the scores."""
    runner, images = build_runner(cfg), [image, *others]
    runner.call_hook('before_run')
    runner.load_checkpoint(checkpoint)
    runner.model.eval()
    single, padded, batch = (padded_batch(runner.cfg, runner.model, runner.repro.root, paths)
                             for paths in ([image], images, images))
    sizes = ['x'.join(map(str, data['inputs'].shape[2:])) for data in (single, batch)]
    padded = {key: value[:1] for key, value in padded.items()}
    tables, alone = [], _predict(runner, single)
    before = alone
    steps = [(IN_BATCH, batch)]
    if sizes[0] != sizes[1]:
        steps.insert(0, (PADDED, padded))
    for change, data in steps:
        after = _predict(runner, data)
        rows = [('predictions', compare_detections(before[0], after[0], threshold)['text'])]
        tables.append(Table((), rows + _first_modules(before[1], after[1]), change))
        before = after
    difference = compare_detections(alone[0], before[0], threshold)
    if difference['same_bits']:
        code, depend, advice = DONE, 'do not depend', []
    else:
        code, depend, advice = DIFFERENT, 'depend', [
            'with --cfg-options +randomness.independent_predictions=True, mmrepro test takes one '
            f'image at a time: {page("explanation/testing.md")}']
    return Report(
        '', f'{image}: the predictions {depend} on {listed(others)} in the batch: '
        f'{difference["text"]}', code, tables,
        [f'{len(alone[0])} detections alone; height and width are padded to {sizes[0]} alone and '
         f'to {sizes[1]} in the batch'], advice,
        data=dict(difference, image=image, others=others, padded=sizes,
                  changes={table.title: table.rows for table in tables}))


def padded_batch(cfg: Any, model: Any, root: int, images: Sequence[str]) -> Any:
    """Return arguments of ``model.forward``: images after the config's test pipeline, padded."""
    from mmcv.transforms import Compose
    from mmdet.utils import get_test_pipeline_cfg
    pipeline, packed = Compose(get_test_pipeline_cfg(cfg)), []
    for path in images:
        seeds.seed_all(root, 'test', 'image')
        packed.append(pipeline(dict(img_path=path, img_id=0)))
    return model.data_preprocessor(
        {key: [sample[key] for sample in packed] for key in packed[0]}, False)


def _predict(runner: Any, data: Any) -> tuple[Any, dict[Any, torch.Tensor]]:
    """Return the detections in the first image, and what modules return, by path and number."""
    paths = {module: path for path, module in runner.model.named_modules()}
    seeds.seed_all(runner.repro.root, 'test', 'image')  # as independent_predictions has it
    samples, records = recorded_outputs(lambda: runner.model(**data, mode='predict'), paths)
    calls: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
    return samples[0].pred_instances.cpu(), {
        (path, next(calls[path])): tensor for path, tensor in records
        if tensor.is_floating_point() and tensor.dim()}


def _first_modules(a: dict[Any, torch.Tensor], b: dict[Any, torch.Tensor]) -> list[tuple[str, str]]:
    """Return the first module whose output differs, and the first by more than rounding."""
    differences = {}
    for key, one in a.items():
        # what belongs to the first image: the first pixels of maps, the first rows
        other = b.get(key, one)[:len(one)]
        if one.dim() == 4:
            other = other[:, :, :one.shape[2], :one.shape[3]]
        difference = compare_tensors(one, other) if one.shape == other.shape else None
        if difference is not None:
            differences[key] = difference
    if not differences:
        return []
    first = next(iter(differences))
    rows = [('first module that differs', first[0]), ('its output', differences[first].text())]
    visible = first_apart(((key, difference.relative) for key, difference in differences.items()),
                          VISIBLE).place
    if visible is not None and visible != first:
        rows += [('first by more than rounding', visible[0]),
                 ('its output', differences[visible].text())]
    return rows


def compare_detections(a: Any, b: Any, threshold: float) -> dict[str, Any]:
    """Compare detections A and B: largest differences, and numbers of scores from the threshold."""
    from mmdet.structures.bbox import bbox_overlaps
    from scipy.optimize import linear_sum_assignment
    # boxes without an area overlap nothing
    near = bbox_overlaps(a.bboxes, b.bboxes).maximum((a.bboxes[:, None] == b.bboxes).all(-1))
    alike = a.labels[:, None] == b.labels
    fit = torch.where(near > IOU, near + alike, 0)
    of_a, of_b = map(torch.from_numpy, linear_sum_assignment(fit, maximize=True))
    of_a, of_b = (indices[fit[of_a, of_b] > 0] for indices in (of_a, of_b))
    shown = [one.scores >= threshold for one in (a, b)]
    both = shown[0][of_a] & shown[1][of_b]
    boxes, scores = (max((x[of_a] - y[of_b]).abs().flatten().tolist(), default=0.)
                     for x, y in ((a.bboxes, b.bboxes), (a.scores, b.scores)))
    vanish, appear = (int(one.sum() - both.sum()) for one in shown)
    relabeled = int((both & ~alike[of_a, of_b]).sum())
    same = state_digest(tensors(a)) == state_digest(tensors(b))
    text = 'same bits' if same else (
        f'boxes differ by up to {boxes:.3g} pixels, scores by up to {scores:.3g}; from a score of '
        f'{threshold:g} on, {appear} appear, {vanish} vanish, {relabeled} have another label')
    return dict(same_bits=same, boxes=boxes, scores=scores, appear=appear, vanish=vanish,
                relabeled=relabeled, threshold=threshold, text=text)
