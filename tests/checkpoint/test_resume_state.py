"""What a resumed run has besides weights: validations, averages, scalers, several optimizers."""
import pytest
import torch
from mmengine.hooks import EarlyStoppingHook, Hook
from mmengine.runner import Runner
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

from mmrepro.checkpoint.adapters import collect, restore


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


@pytest.mark.parametrize('by_epoch, after', [(True, 4), (True, 8), (True, 12), (True, 16),
                                             (False, 8), (False, 12), (False, 16)])
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
        kept.append(collect(torch.nn.Identity(), [*first, *stopping]))
        stopping[1].wait_count = 2
        state = collect(torch.nn.Identity(), stopping)
        again = [*first, EarlyStoppingHook('error', 'less'), EarlyStoppingHook('loss', 'less')]
        assert restore(torch.nn.Identity(), again, state) == []
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


@pytest.mark.parametrize('accumulate', [1, 3])
def test_the_scaler_of_mixed_precision(accumulate, tmp_path, monkeypatch):
    """Its scale doubles every two steps and halves at overflow, here at the seventh iteration."""
    from mmengine.optim import AmpOptimWrapper
    from mmengine.optim.optimizer import amp_optimizer_wrapper as amp
    # MMEngine wants an accelerator for it; torch has the same scaler for the CPU
    monkeypatch.setattr(amp, 'is_cuda_available', lambda: True)
    monkeypatch.setattr(amp, 'GradScaler', lambda **given: torch.amp.GradScaler('cpu', **given))
    monkeypatch.setattr('mmengine.runner.amp.get_device', lambda: 'cpu')

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
    runner = Runner.from_cfg(settings(tmp_path / 'base', **changes))
    runner.train()
    assert isinstance(runner.optim_wrapper, AmpOptimWrapper)
    check_every_resume_point(tmp_path, changes, everything(runner))
    scales = {torch.load(path, weights_only=False)['optimizer']['loss_scaler']['scale']
              for path in (tmp_path / 'base').glob('iter_*.pth')}
    assert len(scales) > 2, 'it grew and fell'
