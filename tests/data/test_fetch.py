"""What a sample draws is a function of its position; what it mixes in, of its batch."""
import copy

import numpy as np
import pytest
import torch
from mmdet.datasets.transforms import CachedMixUp, CachedMosaic
from mmengine.config import ConfigDict
from mmengine.dataset import DefaultSampler
from pictures import SIZE, Pictures, bits, draw
from torch.utils.data import BatchSampler, DataLoader

from mmrepro import seeds
from mmrepro.config import RandomnessConfig
from mmrepro.data import adopt_loader
from mmrepro.data.batch_context import EXTRA_SAMPLES, BatchContext, current_batch, loading
from mmrepro.data.fetch import KeyedFetch
from mmrepro.data.samplers import with_position
from mmrepro.errors import RandomnessError
from mmrepro.patches import cached_transforms
from mmrepro.patches.cached_transforms import copied, partners


def sometimes_nothing(results):
    """Refuse a sample, as FilterAnnotations does: the dataset fetches another one."""
    return None if np.random.rand() < 0.2 else results


def pipeline():
    return [draw, CachedMosaic(img_scale=(SIZE, SIZE), max_cached_images=6), sometimes_nothing,
            CachedMixUp(img_scale=(2 * SIZE, 2 * SIZE), max_cached_images=3)]


pytestmark = [pytest.mark.usefixtures('patched'), pytest.mark.usefixtures('workers_end_soon')]


def loader(workers=0, transforms=None, mode='sample', epoch=0, skip=0, seed=3, **kwargs):
    dataset = Pictures(pipeline=pipeline() if transforms is None else transforms)
    sampler = DefaultSampler(dataset, seed=0)
    made = DataLoader(dataset, batch_sampler=BatchSampler(sampler, 4, False), num_workers=workers,
                      collate_fn=list, **kwargs)
    adopt_loader(made, RandomnessConfig(seed=seed, worker_seed=mode), 'sample', rank=0)
    sampler.set_epoch(epoch)
    made.batch_sampler._mmrepro_loader_position.skip = skip
    return made


def epoch_bits(made):
    return [[bits(item) for item in batch] for batch in made]


@pytest.mark.parametrize('kwargs', [
    dict(), dict(workers=1), dict(workers=3), dict(workers=2, persistent_workers=True),
    dict(workers=2, prefetch_factor=1)], ids=str)
def test_loading_does_not_depend_on_workers_and_a_pass_can_be_entered_anywhere(kwargs):
    expected = epoch_bits(loader())
    for skip in range(4):
        assert epoch_bits(loader(**kwargs, skip=skip)) == expected[skip:]
    assert len({item for batch in expected for item in batch}) == SIZE


@pytest.mark.parametrize('mode', ['sample', 'worker'])
def test_every_epoch_draws_anew_whether_workers_persist_or_not(mode):
    """MMEngine's workers repeat their stream each epoch when they do not persist."""
    runs = []
    for persistent in (False, True):
        made = loader(2, [draw], mode, persistent_workers=persistent)
        runs.append([])
        for epoch in range(3):
            made.batch_sampler.sampler.set_epoch(epoch)
            runs[-1].append([(int(item['gt_bboxes_labels'][0]), bits(item))
                             for batch in made for item in batch])
    assert runs[0] == runs[1]
    for first, second in zip(runs[0], runs[0][1:]):
        assert sum(a == b for a, b in zip(sorted(first), sorted(second))) < SIZE / 2


def test_the_main_process_draws_nothing_for_loading():
    for mode in ('worker', 'sample'):
        for workers in (0, 2):
            made = loader(workers, [draw], mode)
            seeds.seed_all(0, 'step', 0)
            expected = torch.rand(2).tolist()
            seeds.seed_all(0, 'step', 0)
            torch.rand(1)
            iterator = iter(made)
            if workers or mode == 'worker':  # keyed samples in the main process start streams
                next(iterator)
                assert torch.rand(1).item() == expected[1]
            del iterator


def test_partners_come_from_the_batch_and_cost_few_extra_loads():
    made = loader()
    Pictures.loads = 0
    list(made)
    assert SIZE < Pictures.loads  # the extra samples of four batches of four, and refetches
    assert Pictures.loads <= SIZE + 4 * EXTRA_SAMPLES + SIZE  # each loaded once, refusals apart


