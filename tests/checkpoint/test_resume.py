"""A resumed run is the uninterrupted one, as bytes: batches, weights and what else a run has."""
import copy

import pytest
import torch
from demo_runs import log_lines, narrow, small
from harness import Child, run_all, train
from mmengine.hooks import EarlyStoppingHook, Hook
from mmengine.logging import MessageHub
from mmengine.registry import MODELS
from mmengine.runner import Runner
from small_runs import NoisyLine, Points, continued, finish, small_run, trained_runner
from validated_runs import (
    KILLED_AT,
    METRICS_SEEN,
    Killed,
    TwoPlayers,
    everything,
    killed,
    settings,
    trained,
    validated,
)

from mmrepro.checkpoint.kept_attributes import collect, restore
from mmrepro.distributed.unwrap import named_hooks
from mmrepro.errors import RandomnessError

pytestmark = pytest.mark.usefixtures('workers_end_soon', 'no_pause_between_passes')


def test_a_resumed_detector_gives_the_uninterrupted_run(data_root, tmp_path):
    """More detectors, resumed at every iteration: tests/dev/test_tools_of_dev.py."""
    import mmdet.models  # noqa: F401
    cfg = small('yolox_s', data_root)
    narrow(cfg)
    cfg.default_hooks.checkpoint = dict(
        type='CheckpointHook', interval=1, by_epoch=False, max_keep_ckpts=-1)
    base = tmp_path / 'base'
    expected = run_all({'base': (train, (cfg, str(base)), {})})['base']
    point = 1  # in the first of two epochs
    resumed = copy.deepcopy(cfg)
    resumed.resume, resumed.load_from = True, str(base / f'iter_{point}.pth')
    resumed.default_hooks.checkpoint.interval = 100
    resumed.train_dataloader.merge(dict(num_workers=2, persistent_workers=True))
    found = run_all({'resumed': (train, (resumed, str(tmp_path / 'resumed')), {})})['resumed']
    assert found['step'] == list(range(point, 6))
    for key in ('data', 'loss'):
        assert found[key] == expected[key][point:], key
    for key in ('weights', 'optimizer'):
        assert found[key] == expected[key], key
    logged, before = log_lines(tmp_path / 'resumed'), log_lines(base)
    assert logged and all(before[step] == values for step, values in logged.items())


LOOPS = {
    'epochs': {'train_cfg': dict(by_epoch=True, max_epochs=3)},
    'iterations, endless sampler': {
        'train_cfg': dict(by_epoch=False, max_iters=12, val_interval=100),
        'train_dataloader.sampler.type': 'InfiniteSampler'},
    'iterations, epochs of data': {
        'train_cfg': dict(by_epoch=False, max_iters=12, val_interval=100)},
}


@pytest.mark.parametrize('loop', LOOPS)
@pytest.mark.parametrize('workers', [0, 2])
def test_every_iteration_of_every_loop(loop, workers, tmp_path):
    changes = {**LOOPS[loop], 'train_dataloader.num_workers': workers}

    def run(cfg):
        # workers of endless loaders end with the process that started them
        return Child(finish, cfg).result() if workers else finish(cfg)

    expected = run(small_run(tmp_path, **changes))
    for point in range(1, 12) if workers == 0 else (1, 4, 6, 11):
        assert run(continued(tmp_path, point, **changes)) == expected, point


@pytest.mark.parametrize('loop', LOOPS)
def test_no_sample_is_loaded_twice(loop, tmp_path, monkeypatch):
    unchecked = dict(LOOPS[loop], randomness=dict(seed=3, deterministic=True, self_checks=False))
    finish(small_run(tmp_path, **unchecked))
    loads = []
    stock = Points.__getitem__

    def counted(self, i):
        loads.append(i)
        return stock(self, i)

    monkeypatch.setattr(Points, '__getitem__', counted)
    finish(continued(tmp_path, 9, **unchecked))
    assert len(loads) == 3 * 2


def test_a_drawn_seed_comes_back_before_anything_is_built(tmp_path):
    unseeded = dict(randomness=dict(seed=None))
    assert finish(small_run(tmp_path, **unseeded)) == finish(continued(tmp_path, 5, **unseeded))


