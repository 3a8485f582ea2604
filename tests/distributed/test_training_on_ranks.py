"""Several ranks on the CPU over gloo, each a forked child of this warm process."""
import pytest
from demo_runs import changed, workers
from faults import tiny as tiny_run
from ranks import on_ranks


@pytest.fixture(scope='module')
def cfg(tmp_path_factory):
    cfg = tiny_run.tiny(tmp_path_factory.mktemp('tiny'))
    cfg.train_dataloader.batch_size = 1
    cfg.train_cfg.max_epochs = 1
    cfg.custom_hooks.append(dict(type='SyncBuffersHook'))  # statistics are those of all ranks
    cfg.env_cfg = dict()
    return cfg


@pytest.fixture(scope='module')
def two(cfg, tmp_path_factory):
    return on_ranks(2, cfg, tmp_path_factory.mktemp('two'))


def test_ranks_share_weights_and_see_different_data(two):
    first, second = two
    assert first['weights'] == second['weights']
    assert first['optimizer'] == second['optimizer']
    assert not set(first['data']) & set(second['data'])
    assert len(first['step']) == 4


def test_workers_and_a_second_start_change_nothing(cfg, two, tmp_path):
    again = on_ranks(2, changed(cfg, workers(2)), tmp_path)
    for before, after in zip(two, again):
        for key in ('data', 'loss', 'weights', 'optimizer', 'seed'):
            assert before[key] == after[key], key


def test_four_ranks_repeat(cfg, tmp_path):
    runs = [on_ranks(4, cfg, tmp_path / str(i)) for i in range(2)]
    assert len({result['weights'] for run in runs for result in run}) == 1
    assert [result['data'] for result in runs[0]] == [result['data'] for result in runs[1]]
    assert len({tuple(result['data']) for result in runs[0]}) == 4


def test_diff_rank_seed_changes_the_model_only(cfg, two, tmp_path):
    other = on_ranks(2, changed(cfg, lambda cfg: cfg.randomness.update(diff_rank_seed=True)),
                     tmp_path)
    assert [result['data'] for result in other] == [result['data'] for result in two]
    assert other[0]['weights'] == other[1]['weights'] != two[0]['weights']


def test_a_drawn_seed_is_the_same_on_all_ranks(cfg, tmp_path):
    unseeded = changed(cfg, lambda cfg: cfg.randomness.update(seed=None))
    first, second = on_ranks(2, unseeded, tmp_path)
    assert first['seed'] == second['seed']


def test_ranks_that_differ_are_refused_by_name(cfg, tmp_path):
    def of_rank(rank, cfg):
        if rank == 1:
            cfg.optim_wrapper.optimizer.lr = 0.5

    errors = on_ranks(2, cfg, tmp_path, of_rank)
    for error in errors:
        assert isinstance(error, str) and 'AgreementError' in error
        assert 'rank 1' in error and 'lr=0.5' in error
