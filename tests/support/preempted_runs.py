"""A small training that sends signals to itself."""
import os
import signal
import time

import torch
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import HOOKS, METRICS, MODELS
from mmengine.runner import Runner
from small_runs import DumpNothing
from unformatted import Unformatted

from mmrepro.distributed.process_group import process_count
from mmrepro.errors import Preempted
from mmrepro.objects.digests import state_digest as digest
from mmrepro.run.hooks.preempt import stop_announced


@MODELS.register_module(force=True)
class Small(BaseModel):
    """BatchNorm, and noise from the step's stream; validation tells of the weights."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(2, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))

    def forward(self, x, mode='tensor'):
        out = self.layers(torch.stack(x).float())
        if mode == 'loss':
            return dict(loss=(out + torch.rand(1, device=out.device)).square().mean())
        return [out.sum()]


@METRICS.register_module(force=True)
class SumOfOutputs(DumpNothing):
    def process(self, data_batch, data_samples):
        self.results.append(float(data_samples[0]))

    def compute_metrics(self, results):
        return dict(total=sum(results))


def settings(work_dir, **changes):
    cfg = Unformatted(dict(
        model=dict(type='Small'), work_dir=str(work_dir), log_level='ERROR',
        train_dataloader=dict(batch_size=4, num_workers=0, dataset=dict(type='Points', size=16),
                              sampler=dict(type='DefaultSampler', shuffle=True)),
        val_dataloader=dict(batch_size=2, num_workers=0, dataset=dict(type='Points', size=6),
                            sampler=dict(type='DefaultSampler', shuffle=False)),
        val_cfg=dict(), val_evaluator=dict(type='SumOfOutputs'),
        train_cfg=dict(by_epoch=True, max_epochs=3),
        optim_wrapper=dict(optimizer=dict(type='AdamW', lr=0.01), accumulative_counts=3),
        param_scheduler=[dict(type='LinearLR', start_factor=0.1, by_epoch=False, end=9)],
        custom_hooks=[dict(type='EMAHook', ema_type='ExponentialMovingAverage',
                           update_buffers=True)],
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=-1, save_last=False)),
        env_cfg=dict(dist_cfg=dict(backend='gloo')), randomness=dict(seed=5, deterministic=True)))
    cfg.train_cfg = changes.pop('train_cfg', cfg.train_cfg)
    cfg.merge_from_dict(changes)
    return cfg


class Signals(Hook):
    """Records what happens and, at one event, sends signals to this process."""

    def __init__(self, at=None, numbers=(signal.SIGTERM,), send=os.kill):
        self.at, self.numbers, self._send = at, numbers, send
        self.records = {}
        self.events = 0

    def _turn(self):
        if self.events == self.at:
            for number in self.numbers:
                self._send(os.getpid(), number)
        self.events += 1

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.records['loss', runner.iter] = float(outputs['loss'].detach()).hex()
        self._turn()

    def before_val_iter(self, runner, batch_idx, data_batch=None):
        self._turn()

    def after_val_epoch(self, runner, metrics=None):
        self.records['metric', runner.iter] = float(metrics['total']).hex()

    def after_train(self, runner):
        model = getattr(runner.model, 'module', runner.model)
        average = next(hook for hook in runner.hooks if hasattr(hook, 'ema_model')).ema_model
        self.records['end', runner.iter] = digest(
            [model.state_dict(), average.state_dict(), runner.optim_wrapper.state_dict(),
             [scheduler.state_dict() for scheduler in runner.param_schedulers]])


@HOOKS.register_module(force=True)
class HeldAlone(Hook):
    """Makes iterations slow, and lets a process that has no others wait for them.

    It waits after ``after`` iterations of a start, until it is asked to stop, as torchrun does when
    a node has come, or until there is a file ``go`` in the work directory.
    """
    priority = 'LOWEST'  # the iteration is recorded by then

    def __init__(self, after):
        self.after = after

    def before_train(self, runner):
        self.done = 0

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        time.sleep(0.02)
        self.done += 1
        go = os.path.join(runner.work_dir, 'go')
        while self.done == self.after and process_count() == 1 and not (
                stop_announced(runner) or os.path.exists(go)):
            time.sleep(0.05)


def run(cfg, resume=False, hook=None):
    cfg.resume = resume
    hook = hook or Signals()
    runner = Runner.from_cfg(cfg)
    runner.register_hook(hook, priority='LOWEST')
    try:
        runner.train()
    except Preempted as preempted:
        return hook, preempted
    return hook, None
