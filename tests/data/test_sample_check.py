"""Samples are loaded twice: whatever does not follow from a sample's stream is named."""
import copy
import datetime
import functools
import os
import pickle
import random
import re
import secrets
import sqlite3
import sys
import threading
import time
import types
import uuid

import cv2
import numpy as np
import pytest
import torch
from demo_runs import MODELS, small
from harness import digest
from loaders import InOrder, Mean, Noisy, Piped, loader, settings
from mmengine.dataset import DefaultSampler, default_collate, pseudo_collate
from mmengine.dist import get_rank
from mmengine.registry import MODELS as MODELS_OF_ENGINE
from PIL import Image
from small_runs import hook_with
from torch.utils.data import ConcatDataset, DataLoader

from mmrepro import on_virtual_ranks, seeds
from mmrepro.config import RandomnessConfig
from mmrepro.data import adopt_loader, sample_check
from mmrepro.data.sample_check import checked, left_out
from mmrepro.errors import RandomnessError, SampleDiffersError
from mmrepro.run.hooks import SelfCheckHook
from mmrepro.run.runner import ReproRunner
from mmrepro.selfcheck.sample_replay import explain

pytestmark = pytest.mark.usefixtures('workers_end_soon')

HERE = os.path.abspath(__file__)
EARLIER = []
IMPORTED_LATE = sys.modules['generators_of_users'] = types.ModuleType('generators_of_users')
IMPORTED_LATE.rng = np.random.default_rng(0)


def strict(made, explained=True, **kwargs):
    config = RandomnessConfig(seed=3, deterministic=True, **kwargs)
    return adopt_loader(made, config, 'sample', 0, explain=explain if explained else None)


def checking(*transforms, workers=0, **kwargs):
    return strict(loader(InOrder, workers, lambda: Piped(*transforms)), **kwargs)


def plus(value):
    def transform(item):
        return dict(item, x=item['x'] + float(value()))
    return transform


class Lazy:
    rng = None

    def __call__(self, item):
        if self.rng is None:
            self.rng = np.random.default_rng(5)
        return dict(item, x=item['x'] + self.rng.random())


class Counts:
    def __init__(self):
        self.count = 0

    def __call__(self, item):
        self.count += 1
        return dict(item, x=item['x'] + self.count)


class WarmsUp(Counts):
    """Calls more functions in some loads than in others, as one with a cache does."""

    def __call__(self, item):
        for _ in range(3 * (self.count % 4 < 2)):
            plus(float)(item)
        return super().__call__(item)


CountsInSlots = type('CountsInSlots', (), dict(
    __slots__=('count', ), __init__=Counts.__init__, __call__=Counts.__call__))


class Mixes:
    last = None

    def __call__(self, item):
        last, self.last = self.last, item['x'].clone()
        return item if last is None else dict(item, x=item['x'] + last)


def with_earlier(item):
    EARLIER.append(item['x'])
    return dict(item, x=item['x'] + len(EARLIER))


def opencv():
    noise = np.zeros((1, 1))
    cv2.randn(noise, 0, 1)
    return noise[0, 0]


def imported_late():
    import generators_of_users
    return generators_of_users.rng.random()


def in_a_thread(item):
    def add():
        item['x'] = item['x'] + random.SystemRandom().random()
    thread = threading.Thread(target=add)
    thread.start()
    thread.join()
    return item


class MetaOnly:
    def __call__(self, item):
        from mmdet.structures import DetDataSample
        sample = DetDataSample(metainfo=dict(number=uuid.uuid4().int))
        return dict(item, data_samples=sample)


