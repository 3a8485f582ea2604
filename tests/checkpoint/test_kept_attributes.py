"""Attributes that checkpoints keep: a resumed run is the uninterrupted one, wherever they live."""
import copy
import dataclasses
import enum
import random
from collections import Counter, deque

import numpy as np
import pytest
import torch
from harness import Child
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper
from mmengine.registry import DATA_SAMPLERS, DATASETS, HOOKS, MODELS, OPTIM_WRAPPERS
from small_runs import (
    NoisyLine,
    Points,
    RampedAverage,
    small_run,
    trained_runner,
    warnings_of,
    weights_of,
)

from mmrepro import keep_attributes
from mmrepro.checkpoint import kept_attributes, saving
from mmrepro.checkpoint.safe_loading import check_readable
from mmrepro.errors import CheckpointError, ConfigError, ResumeError

pytestmark = pytest.mark.usefixtures('no_pause_between_passes')

UNCHECKED = dict(seed=3, deterministic=True, self_checks=False)
POINTS = 3, 4, 5  # iterations after which a run resumes: within epochs of 4, and at an end


@pytest.fixture(autouse=True)
def rows(monkeypatch):
    """Rows of a test are gone after it."""
    monkeypatch.setattr(kept_attributes, 'KEPT', dict(kept_attributes.KEPT))


def scaled(runner, factor):
    for group in runner.optim_wrapper.param_groups:
        group['lr'] = 0.1 * factor


class Threshold:
    value = 0.


@MODELS.register_module(force=True)
class WithParts(NoisyLine):
    """Attributes of itself, of a part, of a part in a list, and of its class."""
    of_class = 0

    def __init__(self):
        super().__init__()
        self.seen, self._threshold, self.several = 0, Threshold(), dict(a=[Threshold()])

    def forward(self, x, mode='tensor'):
        if mode != 'loss':
            return super().forward(x, mode)
        self.seen += 1
        type(self).of_class += 1
        self._threshold.value += .5
        self.several['a'][0].value += .25
        factor = self.seen + type(self).of_class + self._threshold.value
        return dict(loss=super().forward(x, mode)['loss'] * (
            1 + .1 * (factor + self.several['a'][0].value)))


def test_a_rank_that_does_not_write_keeps_nothing_from_save_to_save(tmp_path, monkeypatch):
    runner = trained_runner(small_run(tmp_path, max_epochs=1))
    keep_attributes(NoisyLine, 'mistyped')
    monkeypatch.setattr(saving, 'get_world_size', lambda: 2)
    monkeypatch.setattr(saving, 'is_main_process', lambda: False)
    monkeypatch.setattr(saving.rank_state, 'gather', lambda state: {})
    writer, sizes = runner.lifecycle.checkpoints, []
    for _ in range(2):
        writer.write(runner, None, str(tmp_path), 'iter_9.pth')
        sizes.append({name: len(value) for name, value in vars(writer).items()
                      if hasattr(value, '__len__')})
    assert sizes[0] == sizes[1]


class Counting(Hook):
    """Base of a hook: what it keeps sets the learning rate."""

    def __init__(self):
        self.count, self.best = 0, None
        self.window, self.seen = deque([0.], maxlen=3), Counter()
        self.array, self.groups = np.zeros(2), {'a': (1, [0])}
        self.frozen = frozenset()

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        loss = float(outputs['loss'])
        self.count += 1
        self.best = min(loss, self.best or loss)
        self.window.append(loss)
        self.seen[self.count % 2] += 1
        self.array[0] += loss
        self.groups['a'][1][0] += 1
        scaled(runner, 1 / (1 + .1 * self.count + self.best + sum(self.window) + self.seen[1]
                            + self.array[0] + self.groups['a'][1][0]))


@HOOKS.register_module(force=True)
class CountingHook(Counting):
    pass


@HOOKS.register_module(force=True)
class TeacherHook(Hook):
    """A module and generators that belong to a hook."""

    def before_train(self, runner):
        self.teacher = copy.deepcopy(runner.model.line)
        self.generators = [torch.Generator().manual_seed(1), np.random.default_rng(1),
                           np.random.RandomState(1), random.Random(1)]

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        first, *others = self.generators
        drawn = float(torch.rand(1, generator=first)) + sum(
            float(one.random() if hasattr(one, 'random') else one.rand()) for one in others)
        with torch.no_grad():
            for mean, value in zip(self.teacher.parameters(), runner.model.line.parameters()):
                mean.lerp_(value, .3)
                value.add_(mean, alpha=.01 * drawn)


