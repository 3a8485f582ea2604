"""Whatever draws while a batch is made, in whichever process, draws from the batch's stream."""
import functools
import pickle
import random

import helper_module
import numpy as np
import pytest
import torch
from harness import digest
from loaders import BATCH, SIZE, Noisy, Piped, adopted, check_training, loader
from mmcv.transforms.utils import cache_randomness
from mmengine.dataset import Compose, DefaultSampler, default_collate, pseudo_collate
from torch.utils.data import DataLoader

from mmrepro.data import generators
from mmrepro.data.fetch import KeyedCollate, keyed_collate
from mmrepro.errors import RandomnessError
from mmrepro.objects.walks import direct_references

OF_MODULE = np.random.default_rng(0)


def scaled(batch, by=3):
    """Return a collate function that draws, from every generator that it can reach."""
    scale = random.choice([1., 2.]) + np.random.rand() + torch.rand(()) + OF_MODULE.random()
    return dict(x=[item['x'] * scale * by for item in batch])


class Scaled:
    def __init__(self):
        self.rng = random.Random(7)

    def __call__(self, batch):
        return dict(x=[item['x'] * self.rng.random() for item in batch])


COLLATES = {'function': scaled, 'partial': functools.partial(scaled, by=2), 'object': Scaled}


class Draws:
    @functools.wraps(np.mean)  # copies the name of a library's module
    def __call__(self, x):
        return x + OF_MODULE.random()


def test_globals_are_looked_for_in_methods_of_users_and_not_in_those_of_libraries():
    assert ('numpy:OF_MODULE', OF_MODULE) in list(direct_references(Draws(), 'x'))
    assert [path for path, _ in direct_references(torch.nn.Flatten(), 'x') if ':' in path] == []


def shuffled(dataset):
    return DefaultSampler(dataset, seed=0)


@pytest.mark.parametrize('name', [
    'function', 'object', pytest.param('partial', marks=pytest.mark.nightly)])
def test_a_collate_function_may_draw(name, tmp_path):
    def make(workers=0):
        collate = COLLATES[name]
        return loader(shuffled, workers, collate=collate() if collate is Scaled else collate)

    whole = check_training(make, tmp_path)
    assert check_training(functools.partial(make, 2), tmp_path / 'workers', points=(8, )) == whole


@pytest.mark.parametrize('function', [
    pseudo_collate, functools.partial(pseudo_collate), default_collate,
    torch.utils.data.default_collate])
def test_collate_functions_that_draw_nothing_are_left_alone(function):
    assert keyed_collate(function) is function


def test_a_keyed_collate_function_can_be_called_by_hand_and_travels():
    collate = pickle.loads(pickle.dumps(KeyedCollate(list)))
    assert collate([1, 2]) == [1, 2]
    assert keyed_collate(collate) is collate


def test_bare_samples_arrive_as_a_plain_list():
    class Bare(Noisy):
        def __getitem__(self, i):
            return super().__getitem__(i)['x']

    batch = next(iter(adopted(loader(shuffled, dataset=Bare))))
    assert type(batch) is list and len(batch) == BATCH


KINDS = {
    'numpy': lambda: np.random.default_rng(7),
    'numpy, Philox': lambda: np.random.Generator(np.random.Philox(7)),
    'RandomState': lambda: np.random.RandomState(7),
    'python': lambda: random.Random(7),
    'torch': lambda: torch.Generator().manual_seed(7),
    'method': lambda: np.random.default_rng(7).random,
}


def drawn(generator):
    if callable(generator):
        return generator()
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator))
    return float(generator.random_sample() if isinstance(generator, np.random.RandomState)
                 else generator.random())


class Adds:
    def __init__(self, kind):
        self.generator = KINDS[kind]()

    def __call__(self, item):
        return dict(x=item['x'] + drawn(self.generator))