CAUSES = {
    'default_rng()': (plus(lambda: np.random.default_rng().random()), 'entropy'),
    'secrets': (plus(lambda: secrets.randbelow(1000000)), 'entropy'),
    'uuid4': (plus(lambda: uuid.uuid4().int % 1000003), 'entropy'),
    'urandom': (plus(lambda: int.from_bytes(os.urandom(3), 'little')), 'entropy'),
    'clock': (plus(lambda: time.time_ns() % 1000003), 'clock: time_ns'),
    'now': (plus(lambda: datetime.datetime.now().microsecond), 'clock: datetime.now'),
    'cv2.randn': (plus(opencv), 'generator of OpenCV: randn'),
    'imported late': (plus(imported_late), 'within it: imported_late'),
    'lazily made': (Lazy(), 'it keeps self.rng: a generator in state'),
    'counter': (Counts(), r'it keeps self.count: \d+, then \d+'),
    'other calls': (WarmsUp(), r'it keeps self.count: \d+, then \d+'),
    'slots': (CountsInSlots(), r'it keeps self.count: \d+, then \d+'),
    'earlier sample': (Mixes(), 'it keeps self.last'),
    'list of the module': (with_earlier, r'it keeps .*:EARLIER: list of \d+, then list of \d+'),
    'thread': (in_a_thread, 'it reads thread: started at'),
    'metainfo': (MetaOnly(), r'data_samples.*number.*'),
}


@pytest.mark.parametrize('name', CAUSES)
def test_what_does_not_follow_from_the_stream_is_an_error(name):
    transform, cause = CAUSES[name]
    with pytest.raises(SampleDiffersError) as error:
        list(checking(transform))
    text = str(error.value)
    assert re.search(cause, text), text
    assert 'Piped: sample 0 (training, epoch 0, position 0)' in text
    assert 'pipeline.transforms[0] of Piped' in text and f'{HERE}:' in text


@pytest.mark.parametrize('start', [None, pytest.param('spawn', marks=pytest.mark.nightly)])
def test_a_worker_names_the_cause_without_its_traceback(start):
    made = strict(loader(InOrder, 1, lambda: Piped(Counts()), multiprocessing_context=start))
    with pytest.raises(SampleDiffersError, match=r'worker 0\).*\n.*\n.*of Counts') as error:
        list(made)
    assert 'Traceback' not in str(error.value)


class Loads(Noisy):
    def __init__(self, size=40):
        self.size, self.asked = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        self.asked.append(i)
        return super().__getitem__(i)


def numbers(count, every):
    return [n for n in range(1, count + 1) if n & (n - 1) == 0 or n % every == 0]


@pytest.mark.parametrize('batch_size', [1, 4, 5])
def test_samples_1_2_4_8_and_one_of_so_many_are_repeated(batch_size):
    made = strict(DataLoader(Loads(), batch_size=batch_size), self_checks=dict(samples=10))
    list(made)
    asked = made.dataset.asked
    again = [i - 1 for i in numbers(40, 10)]
    assert all(asked.count(i) >= 2 for i in again)
    if batch_size > 1:  # otherwise the sample in between is one of the whole dataset
        assert len(asked) - 40 - len(again) <= sum(i % batch_size == batch_size - 1 for i in again)
    # another one between the two loads
    assert all(one != other for one, other in zip(asked, asked[1:]))
    assert checked(made) == len(again)


@pytest.mark.parametrize('persistent', [False, True])
def test_the_counts_of_workers_outlive_them(persistent):
    made = strict(DataLoader(Noisy(), batch_size=2, num_workers=2, persistent_workers=persistent))
    for _ in range(3):
        list(made)
    # 14 samples, four batches for the first worker and three for the second
    assert checked(made) == len(numbers(24, 1000)) + len(numbers(18, 1000))


@pytest.mark.parametrize('settings', [
    dict(self_checks=False), dict(deterministic='warn'), dict(worker_seed='worker')])
def test_without_a_promise_nothing_is_repeated(settings):
    config = RandomnessConfig(**{'seed': 3, 'deterministic': True, **settings})
    made = adopt_loader(DataLoader(Loads(), batch_size=4), config, 'sample', 0)
    list(made)
    assert len(made.dataset.asked) == 40 and checked(made) == 0


def test_the_first_sample_of_every_pipeline_is_repeated():
    whole = ConcatDataset([Loads(9), Loads(3), Loads(9)])
    made = strict(DataLoader(whole, batch_size=3))
    list(made)
    asked = [part.asked for part in whole.datasets]
    assert [one.count(0) for one in asked] == [2, 2, 2] and checked(made) == 7


def test_a_pipeline_that_a_hook_changes_is_new():
    made = checking()
    list(made)
    before = checked(made)
    made.dataset.pipeline.transforms.append(Counts())
    with pytest.raises(SampleDiffersError):
        next(iter(made))
    assert checked(made) > before


