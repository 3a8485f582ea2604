"""Non-maximum suppression: hard, soft, matched."""
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mmcv.ops import batched_nms, nms, nms_match, soft_nms

from mmrepro import ops
from mmrepro.ops.mmcv import nms as kernels

pytestmark = pytest.mark.usefixtures('torch_operators')

NAN, INF = float('nan'), float('inf')
CROWDS = {'scattered': (40, 700.), 'crowded': (60, 60.), 'overlapping': (50, 8.)}


def draw(count, seed=0, size=40, room=300.):
    """Boxes and scores; all scores differ, because mmcv's own sort breaks ties as it likes."""
    random = torch.Generator().manual_seed(seed)
    corner = torch.rand(count, 2, generator=random) * room
    extent = torch.rand(count, 2, generator=random) * size + 1
    scores = (torch.randperm(count, generator=random) + 1) / (count + 1)
    return torch.cat([corner, corner + extent], 1), scores


def naive_nms(boxes, scores, threshold, offset=0):
    """Compute the definition, in loops, in float32; ties by lower index, NaN first."""
    boxes = boxes.numpy()
    keys = [(-np.inf if np.isnan(s) else -s, i) for i, s in enumerate(scores.tolist())]
    order, kept = [i for _, i in sorted(keys)], []
    one, zero = np.float32(offset), np.float32(0)
    with np.errstate(all='ignore'):
        area = (boxes[:, 2] - boxes[:, 0] + one) * (boxes[:, 3] - boxes[:, 1] + one)
        for i in order:
            for k in kept:
                w = max(zero, min(boxes[i, 2], boxes[k, 2]) - max(boxes[i, 0], boxes[k, 0]) + one)
                h = max(zero, min(boxes[i, 3], boxes[k, 3]) - max(boxes[i, 1], boxes[k, 1]) + one)
                if w * h / (area[i] + area[k] - w * h) > np.float32(threshold):
                    break
            else:
                kept.append(i)
    return kept


def naive_soft_nms(boxes, scores, threshold, sigma, least, method, offset):
    """Compute the definition, in loops over boxes that change places, in float32."""
    rows = [(*box, score, index) for index, (box, score) in enumerate(zip(boxes, scores))]
    one, zero, begin = np.float32(offset), np.float32(0), 0

    def area(box):
        return (box[2] - box[0] + one) * (box[3] - box[1] + one)

    while begin < len(rows):
        best = begin
        for i in range(begin + 1, len(rows)):
            best = i if rows[best][4] < rows[i][4] else best
        rows[begin], rows[best] = rows[best], rows[begin]
        a, begin, i = rows[begin], begin + 1, begin + 1
        while i < len(rows):
            b = rows[i]
            size = [np.minimum(b[k + 2], a[k + 2]) - np.maximum(b[k], a[k]) + one for k in (0, 1)]
            inter = np.maximum(size[0], zero) * np.maximum(size[1], zero)
            overlap, score = inter / (area(b) + area(a) - inter), b[4]
            if method == 2 and overlap != 0:
                score *= np.float32(np.exp(np.float64(-(overlap * overlap) / sigma)))
            elif method < 2 and overlap >= threshold:
                score *= np.float32(1) - overlap if method else zero
            rows[i] = (*b[:4], score, b[5])
            if score < least:
                rows[i] = rows[-1]
                rows.pop()
            else:
                i += 1
    return [row[5] for row in rows], [row[4] for row in rows]


def matched(boxes, scores, threshold):
    groups = nms_match(torch.cat([boxes, scores[:, None]], 1), threshold)
    return torch.tensor([len(group) for group in groups]), torch.cat(groups)


@pytest.mark.parametrize('crowd', CROWDS)
@pytest.mark.parametrize('count', [1, 40, 400, 1500])
@pytest.mark.parametrize('function, arguments', [
    *((nms, (threshold, offset)) for threshold in (0., 0.3, 0.7) for offset in (0, 1)),
    *((soft_nms, (0.3, 0.5, 0.05, method, offset)) for method in ('naive', 'linear', 'gaussian')
      for offset in (0, 1)),
    *((matched, (threshold,)) for threshold in (0., 0.3, 0.7))])