class Own(Noisy):
    """Generators in itself, its class, its module, a transform of its pipeline, a closure."""
    of_class = random.Random(3)

    def __init__(self, kind='numpy'):
        self.generator = KINDS[kind]()
        inner = KINDS[kind]()
        self.pipeline = Compose([
            Adds(kind), lambda item: dict(x=item['x'] + drawn(inner)), self.shift])

    def shift(self, item):
        return dict(x=item['x'] + OF_MODULE.random() + self.of_class.random())

    def __getitem__(self, i):
        item = super().__getitem__(i)
        return self.pipeline(dict(x=item['x'] + drawn(self.generator)))


def two_epochs(made, skip=0):
    """Return the digests of the batches; something else draws after each epoch."""
    found = []
    made.batch_sampler._mmrepro_loader_position.skip = skip
    for epoch in range(2):
        made.batch_sampler.sampler.set_epoch(epoch)
        found += [digest(batch) for batch in made]
        torch.rand(3), random.random()
    return found


@pytest.mark.parametrize('kind', KINDS)
def test_generators_of_data_sets_and_transforms_belong_to_the_sample(kind):
    def batches(workers=0, skip=0):
        return two_epochs(adopted(loader(shuffled, workers, dataset=lambda: Own(kind))), skip)

    whole = batches()
    assert len(set(whole)) == 8
    assert batches(workers=2) == whole
    assert batches(skip=3) == whole[3:]


def test_loading_in_the_main_process_leaves_its_generators_alone():
    """A hook that draws from the dataset's generator does not see who loads the samples."""
    made = adopted(loader(shuffled, dataset=Own))
    before = [repr(made.dataset.generator.bit_generator.state), repr(OF_MODULE.__getstate__()),
              OF_MODULE.bit_generator.state['state']]
    list(made)
    assert before == [repr(made.dataset.generator.bit_generator.state),
                      repr(OF_MODULE.__getstate__()), OF_MODULE.bit_generator.state['state']]


def test_a_switched_pipeline_brings_its_own_generators():
    made, resumed = (adopted(loader(shuffled, dataset=Own)) for _ in range(2))
    list(made)
    for each in (made, resumed):
        each.dataset.pipeline = Compose([Adds('python')])
    whole = [digest(batch) for batch in made]
    resumed.batch_sampler._mmrepro_loader_position.skip = 2
    assert [digest(batch) for batch in resumed] == whole[2:]


def test_no_two_generators_share_a_stream():
    own = Own()
    found = generators.find(own, 'Own')
    generators.begin_stream(found, 3, 'sample', 0, 5)
    values = [drawn(generator) for generator in found.values()]
    assert len(set(values)) == len(found)
    generators.begin_stream(found, 3, 'sample', 0, 5)
    assert values == [drawn(generator) for generator in found.values()]


class FromTheSystem(Noisy):
    def __init__(self):
        self.pipeline = [random.SystemRandom()]


class Counting(np.random.MT19937):
    """Takes no seed."""

    def __init__(self):
        super().__init__(0)


class CannotBeSeeded(Noisy):
    def __init__(self):
        self.generator = np.random.Generator(Counting())


class NoSampler:
    def __iter__(self):
        return iter([[0, 1], [2, 3]])

    def __len__(self):
        return 2


@pytest.mark.parametrize('make, message', [
    (lambda: loader(dataset=FromTheSystem), r'dataset.pipeline\[0\] is a random.SystemRandom'),
    (lambda: loader(dataset=CannotBeSeeded),
     'dataset.generator is a Generator that cannot be seeded'),
    (lambda: DataLoader(Noisy(), batch_sampler=NoSampler()),
     'the batch sampler NoSampler has no attribute')])
def test_what_cannot_be_seeded_or_moved_is_refused(make, message):
    with pytest.raises(RandomnessError, match=message):
        adopted(make())


class Shares(Noisy):
    """The global generators, which are none of its own."""

    def __init__(self):
        self.one, self.two = np.random.mtrand._rand, torch.default_generator
        self.three = random.random


class Sums(Noisy):
    """Sums so large that torch shares them out to its threads."""

    def __getitem__(self, i):
        picture = torch.rand(3, 300, 400)
        return dict(x=torch.stack([picture.mean(), picture.std(), picture.square().sum()]))


