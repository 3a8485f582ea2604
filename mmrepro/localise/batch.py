"""Whether the predictions for an image depend on its batch, and where that begins."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..exit_codes import DIFFERENT, DONE
from ..report.report import Report
from ..report.table import Table
from ..text import listed, page
from .predictions import Outputs, batch_of, compare_detections, detector, predict
from .values import compare_tensors

PADDING, BATCH = 'padded as in the batch, still alone', 'with the other images, padded the same'
VISIBLE = 1e-4  # relative difference: no rounding of one operator


def alone_and_in_batch(cfg: Any, checkpoint: str, image: str, others: Sequence[str],
                       threshold: float) -> Report:
    """Predict an image alone and in a batch; the exit code is 1 if the bits differ.

    Args:
        threshold: score from which detections are counted.
    """
    runner, images = detector(cfg, checkpoint), [image, *others]
    single, batch = (batch_of(runner, paths) for paths in ([image], images))
    sizes = ['x'.join(map(str, data['inputs'].shape[2:])) for data in (single, batch)]
    padded = {key: value[:1] for key, value in batch_of(runner, images).items()}
    alone = before = predict(runner, single)
    tables = []
    for cause, data in ((PADDING, padded), (BATCH, batch))[sizes[0] == sizes[1]:]:
        after = predict(runner, data)
        rows = [('predictions', compare_detections(before[0], after[0], threshold).text())]
        tables.append(Table((), rows + _first_modules(before[1], after[1]), cause))
        before = after
    change = compare_detections(alone[0], before[0], threshold)
    notes = [f'{image} has {len(alone[0])} detections alone; height and width are padded to '
             f'{sizes[0]} alone and to {sizes[1]} in the batch']
    if runner.repro.independent_predictions:
        notes.append('with randomness.independent_predictions=True, as here, mmrepro test makes '
                     'no such batch')
    return Report(
        '', f'{image}: the predictions ' + (
            f'are the same alone and in a batch with {listed(others)}' if change.same_bits else
            f'depend on {listed(others)} in the batch: {change.text()}'),
        DONE if change.same_bits else DIFFERENT, tables, notes, [] if change.same_bits else [
            'with --cfg-options +randomness.independent_predictions=True, mmrepro test takes one '
            f'image at a time: {page("explanation/testing.md")}'],
        data=dict(same=change.same_bits, image=image, others=others, padded=sizes,
                  difference=change, changes={table.title: table.rows for table in tables}))


def _first_modules(a: Outputs, b: Outputs) -> list[tuple[str, str]]:
    """Return the first module whose output differs, and the first by more than rounding."""
    rows: list[tuple[str, str]] = []
    for key in filter(b.__contains__, a):
        one, other = a[key], _of_image(a[key], b[key])
        difference = compare_tensors(one, other) if one.shape == other.shape else None
        if difference and (not rows or difference.relative > VISIBLE):
            rows += [('first by more than rounding' if rows else 'first module that differs',
                      key[0]), ('its output', difference.text())]
            if difference.relative > VISIBLE:
                break
    return rows


def _of_image(alone: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return what belongs to the first image: the first rows, or the first pixels of maps."""
    if alone.dim() == 4 and len(output) == len(alone):
        return output[:, :, :alone.shape[2], :alone.shape[3]]
    return output[:len(alone)] if alone.dim() else output