def test_another_seed_is_refused(tmp_path):
    finish(small_run(tmp_path))
    with pytest.raises(RandomnessError, match='randomness.seed=4, but .* a run with seed 3'):
        Runner.from_cfg(small_run(tmp_path, randomness=dict(seed=4), resume=True))


@pytest.fixture(autouse=True)
def fresh():
    yield
    METRICS_SEEN.clear()
    KILLED_AT.clear()


@pytest.mark.parametrize('by_epoch', [True, False])
@pytest.mark.parametrize('killed_in', [0, 2, 4])
def test_a_validation_that_was_killed_comes_first(by_epoch, killed_in, tmp_path):
    expected = trained(validated(tmp_path / 'whole', by_epoch))
    scores = METRICS_SEEN.copy()
    assert len(scores) == 5
    METRICS_SEEN.clear()
    KILLED_AT.append(killed_in)
    with pytest.raises(KeyboardInterrupt):
        trained(validated(tmp_path / 'killed', by_epoch))
    KILLED_AT.clear()
    found = trained(validated(tmp_path / 'killed', by_epoch, resume=True))
    assert METRICS_SEEN == scores
    assert found == expected
    names = [{path.name for path in (tmp_path / run).glob('best_*')} for run in ('whole', 'killed')]
    assert names[0] == names[1] and names[0]


def test_a_missed_validation_runs_when_training_has_begun_for_all_hooks(tmp_path):
    KILLED_AT.append(0)
    with pytest.raises(KeyboardInterrupt):
        trained(validated(tmp_path, True))
    KILLED_AT.clear()
    runner, moments, hook = Runner.from_cfg(validated(tmp_path, True, resume=True)), [], Hook()
    for event in ('before_train', 'before_val', 'before_train_epoch'):
        setattr(hook, event, lambda runner, event=event: moments.append(event))
    runner.register_hook(hook, priority='LOWEST')
    runner.train()
    assert moments[:3] == ['before_train', 'before_val', 'before_train_epoch']


@pytest.mark.parametrize('by_epoch, after', [
    (True, 4), (True, 16), (False, 8), (False, 16),
    *(pytest.param(*which, marks=pytest.mark.nightly) for which in (
        (True, 8), (True, 12), (False, 12)))])
def test_early_stopping_knows_the_metrics_of_the_best_checkpoint(by_epoch, after, tmp_path):
    """MMEngine writes the checkpoint again for a new best, before EarlyStoppingHook has a look."""
    expected = trained(validated(tmp_path / 'whole', by_epoch))
    killed(validated(tmp_path / 'killed', by_epoch), iteration=after)
    assert trained(validated(tmp_path / 'killed', by_epoch, resume=True)) == expected


def test_a_hook_finds_its_state_when_other_hooks_come(tmp_path):
    """Adding a hook that watches must not cost EarlyStoppingHook its memory."""
    kept = []
    for first in ([], [Killed()], [Killed(), Killed()]):
        stopping = [EarlyStoppingHook('error', 'less'), EarlyStoppingHook('loss', 'less')]
        kept.append(collect(dict(named_hooks([*first, *stopping]))))
        stopping[1].wait_count = 2
        state = collect(dict(named_hooks(stopping)))
        again = [*first, EarlyStoppingHook('error', 'less'), EarlyStoppingHook('loss', 'less')]
        assert restore(dict(named_hooks(again)), state) == []
        assert [hook.wait_count for hook in again[-2:]] == [0, 2]
    assert kept[0] == kept[1] == kept[2] and len(kept[0]) == 2


VARIANTS = {
    'averages of weights': dict(custom_hooks=[
        dict(type='EMAHook', ema_type='ExponentialMovingAverage', update_buffers=True)]),
    'averages that begin later': dict(custom_hooks=[
        dict(type='EMAHook', ema_type='StochasticWeightAverage', begin_epoch=1)]),
    'averages of every second step': dict(custom_hooks=[
        dict(type='EMAHook', interval=2, update_buffers=True)]),
    'several optimizers': {
        'model.own_steps': True,
        'optim_wrapper': dict(constructor='OnePerPart', accumulative_counts=3),
        'param_scheduler': dict(
            first=dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=9),
            second=dict(type='MultiStepLR', milestones=[1, 2], by_epoch=True))},
    'clipped gradients, sums over five': {
        'optim_wrapper.accumulative_counts': 5, 'optim_wrapper.clip_grad': dict(max_norm=0.1)},
    'schedules': dict(param_scheduler=[
        dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=5),
        dict(type='CosineAnnealingLR', T_max=7, by_epoch=False, begin=5, end=12),
        dict(type='OneCycleLR', eta_max=0.3, total_steps=12, by_epoch=False)]),
}


