"""Cached transforms: which samples they mix in, in concatenated datasets and in MMYOLO."""
import copy
import itertools

import numpy as np
import pytest
import torch
from loaders import adopted
from mmcv.transforms import RandomApply
from mmdet.datasets import ConcatDataset, MultiImageMixDataset
from mmdet.datasets.transforms import CachedMixUp, CachedMosaic
from mmengine.dataset import ClassBalancedDataset, DefaultSampler, InfiniteSampler, RepeatDataset
from mmengine.registry import DATASETS
from mmengine.runner.runner import _SlicedDataset
from pictures import SIZE, Pictures, bits, draw
from torch.utils.data import DataLoader, Subset

from mmrepro.data.batch_context import BatchContext
from mmrepro.data.dataset_tree import holder, path_of
from mmrepro.data.samplers import with_position
from mmrepro.patches import PATCHES
from mmrepro.patches.cached_transforms import pure_by_chance

pytestmark = pytest.mark.usefixtures('patched')

OF_PART = 100  # labels of a part begin at a multiple of it


class Part(Pictures):
    METAINFO = dict(classes=('a', 'b'))

    def __init__(self, number, size=SIZE, pipeline=()):
        self.number, self.size = number, size
        super().__init__(pipeline=list(pipeline), serialize_data=False)

    def load_data_list(self):
        return [dict(number=i, label=OF_PART * self.number + i) for i in range(self.size)]

    def get_cat_ids(self, idx):
        return [0] if idx else [1]


def labelled(results):
    results['gt_bboxes_labels'] = np.array([results['label']])
    return results


def cached():
    return [draw, labelled, CachedMosaic(img_scale=(SIZE, SIZE), max_cached_images=6),
            CachedMixUp(img_scale=(2 * SIZE, 2 * SIZE), max_cached_images=4)]


built = DATASETS.build


def part(number, size, pipeline=None):
    return dict(type=Part, number=number, size=size,
                pipeline=cached() if pipeline is None else pipeline)


def repeated(dataset, times):
    return dict(type=RepeatDataset, times=times, dataset=dataset)


def joined(*datasets):
    return dict(type=ConcatDataset, datasets=list(datasets))


DATA = {
    'two parts': lambda: built(joined(part(0, 7), part(1, 9))),
    'one part without': lambda: built(joined(part(0, 7, [draw, labelled]), part(1, 9))),
    'wrapped parts': lambda: built(joined(
        repeated(part(0, 4), 3), part(2, 3),
        dict(type=ClassBalancedDataset, oversample_thr=0.9, dataset=part(1, 5)))),
    'wrapped whole': lambda: _SlicedDataset(built(repeated(joined(
        joined(part(1, 4), part(2, 3)), part(0, 5)), 2)), 20),
    'one of many': lambda: built(part(0, 16)),
    'subset': lambda: Subset(DATA['two parts'](), range(1, 16)),
}


def batches(dataset, workers=0, skip=0, sampler=DefaultSampler, count=8):
    dataset = DATA[dataset]()
    made = adopted(DataLoader(dataset, batch_size=5, sampler=sampler(dataset, seed=0),
                              num_workers=workers, collate_fn=list))
    made.batch_sampler._mmrepro_loader_position.skip = skip
    return list(itertools.islice(made, count - skip))


def as_bits(found):
    return [[bits(item) for item in batch] for batch in found]


@pytest.mark.parametrize('name, sampler', [
    *((name, DefaultSampler) for name in DATA), ('wrapped whole', InfiniteSampler)])
def test_neither_workers_nor_a_resume_matter(name, sampler):
    whole = batches(name, sampler=sampler)
    assert len(whole) > 2
    assert as_bits(batches(name, 2, sampler=sampler)) == as_bits(whole)
    for skip in range(1, len(whole), 2):
        assert as_bits(batches(name, 0, skip, sampler)) == as_bits(whole)[skip:]


