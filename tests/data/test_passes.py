"""A pass is the same for any number of workers; one that is entered late loads nothing before."""
import collections
import copy
import functools
import itertools
import json
import multiprocessing
import os
import pickle
import sys
import threading

import numpy as np
import pytest
import torch
from harness import digest
from loaders import InOrder, Noisy, adopted, loader, settings, train
from mmdet.datasets import BaseVideoDataset, ConcatDataset, MultiImageMixDataset, samplers
from mmengine.dataset import ClassBalancedDataset, DefaultSampler, InfiniteSampler, RepeatDataset
from mmengine.hooks import Hook
from pictures import SizedPictures, pretend_rank
from small_runs import hook_with
from torch.utils.data import BatchSampler, DataLoader

import mmrepro.data.samplers
from mmrepro.config import RandomnessConfig
from mmrepro.data import adopt_loader
from mmrepro.data.dataset_changes import PASS, DatasetSnapshot
from mmrepro.data.passes import seek
from mmrepro.util.scoped import replaced

pytestmark = pytest.mark.usefixtures('workers_end_soon', 'no_pause_between_passes')

WORKERS = {
    'none': dict(),
    'two': dict(workers=2),
    'persistent': dict(workers=2, persistent_workers=True),
    'spawned': dict(workers=1, multiprocessing_context='spawn'),
}


class Shifted(Noisy):
    """Something that hooks change, and a transform whose attributes they change."""
    shift = 0.

    def __init__(self):
        self.scale = [1.]

    def __getitem__(self, i):
        return dict(x=(super().__getitem__(i)['x'] + self.shift) * self.scale[0])


class Changes(Hook):
    """Changes the dataset at one event of a run, and resets the loader as YOLOXModeSwitchHook."""

    def __init__(self, event, iteration=0):
        self.iteration = iteration
        setattr(self, event, self.change)

    def change(self, runner, **kwargs):
        if runner.iter == self.iteration:
            loader = runner.train_dataloader
            loader.dataset.shift = 5.
            if loader.persistent_workers:
                loader._DataLoader__initialized = False
                loader._iterator = None
                loader._DataLoader__initialized = True


def batches_of(workers, work_dir, hook, loop='iterations', resume_at=None, sampler=InOrder):
    seen, _ = train(lambda: loader(sampler, dataset=Shifted, **WORKERS[workers]), work_dir, loop,
                    resume_at, validation=False, prepare=lambda runner: runner.register_hook(hook))
    return seen


@pytest.mark.parametrize('event, iteration, workers, loop', [
    # workers start after the hooks of the beginning
    ('before_train', 0, 'persistent', 'iterations'), ('before_train_epoch', 0, 'two', 'iterations'),
    pytest.param('before_run', 0, 'spawned', 'iterations', marks=pytest.mark.nightly),
    ('before_train_iter', 5, 'persistent', 'iterations'), ('after_train_iter', 6, 'two', 'epochs'),
    ('before_train_epoch', 4, 'persistent', 'epochs')])
def test_a_change_takes_effect_with_the_next_batch(event, iteration, workers, loop, tmp_path):
    expected = batches_of('none', tmp_path, Changes(event, iteration), loop)
    assert batches_of(workers, tmp_path / 'other', Changes(event, iteration), loop) == expected
    assert batches_of('none', tmp_path / 'another', Changes(event, 99), loop) != expected


@pytest.mark.parametrize('workers', ['none', 'two', 'persistent'])
def test_a_variable_that_a_hook_changes_shows_in_the_next_pass(workers, tmp_path, monkeypatch):
    def tell(runner):
        monkeypatch.setattr(Shifted, 'shift', float(runner.epoch))

    def run(workers):
        return batches_of(workers, tmp_path / workers, hook_with(before_train_epoch=tell), 'epochs')

    assert run(workers) == run('none') and len({*run(workers)}) == 12


