"""MMYOLO's cached mixing, whose chance comes before the cache: a stub of its transform."""
import copy

import numpy as np
from loaders import adopted
from mmengine.dataset import DefaultSampler
from pictures import SIZE, Pictures, draw
from torch.utils.data import DataLoader

from mmrepro.patches import PATCHES
from mmrepro.patches.cached_transforms import pure_by_chance


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
    stock = type('Uncached', (BaseMixImageTransform, ), {'use_cached': False})
    patched = type('Patched', (stock, ), {
        'transform': pure_by_chance(BaseMixImageTransform.transform)})
    assert epoch(stock, 0) == epoch(patched, 0)


def test_the_row_names_the_class_of_mmyolo():
    rows = [patch for patch in PATCHES if patch.replacement.endswith('pure_by_chance')]
    assert [row.target for row in rows] == [
        'mmyolo.datasets.transforms.mix_img_transforms:BaseMixImageTransform.transform']