@pytest.mark.parametrize('name', DATA)
def test_samples_mix_within_their_part(name):
    mixed = 0
    for item in itertools.chain(*batches(name, sampler=InfiniteSampler)):
        labels = item['gt_bboxes_labels']
        assert len(set((labels // OF_PART).tolist())) <= 1, 'an image of another part'
        mixed += len(set(labels.tolist())) > 2
    assert mixed > 8


def test_a_transform_is_found_where_it_is():
    inside = cached()
    deep = RandomApply([inside[2]], prob=1.)
    shared = CachedMosaic(img_scale=(SIZE, SIZE))
    dataset = built(joined(joined(part(1, 4, [deep, shared]), part(2, 3)),
                           part(0, 4, [draw, shared])))
    inner = dataset.datasets[0]
    assert holder(dataset, inside[2]) == ((0, 0), inner.datasets[0])
    assert holder(dataset, shared) == ((), dataset), 'one object for several parts'
    assert holder(dataset, cached()[2]) == ((), dataset), 'not found'
    assert holder(inner, shared) == ((0, ), inner.datasets[0])


def test_a_transform_of_a_wrapper_mixes_all_parts():
    dataset = MultiImageMixDataset.__new__(MultiImageMixDataset)
    dataset.dataset, dataset.pipeline = DATA['one part without'](), cached()[2:]
    assert holder(dataset, dataset.pipeline[0]) == ((), dataset)
    assert path_of(dataset, 8) == (1, )


def test_extra_samples_differ_from_part_to_part():
    dataset = DATA['two parts']()
    batch = BatchContext(dataset, 3, 'sample', [with_position(i, 0, i) for i in (0, 8, 1, 9)])
    left, right = (batch.subtree(part.pipeline.transforms[2]) for part in dataset.datasets)
    keys = [batch.entry(part.handle(k))[1] for part in (left, right) for k in range(5)]
    keys += [batch.entry(handle)[1] for handle in [((), k) for k in range(5)] + list(range(4))]
    assert len(set(keys)) == 19
    assert [left.handle(k) for k in (5, 6)] == [0, 2]
    assert [right.handle(k) for k in (5, 6)] == [1, 3]
    batch.current = 2
    assert (left.current(), right.current()) == (6, 6)
    assert torch.equal(torch.tensor(batch.paths), torch.tensor([[0], [1], [0], [1]]))


class BaseMixImageTransform:
    """The order of draws and of the cache in MMYOLO 0.6's class of this name."""
    use_cached, max_cached_images, prob = True, 10, 0.5

    def __init__(self):
        self.results_cache = []

    def transform(self, results):
        if np.random.uniform(0, 1) > self.prob:
            return results
        dataset = results.pop('dataset', None)
        self.results_cache.append(copy.deepcopy(results))
        if len(self.results_cache) > self.max_cached_images:
            self.results_cache.pop(0)
        if len(self.results_cache) <= 4:
            return results
        for number in np.random.randint(0, len(self.results_cache), 3):
            results['img'] = results['img'] + self.results_cache[number]['img']
        return dict(results, dataset=dataset)

    def __call__(self, results):
        return self.transform(results)


class Patched(BaseMixImageTransform):
    transform = pure_by_chance(BaseMixImageTransform.transform)


def epoch(kind, workers):
    dataset = Pictures(pipeline=[
        draw, lambda results: dict(results, dataset=object()), kind(), kind()])
    loader = adopted(DataLoader(dataset, 4, sampler=DefaultSampler(dataset, seed=0),
                                num_workers=workers, collate_fn=list))
    return [item['img'].tobytes() for batch in loader for item in batch]


def test_samples_mix_in_others_whatever_the_number_of_workers():
    alone = epoch(Patched, 0)
    assert epoch(Patched, 2) == alone
    assert len(alone) == SIZE
    unmixed = epoch(type('Never', (Patched, ), {'prob': -1}), 0)
    mixed = sum(one != other for one, other in zip(alone, unmixed))
    assert 0 < mixed < SIZE, 'some samples are mixed and some are not'
    # without the patch it matters
    assert epoch(BaseMixImageTransform, 0) != epoch(BaseMixImageTransform, 2)


def test_without_a_cache_the_stock_method_runs():
    uncached = type('Uncached', (BaseMixImageTransform, ), {'use_cached': False})
    pure = type('Pure', (uncached, ), {'transform': Patched.transform})
    assert epoch(uncached, 0) == epoch(pure, 0)


def test_the_row_names_the_class_of_mmyolo():
    rows = [patch for patch in PATCHES if patch.replacement.endswith('pure_by_chance')]
    assert [row.target for row in rows] == [
        'mmyolo.datasets.transforms.mix_img_transforms:BaseMixImageTransform.transform']
