"""Samples are loaded twice: whatever does not follow from a sample's stream is named."""
import copy
import datetime
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
from faults.tiny import tiny
from harness import digest
from loaders import InOrder, Noisy, Piped, loader, settings
from mmcv.transforms import BaseTransform
from mmengine.registry import DATASETS
from torch.utils.data import ConcatDataset, DataLoader

from dev.user_setups import samples  # noqa: F401  registers set-ups
from dev.user_setups.setup import SETUPS
from mmrepro.another_process import MAX_ITEMS, copied
from mmrepro.config import RandomnessConfig
from mmrepro.data import adopt_loader, written_files
from mmrepro.data.sample_check import checked, left_out
from mmrepro.errors import RandomnessError, SampleDiffersError
from mmrepro.fingerprint.sample_replay import explain
from mmrepro.runner import ReproRunner

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
    assert checked(made) == before + 1


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
    monkeypatch.setattr(written_files, 'print_log', lambda text, *_: said.append(text))
    path = str(tmp_path / 'cache.png')
    named = type(f'Writes_{write}', (Writes, ), {})
    made = strict(DataLoader(named(WRITERS[write], path), batch_size=2))
    for _ in range(2):
        list(made)
    assert [text.partition(' while')[0] for text in said] == [
        f'Writes_{write}: a sample has written {path}']


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


class KeepsFromBatches(Noisy):
    first = None

    def __getitems__(self, indices):
        self.first = indices[0] if self.first is None else self.first
        return [dict(x=self[i]['x'] + self.first) for i in indices]


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
    (lambda: strict(DataLoader(KeepsFromBatches(), batch_size=4)),
     'batch of sample 4 .*position 4.* as another process loads it.*\n.*\n.*dataset.first')])
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
    assert digest(twin.__getitems__(batch)) == digest(made._mmrepro_fetch.__getitems__(batch))


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
    made = strict(loader(InOrder, workers, dataset))
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
    made = strict(loader(InOrder, 0, lambda: dataset))
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
