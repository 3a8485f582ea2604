"""Operators of the libraries beside MMDetection: PSAMask, TIN shift, chamfer distance, text."""
from __future__ import annotations

import collections

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mmcv.ops import chamfer_distance, contour_expand, pixel_group, tin_shift
from mmcv.ops.psa_mask import psa_mask

from mmrepro import ops
from mmrepro.ops.mmcv import psa_mask as psa

pytestmark = pytest.mark.usefixtures('torch_operators')


def random(seed):
    return torch.Generator().manual_seed(seed)


# ------------------------------------------------------------------------------------- PSAMask


def naive(masks, kind, mask):
    """The definition, in loops."""
    n, _, height, width = masks.shape
    out = torch.zeros(n, height * width, height, width, dtype=masks.dtype)
    for h in range(height):
        for w in range(width):
            for i in range(mask[0]):
                for j in range(mask[1]):
                    y, x = h + i - (mask[0] - 1) // 2, w + j - (mask[1] - 1) // 2
                    if 0 <= y < height and 0 <= x < width:
                        value = masks[:, i * mask[1] + j, h, w]
                        if kind == 0:
                            out[:, y * width + x, h, w] = value
                        else:
                            out[:, h * width + w, y, x] = value
    return out


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_psa_mask_follows_the_definition(data):
    n, height, width, *mask = (data.draw(st.integers(1, most)) for most in (2, 4, 5, 9, 7))
    masks = torch.randn(n, mask[0] * mask[1], height, width, generator=random(0))
    for kind in (0, 1):
        with ops.using('torch'):
            assert torch.equal(psa_mask(masks, kind, mask), naive(masks, kind, mask))


@pytest.mark.parametrize('kind', [0, 1])
def test_psa_mask_has_the_gradient_of_its_forward(wave, kind, same_bytes):
    masks = wave(2, 15, 3, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: psa_mask(x, kind, (5, 3)), masks, fast_mode=True)
    same_bytes(lambda: torch.autograd.grad(psa_mask(masks, kind, (5, 3)).square().sum(), masks))


@pytest.mark.parametrize('kind', [0, 1])
def test_psa_mask_of_a_compiled_mmcv(compiled, wave, kind):
    masks = wave(2, 15, 4, 3, dtype=torch.float32).requires_grad_()
    up = wave(2, 12, 4, 3, dtype=torch.float32, phase=1)
    found, expected = [], []
    for context, results in ((ops.using('torch'), found), (compiled(), expected)):
        with context:
            out = psa_mask(masks, kind, (3, 5))
            results += [out.detach(), torch.autograd.grad(out, masks, up)[0]]
    assert all(map(torch.equal, found, expected))


def test_psa_mask_refuses_shapes_that_do_not_fit():
    with pytest.raises(RuntimeError, match=r'psamask_forward: the masks must have shape \(1, 9, 4'):
        psa.psamask_forward(torch.zeros(1, 8, 4, 4), torch.zeros(1, 16, 4, 4), 0, 1, 4, 4, 3, 3, 1,
                            1)
    with pytest.raises(RuntimeError, match=r'psa_type must be 0 \(collect\) or 1 .*got 2'):
        psa_mask(torch.zeros(1, 9, 4, 4), 2, (3, 3))


