"""Small trainings with all the state that a resume restores: validations, averages, schedules."""
import pytest
import torch
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import HOOKS, METRICS, MODELS
from small_runs import small_run, trained_runner, validating

from mmrepro.objects.digests import state_digest


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


KILLED_AT, METRICS_SEEN = [], []


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


@HOOKS.register_module(force=True)
class Scores(Hook):
    priority = 90

    def after_val_epoch(self, runner, metrics=None):
        METRICS_SEEN.append((runner.iter, metrics['error'].hex()))


class Killed(Hook):
    """Ends the process before the ``nth`` checkpoint is written, or before an iteration."""
    priority = 100

    def __init__(self, write=None, iteration=None):
        self.write, self.iteration, self.writes = write, iteration, 0

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == self.iteration:
            raise KeyboardInterrupt

    def before_save_checkpoint(self, runner, checkpoint):
        self.writes += 1
        if self.writes == self.write:
            raise KeyboardInterrupt


def settings(work_dir, **changes):
    return small_run(work_dir, train_cfg=dict(by_epoch=True, max_epochs=3),
                     **{'model.type': 'TwoPlayers', **changes})


def validated(work_dir, by_epoch, **changes):
    """Validates after every epoch (4 iterations); error is compared for the best and to stop."""
    cfg = settings(work_dir, **changes)
    cfg.train_cfg = dict(by_epoch=True, max_epochs=5) if by_epoch else dict(
        by_epoch=False, max_iters=20, val_interval=4)
    validating(cfg, 'LossOnPoints')
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
    return everything(trained_runner(cfg))


def killed(cfg, **when):
    with pytest.raises(KeyboardInterrupt):
        trained_runner(cfg, Killed(**when))