class Images(Noisy):
    def __getitem__(self, i):
        # it shares the memory of the array, and its copy does not
        return Image.fromarray(np.full((2, 2), i, np.uint8))


def test_samples_that_a_copy_changes_end_no_run():
    made = strict(DataLoader(Images(), batch_size=4, collate_fn=lambda items: items))
    assert [image.getpixel((0, 0)) for image in next(iter(made))] == [0, 1, 2, 3]
    assert checked(made)


WRITERS = {
    'open': lambda path: open(os.fsencode(path), 'a').close(),
    'descriptor': lambda path: os.close(os.open(path, os.O_WRONLY | os.O_CREAT)),
    'symlink': lambda path: os.path.lexists(path) or os.symlink('target', path),
    'sqlite': lambda path: sqlite3.connect(path).close(),
    'torch': lambda path: torch.save(torch.zeros(1), f=path),
    'opencv': lambda path: cv2.imwrite(path, np.zeros((2, 2), np.uint8)),
}


class Writes(Noisy):
    def __init__(self, write, path):
        self.write, self.path = write, path

    def __getitem__(self, i):
        self.write(self.path)
        open(os.devnull, 'w').close()
        return super().__getitem__(i)


@pytest.mark.parametrize('write', WRITERS)
def test_a_file_that_samples_write_is_named_once(write, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(sample_check, 'print_log', lambda text, *_: said.append(text))
    path = str(tmp_path / 'cache.png')
    named = type(f'Writes_{write}', (Writes, ), {})
    made = strict(DataLoader(named(WRITERS[write], path), batch_size=2))
    for _ in range(2):
        list(made)
    assert [text.partition(' while')[0] for text in said] == [
        f'Writes_{write}: a sample has written {path}']


@pytest.mark.parametrize('address', ['file:{}?mode=ro', 'file:{}?cache=shared&immutable=1',
                                     'file:x?mode=memory', ':memory:'])
def test_a_database_that_samples_only_read_is_not_named(address, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(sample_check, 'print_log', lambda text, *_: said.append(text))
    path = tmp_path / 'data.sqlite'
    sqlite3.connect(path).close()
    named = type(f'Reads_{address}', (Writes, ), {})
    list(strict(DataLoader(named(lambda where: sqlite3.connect(where, uri=True).close(),
                                 address.format(path)), batch_size=2)))
    assert said == []


class Buffered:
    def __init__(self):
        self.memory = torch.zeros(4)

    def __call__(self, item):
        return dict(x=self.memory.copy_(item['x']))


class Annotated(Piped):
    def __init__(self, *transforms):
        super().__init__(*transforms)
        self.boxes = [np.full((2, 4), i) for i in range(14)]

    def __getitem__(self, i):
        return dict(self.pipeline(dict(boxes=self.boxes[i])), x=torch.zeros(4))


def shifted(item):
    item['boxes'] += 1
    return item


class Batches(Noisy):
    def __getitems__(self, indices):
        return [dict(x=self[i]['x'] + secrets.randbelow(1000000)) for i in indices]


class Smears(Noisy):
    """Returns memory that the next load of a sample overwrites."""
    memory = torch.zeros(4)

    def __getitem__(self, i):
        return dict(x=self.memory.add_(1))


class Vanishes(Noisy):
    def __init__(self):
        self.left = {i: i for i in range(14)}

    def __getitem__(self, i):
        return self.left.pop(i)


@pytest.mark.parametrize('make, message', [
    (lambda: checking(Buffered()), 'returns memory that it keeps'),  # later samples overwrite it
    # a sample that is loaded again has been moved once more, in the first result as well
    *((lambda size=size: strict(DataLoader(Annotated(shifted), batch_size=size)),
       r'overwritten.*\n.*what reaches shifted') for size in (1, 4)),
    (lambda: strict(DataLoader(Vanishes(), batch_size=2)),
     'could not be loaded once more.*KeyError: 0'),
    (lambda: strict(DataLoader(Smears())), 'loaded twice'),
    (lambda: strict(DataLoader(Batches(), batch_size=4)),
     'batch of sample 0 .*position 0.*\n.*\n.*Batches')])
def test_samples_that_change_or_vanish_behind_their_load_are_an_error(make, message):
    with pytest.raises(SampleDiffersError, match=message):
        list(make())


def test_a_collate_function_that_counts_in_memory_that_it_returns_is_an_error():
    count, memory = [0], torch.zeros(4, 4)

    def collate(items):
        count[0] += 1
        return dict(x=memory.copy_(torch.stack([item['x'] for item in items]) + count[0]))

    with pytest.raises(SampleDiffersError, match='collate function .*collate.*\n.*overwritten'):
        next(iter(strict(DataLoader(Noisy(), batch_size=4, collate_fn=collate))))


def test_one_sample_at_a_time_may_share_memory():
    """What is loaded in between is overwritten by the repetition."""
    def batches(every):
        made = strict(DataLoader(Piped(Buffered())), self_checks=dict(samples=every))
        return [digest(batch) for batch in made]

    assert batches(1) == batches(0)


def test_datasets_that_cannot_repeat_are_left_out():
    with pytest.raises(SampleDiffersError, match="nonrepeatable_datasets=.'Noisier'"):
        list(strict(DataLoader(Noisier(), batch_size=2)))
    for batch_size in (1, 2):
        made = strict(DataLoader(Vanishes(), batch_size=batch_size),
                      self_checks=dict(nonrepeatable_datasets=['Vanishes']))
        assert len(list(made)) == 14 // batch_size and checked(made) == 0


def test_names_of_datasets_must_exist():
    config = RandomnessConfig(self_checks=dict(nonrepeatable_datasets=['Noisi']))
    with pytest.raises(RandomnessError, match="'Noisi'.*did you mean 'Noisy'.*Piped, Rep"):
        left_out(config, [DataLoader(Piped()), None, dict(dataset=dict(
            type='RepeatDataset', dataset=dict(type=Noisy, pipeline=[dict(type='Noisi')])))])
    config = RandomnessConfig(self_checks=dict(nonrepeatable_datasets=['Noisy']))
    assert left_out(config, [dict(dataset=dict(type='mmdet.Noisy'))]) == ['Noisy']


def run_of(tmp_path, **randomness):
    cfg = settings(lambda: loader(InOrder), tmp_path)
    cfg.update(randomness=dict(seed=3, deterministic=True, **randomness), log_level='INFO',
               train_cfg=dict(by_epoch=True, max_epochs=1))
    return ReproRunner(**cfg)


def test_a_run_says_what_it_leaves_out(tmp_path):
    runner = run_of(tmp_path, self_checks=dict(nonrepeatable_datasets=['Noisy']))
    runner.train()
    assert runner.lifecycle.facts['randomness.self_checks.nonrepeatable_datasets'] == 'Noisy'
    assert checked(runner.train_dataloader) == 0
    log, = tmp_path.glob('*/*.log')
    assert log.read_text().count('samples of Noisy are not checked') == 1
    with pytest.raises(RandomnessError, match="has the name 'Nosy'.*did you mean 'Noisy'"):
        run_of(tmp_path, self_checks=dict(nonrepeatable_datasets=['Nosy'])).train()


def test_training_and_validation_are_checked_and_named_apart(tmp_path):
    runner = run_of(tmp_path)
    runner.train()
    assert checked(runner.train_dataloader) == checked(runner.val_dataloader) == 4
    runner = run_of(tmp_path)
    runner.val_dataloader.dataset.__class__ = Noisier
    with pytest.raises(SampleDiffersError, match=r'Noisier: sample 0 \(validation, epoch 0'):
        runner.train()


class Noisier(Noisy):
    def __getitem__(self, i):
        return dict(x=torch.tensor([np.random.default_rng().random()]))


def test_loaders_with_the_check_travel():
    draws = Lazy()
    draws.rng = np.random.default_rng(1)
    made = checking(draws)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(made._mmrepro_fetch)))
    batch = list(made.batch_sampler)[0]
    ours, others = (fetch.__getitems__(batch).items for fetch in (made._mmrepro_fetch, twin))
    assert digest(ours) == digest(others)