# ----------------------------------------------------------------------------------- TIN shift


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_groups_of_channels_move_in_time(data):
    n, frames, groups, size = (data.draw(st.integers(1, 4)) for _ in range(4))
    channels = groups * data.draw(st.integers(1, 3))
    shift = torch.tensor(data.draw(st.lists(st.lists(
        st.integers(-5, 5), min_size=groups, max_size=groups), min_size=n, max_size=n)))
    x = torch.randn(n, frames, channels, size, generator=random(0)).requires_grad_()
    with ops.using('torch'):
        out = tin_shift(x, shift.int())
        up = torch.randn(out.shape, generator=random(1))
        grad, = torch.autograd.grad(out, x, up)
    # the gradient moves as the frames do: mmcv's kernels are the same for both
    for result, source in ((out.detach(), x.detach()), (grad, up)):
        expected = torch.zeros_like(source)
        for i in range(n):
            for c in range(channels):
                by = int(shift[i, c // (channels // groups)])
                for t in range(frames):
                    if 0 <= t + by < frames:
                        expected[i, t + by, c] = source[i, t, c]
        assert torch.equal(result, expected)


def test_tin_shift_refuses_what_it_cannot_shift():
    with pytest.raises(RuntimeError, match='shift must be int32, got .2, 3. float32 on cpu'):
        tin_shift(torch.zeros(2, 4, 6, 5), torch.zeros(2, 3))


# ---------------------------------------------------------------------------- chamfer distance


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 7), st.integers(1, 7), st.integers(0, 99))
def test_chamfer_distance_is_to_the_nearest_point(batch, n, m, seed):
    one, two = (torch.randn(batch, count, 2, generator=random(seed + number), dtype=torch.float64)
                .requires_grad_() for number, count in enumerate((n, m)))
    square = (one[:, :, None] - two[:, None]).square().sum(3)
    with ops.using('torch'):
        dist1, dist2, idx1, idx2 = chamfer_distance(one, two)
    assert torch.equal(idx1.long(), square.argmin(2)) and idx1.dtype == torch.int32
    assert torch.equal(idx2.long(), square.argmin(1))
    weights = [torch.randn(d.shape, generator=random(5), dtype=torch.float64)
               for d in (dist1, dist2)]
    found = torch.autograd.grad((dist1, dist2), (one, two), weights)
    expected = torch.autograd.grad((square.amin(2), square.amin(1)), (one, two), weights)
    for a, b in zip((dist1, dist2, *found), (square.amin(2), square.amin(1), *expected)):
        # mmcv's Python of 2.1 makes the results float32
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=1e-6)


def test_of_equally_near_points_the_first_is_taken(same_bytes):
    one = torch.zeros(1, 3, 2).requires_grad_()
    two = torch.tensor([[[1., 0], [0, 1], [1, 0], [5, 5]]]).requires_grad_()
    dist1, dist2, idx1, idx2 = chamfer_distance(one, two)
    assert idx1.tolist() == [[0, 0, 0]] and idx2.tolist() == [[0, 0, 0, 0]]
    grad, other = torch.autograd.grad(dist1.sum() + dist2.sum(), (one, two))
    assert grad[0, 0].tolist() == [-16., -12] and other[0, 2].tolist() == [2, 0]
    far = torch.randn(2, 900, 2, generator=random(0)).requires_grad_()
    near = torch.randn(2, 30, 2, generator=random(1)).requires_grad_()
    same_bytes(lambda: torch.autograd.grad(
        sum(d.sum() for d in chamfer_distance(far, near)[:2]), (far, near)))


def test_half_precision_and_other_shapes():
    one = torch.tensor([[[3., 4]]], dtype=torch.float16)
    assert chamfer_distance(one, torch.zeros_like(one))[0].tolist() == [[25.]]
    with pytest.raises(RuntimeError, match=r'xyz2 must have shape \(1, N, 2\), got \(2, 1, 2\)'):
        chamfer_distance(one, torch.zeros(2, 1, 2, dtype=torch.float16))


# -------------------------------------------------------------------------------- text regions


def grown(labels, queue, steps, accept):
    """The definition: a search in breadth, one pixel after the other."""
    queue = collections.deque(queue)
    while queue:
        y, x = queue.popleft()
        for dy, dx in steps:
            a, b = y + dy, x + dx
            if (0 <= a < labels.shape[0] and 0 <= b < labels.shape[1] and labels[a, b] <= 0
                    and accept(a, b, labels[y, x])):
                labels[a, b] = labels[y, x]
                queue.append((a, b))
    return labels


def kernels(seed, height, width, number):
    """Labels from 0 to ``number``, most of them 0."""
    labels = torch.randint(-6, number + 1, (height, width), generator=random(seed))
    return labels.clamp_(min=0).int()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 4), st.integers(0, 99),
       st.integers(1, 3))