def test_the_kept_boxes_are_mmcvs(ours_and_theirs, count, crowd, function, arguments):
    count = count if function is nms else min(count, 400)
    ours, expected = ours_and_theirs(function, *draw(count, count, *CROWDS[crowd]), *arguments)
    assert torch.equal(ours[1], expected[1])
    if 'gaussian' in arguments:
        torch.testing.assert_close(ours[0], expected[0], rtol=1e-5, atol=0)
    else:
        assert torch.equal(ours[0], expected[0])


@pytest.mark.parametrize('threshold', [-0.1, 0., 0.5, 1.])
@pytest.mark.parametrize('offset', [0, 1])
@pytest.mark.parametrize('count', [60, 400])
def test_nms_of_impossible_boxes_is_mmcvs(ours_and_theirs, count, offset, threshold):
    boxes, scores = draw(count)
    boxes[7, 2], boxes[8], boxes[10, 0], boxes[12] = NAN, INF, -INF, -INF
    boxes[11, 2], boxes[13, 3], boxes[14] = boxes[11, 0], boxes[13, 1] - 9, 0
    boxes[15], boxes[16] = boxes[17] * 1e-25, boxes[18] * 1e25
    boxes[19, 2], boxes[20] = boxes[19, 0] - 200, boxes[20].roll(2)
    scores[5] = NAN
    ours, expected = ours_and_theirs(nms, boxes, scores, threshold, offset)
    assert torch.equal(ours[1], expected[1])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 70), st.integers(0, 2 ** 16), st.sampled_from([0., 0.2, 0.5, 0.8]),
       st.integers(0, 1), st.sampled_from([3, 30]))
def test_nms_is_the_definition_with_ties_by_index(count, seed, threshold, offset, grid):
    random = torch.Generator().manual_seed(seed)
    corner = torch.randint(0, grid, (count, 2), generator=random)
    boxes = torch.cat([corner, corner + torch.randint(0, 9, (count, 2), generator=random)], 1)
    scores = torch.randint(0, 4, (count,), generator=random) / 4
    scores[scores == 0.75] = NAN
    kept = nms(boxes.float(), scores, threshold, offset)[1]
    assert kept.tolist() == naive_nms(boxes.float(), scores, threshold, offset)


def test_every_way_to_sweep_gives_the_same_boxes(monkeypatch):
    for crowd, (size, room) in CROWDS.items():
        boxes, scores = draw(400, 3, size, room)
        cols = kernels.columns(boxes[kernels.rank(scores)], 0)
        device = cols.device
        expected = naive_nms(boxes, scores, 0.4)
        conflicts = kernels.dense_conflicts(cols, float(np.float32(0.4)), 0)
        found = {'blocks': kernels.greedy(400, conflicts, device, 64),
                 'one block': kernels.greedy(400, conflicts, device, 400)}
        ranked = boxes[kernels.rank(scores)].numpy()
        for name, allowed in (('listed', 1 << 20), ('dense', -1 << 20)):
            monkeypatch.setattr(kernels, '_CROWD_ALLOWED', allowed)
            found[name] = torch.from_numpy(kernels.keep_cpu(ranked, float(np.float32(0.4)), 0))
        monkeypatch.setattr(kernels, 'resolve', kernels._resolve_rounds)
        found['rounds'] = kernels.greedy(400, conflicts, device, 64)
        monkeypatch.undo()
        order = kernels.rank(scores)
        for name, kept in found.items():
            assert order[kept].tolist() == expected, (crowd, name)


