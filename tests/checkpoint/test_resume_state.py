"""What a resumed run has besides weights: validations, averages, scalers, several optimizers."""
import pytest
import torch
from mmengine.evaluator import BaseMetric
from mmengine.hooks import EarlyStoppingHook, Hook
from mmengine.model import BaseModel
from mmengine.registry import HOOKS, METRICS, MODELS, OPTIM_WRAPPER_CONSTRUCTORS
from mmengine.runner import Runner
from test_runner import Points, config  # noqa: F401  registered classes

from mmrepro.checkpoint.adapters import collect, restore
from mmrepro.digests import state_digest


@MODELS.register_module(force=True)
class TwoPlayers(BaseModel):
    """Two parts, each with an optimizer of its own; noise from the step's stream."""

    def __init__(self, own_steps=False):
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)
        self.norm, self.own_steps = torch.nn.BatchNorm1d(4), own_steps

    def forward(self, x, mode='tensor'):
        x = torch.stack(x).float()
        loss = (self.second(self.norm(self.first(x))) + torch.rand(1)).square().mean()
        return dict(loss=loss) if mode == 'loss' else [loss]

    def train_step(self, data, optim_wrapper):
        if not self.own_steps:
            return super().train_step(data, optim_wrapper)
        losses = {}
        for name in ('first', 'second'):
            loss = self(self.data_preprocessor(data)['x'], mode='loss')['loss']
            optim_wrapper[name].update_params(loss)
            losses[f'loss_{name}'] = loss
        return losses


@OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
class OnePerPart:
    def __init__(self, optim_wrapper_cfg, paramwise_cfg=None):
        pass

    def __call__(self, model):
        from mmengine.optim import OptimWrapper, OptimWrapperDict
        return OptimWrapperDict(
            first=OptimWrapper(torch.optim.AdamW(model.first.parameters(), lr=0.01),
                               accumulative_counts=3),
            second=OptimWrapper(torch.optim.SGD(model.second.parameters(), lr=0.1, momentum=0.9)))


KILLED_AT = []


@METRICS.register_module(force=True)
class LossOnPoints(BaseMetric):
    """Goes up and down with the weights; ends the process where KILLED_AT says so."""
    seen = 0

    def process(self, data_batch, data_samples):
        if KILLED_AT and len(METRICS_SEEN) == KILLED_AT[0]:
            raise KeyboardInterrupt
        self.results.append(float(data_samples[0]))

    def compute_metrics(self, results):
        return dict(error=sum(results))


METRICS_SEEN = []


@HOOKS.register_module(force=True)
class Scores(Hook):
    priority = 90

    def after_val_epoch(self, runner, metrics=None):
        METRICS_SEEN.append((runner.iter, metrics['error'].hex()))


@pytest.fixture(autouse=True)
def fresh():
    yield
    METRICS_SEEN.clear()
    KILLED_AT.clear()


def settings(work_dir, **changes):
    cfg = config(work_dir)
    cfg.model = dict(type='TwoPlayers')
    cfg.train_cfg = dict(by_epoch=True, max_epochs=3)
    cfg.default_hooks.checkpoint = dict(
        type='CheckpointHook', interval=1, by_epoch=False, max_keep_ckpts=-1)
    cfg.merge_from_dict(changes)
    return cfg


def validated(work_dir, by_epoch, **changes):
    """Validates after every epoch (4 iterations); error is compared for the best and to stop."""
    cfg = settings(work_dir, **changes)
    cfg.train_cfg = dict(by_epoch=True, max_epochs=5) if by_epoch else dict(
        by_epoch=False, max_iters=20, val_interval=4)
    cfg.val_cfg, cfg.val_evaluator = dict(), dict(type='LossOnPoints')
    cfg.val_dataloader = dict(batch_size=2, num_workers=0, dataset=dict(type='Points'),
                              sampler=dict(type='DefaultSampler', shuffle=False))
    cfg.default_hooks.checkpoint = dict(
        type='CheckpointHook', interval=1 if by_epoch else 4, by_epoch=by_epoch,
        save_best='error', rule='less')
    cfg.custom_hooks = [
        dict(type='Scores'),
        dict(type='EarlyStoppingHook', monitor='error', rule='less', patience=3, min_delta=0.),
        dict(type='EMAHook', momentum=0.2)]
    if by_epoch:  # MMEngine has it for epochs only
        cfg.param_scheduler = [dict(type='ReduceOnPlateauLR', monitor='error', rule='less',
                                    patience=1, factor=0.5)]
    return cfg


def everything(runner):
    """All that a run leaves behind, as a digest by name."""
    schedulers = runner.param_schedulers or []
    found = dict(
        model=runner.model.state_dict(), optimizer=runner.optim_wrapper.state_dict(),
        best={key: value for key, value in runner.message_hub.runtime_info.items()
              if key.startswith('best_score')},
        average=[hook.ema_model.state_dict() for hook in runner.hooks
                 if hasattr(hook, 'ema_model')],
        stopping=[(hook.wait_count, hook.best_score) for hook in runner.hooks
                  if hasattr(hook, 'wait_count')],
        schedulers=[one.state_dict() for group in (
            schedulers.values() if isinstance(schedulers, dict) else [schedulers])
            for one in group],
        lr=runner.optim_wrapper.get_lr())
    return {name: state_digest(value) for name, value in found.items()}, runner.iter