@pytest.mark.parametrize('model, batch_size', [
    ('rtmdet_tiny', 3), *(pytest.param(model, size, marks=pytest.mark.nightly)
                          for model in MODELS for size in (1, 3))])
def test_the_pipelines_of_detectors_repeat(model, batch_size, data_root, patched):
    """Every sample is repeated, and the batches are those without the check."""
    from mmengine.runner import Runner

    def batches(every):
        cfg = small(model, data_root).train_dataloader
        cfg.update(batch_size=batch_size, num_workers=0, persistent_workers=False)
        made = strict(Runner.build_dataloader(cfg, seed=0), self_checks=dict(samples=every))
        return [digest(batch) for batch in made], checked(made), len(made.dataset)

    with_check, count, size = batches(1)
    without, none, _ = batches(0)
    assert with_check == without
    assert (count, none) == (min(size, len(with_check) * batch_size), 0)


# ------------------------------------------------------ what only another process can show: explain


class Reference:
    """Keeps something of the first sample that it sees; ``kept`` is where."""
    kept = None
    of_all = {}

    def __call__(self, item):
        if self.kept is None:
            self.kept = item['x'].mean()
        return dict(item, x=item['x'] - self.kept)


def keeps_in_itself(item):
    if not hasattr(keeps_in_itself, 'kept'):
        keeps_in_itself.kept = item['x'].mean()
    return dict(item, x=item['x'] - keeps_in_itself.kept)