def degenerate(random, count):
    """Boxes of few sizes or many, some of them equal, inverted, huge, tiny, infinite or NaN."""
    corner = random.random((count, 2)) * 10 ** random.uniform(0.3, 3.5)
    boxes = np.concatenate([corner, corner + random.random((count, 2)) * 60], 1)
    if random.random() < 0.5:
        boxes = boxes.round()
    boxes = (boxes * 10. ** random.choice([-30, -22, 0, 0, 0, 18])).astype(np.float32)
    boxes += np.float32(random.choice([0, 0, 2 ** 24]))
    for share in random.choice([0, 0.1], 3):
        chosen = random.random(count) < share
        boxes[chosen] = boxes[chosen][:, [2, 3, 0, 1]]
        boxes[chosen, random.integers(4)] = random.choice([NAN, INF, -INF, 0, -0., 1e38, 1e-40])
        boxes[random.random(count) < share] = boxes[0]
    return boxes


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2 ** 32), st.sampled_from([1, 2, 7, 100, 256, 257, 600]), st.integers(0, 1),
       st.sampled_from([-0.1, 0., 1e-30, 0.005, 0.01, 1 / 3, 0.5, 0.7, 1., 1.5, INF, NAN]))
def test_listed_conflicts_keep_the_boxes_that_blocks_keep(seed, count, offset, threshold):
    random = np.random.default_rng(seed)
    boxes = torch.from_numpy(degenerate(random, count))
    scores = random.choice([0., -0., 0.25, NAN], count).astype(np.float32)
    if seed % 2:
        scores = random.random(count, np.float32)
    scores = torch.from_numpy(scores)
    order = kernels.rank(scores)
    conflicts = kernels.dense_conflicts(kernels.columns(boxes[order], offset),
                                        float(np.float32(threshold)), offset)
    expected = order[kernels.greedy(count, conflicts, order.device, 256)]
    assert kernels.nms(boxes, scores, threshold, offset).tolist() == expected.tolist()


def test_conflicts_are_settled_in_rounds():
    """A chain in which every other box stays; a sweep that is not symmetric."""
    chain, sweep = (torch.zeros(size, size, dtype=torch.bool) for size in (101, 3))
    chain.diagonal(1)[:] = True
    sweep[1, 0] = sweep[1, 2] = True
    every_other = [i % 2 == 0 for i in range(101)]
    for conflicts, kept in ((chain, every_other), (sweep, [True, True, False])):
        for settle in (kernels.resolve, kernels._resolve_rounds):
            assert settle(conflicts.clone()).tolist() == kept


def test_equal_scores_go_by_index_on_any_number_of_boxes():
    boxes = torch.tensor([[0., 0, 10, 10]]).repeat(3000, 1)
    assert nms(boxes, torch.full((3000,), 0.5), 0.5)[1].tolist() == [0]
    boxes = draw(3000, size=4, room=3000.)[0]
    assert torch.equal(nms(boxes, torch.full((3000,), 0.5), 0.9)[1], torch.arange(3000))


@pytest.mark.parametrize('classes', [1, 5, 80])
def test_batched_nms_keeps_what_mmcv_keeps(ours_and_theirs, classes):
    boxes, scores = draw(2500, classes, 50, 250.)
    labels = torch.arange(2500) % classes
    for config in ({'iou_threshold': 0.6}, {'iou_threshold': 0.6, 'split_thr': 500},
                   {'iou_threshold': 0.6, 'max_num': 100, 'class_agnostic': True},
                   {'type': 'soft_nms', 'iou_threshold': 0.3, 'min_score': 0.05}):
        (dets, kept), expected = ours_and_theirs(batched_nms, boxes, scores, labels, dict(config))
        assert torch.equal(kept, expected[1]), config
        assert torch.equal(dets, expected[0]), config


def test_nms_of_nothing_and_of_other_scores():
    for shape in ((0, 4), (0,)):
        kept = kernels.nms(torch.zeros(shape), torch.zeros(0), 0.5, 0)
        assert kept.shape == (0,) and kept.dtype == torch.long
    dets, kept = soft_nms(torch.zeros(0, 4), torch.zeros(0))
    assert dets.shape == (0, 5) and kept.shape == (0,) and kept.dtype == torch.long
    boxes, scores = draw(50)
    expected = nms(boxes, scores, 0.3)[1]
    assert torch.equal(nms(boxes.requires_grad_(), scores, 0.3)[1], expected)
    assert torch.equal(nms(boxes, scores.double(), 0.3)[1], expected)