def check_every_resume_point(folder, changes, expected):
    for point in range(1, 12):
        cfg = settings(folder / str(point), **changes, resume=True,
                       load_from=str(folder / 'base' / f'iter_{point}.pth'))
        cfg.default_hooks.checkpoint.interval = 100
        assert trained(cfg) == expected, f'resumed at {point}'


@pytest.mark.parametrize('variant', VARIANTS)
def test_every_resume_point(variant, tmp_path):
    expected = trained(settings(tmp_path / 'base', **VARIANTS[variant]))
    check_every_resume_point(tmp_path, VARIANTS[variant], expected)


@MODELS.register_module(force=True)
class CountsItsCycle(NoisyLine):
    """Adds up the gradients of three iterations by itself."""

    def train_step(self, data, optim_wrapper):
        loss = self(**self.data_preprocessor(data, True), mode='loss')['loss']
        loss.backward()
        if MessageHub.get_current_instance().get_info('iter') % 3 == 2:
            optim_wrapper.step()
            optim_wrapper.zero_grad()
        return dict(loss=loss)


def test_gradients_that_only_the_model_adds_up_are_kept(tmp_path):
    changes = dict(model=dict(type='CountsItsCycle'))
    expected = finish(small_run(tmp_path, **changes))
    for point in range(1, 7):
        assert finish(continued(tmp_path, point, **changes)) == expected, point
    content = torch.load(tmp_path / 'iter_6.pth', weights_only=False)
    assert not content['mmrepro']['gradients']  # a step has used them


@pytest.mark.parametrize('kept', [True, False])
def test_gradients_are_said_to_be_lost_only_where_they_are(kept, tmp_path, caplog):
    changes = {'optim_wrapper.accumulative_counts': 3}
    finish(small_run(tmp_path / 'run', **changes))
    if not kept:
        path = tmp_path / 'run' / 'iter_1.pth'
        content = torch.load(path, weights_only=False)
        assert content['mmrepro'].pop('gradients')
        torch.save(content, path)
    runner = Runner.from_cfg(continued(
        tmp_path / 'run', 1, log_level='WARNING', **changes))
    handler = caplog.handler
    runner.logger.addHandler(handler)
    runner.train()
    assert ('the gradient of some iterations is lost' in caplog.text) is not kept


@pytest.mark.parametrize('accumulate', [1, 3])
def test_the_scaler_of_mixed_precision(accumulate, tmp_path, monkeypatch, amp_on_cpu):
    """Its scale doubles every two steps and halves at overflow, here at the seventh iteration."""
    from mmengine.optim import AmpOptimWrapper

    def overflows(self, x, mode='tensor', stock=TwoPlayers.forward):
        losses = stock(self, x, mode)
        self.calls = getattr(self, 'calls', 0) + 1
        if mode == 'loss' and float(torch.stack(x).sum()) > 24:
            losses['loss'] = losses['loss'] * float('inf')
        return losses

    monkeypatch.setattr(TwoPlayers, 'forward', overflows)
    changes = {'optim_wrapper.type': 'AmpOptimWrapper', 'optim_wrapper.dtype': 'bfloat16',
               'optim_wrapper.loss_scale': dict(init_scale=1024.,
                                                growth_interval=1 + (accumulate == 1)),
               'optim_wrapper.accumulative_counts': accumulate}
    runner = trained_runner(settings(tmp_path / 'base', **changes))
    assert isinstance(runner.optim_wrapper, AmpOptimWrapper)
    check_every_resume_point(tmp_path, changes, everything(runner))
    scales = {torch.load(path, weights_only=False)['optimizer']['loss_scaler']['scale']
              for path in (tmp_path / 'base').glob('iter_*.pth')}
    assert len(scales) > 2, 'it grew and fell'
