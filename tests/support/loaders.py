"""Loaders that users bring, and a small training with them."""
import random

import numpy as np
import torch
from harness import digest
from mmengine.dataset import Compose, pseudo_collate
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.registry import METRICS, MODELS
from small_runs import hook_with
from torch.utils.data import DataLoader, Sampler

from mmrepro.config import RandomnessConfig
from mmrepro.data import adopt_loader
from mmrepro.run.runner import ReproRunner

SIZE, BATCH = 14, 4  # four batches an epoch, the last one of two


@MODELS.register_module(force=True)
class Mean(BaseModel):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x, mode='tensor'):
        loss = (torch.stack(list(x)).mean() * self.weight).square().sum()
        return dict(loss=loss) if mode == 'loss' else [loss]


@METRICS.register_module(force=True)
class Drawing(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results.append(0)

    def compute_metrics(self, results):
        random.random(), np.random.rand(), torch.rand(1)
        return {}


class Noisy(torch.utils.data.Dataset):
    """Its index, and noise of every generator."""

    def __len__(self):
        return SIZE

    def __getitem__(self, i):
        return dict(x=torch.tensor([float(i), random.random(), np.random.rand(), torch.rand(())]))


class Piped(Noisy):
    def __init__(self, *transforms):
        self.pipeline = Compose(list(transforms))

    def __getitem__(self, i):
        return self.pipeline(super().__getitem__(i))


class InOrder(Sampler):
    """The least that a sampler has to have."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __iter__(self):
        return iter(range(len(self.dataset)))


LOOPS = {
    'epochs': dict(by_epoch=True, max_epochs=3),
    'iterations': dict(by_epoch=False, max_iters=12, val_interval=3),
}


def loader(sampler=InOrder, workers=0, dataset=Noisy, collate=pseudo_collate, **kwargs):
    dataset = dataset()
    return DataLoader(dataset, batch_size=BATCH, sampler=sampler(dataset), num_workers=workers,
                      collate_fn=collate, **kwargs)


def adopted(made, stream='sample', **kwargs):
    return adopt_loader(made, RandomnessConfig(seed=3, **kwargs), stream, rank=0)


def settings(make, work_dir, loop='epochs', resume_at=None, validation=True):
    """Return the run of a loader that ``make`` builds; checkpoints of every iteration."""
    cfg = dict(
        model=dict(type='Mean'), work_dir=str(work_dir), log_level='ERROR',
        train_dataloader=make(), train_cfg=dict(LOOPS[loop]),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=1e-3)),
        randomness=dict(seed=3, deterministic=True),
        default_hooks=dict(checkpoint=dict(
            type='CheckpointHook', interval=1000 if resume_at else 1, by_epoch=False)),
        resume=resume_at is not None,
        load_from=resume_at and str(work_dir / f'iter_{resume_at}.pth'))
    if validation:
        cfg.update(val_dataloader=loader(), val_cfg=dict(), val_evaluator=dict(type='Drawing'))
    return cfg


def train(make, work_dir, *args, prepare=lambda runner: None, cfg=None, **kwargs):
    """Digests of all batches, and of the weights at the end; ``cfg`` in place of settings."""
    seen = []
    runner = ReproRunner(**cfg or settings(make, work_dir, *args, **kwargs))
    runner.register_hook(hook_with(before_train_iter=lambda runner, batch_idx, data_batch:
                                   seen.append(digest(data_batch))))
    prepare(runner)
    runner.train()
    return seen, digest(runner.model.state_dict())


def check_training(make, work_dir, loop='epochs', points=(5, )):
    """Check that neither validation nor a resume changes a bit; return what :func:`train` does."""
    seen, weights = train(make, work_dir, loop)
    assert len(set(seen)) == len(seen), 'an epoch repeats the draws of another'
    assert train(make, work_dir / 'other', loop, validation=False) == (seen, weights)
    for point in points:
        assert train(make, work_dir, loop, point) == (seen[point:], weights), f'resumed at {point}'
    return seen, weights