def keeps_in_a_default(item, memory={}):  # noqa: B006
    return dict(item, x=item['x'] - memory.setdefault('kept', item['x'].mean()))


def keeps_in_a_global(item):
    return dict(item, x=item['x'] - Reference.of_all.setdefault('kept', item['x'].mean()))


class ReferenceModule(torch.nn.Module):
    kept = None

    def forward(self, item):
        if self.kept is None:
            self.kept = item['x'].mean()
        return dict(item, x=item['x'] - self.kept)


class Descriptor:
    value = None

    def __get__(self, owner, cls=None):
        if self.value is None:
            self.value = random.random()
        return self.value


class WithDescriptor:
    strength = Descriptor()

    def __call__(self, item):
        return dict(item, x=item['x'] * self.strength)


def in_a_closure():
    memory = []

    def keeps(item):
        memory.extend([item['x'].mean()] * (not memory))
        return dict(item, x=item['x'] - memory[0])
    return keeps


KEEPING = {
    'attribute': (Reference, 'it keeps self.kept: None, then Tensor'),
    'function': (lambda: keeps_in_itself, 'it keeps .*kept'),
    'default': (lambda: keeps_in_a_default, 'it keeps .*: dict of 0, then dict of 1'),
    'global': (lambda: keeps_in_a_global, 'it keeps .*of_all: dict of 0, then dict of 1'),
    'module': (ReferenceModule, 'it keeps self.kept: None, then Tensor'),
    'descriptor': (WithDescriptor, r'it keeps .*value: None, then 0\.'),
    'partial': (lambda: functools.partial(lambda item, memory: keeps_in_a_default(item, memory),
                                          memory={}), 'it keeps .*: dict of 0, then dict of 1'),
    'closure': (in_a_closure, 'it keeps .*: list of 0, then list of 1'),
}


def load(number, dataset):
    seeds.seed_all(3, 'sample', number)
    return dataset[number]


@pytest.mark.parametrize('earlier', [True, False])
@pytest.mark.parametrize('name', KEEPING)
def test_what_a_transform_keeps_from_earlier_samples_is_named(name, earlier):
    """Loaded once more in this process, the sample is the same: the first load has kept it."""
    make, cause = KEEPING[name]
    vars(keeps_in_itself).pop('kept', None)
    keeps_in_a_default.__defaults__[0].clear()
    Reference.of_all.clear()
    vars(WithDescriptor)['strength'].value = None
    dataset = Piped(make())

    lines = '\n'.join(explain([dataset], lambda: load(5, dataset),
                              lambda: load(1, dataset) if earlier else None))
    assert re.search(f'pipeline.transforms.0. of Piped, {HERE}', lines), lines
    assert re.search(cause, lines), lines
    assert 'keep nothing from sample to sample' in lines