@DATASETS.register_module(force=True)
class WeightedPoints(Points):
    """Points that say which they are; the dataset has weights."""

    def __init__(self):
        super().__init__()
        self.weights = torch.ones(8)

    def __getitem__(self, i):
        return dict(x=torch.tensor([i, float(self.weights[i])]) + torch.rand(2))


class Weighted(torch.utils.data.Sampler):
    """Draws an epoch at once; ``weights`` are its own, or those of the dataset."""

    def __init__(self, dataset, seed=0):
        self.dataset, self.weights, self.passes = dataset, torch.ones(len(dataset)), 0

    def __len__(self):
        return len(self.weights)

    def __iter__(self):
        self.passes += 1
        return iter(torch.multinomial(self.source().weights * (1 + .5 * torch.arange(8) * (
            self.passes % 2)), 8, replacement=True).tolist())

    def source(self):
        return self


@DATA_SAMPLERS.register_module(force=True)
class OwnWeights(Weighted):
    pass


@DATA_SAMPLERS.register_module(force=True)
class WeightsOfDataset(Weighted):

    def source(self):
        return self.dataset


@DATA_SAMPLERS.register_module(force=True)
class Endless(OwnWeights):
    """Without an end, and it draws with the weights of each moment."""

    def __iter__(self):
        while True:
            yield from torch.multinomial(self.weights, 2, replacement=True).tolist()


class LateBatches(torch.utils.data.BatchSampler):
    """Chooses each batch when it is asked for."""

    def __init__(self, sampler, batch_size, drop_last=False):
        super().__init__(sampler, batch_size, drop_last)
        self.weights = torch.ones(8)

    def __iter__(self):
        indices = list(self.sampler)
        for _ in range(4):
            yield [indices[i] for i in torch.multinomial(self.weights, 2).tolist()]


DATA_SAMPLERS.register_module(module=LateBatches, force=True)


@HOOKS.register_module(force=True)
class Reweigh(Hook):
    """Hard example mining."""

    def __init__(self, of='sampler'):
        self.of = of

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        loader = runner.train_dataloader
        weights = dict(sampler=loader.batch_sampler.sampler, dataset=loader.dataset,
                       batches=loader.batch_sampler)[self.of].weights
        hard = int(100 * float(outputs['loss'])) % 8
        weights[hard] = weights[hard] * .5 + 4 * float(outputs['loss'])


@OPTIM_WRAPPERS.register_module(force=True)
class CountingWrapper(OptimWrapper):
    calls = 0

    def update_params(self, loss, *args, **kwargs):
        self.calls += 1
        super().update_params(loss / self.calls, *args, **kwargs)


def kept_average():
    keep_attributes(RampedAverage, 'updates', why='the decay ramps')


def kept_part():
    keep_attributes(WithParts, 'seen')
    keep_attributes(WithParts, 'of_class')
    keep_attributes(Threshold, 'value')


def data(sampler, of, **more):
    return {'custom_hooks': [dict(type='Reweigh', of=of)],
            'train_dataloader.dataset.type': 'WeightedPoints',
            'train_dataloader.sampler': dict(_delete_=True, type=sampler), **more}


def workers(kind):
    change, keep = KINDS[kind]
    return {**change, 'train_dataloader.num_workers': 2}, keep