def test_contours_expand_within_the_largest_mask(height, width, least, seed, masks):
    mask = (torch.rand(masks, height, width, generator=random(seed)) < 0.6).byte()
    labels = kernels(seed, height, width, 3)
    with ops.using('torch'):
        found = contour_expand(mask, labels, least, 3)
    expected = labels.numpy().copy()
    area = collections.Counter(expected.ravel().tolist())
    for label in (1, 2, 3):
        if area[label] < least:
            expected[expected == label] = 0
    if masks > 1:
        queue = [(y, x) for y, x in zip(*np.nonzero(expected))]
        grown(expected, queue, ((-1, 0), (1, 0), (0, -1), (0, 1)), lambda y, x, _: mask[0, y, x])
    assert found == expected.tolist()


def groups(seed, height, width):
    """Arguments of pixel_group: three kernels and the background."""
    embedding = torch.randn(height, width, 3, generator=random(seed))
    return (torch.rand(height, width, generator=random(seed + 1)),
            torch.rand(height, width, generator=random(seed + 2)) < 0.7,
            embedding, kernels(seed, height, width, 3),
            (torch.rand(height, width, generator=random(seed + 3)) < 0.8).byte(), 4, 1.8)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 99))
def test_pixels_join_the_kernel_that_reaches_them_first(height, width, seed):
    score, mask, embedding, labels, contour, number, limit = groups(seed, height, width)
    with ops.using('torch'):
        found = pixel_group(score, mask, embedding, labels, contour, number, limit)
    expected = labels.numpy().copy()
    means = [embedding[labels == label].double().mean(0) for label in range(number)]
    queue = [(y, x) for y in range(height) for x in range(width)
             if expected[y, x] > 0 and contour[y, x]]
    grown(expected, queue, ((0, -1), (0, 1), (-1, 0), (1, 0)), lambda y, x, label: mask[y, x] and (
        means[label] - embedding[y, x]).norm() < limit)
    assert len(found) == number and found[0] == [0., 0.]
    for label in range(1, number):
        y, x = np.nonzero(expected == label)
        mean = float(score[y, x].mean()) if len(y) else 0.
        assert found[label][0] == pytest.approx(mean, rel=1e-5)
        assert found[label][1:] == [len(y), *np.stack((x, y), 1).ravel().tolist()]


@pytest.mark.parametrize('seed', range(5))
def test_regions_of_a_compiled_mmcv(compiled, seed):
    mask = (torch.rand(4, 40, 50, generator=random(seed)) < 0.7).byte()
    labels = kernels(seed, 40, 50, 3)
    arguments = groups(seed, 40, 50)
    results = []
    for context in (ops.using('torch'), compiled()):
        with context:
            results.append((contour_expand(mask, labels, 2, 3), pixel_group(*arguments)))
    assert results[0] == results[1]


def test_bad_regions_are_refused():
    score, mask, embedding, labels, contour, number, limit = groups(0, 5, 6)
    for call, words in (
            (lambda: contour_expand(contour[None], labels, 0, 1), 'from 0 to kernel_num, 1; got'),
            (lambda: contour_expand(contour[None], labels.long(), 0, 3),
             'internal_kernel_label must be int32, got .5, 6. int64'),
            (lambda: contour_expand(contour, labels, 0, 3), 'shapes do not match'),
            (lambda: pixel_group(score, mask, embedding, labels, contour, 2, limit),
             'labels must be below kernel_region_num, 2; got 3'),
            (lambda: pixel_group(score, mask[:4], embedding, labels, contour, number, limit),
             r'mask must have shape \(5, 6\), got \(4, 6\)'),
            (lambda: pixel_group(score, mask.byte(), embedding, labels, contour, number, limit),
             'mask must be bool')):
        with pytest.raises(RuntimeError, match=words):
            call()
    assert contour_expand(contour[None, :, :0], labels[:, :0], 0, 3) == [[]] * 5