def test_threads_of_the_main_process_do_not_matter():
    """Workers have one each."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        def summed(batch):
            assert torch.get_num_threads() == 1
            return torch.rand(400, 300).sum()

        for collate in (pseudo_collate, summed):
            alone, two = ([digest(batch) for batch in adopted(loader(
                shuffled, workers, dataset=Sums, collate=collate))] for workers in (0, 2))
            assert alone == two
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_in_worker_mode_streams_go_on_from_sample_to_sample():
    """``worker_seed='worker'``: one worker and the main process are the same."""
    def batches(workers):
        return two_epochs(adopted(loader(shuffled, workers, dataset=Own, collate=scaled),
                                  worker_seed='worker'))

    alone = batches(0)
    assert len(set(alone)) == 8 == 2 * -(-SIZE // BATCH)
    assert batches(1) == alone


def decorated(function):
    rng = random.Random(4)

    @functools.wraps(function)
    def wrapper(*args):
        return function(*args) + rng.random()
    return wrapper


def undeclared(function):
    """Leaves no `__wrapped__`."""
    def wrapper(*args):
        return function(*args)
    return wrapper


CACHED, STATIC, CLASS, PROPERTY, WRAPPED = (np.random.default_rng(i) for i in range(5))


class Helper:
    rng = np.random.default_rng(8)

    def draw(self):
        return self.rng.random()


class Methods:
    """Draws from generators that only methods of some kind name."""
    __slots__ = ('rng', )

    def __init__(self):
        self.rng = np.random.default_rng(9)

    @cache_randomness
    def cached(self):
        return CACHED.random()

    @staticmethod
    def static():
        return STATIC.random()

    @classmethod
    def of_class(cls):
        return CLASS.random()

    @property
    def prop(self):
        return PROPERTY.random()

    @decorated
    def declared(self):
        return 0

    @undeclared
    def wrapped(self):
        return WRAPPED.random()

    def draws(self):
        return dict(static=self.static(), of_class=self.of_class(), prop=self.prop,
                    declared=self.declared(), wrapped=self.wrapped(), slot=self.rng.random(),
                    other_module=helper_module.rng.random(), other_function=helper_module.draw(),
                    helper=Helper().draw())

    def __call__(self, item):
        return dict(item, x=item['x'] + sum(self.draws().values()))


class Cached(Methods):
    """`cache_randomness` looks for its object by a weak reference."""

    def __call__(self, item):
        return dict(item, x=item['x'] + self.cached())


def test_generators_behind_methods_of_any_kind_belong_to_the_sample():
    alone, with_workers = ([digest(batch) for batch in adopted(loader(
        workers=workers, dataset=lambda: Piped(Methods(), Cached())))] for workers in (0, 2))
    assert with_workers == alone and len(set(alone)) == 4


class OwnAndBase(Helper):
    rng = np.random.default_rng(10)


@pytest.mark.parametrize('kind, names', [
    (Own, ['it.generator', 'it.pipeline.transforms[0].generator',
           'it.pipeline.transforms[1].inner', 'it.of_class', f'{__name__}:OF_MODULE']),
    (Methods, ['it.rng', *(f'{__name__}:{name}' for name in (
        'CACHED', 'STATIC', 'CLASS', 'PROPERTY', 'WRAPPED', 'Helper.rng')), 'it.declared.rng',
        'helper_module:rng', 'helper_module:hidden']),
    (OwnAndBase, ['it.rng', "it.rng'"]), (Shares, [])])
def test_generators_are_found_by_name(kind, names):
    found = generators.find(kind(), 'it')
    assert set(found) == {*names}
    if kind is OwnAndBase:  # one of the class, one of its base
        assert [*found.values()] == [OwnAndBase.rng, Helper.rng]


def test_the_script_has_one_name_in_all_processes():
    """A spawned worker imports it as `__mp_main__`."""
    def draw():
        return CACHED.random() + helper()

    def helper():
        return 0

    keys = []
    for name in ('__main__', '__mp_main__'):
        draw.__module__ = name
        keys.append([key for key in generators.find(draw, 'transform') if 'CACHED' in key])
    assert keys == [['__main__:CACHED']] * 2