def trained(cfg):
    runner = Runner.from_cfg(cfg)
    runner.train()
    return everything(runner)


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
    names = [{path.name for path in (tmp_path / run).glob('best_*')} for run in
             ('whole', 'killed')]
    assert names[0] == names[1] and names[0]


class KilledAfter(Hook):
    """Ends the process in the first iteration after the validation at ``iteration``."""

    def __init__(self, iteration):
        self.iteration = iteration

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == self.iteration:
            raise KeyboardInterrupt


@pytest.mark.parametrize('by_epoch, after', [(True, 4), (True, 8), (True, 12), (True, 16),
                                             (False, 8), (False, 12), (False, 16)])
def test_early_stopping_knows_the_metrics_of_the_best_checkpoint(by_epoch, after, tmp_path):
    """MMEngine writes the checkpoint again for a new best, before EarlyStoppingHook has a look."""
    def run(cfg, *hooks):
        runner = Runner.from_cfg(cfg)
        for hook in hooks:
            runner.register_hook(hook)
        runner.train()
        return everything(runner)

    expected = run(validated(tmp_path / 'whole', by_epoch))
    with pytest.raises(KeyboardInterrupt):
        run(validated(tmp_path / 'killed', by_epoch), KilledAfter(after))
    assert run(validated(tmp_path / 'killed', by_epoch, resume=True)) == expected


def test_a_hook_finds_its_state_when_other_hooks_come(tmp_path):
    """Adding a hook that watches must not cost EarlyStoppingHook its memory."""
    kept = []
    for first in ([], [KilledAfter(-1)], [KilledAfter(-1), KilledAfter(-2)]):
        stopping = [EarlyStoppingHook('error', 'less'), EarlyStoppingHook('loss', 'less')]
        kept.append(collect(torch.nn.Identity(), [*first, *stopping]))
        stopping[1].wait_count = 2
        state = collect(torch.nn.Identity(), stopping)
        again = [*first, EarlyStoppingHook('error', 'less'), EarlyStoppingHook('loss', 'less')]
        assert restore(torch.nn.Identity(), again, state) == []
        assert [hook.wait_count for hook in again[-2:]] == [0, 2]
    assert kept[0] == kept[1] == kept[2] and len(kept[0]) == 2


def test_a_validation_that_was_completed_is_not_repeated(tmp_path):
    cfg = validated(tmp_path, True)
    cfg.train_cfg.max_epochs = 2
    trained(cfg)
    done = len(METRICS_SEEN)
    # the best checkpoint of MMEngine is followed by a second copy of the last one
    assert done == 2
    cfg = validated(tmp_path, True, resume=True, resume_strict=False)
    cfg.randomness.resume_strict = False
    trained(cfg)
    assert [iteration for iteration, _ in METRICS_SEEN[done:]] in ([12, 16, 20], [8, 12, 16, 20])


VARIANTS = {
    'averages of weights': dict(custom_hooks=[
        dict(type='EMAHook', ema_type='ExponentialMovingAverage', update_buffers=True)]),
    'averages that begin later': dict(custom_hooks=[
        dict(type='EMAHook', ema_type='StochasticWeightAverage', begin_epoch=1)]),
    'averages of every second step': dict(custom_hooks=[
        dict(type='EMAHook', interval=2, update_buffers=True)]),
    'one sequence of random numbers': {'randomness.step_seed': False},
    'several optimizers': {
        'model.own_steps': True,
        'optim_wrapper': dict(constructor='OnePerPart'),
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


@pytest.mark.parametrize('variant', VARIANTS)
def test_every_resume_point(variant, tmp_path):
    changes = VARIANTS[variant]
    expected = trained(settings(tmp_path / 'base', **changes))
    for point in range(1, 12):
        cfg = settings(tmp_path / str(point), **changes)
        cfg.resume, cfg.load_from = True, str(tmp_path / 'base' / f'iter_{point}.pth')
        cfg.default_hooks.checkpoint.interval = 100
        assert trained(cfg) == expected, f'{variant}: resumed at {point}'


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
    expected = everything(runner)
    scales = set()
    for point in range(1, 12):
        path = tmp_path / 'base' / f'iter_{point}.pth'
        scales.add(torch.load(path, weights_only=False)['optimizer']['loss_scaler']['scale'])
        cfg = settings(tmp_path / str(point), **changes)
        cfg.resume, cfg.load_from = True, str(path)
        cfg.default_hooks.checkpoint.interval = 100
        assert trained(cfg) == expected, f'resumed at {point}'
    assert len(scales) > 2, 'it grew and fell'