def test_what_a_transform_sees_of_a_partner_is_what_the_partner_saw():
    dataset = Pictures(pipeline=pipeline())
    batch = [with_position(i, 0, 40 + i) for i in range(4)]
    mixup = dataset.pipeline.transforms[3]
    early = BatchContext(dataset, 3, 'sample', batch)
    states = []
    for order in ((), (0, 1, 2, 3)):
        with loading(BatchContext(dataset, 3, 'sample', batch)) as context:
            for i in order:
                context.load(i)
            states.append([bits(context.state(mixup, i)) for i in range(4)])
    assert states[0] == states[1]
    assert current_batch() is None and early.current == 0


@pytest.mark.parametrize('kind, limit', [('CachedMosaic', 6), ('CachedMosaic', 40),
                                         ('CachedMixUp', 3), ('CachedMixUp', 20)])
def test_a_sample_never_mixes_with_later_ones_or_itself(kind, limit):
    for current in range(EXTRA_SAMPLES, 60):
        chosen = partners(kind, current, limit)
        assert 0 < len(chosen) < limit
        assert all(0 <= offset < current for offset in chosen)


def structure(value, seen):
    """Return types and values, and which mutable parts are one object."""
    if isinstance(value, (list, tuple, dict)):
        if id(value) in seen:
            return seen[id(value)]
        seen[id(value)] = len(seen)
        parts = [*value.items()] if isinstance(value, dict) else value
        return type(value), [structure(part, seen) for part in parts]
    return type(value), value.tobytes() if isinstance(value, np.ndarray) else repr(value)


def mutable_parts(value):
    parts = {id(value)} if isinstance(value, (list, dict, np.ndarray)) else set()
    inside = []
    if isinstance(value, (list, tuple, dict)):
        inside = [*value.items()] if isinstance(value, dict) else value
    return parts.union(*map(mutable_parts, inside))


def nested():
    polygon, image = [1.5, 2, float('nan'), -0.0], np.arange(6.)
    instances = [dict(mask=[polygon], bbox=[1, 2, 3, 4], ignore_flag=0), dict(mask=[polygon])]
    return dict(instances=instances, img=image, again=image, shape=(3, [4, polygon]), empty=[],
                config=ConfigDict(scale=dict(size=[1, 2])), text='name', none=None, flags=[True],
                **{'no mutable part': (1, 2.5)}, key={(1, 2): [b'x', 1j]})


def test_a_copy_of_a_sample_has_what_a_deep_copy_has():
    value = nested()
    made, expected = copied(value), copy.deepcopy(value)
    assert structure(made, {}) == structure(expected, {}) == structure(value, {})
    assert not mutable_parts(made) & mutable_parts(value)
    value['itself'] = [value]
    made = copied(value)
    assert made['itself'][0] is made


def test_mixed_samples_have_the_bits_that_deep_copies_give(monkeypatch):
    with_copies = epoch_bits(loader())
    monkeypatch.setattr(cached_transforms, 'copied', copy.deepcopy)
    assert epoch_bits(loader()) == with_copies


def test_outside_of_data_loading_stock_behaviour_remains():
    dataset = Pictures(pipeline=pipeline())
    for i in range(8):
        dataset[i]
    assert len(dataset.pipeline.transforms[1].results_cache) == 6


def test_a_sample_whose_pipeline_lacks_the_transform_is_an_error():
    dataset = Pictures(pipeline=[draw])
    context = BatchContext(dataset, 0, 'sample', [with_position(0, 0, 0)])
    mosaic = CachedMosaic(img_scale=(SIZE, SIZE))
    with pytest.raises(RuntimeError, match='CachedMosaic mixes samples, but the pipeline of'):
        context.state(mosaic, 0)


def test_an_index_without_position_is_refused():
    fetch = KeyedFetch(Pictures(pipeline=[draw]), 0, 'sample', True, 0)
    for index in (3, (3, 4), (with_position(3, 0, 0), with_position(4, 0, 1))):
        with pytest.raises(RandomnessError, match='without its position'):
            fetch.__getitems__([index])


def test_the_users_worker_init_function_runs_after_ours():
    called = []
    made = DataLoader(Pictures(pipeline=[draw]))
    adopt_loader(made, RandomnessConfig(seed=0), 'sample', 0, user_init=called.append)
    made.worker_init_fn(1)
    adopt_loader(made, RandomnessConfig(seed=0), 'sample', 0, user_init=made.worker_init_fn)
    made.worker_init_fn(2)
    assert called == [1, 2]


def test_a_dataset_does_not_know_who_loads_from_it():
    dataset = Pictures(pipeline=[draw])
    before = dict(vars(dataset))
    made = adopt_loader(DataLoader(dataset, collate_fn=list), RandomnessConfig(seed=0), 'val', 0)
    list(made)
    assert vars(dataset) == before and made.dataset is dataset
