"""A signal to some ranks: all leave after the same iteration, and nothing is lost."""
import pytest
from preempted_runs import Signals, run, settings
from ranks import joined, on_ranks


def trained(cfg, work_dir, at=None, resume=False):
    """Return, of three ranks, what they recorded and the iteration after which they left."""
    def of_rank(rank, world, port, cfg, work_dir):
        with joined(rank, world, port, cfg):
            hook, preempted = run(cfg, resume, Signals((at or {}).get(rank)))
            return hook.records, preempted and preempted.iteration

    return on_ranks(3, cfg, work_dir, function=of_rank)


# rank -> event in which its signal comes; an epoch has 4 iterations and 2 validation batches, and
# of these batches rank 0 has one more
MOMENTS = {'one rank': {1: 2}, 'at different times': {0: 4, 2: 3}, 'in a validation': {2: 5}}


CHANGES = {'train_cfg.max_epochs': 20, 'val_dataloader.dataset.size': 13,
           'train_dataloader.batch_size': 2, 'train_dataloader.dataset.size': 24,
           'randomness.deterministic': True}


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp('whole')
    return trained(settings(folder, **CHANGES), folder)


@pytest.mark.parametrize('moment', MOMENTS)
def test_ranks_leave_after_the_same_iteration(moment, whole, tmp_path):
    cfg = settings(tmp_path, **CHANGES)
    first, second = trained(cfg, tmp_path, MOMENTS[moment]), trained(cfg, tmp_path, resume=True)
    assert len({iteration for _, iteration in first}) == 1 and first[0][1] is not None
    for rank in range(3):
        assert {**first[rank][0], **second[rank][0]} == whole[rank][0], f'rank {rank}'
