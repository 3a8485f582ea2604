"""A resumed job of several ranks is the uninterrupted one, state of every rank included."""
import copy
import functools

import pytest
import torch
from harness import digest
from mmengine.registry import MODELS
from preempted_runs import Small
from preempted_runs import settings as small_settings
from ranks import as_rank, on_ranks
from small_runs import NoisyLine  # noqa: F401  registered

import mmrepro  # noqa: F401


@MODELS.register_module(force=True)
class RankState(Small):
    """Besides BatchNorm without synchronisation, a buffer and an attribute of each rank."""

    def __init__(self):
        super().__init__()
        self.register_buffer('seen', torch.zeros(1), persistent=False)
        self.largest = 0.

    def forward(self, x, mode='tensor'):
        self.seen += torch.stack(x).abs().sum()
        self.largest = max(self.largest, float(torch.stack(x).max()))
        return dict(loss=super().forward(x, 'loss')['loss'] * (self.seen + self.largest))


@pytest.fixture(autouse=True)
def adapter():
    from mmrepro.checkpoint import adapters
    adapters.register(RankState, 'largest', why='of this rank')
    yield
    adapters.ADAPTERS.pop('RankState')


def settings(work_dir, accumulate=1):
    cfg = small_settings(work_dir, **{
        'model.type': 'RankState', 'train_dataloader.dataset.size': 48, 'train_cfg.max_epochs': 2,
        'optim_wrapper.clip_grad': dict(max_norm=1.),
        'optim_wrapper.accumulative_counts': accumulate,
        'default_hooks.checkpoint': dict(interval=1, by_epoch=False, max_keep_ckpts=-1),
        'randomness': dict(deterministic=True, diff_rank_seed=True)})
    cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    return cfg


def state_of(runner):
    model = runner.model.module
    ema = next(hook for hook in runner.hooks if type(hook).__name__ == 'EMAHook').ema_model
    return dict(state=dict(model=digest(model.state_dict()), seen=model.seen.item().hex(),
                           largest=model.largest, ema=digest(ema.state_dict()),
                           optimizer=digest(runner.optim_wrapper.state_dict())))


@pytest.mark.parametrize('world, points', [(2, (4, 6, 11)), (3, (2, ))])
def test_every_rank_continues_with_its_own_state(world, points, tmp_path):
    with_state = functools.partial(as_rank, look=state_of)
    expected = on_ranks(world, settings(tmp_path, 3), tmp_path / 'base', function=with_state)
    assert len({rank['state']['model'] for rank in expected}) == world, 'ranks hold their own BN'
    last = len(expected[0]['step'])
    for point in points:
        cfg = settings(tmp_path / str(point), 3)
        cfg.resume, cfg.load_from = True, str(tmp_path / 'base' / f'iter_{point}.pth')
        found = on_ranks(world, cfg, tmp_path / str(point), function=with_state)
        for rank, (before, after) in enumerate(zip(expected, found)):
            where = f'rank {rank} of {world}, resumed at {point}'
            assert isinstance(after, dict), after
            assert after['step'] == list(range(point, last)), where
            for key in ('data', 'loss'):
                assert after[key] == before[key][point:], f'{where}: {key}'
            assert after['state'] == before['state'], where


def test_ranks_that_are_equal_hand_nothing_over(tmp_path):
    cfg = settings(tmp_path)
    cfg.model.type = 'NoisyLine'
    cfg.custom_hooks = []
    on_ranks(2, cfg, tmp_path)
    saved = torch.load(tmp_path / 'iter_3.pth', weights_only=False)
    assert saved['mmrepro']['ranks'] == {}


def test_every_rank_writes_its_fingerprints_and_continues_them(tmp_path):
    from mmrepro.fingerprint.reader import read_run
    cfg = settings(tmp_path / 'run')
    cfg.custom_hooks = [dict(type='FingerprintHook')]
    on_ranks(2, cfg, tmp_path / 'run')
    first, second = (read_run(str(tmp_path / 'run')).ranks[rank].steps for rank in (0, 1))
    assert list(first) == list(second) == list(range(12))
    for one, other in zip(first.values(), second.values()):
        assert one['parameters'] == other['parameters'] and one['gradients'] == other['gradients']
        assert one['optimizer'] == other['optimizer']
        assert not set(one['batch']['positions']) & set(other['batch']['positions'])
        assert one['buffers'] != other['buffers'], 'BatchNorm is not synchronised here'
    cfg.resume, cfg.load_from = True, str(tmp_path / 'run' / 'iter_5.pth')
    on_ranks(2, cfg, tmp_path / 'run')
    run = read_run(str(tmp_path / 'run'))
    assert [manifest['resumed_from'] for manifest in run.manifests] == [None, cfg.load_from]
    again = run.ranks
    assert (again[0].steps, again[1].steps) == (first, second)
    assert [len(again[rank].starts) for rank in (0, 1)] == [2, 2]
    assert not any('differ' in note for rank in (0, 1) for note in again[rank].notes)


def counted_on_rank(rank, world, port, cfg, work_dir):
    from counted import Counted
    counted = Counted()
    as_rank(rank, world, port, cfg, work_dir)
    return counted.calls['check'], counted.calls['state']


def test_every_rank_checks_a_checkpoint_once_and_collects_its_state_once(tmp_path):
    cfg = settings(tmp_path)
    for _, states in on_ranks(2, copy.deepcopy(cfg), tmp_path, function=counted_on_rank):
        assert states == 12
    cfg.resume, cfg.load_from = True, str(tmp_path / 'iter_10.pth')
    assert on_ranks(2, cfg, tmp_path, function=counted_on_rank) == [(1, 2)] * 2