@pytest.mark.skipif(not ops.is_compiled(), reason='no compiled mmcv here')
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(0, 2 ** 16), st.sampled_from(['naive', 'linear']))
def test_soft_nms_breaks_ties_as_mmcv_does(count, seed, method):
    random = torch.Generator().manual_seed(seed)
    corner = torch.randint(0, 12, (count, 2), generator=random)
    boxes = torch.cat([corner, corner + torch.randint(0, 9, (count, 2), generator=random)], 1)
    boxes = boxes.float()
    scores = torch.randint(0, 4, (count,), generator=random) / 4
    scores[torch.rand(count, generator=random) < 0.1] = NAN
    dets, kept = soft_nms(boxes, scores, 0.2, 0.5, 0.3, method)
    with ops.using('compiled'):
        expected_dets, expected = soft_nms(boxes, scores, 0.2, 0.5, 0.3, method)
    assert torch.equal(kept, expected)
    assert dets.numpy().tobytes() == expected_dets.numpy().tobytes()


@pytest.mark.parametrize('levels', [3, 40, 1 << 20])
@pytest.mark.parametrize('method', ['naive', 'linear'])
def test_soft_nms_with_scores_at_the_limit_is_mmcvs(ours_and_theirs, method, levels):
    """Few levels make ties, 40 some of them, many none but what the decay makes.

    Some scores are the limit itself, which is not below it."""
    boxes, scores = draw(300, 5, 60, 200.)
    scores = (scores * levels).ceil() / levels
    scores[::17] = least = 0.125
    ours, expected = ours_and_theirs(soft_nms, boxes, scores, 0.3, 0.5, least, method)
    for a, b in zip(ours, expected):
        assert torch.equal(a, b)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2 ** 32), st.sampled_from([1, 2, 9, 40]), st.integers(0, 2),
       st.integers(0, 1), st.sampled_from([0., 0.3, 1., NAN]), st.sampled_from([0.5, 1e-6, -1.]),
       st.sampled_from([1e-3, 0.3, 0., -0.2, -INF, INF, NAN]), st.sampled_from([1, 99, 1 << 16]))
def test_soft_nms_is_the_definition(seed, count, method, offset, threshold, sigma, least, tile):
    """Of any boxes and scores, also where the factors of few boxes only are computed together."""
    random = np.random.default_rng(seed)
    boxes = degenerate(random, count)
    scores = random.choice([0., -0., 0.25, 1 / 3, -0.5, NAN, INF, -INF], count).astype(np.float32)
    if seed % 2:
        scores = random.random(count, np.float32)
    parameters = [np.float32(number) for number in (threshold, sigma, least)]
    with np.errstate(all='ignore'):
        expected, final = naive_soft_nms(boxes, scores, *parameters, method, offset)
    dets = torch.empty(count, 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(kernels.TILE, 'cpu', tile)
        kept = kernels.softnms(torch.from_numpy(boxes), torch.from_numpy(scores), dets, threshold,
                               sigma, least, method, offset)
    assert kept.tolist() == expected
    np.testing.assert_array_equal(dets[:len(kept), 4].numpy(), np.array(final, np.float32))


def test_soft_nms_follows_the_working_order_once_a_tie_appears():
    """The last box comes to the front and the first behind the second, which falls to its score."""
    boxes = torch.tensor([[50., 0, 60, 10], [0, 0, 10, 5], [0, 0, 10, 10]])
    scores = torch.tensor([0.25, 0.5, 1.])
    dets, kept = soft_nms(boxes, scores)
    assert dets[:, 4].tolist() == [1., 0.25, 0.25] and kept.tolist() == [2, 1, 0]


def test_nms_match_breaks_ties_by_index_and_takes_nothing():
    dets = torch.tensor([[0., 0, 9, 9, .5], [0, 0, 9, 9, .5], [50, 50, 60, 60, .5],
                         [0, 0, 9, 9, .9], [50, 50, 60, 60, .5]])
    assert [g.tolist() for g in nms_match(dets, 0.5)] == [[3, 0, 1], [2, 4]]
    assert nms_match(torch.zeros(0, 5), 0.5) == []
    assert kernels.nms_match(torch.zeros(0, 5), 0.5) == []
