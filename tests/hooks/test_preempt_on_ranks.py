"""A signal to some ranks: all leave after the same iteration, and nothing is lost."""
import os

import pytest
import torch
from harness import Child
from preempted_runs import Signals, run, settings
from ranks import free_port

pytestmark = pytest.mark.filterwarnings('ignore')


def of_rank(rank, world, cfg, port, at, resume):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world),
                      MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
    cfg.launcher = 'pytorch'
    try:
        hook, preempted = run(cfg, resume, Signals(at.get(rank)))
        return hook.records, preempted and preempted.iteration
    finally:
        torch.distributed.destroy_process_group()


def on_ranks(world, cfg, at=None, resume=False):
    port = free_port()
    children = [Child(of_rank, rank, world, cfg, port, at or {}, resume)
                for rank in range(world)]
    return [child.result() for child in children]


# rank -> event in which its signal comes; an epoch has 4 iterations and 2 validation batches, and
# of these batches rank 0 has one more
MOMENTS = {'one rank': {1: 2}, 'at different times': {0: 4, 2: 3}, 'in a validation': {2: 5}}


CHANGES = {'train_cfg.max_epochs': 20, 'val_dataloader.dataset.size': 13,
           'train_dataloader.batch_size': 2, 'train_dataloader.dataset.size': 24,
           'randomness.deterministic': True}


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    return on_ranks(3, settings(tmp_path_factory.mktemp('whole'), **CHANGES))


@pytest.mark.parametrize('moment', MOMENTS)
def test_ranks_leave_after_the_same_iteration(moment, whole, tmp_path):
    cfg = settings(tmp_path, **CHANGES)
    first = on_ranks(3, cfg, MOMENTS[moment])
    second = on_ranks(3, cfg, resume=True)
    assert len({iteration for _, iteration in first}) == 1 and first[0][1] is not None
    for rank in range(3):
        assert {**first[rank][0], **second[rank][0]} == whole[rank][0], f'rank {rank}'