KINDS = {
    'an average': (dict(custom_hooks=[dict(type='EMAHook', ema_type='RampedAverage')]),
                   kept_average),
    'a model and its parts': ({'model.type': 'WithParts'}, kept_part),
    'a hook': (dict(custom_hooks=[dict(type='CountingHook')]), lambda: keep_attributes(
        Counting, 'count', 'best', 'window', 'seen', 'array', 'groups')),
    'a module and generators of a hook': (
        dict(custom_hooks=[dict(type='TeacherHook')]),
        lambda: keep_attributes(TeacherHook, 'teacher', 'generators')),
    'a sampler': (data('OwnWeights', 'sampler'),
                  lambda: keep_attributes(OwnWeights, 'weights', 'passes')),
    'a dataset': (data('WeightsOfDataset', 'dataset'), lambda: (
        keep_attributes(WeightedPoints, 'weights'), keep_attributes(Weighted, 'passes'))),
    'a sampler without an end': (
        data('Endless', 'sampler', train_cfg=dict(type='IterBasedTrainLoop', max_iters=8)),
        lambda: keep_attributes(Endless, 'weights')),
    'a batch sampler': (
        data('DefaultSampler', 'batches', **{
            'train_dataloader.batch_sampler': dict(type='LateBatches')}),
        lambda: keep_attributes(LateBatches, 'weights')),
    'an optimizer wrapper': ({'optim_wrapper.type': 'CountingWrapper'},
                             lambda: keep_attributes(CountingWrapper, 'calls')),
}
KINDS['a sampler, with workers'] = workers('a sampler')
KINDS['a dataset, with workers'] = workers('a dataset')


def bits(folder, change, **more):
    def job():
        cfg = small_run(folder, randomness=UNCHECKED, **copy.deepcopy(change), **more)
        runner = trained_runner(cfg)
        averages = [value.numpy().tobytes() for hook in runner.hooks if hasattr(hook, 'ema_model')
                    for value in hook.ema_model.state_dict().values()]
        return weights_of(runner), averages
    return Child(job).result()


def resumed(tmp_path, kind, point):
    return bits(tmp_path / f'from_{point}', KINDS[kind][0], resume=True,
                load_from=str(tmp_path / 'whole' / f'iter_{point}.pth'))


@pytest.mark.parametrize('kind', KINDS)
def test_a_resumed_run_is_the_uninterrupted_one(kind, tmp_path):
    KINDS[kind][1]()
    expected = bits(tmp_path / 'whole', KINDS[kind][0])
    for point in POINTS:
        assert resumed(tmp_path, kind, point) == expected, point


@pytest.mark.parametrize('kind', [kind for kind in KINDS if 'with' not in kind])
def test_without_these_attributes_it_is_not(kind, tmp_path):
    expected = bits(tmp_path / 'whole', KINDS[kind][0])
    assert resumed(tmp_path, kind, 5) != expected


def running(tmp_path, hooks, **changes):
    return trained_runner(small_run(tmp_path / 'run', custom_hooks=hooks, randomness=UNCHECKED,
                                    **changes))


def attributes_in(tmp_path, point=8):
    content = torch.load(tmp_path / 'run' / f'iter_{point}.pth', weights_only=False)
    return content['mmrepro']['attributes']


def test_names_add_up_and_derived_classes_have_them():
    class Base:
        a, b = 1, 2

    class Derived(Base):
        c = 3

    keep_attributes(Base, 'a', why='x')
    keep_attributes(Base, 'b', 'a')
    keep_attributes(Derived, 'c')
    owner = Derived()
    owner.a, owner.b, owner.c = 4, 5, 6
    state = kept_attributes.collect(dict(one=owner, two=Base()))
    assert state['one'] == dict(a=4, b=5, c=6) and [*state['two'].values()] == [1, 2]
    again = Derived()
    assert kept_attributes.restore(dict(one=again), dict(one=state['one'])) == []
    assert vars(again) == vars(owner)


def test_classes_of_one_name_are_told_apart():
    def classes():
        class Same:
            count = 1
        return Same
    first = classes()
    second = type('Same', (), dict(count=1, __module__='elsewhere'))
    keep_attributes(second, 'count')
    assert kept_attributes.collect(dict(a=first(), b=second())) == {'b': {'count of the class': 1}}


def test_types_of_containers_come_back():
    owner = CountingHook()
    keep_attributes(Counting, 'window', 'seen', 'groups', 'frozen')
    owner.window.extend([1., 2., 3.])
    owner.frozen = frozenset([1, 2])
    owner.seen['x'] += 2
    state = kept_attributes.collect(dict(hook=owner))
    again = CountingHook()
    kept_attributes.restore(dict(hook=again), state)
    assert again.window == deque([1., 2., 3.]) and again.window.maxlen == 3
    assert type(again.seen) is Counter and again.groups == {'a': (1, [0])}
    assert type(again.frozen) is frozenset and again.frozen == {1, 2}