def test_hooks_may_change_the_data_between_validations(tmp_path):
    def tell(runner):
        runner.val_dataloader.dataset.shift = float(runner.epoch)

    cfg = dict(settings(loader, tmp_path), val_dataloader=loader(dataset=Shifted))
    seen, _ = train(None, None, cfg=cfg, prepare=lambda runner: runner.register_hook(
        hook_with(before_val_epoch=tell)))
    assert len(seen) == 12  # no sample was said to depend on others


@pytest.mark.parametrize('sampler', [InOrder, InfiniteSampler])
def test_a_resumed_run_starts_its_workers_there_too(sampler, tmp_path):
    whole = batches_of('none', tmp_path, Changes('before_train'), sampler=sampler)
    hook = Changes('before_train', 5)
    found = batches_of('two', tmp_path, hook, resume_at=5, sampler=sampler)
    assert found == whole[5:]


def alive(made):
    return [worker.pid for worker in made._iterator._workers]


def test_persistent_workers_stay_while_the_dataset_stays():
    made = adopted(loader(dataset=Shifted, **WORKERS['persistent']))
    list(made)
    first = alive(made)
    list(made)
    assert alive(made) == first
    made.dataset.scale.append(3.)
    list(made)
    assert not set(alive(made)) & set(first)


@pytest.mark.parametrize('workers', ['none', 'two', 'persistent'])
def test_a_pass_within_a_pass_disturbs_neither(workers):
    """A hook may look at the data in the middle of an epoch."""
    made = adopted(loader(**WORKERS[workers]))
    whole = [digest(batch) for batch in made]
    found = []
    for batch in made:
        found.append(digest(batch))
        if len(found) == 2:
            assert [digest(one) for one in made] == whole
            drawn = made.batch_sampler._mmrepro_loader_position.drawn
    assert found == whole
    assert made.batch_sampler._mmrepro_loader_position.drawn is not drawn


LEVEL = [0.]


class Slotted:
    __slots__ = ('value', )


class AttrDict(dict):
    __getattr__ = dict.__getitem__


def reads_a_global(item):
    return item * LEVEL[0]


class Holds:
    of_class = 1

    def __init__(self):
        self.number, self.names, self.inner = 1, ['a', 'b'], dict(deep=[[1, 2]])
        self.array, self.tensor = np.zeros(3), torch.zeros(3)
        self.long, self.transform = [float(i) for i in range(10_000)], Shifted()
        self.levels = dict.fromkeys(range(5000), 0)
        self.infos = [dict(level=0) for _ in range(2000)]
        self.objects = np.array([[1], None], dtype=object)
        self.wide, self.shared = np.zeros(10_000), torch.zeros(200_000).share_memory_()
        self.slotted, self.options, self.seen = Slotted(), AttrDict(size=3), {1}
        self.slotted.value = 1
        self.value, self.buffer = multiprocessing.Value('i', 0), bytearray(4)
        self.module = torch.nn.Sequential(torch.nn.Dropout(.5))
        self.function, self.partial = reads_a_global, functools.partial(max, [0])
        self.queue = collections.deque([1, 2])
        depth = [0]
        self.closure = lambda item: item + depth[0]
        # what cannot be copied or pickled, and what does not like to be read
        self.lock, self.json, self.file = threading.Lock(), json, open(os.devnull)
        self.version, self.proxy = sys.version_info, Proxy()
        self.generator = np.random.default_rng(0)


class Proxy:
    @property
    def __dict__(self):
        raise RuntimeError('nothing is bound')

    @property
    def __class__(self):
        raise RuntimeError('nothing is bound')

    def __eq__(self, other):
        raise RuntimeError('nothing is bound')


