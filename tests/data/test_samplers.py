"""Orders of samplers are pure functions of (root, epoch, position), whatever has run before."""
import itertools
from types import SimpleNamespace

import pytest
from mmdet.datasets import ConcatDataset, samplers
from mmengine.dataset import DefaultSampler, InfiniteSampler
from pictures import SizedPictures as Images
from pictures import pretend_rank
from torch.utils.data import BatchSampler

from mmrepro.data.samplers import LoaderPosition, adopt_sampler, plain, with_position
from mmrepro.data.sampling_orders import infinite
from mmrepro.errors import RandomnessError


def concat(*sizes):
    return ConcatDataset([Images(size) for size in sizes])


SAMPLERS = {
    'default': lambda: DefaultSampler(Images(11), seed=1),
    'ordered': lambda: DefaultSampler(Images(11), shuffle=False, seed=1),
    'ragged': lambda: DefaultSampler(Images(11), round_up=False, seed=1),
    'infinite': lambda: InfiniteSampler(Images(11), seed=1),
    'class aware': lambda: samplers.ClassAwareSampler(Images(11), seed=1),
    'multi source': lambda: samplers.MultiSourceSampler(concat(7, 5), 3, [1, 2], seed=1),
    'group multi source': lambda: samplers.GroupMultiSourceSampler(
        concat(17, 15), 3, [1, 2], seed=1),
    'custom size': lambda: samplers.CustomSampleSizeSampler(concat(7, 5), [3, -1], seed=1),
    'multi data': lambda: samplers.MultiDataSampler(concat(7, 5), [1, 2], seed=1),
}
ENDLESS = ('infinite', 'multi source', 'group multi source')


@pytest.fixture
def ranks(monkeypatch):
    def build(name, rank=0, world_size=1, root=0):
        pretend_rank(monkeypatch, rank, world_size)
        return adopt_sampler(SAMPLERS[name](), LoaderPosition(root))

    return build


def take(sampler, name='', count=40):
    count = count if name in ENDLESS else None
    return [(int(i), i.epoch, i.position) for i in itertools.islice(sampler, count)]


@pytest.mark.parametrize('name', sorted(set(SAMPLERS) - set(ENDLESS) - {'ordered'}))
def test_epochs_and_neighbouring_seeds_do_not_repeat_each_other(ranks, name):
    orders = set()
    for root, epoch in itertools.product(range(3), range(3)):
        sampler = ranks(name, root=root)
        sampler.set_epoch(epoch)
        order = take(sampler)
        assert {e for _, e, _ in order} == {epoch}
        orders.add(tuple(index for index, _, _ in order))
    assert len(orders) == 9


@pytest.mark.parametrize('name', SAMPLERS)
@pytest.mark.parametrize('world_size', [2, 3])
def test_ranks_have_positions_of_their_own(ranks, name, world_size):
    positions = [[p for _, _, p in take(ranks(name, rank, world_size), name, 12)]
              for rank in range(world_size)]
    every = list(itertools.chain(*positions))
    assert len(set(every)) == len(every)


@pytest.mark.parametrize('name', ['default', 'infinite', 'custom size', 'ordered'])
def test_the_global_order_does_not_depend_on_the_number_of_ranks(ranks, name):
    alone = take(ranks(name), name, 24)
    left, right = (take(ranks(name, rank, 2), name, 12) for rank in range(2))
    together = list(itertools.chain(*zip(left, right)))
    assert together[:len(alone)] == alone


def test_every_image_once_an_epoch(ranks):
    assert sorted(index for index, _, _ in take(ranks('default'))) == list(range(11))
    for passed in range(3):
        window = take(ranks('infinite'), 'infinite', 44)[passed * 11:passed * 11 + 11]
        assert sorted(index for index, _, _ in window) == list(range(11))


@pytest.mark.parametrize('name', ['multi source', 'group multi source'])
def test_multi_source_keeps_its_shares_and_groups_of_a_batch_are_pure(ranks, name):
    sampler = ranks(name)
    first = sampler.cumulative_sizes[1]
    for batch in itertools.islice(BatchSampler(sampler, 3, False), 10):
        assert sum(index < first for index in batch) == sampler.num_per_source[0]
        ratios = {sampler.dataset.datasets[source].get_data_info(
            index - sampler.cumulative_sizes[source])['width'] > 2
            for index in batch for source in [sampler.dataset.get_dataset_source(index)]}
        assert len(ratios) == 1 or 'group' not in name


def test_custom_size_cycles_through_a_source_before_it_repeats(ranks):
    seen = []
    for epoch in range(3):
        sampler = ranks('custom size')
        sampler.set_epoch(epoch)
        seen += [index for index, _, _ in take(sampler) if index < 7]
    assert len(set(seen[:6])) == 6  # two epochs of three of seven


BATCH_SAMPLERS = {
    'plain': lambda sampler: BatchSampler(sampler, 4, False),
    'drop last': lambda sampler: BatchSampler(sampler, 4, True),
    'aspect ratio': lambda sampler: samplers.AspectRatioBatchSampler(sampler, 4),
    'aspect ratio, drop last': lambda sampler: samplers.AspectRatioBatchSampler(sampler, 4, True),
}


@pytest.mark.parametrize('name', BATCH_SAMPLERS)
def test_an_abandoned_pass_leaves_nothing_behind(name):
    """mmdet's aspect-ratio buckets carry samples into the next epoch, a second iter() too."""
    loader_position = LoaderPosition(0)
    sampler = DefaultSampler(Images(23), seed=1)
    assert adopt_sampler(sampler, loader_position) is sampler
    assert isinstance(sampler, DefaultSampler)
    assert len(sampler) == 23 and sampler.seed == 1
    batch_sampler = adopt_sampler(BATCH_SAMPLERS[name](sampler), loader_position, batches=True)
    whole = list(batch_sampler)
    abandoned = iter(batch_sampler)
    begun = [next(abandoned), next(abandoned)]
    assert list(batch_sampler) == whole
    assert begun + list(abandoned) == whole, 'nor is it disturbed'


def test_positions_travel_to_workers():
    import pickle
    batch = [with_position(3, 1, 40), with_position((2, 5), 1, 41)]
    received = pickle.loads(pickle.dumps(batch))
    assert received == [3, (2, 5)]
    assert [(i.epoch, i.position) for i in received] == [(1, 40), (1, 41)]
    assert [type(i) for i in received] == [type(i) for i in batch]
    assert [type(plain(i)) for i in received] == [int, tuple]


def test_an_index_of_another_type_and_a_source_without_images_are_refused():
    with pytest.raises(RandomnessError, match="the sampler yields 'a.jpg' of type str"):
        with_position('a.jpg', 0, 0)
    sampler = SimpleNamespace(dataset=[], shuffle=True, rank=0, world_size=1)
    with pytest.raises(RandomnessError, match='empty source'):
        next(infinite(sampler, 0, 0))