class Phase(enum.Enum):
    WARMUP, TRAIN = 'warmup', (2, 'train')


@dataclasses.dataclass
class Course:
    phase: Phase = Phase.WARMUP
    losses: deque = dataclasses.field(default_factory=lambda: deque(maxlen=2))


class Step(enum.IntEnum):
    FIRST, SECOND = 1, 2


@dataclasses.dataclass(frozen=True)
class Fixed:
    step: Step = Step.FIRST


FIRST = Fixed()


class OfTypes:
    def __init__(self):
        self.phase, self.course, self.fixed = Phase.WARMUP, Course(), FIRST


def test_enums_and_dataclasses_come_back(tmp_path):
    keep_attributes(OfTypes, 'phase', 'course', 'fixed')
    owner, again = OfTypes(), OfTypes()
    owner.phase = owner.course.phase = Phase.TRAIN
    owner.course.losses.extend([1., 2., 3.])
    owner.fixed = Fixed(Step.SECOND)
    state = kept_attributes.collect(dict(one=owner))
    check_readable(state)  # no class of the user is in the file
    course = again.course
    assert kept_attributes.restore(dict(one=again), state) == []
    assert again.phase is Phase.TRAIN and again.course is course
    assert course == owner.course and course.losses.maxlen == 2
    assert again.fixed == owner.fixed and again.fixed.step is Step.SECOND
    assert FIRST.step is Step.FIRST
    state['one']['phase'][kept_attributes.STATE] = 'gone'
    with pytest.raises(ResumeError, match="OfTypes.phase in the checkpoint does not fit: 'gone'"):
        kept_attributes.restore(dict(one=again), state)


TABLE = np.dtype([('seen', 'i4'), ('box', 'f4', (4, )), ('range', [('low', 'f8'), ('high', 'f8')])])


@pytest.mark.parametrize('value', [
    np.array([(3, (1, 2, 3, 4), (.5, 1.5))] * 5, TABLE), np.zeros((2, 3), TABLE),
    np.array([1 + 2j]), np.array([1 + 2j], np.complex64),
    np.array(['2026-01-02'], 'M8[D]'), np.array([3], 'm8[ms]')], ids=lambda value: str(value.dtype))
def test_arrays_of_all_kinds_come_back(value):
    keep_attributes(OfTypes, 'array')
    owner, again = OfTypes(), OfTypes()
    owner.array, again.array = value, np.zeros((0, ) * value.ndim, value.dtype)
    state = kept_attributes.collect(dict(one=owner))
    check_readable(state)
    kept_attributes.restore(dict(one=again), state)
    np.testing.assert_array_equal(again.array, value)
    assert again.array.dtype == value.dtype and again.array is not value


def test_a_set_of_objects_is_named():
    keep_attributes(OfTypes, 'seen')
    owner = OfTypes()
    owner.seen = {Phase.WARMUP}
    with pytest.raises(CheckpointError, match='OfTypes.seen is a set of objects, .*: keep names'):
        kept_attributes.collect(dict(one=owner))


class Drawing:
    seen = 0

    def __init__(self):
        self.course, self.generator, self.fixed = Course(), np.random.default_rng(1), FIRST


def test_what_an_order_was_drawn_from_is_there_in_a_block_only(monkeypatch):
    monkeypatch.setattr(kept_attributes, '_of_data', lambda loader: dict(sampler=loader))
    keep_attributes(Drawing, 'course', 'generator', 'fixed', 'seen')
    sampler, then = Drawing(), Drawing()
    then.course.phase, then.fixed, then.seen = Phase.TRAIN, Fixed(Step.SECOND), 3
    state = kept_attributes.KeptData(then).read()
    sampler.generator.random()
    kept = kept_attributes.KeptData(sampler)
    before, objects = kept.read(), dict(vars(sampler))
    with kept.replaced(state):
        assert kept.read() == state
    assert kept.read() == before and vars(sampler) == objects
    assert all(vars(sampler)[name] is value for name, value in objects.items())


class WithSlots:
    __slots__ = ('count', )

    def __init__(self):
        self.count = 0


