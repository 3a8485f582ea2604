"""A resume moves the loader of the training loop, in its own first pass, and no other."""
import pytest
from harness import digest
from loaders import BATCH, Noisy, loader, train
from mmengine.dataset import DefaultSampler, pseudo_collate
from mmengine.hooks import Hook
from mmengine.registry import DATASETS
from small_runs import hook_with
from torch.utils.data import DataLoader

DATASETS.register_module(module=Noisy, name='NoisyForHooks', force=True)


def made():
    return loader(DefaultSampler)


def dict_of_one():
    return dict(batch_size=BATCH, num_workers=0, dataset=dict(type='NoisyForHooks'),
                sampler=dict(type='DefaultSampler', shuffle=True))


class Looking(Hook):
    def __init__(self):
        self.seen, self.done = {}, False


class OwnLoader(Looking):
    def before_train(self, runner):
        self.loader = runner.build_dataloader(dict_of_one())

    def after_train_epoch(self, runner):
        self.seen['own', runner.epoch] = [digest(batch) for batch in self.loader]


class LooksAtTheData(Looking):
    """Goes through the training data by itself, as hooks do that estimate statistics."""

    def look(self, event, runner):
        self.seen[event, runner.epoch] = [digest(batch) for batch in runner.train_dataloader]

    def before_train(self, runner):
        self.look('before', runner)

    def before_train_epoch(self, runner):
        self.look('begin', runner)

    def after_train_epoch(self, runner):
        self.look('end', runner)


class AnotherLoader(Looking):
    def build(self, runner):
        return runner.build_dataloader(dict_of_one())

    def before_train_epoch(self, runner):
        if runner.epoch >= 1 and not self.done:
            self.done = True
            runner.train_loop.dataloader = self.build(runner)


class LoaderOfTorch(AnotherLoader):
    def build(self, runner):
        return DataLoader(Noisy(), BATCH, shuffle=True, collate_fn=pseudo_collate)


@pytest.mark.parametrize('point', [5, 8])
@pytest.mark.parametrize('kind', [OwnLoader, LooksAtTheData, AnotherLoader, LoaderOfTorch])
def test_what_hooks_load_is_not_moved(kind, point, tmp_path):
    def run(resume_at=None):
        hook = kind()
        found = train(made, tmp_path, 'epochs', resume_at, validation=False,
                      prepare=lambda runner: runner.register_hook(hook))
        return found, hook.seen

    (whole, weights), seen = run()
    (resumed, again), later = run(point)
    assert (resumed, again) == (whole[point:], weights)
    assert {key: later[key] for key in later if key[0] != 'before'} == {
        key: seen[key] for key in seen if key[0] != 'before' and key[1] >= (point - 1) // 4}
    assert all(len(batches) == 4 for batches in later.values())
    if kind is not OwnLoader:
        assert len(set(whole)) == 12, 'an epoch repeats the draws of another'


def test_a_loader_that_a_hook_gives_to_the_validation_is_keyed(tmp_path):
    def seen(workers):
        batches = []

        def give(runner):
            runner.val_loop.dataloader = DataLoader(
                Noisy(), BATCH, num_workers=workers, collate_fn=pseudo_collate)

        train(made, tmp_path / str(workers), prepare=lambda runner: runner.register_hook(hook_with(
            before_val_epoch=give, before_val_iter=lambda runner, batch_idx, data_batch:
            batches.append(digest(data_batch)))))
        return batches

    alone = seen(0)
    assert len(set(alone)) == 4 and seen(2) == alone


class Keeps(Hook):
    def before_train(self, runner):
        self.batches = iter(runner.build_dataloader(dict_of_one()))

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter < 3:
            next(self.batches)


def test_a_pass_whose_position_is_lost_is_named(tmp_path, monkeypatch):
    said = []

    def prepare(runner):
        runner.register_hook(Keeps())
        monkeypatch.setattr(runner.logger, 'warning', lambda text, *args: said.append(text))

    train(made, tmp_path, 'epochs', validation=False, prepare=prepare)
    named = [text for text in said if 'in the middle of a pass' in text]
    assert len(named) == 1 and 'a loader of Noisy' in named[0]