CHANGES = {
    'dataset.number': lambda one: setattr(one, 'number', 2),
    'dataset.new': lambda one: setattr(one, 'new', 2),
    'dataset.names': lambda one: delattr(one, 'names'),
    'dataset.names ': lambda one: one.names.append('c'),
    "dataset.inner['deep'][0][1]": lambda one: one.inner['deep'][0].__setitem__(1, 3),
    'dataset.array': lambda one: one.array.__setitem__(1, 3),
    'dataset.tensor': lambda one: one.tensor.add_(1),
    'dataset.long': lambda one: one.long.append(1),
    'dataset.long[0]': lambda one: one.long.__setitem__(slice(None), [1.] * 10_000),
    'dataset.levels[0]': lambda one: one.levels.update(dict.fromkeys(range(5000), 1)),
    "dataset.infos[1999]['level']": lambda one: one.infos[1999].update(level=1),
    'dataset.objects': lambda one: one.objects.__setitem__(1, 1),
    'dataset.objects ': lambda one: one.objects[0].append(1),
    'dataset.wide': lambda one: one.wide.__setitem__(9_999, 1),
    'dataset.shared': lambda one: one.shared.fill_(1),
    'dataset.slotted.value': lambda one: setattr(one.slotted, 'value', 2),
    "dataset.options['size']": lambda one: one.options.update(size=4),
    'dataset.seen': lambda one: one.seen.add(2),
    'dataset.value._obj': lambda one: setattr(one.value, 'value', 1),
    'dataset.buffer': lambda one: one.buffer.__setitem__(1, 3),
    "dataset.module._modules['0'].p": lambda one: setattr(one.module[0], 'p', .2),
    'dataset.function.static': lambda one: setattr(one.function, 'static', 2),
    f'{__name__}:LEVEL[0]': lambda one: LEVEL.__setitem__(0, LEVEL[0] + 1),
    'dataset.partial[0][0]': lambda one: one.partial.args[0].__setitem__(0, 1),
    'dataset.queue[1]': lambda one: one.queue.__setitem__(1, 3),
    'dataset.closure.depth[0]': lambda one: one.closure.__closure__[0].cell_contents.__setitem__(
        0, 1),
    'Holds.of_class': lambda one: setattr(Holds, 'of_class', Holds.of_class + 1),
    'dataset.transform': lambda one: setattr(one, 'transform', Shifted()),
    'dataset.transform.shift': lambda one: setattr(one.transform, 'shift', 1),
    'dataset.transform.scale[0]': lambda one: one.transform.scale.__setitem__(0, 2),
    'dataset.proxy': lambda one: setattr(one, 'proxy', Proxy()),
}


@pytest.mark.parametrize('path', CHANGES)
def test_a_change_is_found_by_its_path(path):
    one, equal = Holds(), Holds()
    snapshot, other = DatasetSnapshot(one), DatasetSnapshot(equal)
    equal.names, equal.inner['deep'] = list(equal.names), [[1, 2]]
    one.generator.random()  # seeded for each sample
    assert snapshot.change() is None and other.change() is None
    CHANGES[path](one)
    assert snapshot.change() == path.strip()
    vars(reads_a_global).clear()


