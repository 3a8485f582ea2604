"""A pass over the data is the same for any number of workers, whatever hooks do to the dataset."""
import numpy as np
import pytest
import torch
from harness import digest
from loaders import InOrder, Noisy, adopted, loader, train
from mmengine.dataset import InfiniteSampler
from mmengine.hooks import Hook

from mmrepro.data.dataset_changes import DatasetSnapshot

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
            drawn = made.batch_sampler._mmrepro_placement.drawn
    assert found == whole
    assert made.batch_sampler._mmrepro_placement.drawn is not drawn


class Holds:
    def __init__(self):
        self.number, self.names, self.inner = 1, ['a', 'b'], dict(deep=[[1, 2]])
        self.array, self.tensor = np.zeros(3), torch.zeros(3)
        self.long, self.transform = list(range(1000)), Shifted()


CHANGES = {
    'dataset.number': lambda one: setattr(one, 'number', 2),
    'dataset.new': lambda one: setattr(one, 'new', 2),
    'dataset.names': lambda one: delattr(one, 'names'),
    'dataset.names[2]': lambda one: one.names.append('c'),
    "dataset.inner['deep'][0][1]": lambda one: one.inner['deep'][0].__setitem__(1, 3),
    'dataset.array': lambda one: one.array.__setitem__(1, 3),
    'dataset.tensor': lambda one: one.tensor.add_(1),
    'dataset.long': lambda one: one.long.append(1),
    'dataset.transform': lambda one: setattr(one, 'transform', Shifted()),
    'dataset.transform.shift': lambda one: setattr(one.transform, 'shift', 1),
    'dataset.transform.scale[0]': lambda one: one.transform.scale.__setitem__(0, 2),
}


@pytest.mark.parametrize('path', CHANGES)
def test_a_change_is_found_by_its_path(path):
    one, equal = Holds(), Holds()
    snapshot, other = DatasetSnapshot(one), DatasetSnapshot(equal)
    equal.names, equal.inner['deep'] = list(equal.names), [[1, 2]]
    assert snapshot.change() is None and other.change() is None
    CHANGES[path](one)
    assert snapshot.change() == path


@pytest.mark.parametrize('tensor', [torch.zeros(()).expand(1), torch.zeros(4)[::4]],
                         ids=['expanded', 'every fourth'])
def test_a_tensor_of_one_element_may_have_any_stride(tensor):
    one = Holds()
    one.tensor = tensor
    snapshot = DatasetSnapshot(one)
    assert snapshot.change() is None
    one.tensor.add_(1)
    assert snapshot.change() == 'dataset.tensor'
