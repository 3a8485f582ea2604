"""What a dataset keeps from its earlier samples is found: they are loaded from a copy as well."""
import threading

import numpy as np
import pytest
import torch
from faults.tiny import tiny
from loaders import InOrder, Noisy, loader
from mmcv.transforms import BaseTransform
from mmengine.registry import DATASETS

from dev.user_setups import samples  # noqa: F401  registers set-ups
from dev.user_setups.setup import SETUPS
from mmrepro.another_process import MAX_ITEMS, copied
from mmrepro.config import RandomnessConfig
from mmrepro.data import adopt_loader
from mmrepro.errors import SampleDiffersError
from mmrepro.fingerprint.sample_replay import explain


def checked(made):
    config = RandomnessConfig(seed=3, deterministic=True)
    return adopt_loader(made, config, 'sample', 0, explain=explain)


class Keeping(Noisy):
    reference = None

    def __init__(self):
        self.offsets, self.generator = {}, np.random.default_rng(5)
        self.table = np.zeros(3)

    def __getitem__(self, i):
        return dict(super().__getitem__(i), kept=float(self.kept(i)))


class ReferenceImage(Keeping):
    def kept(self, i):
        if self.reference is None:
            self.reference = float(i)
        return self.reference


class Pure(Keeping):
    """Caches what follows from the sample, and draws from a generator that is keyed."""

    def kept(self, i):
        return self.offsets.setdefault(i, i) + self.generator.random()


class Locked(ReferenceImage):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


def passes(dataset, workers=0, epochs=1):
    made = checked(loader(InOrder, workers, dataset))
    return [[batch for batch in made] for _ in range(epochs)]


@pytest.mark.parametrize('setup, path', [
    ('MeanOfTheFirst', 'dataset.pipeline.transforms[2].reference'),
    ('MemoOfTheDataset', 'dataset.memo'), ('RunningMean', '')])
@pytest.mark.parametrize('workers', [0, 2])
def test_what_is_kept_from_earlier_samples_is_named(setup, path, workers, tmp_path):
    cfg = tiny(tmp_path)
    cfg.train_dataloader.dataset.size = 16
    SETUPS[setup].change(cfg)
    with pytest.raises(SampleDiffersError) as caught:
        passes(lambda: DATASETS.build(cfg.train_dataloader.dataset), workers)
    if path:  # otherwise it differs already when it is loaded twice in a row
        assert 'from a copy of the dataset' in str(caught.value)
        assert f'left in {path}' in str(caught.value)


@pytest.mark.parametrize('dataset, workers', [(Pure, 0), (Pure, 2), (Locked, 0)])
def test_pure_caches_and_what_cannot_be_copied_are_no_difference(dataset, workers):
    """What cannot be copied is loaded twice only."""
    passes(dataset, workers, epochs=2 if dataset is Pure else 1)
    assert copied(Locked()) is None


def test_a_dataset_that_hooks_change_between_epochs_is_no_difference():
    dataset = Pure()
    made = checked(loader(InOrder, 0, lambda: dataset))
    for epoch in range(3):
        dataset.table = np.full(3, float(epoch))
        dataset.kept = lambda i, epoch=epoch: epoch
        made.batch_sampler.sampler.set_epoch(epoch)
        assert len(list(made)) > 1


def test_a_copy_shares_annotations_and_modules_and_nothing_else():
    dataset = Noisy()
    dataset.annotations = [dict(box=[i]) for i in range(MAX_ITEMS + 1)]
    dataset.pipeline, dataset.net = [dict(seen=[])], torch.nn.Linear(2, 2)
    dataset.pixels = np.zeros((512, 512))
    copy = copied(dataset)
    assert copy.annotations is dataset.annotations and copy.net is dataset.net
    assert copy.pixels is dataset.pixels
    assert copy.pipeline is not dataset.pipeline
    assert copy.pipeline[0]['seen'] is not dataset.pipeline[0]['seen']


def test_a_copy_of_a_used_transform_draws_by_itself():
    """mmcv refers to a transform whose random numbers were shared by a weak reference."""
    from mmcv.transforms.utils import cache_random_params, cache_randomness

    class Drawing(BaseTransform):
        @cache_randomness
        def number(self):
            return np.random.random()

        def transform(self, results):
            return results + self.number()

    transform = Drawing()
    for _ in range(2):
        with cache_random_params(transform):
            assert transform.transform(0) == transform.transform(0)
    duplicate = copied(transform)
    with cache_random_params(duplicate):
        assert duplicate.transform(0) == duplicate.transform(0)