def test_an_object_with_slots_is_named_as_any_other():
    keep_attributes(OfTypes, 'phase')
    owner = OfTypes()
    owner.phase = WithSlots()
    with pytest.raises(CheckpointError, match='phase is a .*WithSlots, .*name its attributes inst'):
        kept_attributes.collect(dict(one=owner))
    keep_attributes(OfTypes, 'slots.count')
    del owner.phase
    owner.slots, other = WithSlots(), OfTypes()
    owner.slots.count, other.slots = 3, WithSlots()
    kept_attributes.restore(dict(one=other), kept_attributes.collect(dict(one=owner)))
    assert other.slots.count == 3


@pytest.mark.parametrize('arguments, message', [
    (('Hook', 'a'), "keep_attributes\\('Hook', ...\\): the first argument has to be a class"),
    ((Hook, ), r"keep_attributes\(Hook, ''\): expected names"),
    ((Hook, 3), r'keep_attributes\(Hook, 3\)'), ((Hook, 'a b'), "'a b'")])
def test_wrong_arguments(arguments, message):
    with pytest.raises(ConfigError, match=message):
        keep_attributes(*arguments)


def test_an_attribute_that_does_not_exist_is_named_once(tmp_path):
    from mmengine.runner import Runner
    keep_attributes(Counting, 'cuont')

    def job():
        return warnings_of(Runner.from_cfg(small_run(tmp_path / 'run', custom_hooks=[
            dict(type='CountingHook')])))

    found = [text for text in Child(job).result() if 'keep_attributes' in text]
    assert len(found) == 1 and found[0].startswith('Counting.cuont: ')


def test_an_object_that_is_no_data_is_named_at_the_first_checkpoint(tmp_path):
    keep_attributes(WithParts, '_threshold')
    with pytest.raises(CheckpointError, match=r'WithParts\._threshold is a .*Threshold, .*name its '
                                              r'attributes instead'):
        running(tmp_path, [], **{'model.type': 'WithParts'})


@pytest.mark.parametrize('before_train, message', [
    (lambda self, runner: None, 'TeacherHook.teacher, which is None when the resumed training'),
    (lambda self, runner: setattr(self, 'teacher', torch.nn.Linear(3, 1)),
     'the state of TeacherHook.teacher in the checkpoint does not fit: ')])
def test_a_module_that_the_resumed_run_has_not_is_named(
        before_train, message, tmp_path, monkeypatch):
    keep_attributes(TeacherHook, 'teacher')
    hooks = dict(custom_hooks=[dict(type='TeacherHook')])
    bits(tmp_path / 'whole', hooks)

    def job():
        monkeypatch.setattr(TeacherHook, 'before_train', before_train)
        with pytest.raises(ResumeError, match=message):
            trained_runner(small_run(tmp_path / 'again', resume=True, load_from=str(
                tmp_path / 'whole' / 'iter_3.pth'), **hooks))

    Child(job).result()


def test_files_have_the_state_of_the_moment_and_what_the_running_order_was_drawn_from(tmp_path):
    keep_attributes(OwnWeights, 'weights')

    def job():
        runner = running(tmp_path, **{'hooks': [dict(type='Reweigh')],
                                      'train_dataloader.sampler': dict(
                                          _delete_=True, type='OwnWeights')})
        return runner.train_dataloader.sampler.weights.tolist()

    weights = Child(job).result()
    assert attributes_in(tmp_path)['data:sampler']['weights'].tolist() == weights
    content = torch.load(tmp_path / 'run' / 'iter_6.pth', weights_only=False)['mmrepro']
    (state, ) = content['order']['states']  # of the beginning of the second epoch
    assert torch.equal(state['data:sampler']['weights'],
                       attributes_in(tmp_path, 4)['data:sampler']['weights'])
    assert not torch.equal(state['data:sampler']['weights'],
                           content['attributes']['data:sampler']['weights'])


def test_runs_without_such_attributes_have_nothing_more_in_their_files(tmp_path):
    Child(lambda: running(tmp_path, []) and None).result()
    assert attributes_in(tmp_path) == {} and torch.load(
        tmp_path / 'run' / 'iter_8.pth', weights_only=False)['mmrepro']['order'] == {}