@pytest.mark.parametrize('copied', [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_of_an_object_is_no_change_of_its_class(copied):
    cls = type('Kept', (), dict(__module__=__name__))
    one = Holds()
    one.inner = cls()
    snapshot = DatasetSnapshot(one)
    with replaced(sys.modules[__name__], Kept=cls):
        copied(one.inner)
    assert '__slotnames__' in vars(cls)
    assert snapshot.change() is None


def test_annotations_are_compared_before_each_pass_only():
    one = Holds()
    one.infos = [dict(box=[1., 2., float(i)]) for i in range(20_000)]
    one.pixels = np.zeros((1000, 1000))
    before_batch, before_pass = DatasetSnapshot(one), DatasetSnapshot(one, limits=PASS)
    one.infos[10]['box'][0] = one.pixels[5, 5] = 2.
    assert before_batch.change() is None and before_pass.change() is not None
    one.infos.append(dict(box=[]))
    assert before_batch.change() == 'dataset'


class Curriculum(Noisy):
    """Reads a level that hooks raise."""

    def __init__(self, make, read):
        self.level, self.read = make(), read

    def __getitem__(self, i):
        return dict(x=super().__getitem__(i)['x'] + float(self.read(self.level, i)))


KINDS = {  # how a level is made, read, and raised by a hook
    'list': (lambda: [0] * 2000, lambda level, i: level[i],
             lambda level, to: level.__setitem__(slice(None), [to] * len(level))),
    'array': (lambda: np.zeros(10_000), lambda level, i: level[i],
              lambda level, to: level.fill(to)),
    'tensor': (lambda: torch.zeros(10_000), lambda level, i: level[i],
               lambda level, to: level.fill_(to)),
    'shared tensor': (lambda: torch.zeros(10_000).share_memory_(), lambda level, i: level[i],
                      lambda level, to: level.fill_(to)),
    'dict': (lambda: dict.fromkeys(range(3000), 0), lambda level, i: level[i],
             lambda level, to: level.update(dict.fromkeys(range(3000), to))),
    'infos': (lambda: [dict(level=0) for _ in range(3000)], lambda level, i: level[i]['level'],
              lambda level, to: [info.update(level=to) for info in level]),
    'module': (lambda: torch.nn.Dropout(0.), lambda level, i: level.p,
               lambda level, to: setattr(level, 'p', to / 100)),
    'shared value': (lambda: multiprocessing.Value('i', 0), lambda level, i: level.value,
                     lambda level, to: setattr(level, 'value', to)),
    'function': (lambda: reads_a_global, lambda level, i: getattr(level, 'static', 0),
                 lambda level, to: setattr(level, 'static', to)),
}


@pytest.mark.parametrize('kind', [
    kind if kind in ('shared value', 'function') else
    pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS])
def test_a_level_that_a_hook_raises_is_the_same_for_any_number_of_workers(kind, tmp_path):
    make, read, raise_to = KINDS[kind]

    def batches(workers, event):
        def tell(runner, **_):
            if event == 'before_train_epoch' or runner.iter == 5:
                raise_to(runner.train_dataloader.dataset.level, 1 + runner.iter)

        vars(reads_a_global).clear()
        seen, _ = train(lambda: loader(dataset=lambda: Curriculum(make, read), **WORKERS[workers]),
                        tmp_path / f'{workers}{event}', validation=False, prepare=lambda runner:
                        runner.register_hook(hook_with(**{event: tell})))
        return seen

    for event in ('before_train_epoch', 'after_train_iter'):
        expected = batches('none', event)
        assert len(set(expected)) == 12
        assert batches('persistent', event) == batches('two', event) == expected


@pytest.mark.parametrize('tensor', [torch.zeros(()).expand(1), torch.zeros(4)[::4]],
                         ids=['expanded', 'every fourth'])
def test_a_tensor_of_one_element_may_have_any_stride(tensor):
    one = Holds()
    one.tensor = tensor
    snapshot = DatasetSnapshot(one)
    assert snapshot.change() is None
    one.tensor.add_(1)
    assert snapshot.change() == 'dataset.tensor'


LOADS = []


def load(data_info):
    name = (data_info.get('img_id', data_info.get('video_id')), data_info.get('key_frame_id'))
    LOADS.append(name)
    return name, torch.rand(()).item()


Pictures = functools.partial(SizedPictures, pipeline=load)


class Videos(BaseVideoDataset):
    METAINFO = dict(classes=('a', 'b'))

    def __init__(self, count=5, test_mode=False):
        self.count = count
        super().__init__(test_mode=test_mode)
        self.pipeline = load

    def load_data_list(self):
        return [dict(video_id=v, video_length=2 + v % 3, images=[
            dict(width=3 if v % 2 else 1, height=2, frame_id=f, instances=[dict(bbox_label=v % 2)])
            for f in range(2 + v % 3)]) for v in range(self.count)]

    def filter_data(self):
        return self.data_list


def concat():
    return ConcatDataset([Pictures(17), Pictures(15)])


WRAPPED = {
    'repeated': lambda: RepeatDataset(Pictures(7), 3), 'several sets': concat,
    'class balanced': lambda: ClassBalancedDataset(Pictures(13), oversample_thr=0.9),
    'mixed images': lambda: MultiImageMixDataset(Pictures(23), pipeline=[]),
}
# a sampler takes a dataset, a batch sampler takes a sampler; nothing: torch's BatchSampler
CASES = {
    'Default': (lambda: Pictures(23), DefaultSampler),
    'Default, not shuffled, ragged': (
        lambda: Pictures(23), lambda data: DefaultSampler(data, shuffle=False, round_up=False)),
    **{f'Default, {name}': (data, DefaultSampler) for name, data in WRAPPED.items()},
    'Infinite': (lambda: Pictures(11), InfiniteSampler),
    'ClassAware': (lambda: Pictures(23), samplers.ClassAwareSampler),
    'MultiSource': (concat, lambda data: samplers.MultiSourceSampler(data, 4, [1, 3])),
    'GroupMultiSource': (concat, lambda data: samplers.GroupMultiSourceSampler(data, 4, [1, 3])),
    'CustomSampleSize': (concat, lambda data: samplers.CustomSampleSizeSampler(data, [5, -1])),
    'MultiData': (concat, lambda data: samplers.MultiDataSampler(data, [1, 2])),
    'TrackImg': (Videos, samplers.TrackImgSampler),
    'TrackImg, test': (lambda: Videos(test_mode=True), samplers.TrackImgSampler),
    'AspectRatio': (lambda: Pictures(23), DefaultSampler, samplers.AspectRatioBatchSampler),
    **{f'AspectRatio, {name}': (data, DefaultSampler, samplers.AspectRatioBatchSampler)
       for name, data in WRAPPED.items()},
    'AspectRatio, class aware': (
        lambda: Pictures(23), samplers.ClassAwareSampler, samplers.AspectRatioBatchSampler),
    'AspectRatio, endless': (
        lambda: Pictures(11), InfiniteSampler, samplers.AspectRatioBatchSampler),
    'MultiDataAspectRatio': (
        concat, lambda data: samplers.MultiDataSampler(data, [1, 2]),
        lambda sampler, size: samplers.MultiDataAspectRatioBatchSampler(
            sampler, [2, size], 2, False)),
    'TrackAspectRatio, frames': (
        Videos, samplers.TrackImgSampler, samplers.TrackAspectRatioBatchSampler),
    'TrackAspectRatio, videos': (
        lambda: Videos(13), DefaultSampler, samplers.TrackAspectRatioBatchSampler),
}
BATCH_SIZE = 4
RANKS = {'alone': (0, 1), 'rank 1 of 2': (1, 2)}


@functools.cache
def made(dataset):
    return dataset()


@pytest.fixture(params=RANKS)
def make(request, monkeypatch):
    rank, world = RANKS[request.param]
    pretend_rank(monkeypatch, rank, world)

    def build(case):
        dataset, sampler, *batches = CASES[case]
        sampler = sampler(made(dataset))
        batches = batches[0](sampler, BATCH_SIZE) if batches else BatchSampler(
            sampler, BATCH_SIZE, False)
        loader = DataLoader(sampler.dataset, batch_sampler=batches, collate_fn=list)
        return adopt_loader(loader, RandomnessConfig(seed=3), 'sample', rank)

    return build


@pytest.mark.parametrize('case', CASES)
def test_nothing_is_loaded_to_get_there(case, make):
    count = 12 if 'Infinite' in case or 'endless' in case or 'Source' in case else None
    for epoch in (0,) if count else (0, 2):
        loader = make(case)
        seek(loader, epoch, 0)
        whole = list(itertools.islice(loader, count))
        assert len(whole) > 1
        for skip in range(len(whole)):
            loader = make(case)
            LOADS.clear()
            seek(loader, epoch, skip)
            batches = iter(loader)
            assert not LOADS, 'before the first batch is asked for'
            assert next(batches) == whole[skip]
            assert len(LOADS) == len(whole[skip]), 'the samples of one batch, and no others'
            rest = list(itertools.islice(batches, count - skip - 1 if count else None))
            assert rest == whole[skip + 1:]


FAR = 10**12


@pytest.mark.parametrize('case', ['Infinite', 'MultiSource'])
def test_an_endless_sampler_jumps_any_distance(case, make):
    """This would not come back if it counted there."""
    loader = make(case)
    seek(loader, 0, FAR)
    indices = next(iter(loader.batch_sampler))
    assert indices[0].position // len(indices) >= FAR


@pytest.mark.parametrize('case', [
    'Default', *(f'Default, {name}' for name in WRAPPED), 'CustomSampleSize'])
def test_the_order_of_an_epoch_is_entered_without_counting(case, make, monkeypatch):
    loader = make(case)
    last = len(loader) - 1
    seek(loader, 5, last)
    yielded, stock = [], mmrepro.data.samplers.with_position

    def noted(*args):
        yielded.append(args)
        return stock(*args)

    monkeypatch.setattr(mmrepro.data.samplers, 'with_position', noted)
    batch = next(iter(loader.batch_sampler))
    assert last > 1 and len(yielded) <= BATCH_SIZE
    assert {index.epoch for index in batch} == {5}


def test_every_sampler_and_batch_sampler_that_is_shipped_has_a_case():
    from mmdet.registry import DATA_SAMPLERS as DETECTION
    from mmengine.registry import DATA_SAMPLERS as ENGINE
    shipped = {name for registry in (DETECTION, ENGINE) for name, cls in
               registry.module_dict.items() if cls.__module__.startswith(('mmdet.', 'mmengine.'))}
    covered = {name.split(',')[0] for name in CASES}
    assert {name.replace('BatchSampler', '').replace('Sampler', '') for name in shipped} <= covered


def train_on(case, work_dir, train_cfg, resume_at=None):
    def make():
        dataset, sampler, batches = VARYING[case]
        sampler = sampler(dataset())
        return DataLoader(sampler.dataset, batch_sampler=batches(sampler), collate_fn=lambda batch:
                          dict(x=[torch.tensor([float(name[0]), noise]) for name, noise in batch]))

    cfg = settings(make, work_dir, 'iterations', resume_at, validation=False)
    return train(None, None, cfg=dict(cfg, train_cfg=train_cfg))


VARYING = {
    # drops a remainder of just one batch, and counts it
    'AspectRatio, drop last': (
        lambda: Pictures(24), DefaultSampler,
        lambda sampler: samplers.AspectRatioBatchSampler(sampler, 4, drop_last=True)),
    # each epoch draws other shares of its datasets
    'MultiDataAspectRatio': (
        concat, lambda data: samplers.MultiDataSampler(data, [1, 2]),
        lambda sampler: samplers.MultiDataAspectRatioBatchSampler(sampler, [2, 4], 2, False)),
}


@pytest.mark.parametrize('case', VARYING)
@pytest.mark.parametrize('train_cfg', [
    dict(by_epoch=True, max_epochs=3), dict(by_epoch=False, max_iters=26, val_interval=100)],
    ids=['epochs', 'iterations'])
def test_epochs_may_differ_in_length(case, train_cfg, tmp_path):
    seen, weights = train_on(case, tmp_path, train_cfg)
    assert len(set(seen)) == len(seen)
    for point in range(3, len(seen), 4):
        assert train_on(case, tmp_path, train_cfg, point) == (seen[point:], weights), point
