"""Suppression of lanes, compared with the kernel of onedl-mmcv read line by line."""
from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dev.operator_check.cases_mmcv import lanes
from dev.operator_check.operator_cases import Inputs
from mmrepro.ops.mmcv import line_nms
from mmrepro.ops.mmcv.line_nms import line_nms_forward


def are_near(a, b, threshold):
    """The test of the kernel for two lanes, in the dtype of the arrays."""
    number = type(a[0])
    starts = [int(number(np.float64(lane[2]) * 71 + .5)) for lane in (a, b)]
    ends = [start + int(lane[4]) - 1 for start, lane in zip(starts, (a, b))]
    start, end = max(starts), min(*ends, 71)
    if end < start or start < 0:
        return False
    distance = number(0)
    for height in range(start, end + 1):
        distance += abs(a[5 + height] - b[5 + height])
    return distance < number(threshold) * number(end - start + 1)


def kernel(boxes, scores, threshold, top_k):
    """Both kernels, one lane after the other."""
    boxes, count = boxes.numpy(), len(boxes)
    order = np.argsort(-scores.numpy(), kind='stable')
    # a row is a lane by its position, a column by its rank
    drops = [[j for j in range(i + 1, count) if are_near(boxes[i], boxes[order[j]], threshold)]
             for i in range(count)]
    keep, parent, removed = [], [0] * count, set()
    for i in range(count):
        if i in removed:
            continue
        keep.append(order[i])
        removed.update(drops[i])
        for j in (*drops[i], i):
            parent[order[j]] = len(keep)
        if len(keep) == top_k:
            break
    return keep + [0] * (count - len(keep)), len(keep), parent


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 40), st.integers(1, 12), st.sampled_from([2., 8., 12., 60.]),
       st.integers(0, 99), st.sampled_from([torch.float32, torch.float64]), st.booleans())
def test_it_follows_the_kernel(number, top_k, threshold, seed, dtype, in_order):
    inputs = Inputs(False)
    inputs.random.manual_seed(seed)
    scores = inputs.scores(number + 2)[:number]
    if in_order:
        scores = scores.sort(descending=True).values
    boxes = lanes(inputs, number + 2)[:number].to(dtype)
    keep, kept, parent = line_nms_forward(boxes, scores, threshold, top_k)
    assert (keep.tolist(), kept.item(), parent.tolist()) == kernel(boxes, scores, threshold, top_k)
    assert keep.dtype == kept.dtype == parent.dtype == torch.int64


def test_more_lanes_than_a_block_and_any_number_kept(monkeypatch, same_bytes):
    inputs = Inputs(False)
    boxes, scores = lanes(inputs, 70), inputs.scores(70)
    expected = kernel(boxes, scores, 8., 70)
    assert 5 < expected[1] < 65 and len(set(expected[2])) > 5  # some are dropped, some kept
    same_bytes(lambda: line_nms_forward(boxes, scores, 8., 70))
    monkeypatch.setitem(line_nms.BLOCK, 'cpu', 3)
    found = line_nms_forward(boxes, scores, 8., 70)
    assert tuple(tensor.tolist() for tensor in found) == expected


def lane(start, length, xs, dtype=torch.float32):
    return torch.tensor([0., 0, start, 0, length, *np.broadcast_to(xs, 72)], dtype=dtype)


def kept_of(*given_lanes, threshold=1., top_k=9):
    scores = torch.linspace(1, .5, len(given_lanes))
    return line_nms_forward(torch.stack(given_lanes), scores, threshold, top_k)[1].item()


@pytest.mark.parametrize('dtype', [torch.float16, torch.float32, torch.float64])
def test_lanes_are_near_where_both_are(dtype):
    near, far = lane(0, 72, 100., dtype), lane(0, 72, 101., dtype)
    assert kept_of(near, near) == 1
    assert kept_of(near, far) == 2 and kept_of(near, far, threshold=1.01) == 1
    assert kept_of(near, far, threshold=1.) == 2  # not near if equal
    # no height in common; one height in common; a length of 0 or less
    assert kept_of(lane(0, 20, 100., dtype), lane(20 / 71, 20, 100., dtype)) == 2
    assert kept_of(lane(0, 21, 100., dtype), lane(20 / 71, 20, 100., dtype)) == 1
    assert kept_of(near, lane(.5, 0, 100., dtype)) == 2
    # longer than the image; before its beginning
    assert kept_of(lane(.9, 500, 100., dtype), near) == 1
    assert kept_of(lane(-.5, 72, 100., dtype), lane(-.5, 72, 100., dtype)) == 2


@pytest.mark.parametrize('threshold, top_k, kept', [(.5, 5, 4), (0, 5, 5), (1, 5, 4), (1, 1, 1)])
def test_as_many_are_kept_as_the_tests_of_the_fork_ask_for(threshold, top_k, kept):
    """With a threshold of 0.5: two pairs are 1 and 2 apart, and yet a lane is dropped."""
    steps = np.arange(72.)
    boxes = torch.stack([lane(start, length, xs, torch.float64) for start, length, xs in (
        (.1, 30, 10.), (.12, 28, 12.), (.2, 40, steps), (.3, 35, steps / 2), (.21, 38, steps + 1))])
    scores = torch.tensor([.9, .7, .8, .6, .5], dtype=torch.float64)
    assert line_nms_forward(boxes, scores, threshold, top_k)[1] == kept


def test_lanes_that_are_no_numbers_drop_nothing():
    bad = lane(0, 72, 100.)
    bad[40] = float('nan')
    assert kept_of(bad, bad) == 2
    assert kept_of(lane(float('nan'), 72, 1.), lane(0, 72, 1.)) == 1  # a cast to int gives 0
    assert kept_of(lane(0, float('inf'), 1.), lane(0, 72, 1.)) == 1
    nothing = line_nms_forward(torch.zeros(0, 77), torch.zeros(0), 1., 5)
    assert [tensor.numel() for tensor in nothing] == [0, 1, 0] and nothing[1].item() == 0


def test_equal_scores_are_broken_by_index():
    one, other = lane(0, 72, 100.), lane(0, 72, 500.)
    keep, kept, parent = line_nms_forward(torch.stack([one, other, one, other]), torch.ones(4), 1.,
                                          9)
    assert keep.tolist() == [0, 1, 0, 0] and kept == 2 and parent.tolist() == [1, 2, 1, 2]


def test_bad_arguments_are_refused():
    good, scores = torch.zeros(3, 77), torch.zeros(3)
    for boxes, given_scores, top_k, words in (
            (torch.zeros(3, 78), scores, 1, r'boxes must have shape \(N, 77\), got \(3, 78\)'),
            (good.int(), scores, 1, 'boxes must be float32, float64, float16'),
            (good, scores[:2], 1, r'one score per lane: boxes \(3, 77\)'),
            (good, scores, 0, 'top_k must be at least 1, got 0')):
        with pytest.raises(RuntimeError, match=f'line_nms_forward: {words}'):
            line_nms_forward(boxes, given_scores, 1., top_k)