SLOW = {
    'clock of an hour': (plus(lambda: time.time() // 3600), 'clock: time'),
    'date': (plus(lambda: datetime.date.today().day), 'clock: date.today'),
    'local time': (plus(lambda: time.localtime().tm_hour), 'clock: localtime'),
    'process': (plus(lambda: os.getpid() % 7), 'process id: getpid'),
    'opencv': (plus(lambda: opencv() * 0), 'generator of OpenCV: randn'),
    'entropy': (plus(lambda: secrets.randbelow(1)), 'entropy'),
}


@pytest.mark.parametrize('name', SLOW)
def test_what_rarely_changes_is_named_although_loads_agree(name):
    transform, cause = SLOW[name]
    dataset = Piped(transform)
    lines = '\n'.join(explain([dataset], lambda: load(0, dataset), lambda: None))
    assert 'the results agree' in lines and f'it reads {cause}' in lines, lines


def test_a_pure_pipeline_is_not_accused():
    dataset = Piped(plus(random.random))
    lines = explain([dataset], lambda: load(0, dataset), lambda: load(1, dataset))
    assert len(lines) == 2 and 'something else than the sample' in lines[0]


# ---------------------------------------------------------------- what the training does not read


class Timed(Noisy):
    """A time in the metainfo, and one in a tensor."""

    def __getitem__(self, i):
        now = time.perf_counter() * 1e6 % 1000  # read in full by a loss in float32
        return dict(super().__getitem__(i), load_time=now, times=torch.tensor([now]))


class OneRankTimed(Noisy):
    """Samples of the first rank only."""

    def __getitem__(self, i):
        now = time.perf_counter() * 1e6 % 1000 if get_rank() == 0 else 0.
        return dict(super().__getitem__(i), times=torch.tensor([now]))


class TimedBatches(Timed):
    def __getitems__(self, indices):
        return [self[i] for i in indices]


@MODELS_OF_ENGINE.register_module(force=True)
class Reads(Mean):
    """Reads a field of the batch, from some iteration on."""

    def __init__(self, name=None, begin=0):
        super().__init__()
        self.name, self.begin = name, begin
        self.register_buffer('steps', torch.zeros(()))

    def forward(self, x, mode='tensor', **fields):
        loss = super().forward(x, mode)
        self.steps += mode == 'loss'
        if mode == 'loss' and self.name and self.steps > self.begin:
            loss['loss'] = loss['loss'] * sum(map(float, fields[self.name]))
        return loss


def timed_run(tmp_path, dataset=Timed, model=None, validated=None, wrap=lambda made: made,
              steps=1000, samples=1000, **options):
    cfg = settings(lambda: wrap(loader(InOrder, dataset=dataset, **options)), tmp_path)
    cfg.update(model=dict(type='Reads', **model or {}), log_level='INFO',
               train_cfg=dict(by_epoch=True, max_epochs=2), randomness=dict(
                   seed=3, deterministic=True, self_checks=dict(steps=steps, samples=samples)))
    if validated:
        cfg['val_dataloader'] = loader(dataset=validated, **options)
    runner = ReproRunner(**cfg)
    runner.train()
    log, = tmp_path.glob('*/*.log')
    return digest(runner.model.state_dict()), log.read_text()


LOADERS = {
    'here': dict(), 'workers': dict(workers=2), 'pinned': dict(workers=1, pin_memory=True),
    'persistent': dict(workers=2, persistent_workers=True),
    'default collate': dict(workers=1, collate=default_collate),
    'own collate': dict(collate=lambda items: pseudo_collate(items)),
    'batches': dict(workers=1, dataset=TimedBatches),
}


@pytest.mark.parametrize('name', LOADERS)
def test_a_field_that_no_training_reads_is_one_line(name, tmp_path):
    weights, log = timed_run(tmp_path, **LOADERS[name])
    assert log.count('The training does not read these fields') == 1
    assert re.search(r"samples that are loaded twice differ in .*\['load_time'\].*\['times'\]", log)
    assert re.search(r'steps were repeated: same bits \(but for .*times.* of samples, which the '
                     'training does not read', log)  # the last line may stand alone
    unchecked, log = timed_run(tmp_path / 'other', **LOADERS[name], samples=0)
    assert weights == unchecked and 'does not read' not in log


@pytest.mark.parametrize('field', ['load_time', 'times'])
@pytest.mark.parametrize('name', ['here', 'workers', 'default collate', 'batches'])
def test_a_field_that_the_training_reads_is_an_error_that_names_its_cause(name, field, tmp_path):
    with pytest.raises(SampleDiffersError) as error:
        timed_run(tmp_path, model=dict(name=field), **LOADERS[name])
    text = str(error.value)
    assert re.search(r'Timed.*sample 0 \(training, epoch 0, position 0', text)
    assert f'clock: perf_counter at {HERE}' in text and 'to do: compute' in text


@pytest.mark.parametrize('read', [False, True])
def test_virtual_ranks_find_out_together(read, tmp_path):
    def main():
        cfg = settings(lambda: loader(DefaultSampler, dataset=OneRankTimed), tmp_path,
                       validation=False)
        cfg.update(model=dict(type='Reads', name='times' if read else None), log_level='INFO')
        cfg['randomness']['virtual_ranks'] = 2
        runner = ReproRunner(**cfg)
        runner.train()
        hook, = (hook for hook in runner.hooks if isinstance(hook, SelfCheckHook))
        return hook.unread

    if read:
        with pytest.raises(SampleDiffersError, match='clock'):
            on_virtual_ranks(2, main)
    else:
        assert on_virtual_ranks(2, main) == {"['times']"}


def test_a_field_that_the_training_reads_later_is_an_error_then(tmp_path):
    with pytest.raises(SampleDiffersError, match='epoch 0, position 7'):
        timed_run(tmp_path, model=dict(name='times', begin=1))


def test_without_repeated_steps_every_difference_is_an_error(tmp_path):
    with pytest.raises(SampleDiffersError, match='clock'):
        timed_run(tmp_path, steps=0)
    with pytest.raises(SampleDiffersError, match='clock'):  # nobody trains on it
        list(strict(DataLoader(Timed(), batch_size=2)))


def test_a_batch_that_is_replaced_before_its_step_is_an_error(tmp_path):
    """It cannot be told which alternative the step would take."""
    with pytest.raises(SampleDiffersError, match='clock'):
        cfg = settings(lambda: loader(InOrder, dataset=Timed), tmp_path)
        cfg['model'] = dict(type='Reads')
        runner = ReproRunner(**cfg)
        stock = runner.train_loop.run_iter
        runner.train_loop.run_iter = lambda idx, batch: stock(idx, dict(batch))
        runner.train()


def test_a_batch_that_no_step_has_taken_is_an_error_with_the_next(tmp_path):
    def look(runner):
        next(iter(runner.train_dataloader))

    cfg = settings(lambda: loader(InOrder, dataset=Timed), tmp_path)
    cfg['model'] = dict(type='Reads')
    runner = ReproRunner(**cfg)
    runner.register_hook(hook_with(before_train_iter=lambda runner, **_: look(runner)))
    with pytest.raises(SampleDiffersError, match='clock'):
        runner.train()


def test_a_batch_that_the_second_load_has_overwritten_is_an_error(tmp_path):
    """The alternative is the same memory, so no step would tell them apart."""
    with pytest.raises(SampleDiffersError, match='has overwritten the first'):
        timed_run(tmp_path, Smears, wrap=lambda made: DataLoader(
            made.dataset, sampler=made.sampler, collate_fn=pseudo_collate))


class TimedText(Noisy):
    def __getitem__(self, i):
        return dict(super().__getitem__(i), load_time=time.perf_counter())


@pytest.mark.parametrize('workers', [0, 2])
def test_numbers_and_text_of_a_validation_are_one_warning(workers, tmp_path):
    _, log = timed_run(tmp_path, Noisy, validated=TimedText, workers=workers)
    assert log.count("TimedText: samples that are loaded twice differ in ['load_time']") == 1
    with pytest.raises(SampleDiffersError, match=r'Timed: sample 0 \(validation'):
        timed_run(tmp_path / 'other', Noisy, validated=Timed, workers=workers)
