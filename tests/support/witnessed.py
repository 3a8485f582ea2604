"""Small runs with a witness, and what users write that another process does not have."""
import os
import random
from pathlib import Path

import numpy as np
import torch
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseAveragedModel, BaseModel
from mmengine.registry import DATA_SAMPLERS, DATASETS, HOOKS, LOOPS, METRICS, MODELS
from mmengine.runner import Runner, ValLoop
from torch import nn
from unformatted import Unformatted

from mmrepro.util.scoped import replaced


@DATASETS.register_module(force=True)
class Numbers(torch.utils.data.Dataset):
    """Three numbers for each index, and noise from the sample's stream."""

    def __init__(self, size=16):
        self.size, self.factor = size, 1.0

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return dict(x=torch.full((3, ), float(i)) * self.factor + random.random())


def _kept(x, kept=[]):  # noqa: B006  a default that users keep state in
    if not kept:
        kept.append(float(x.mean()))
    return x - kept[0]


def _static(x):
    if not hasattr(_static, 'first'):
        _static.first = float(x.mean())
    return x - _static.first


class Reference(nn.Module):
    """A transform in the manner of torchvision v2, which keeps its first image."""
    first = None

    def forward(self, x):
        if self.first is None:
            self.first = float(x.mean())
        return x - self.first


@DATASETS.register_module(force=True)
class Keeping(Numbers):
    """Keeps something of its first sample, at a place that no list names."""

    def __init__(self, how, size=16):
        super().__init__(size)
        self.keep = dict(default=_kept, static=_static, module=Reference())[how]

    def __getitem__(self, i):
        return dict(x=self.keep(super().__getitem__(i)['x']))


@MODELS.register_module(force=True)
class Layers(BaseModel):
    """Two layers with batch norm; ``keeps`` says where something of the first step is kept."""

    def __init__(self, keeps='', logs=False):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.hidden = [Reference()]
        self.keeps, self.logs, self.scale, self.offset = keeps, logs, 1.0, 0.0
        seen = {}
        if keeps == 'forward hook':
            self.first.register_forward_hook(
                lambda module, given, out: out - seen.setdefault('first', out.detach().mean(0)))

    def forward(self, x, mode='tensor'):
        y = self.first(torch.stack(list(x)) if isinstance(x, list) else x)
        if self.keeps == 'module in a list':
            y = self.hidden[0](y)
        if self.keeps == 'function':
            y = _static(y)
        losses = dict(loss=self.scale * self.last(self.norm(y).tanh()).pow(2).mean())
        if self.logs:  # only logged: 'loss' is not in its name
            losses['process'] = torch.tensor(float(os.getpid()))
        return losses if mode == 'loss' else [self.last(self.norm(y).tanh()) + self.offset]


@METRICS.register_module(force=True)
class Mean(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results += [float(sample.mean()) for sample in data_samples]

    def compute_metrics(self, results):
        return dict(mean=float(np.mean(results)))


@METRICS.register_module(force=True)
class MeanAsTensor(Mean):
    def compute_metrics(self, results):
        return dict(mean=torch.tensor(results).mean())


@LOOPS.register_module(force=True)
class ValidatesTwice(ValLoop):
    """Predicts with another setting, too, as of a student and its teacher."""

    def run(self):
        super().run()
        self.runner.model.offset = 1.0
        metrics = super().run()
        self.runner.model.offset = 0.0
        return metrics


@MODELS.register_module(force=True)
class Counting(BaseAveragedModel):
    """An average whose momentum follows from a Python attribute."""
    updates = 0

    def avg_func(self, averaged_param, source_param, steps):
        averaged_param.lerp_(source_param, 1 / (2 + self.updates))

    def update_parameters(self, model):
        super().update_parameters(model)
        self.updates += 1


@HOOKS.register_module(force=True)
class Patience(Hook):
    """Lowers the learning rate at the third validation; a lost count shows late."""

    def __init__(self):
        self.seen, self.values = 0, []

    def after_val_epoch(self, runner, metrics=None):
        self.seen += 1
        self.values.append(self.seen)
        if self.seen == 3:
            for group in runner.optim_wrapper.param_groups:
                group['lr'] /= 10


@HOOKS.register_module(force=True)
class ActsRarely(Hook):
    """Changes weights in each seventh iteration that it has seen."""

    def __init__(self):
        self.seen = set()

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.seen.add(len(self.seen))
        if len(self.seen) % 7 == 0:
            runner.model.last.weight.data.mul_(0.5)


@HOOKS.register_module(force=True)
class OffsetOfPredictions(Hook):
    """Changes what the model predicts, and nothing that it learns."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        runner.model.offset += 1.0


@HOOKS.register_module(force=True)
class SetsOnce(Hook):
    """Changes the data in one epoch, and does not change them again in a resumed run."""

    def before_train_epoch(self, runner):
        if runner.epoch == 1:
            runner.train_dataloader.dataset.factor = 2.0


@HOOKS.register_module(force=True)
class KeepsAFile(Hook):
    """Trains with a number that it has written into the work directory after the last epoch."""

    def __init__(self, name='scales/{}.txt', large=False):
        self.name, self.large = name, large

    def _file(self, runner):
        return Path(runner.work_dir, self.name.format(runner.epoch))

    def before_train_epoch(self, runner):
        if self._file(runner).exists():
            runner.model.scale = float(self._file(runner).read_text())

    def after_train_epoch(self, runner):
        with replaced(runner.train_loop, _epoch=runner.epoch + 1):
            file, text = self._file(runner), str(1 / (2 + runner.epoch))
        file.parent.mkdir(exist_ok=True)
        if not self.large:
            file.write_text(text)
        elif not file.exists():
            file.write_text(text.ljust(1 << 21))


@HOOKS.register_module(force=True)
class ReadsTheLastCheckpoint(Hook):
    """Trains with a number that follows from the checkpoint of the last epoch."""

    def before_train_epoch(self, runner):
        path = Path(runner.work_dir, f'epoch_{runner.epoch}.pth')
        if path.exists():
            content = torch.load(path, weights_only=False)
            runner.model.scale = float(content['state_dict']['first.weight'].abs().mean())


@DATA_SAMPLERS.register_module(force=True)
class Weighted(torch.utils.data.Sampler):
    """An order that follows from weights, which a hook changes."""

    def __init__(self, dataset, seed=0):
        self.weights, self.epoch = torch.ones(len(dataset)), 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.weights)

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.multinomial(self.weights, len(self), True, generator=generator).tolist())


@HOOKS.register_module(force=True)
class Reweights(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        runner.train_dataloader.sampler.weights[batch_idx] += float(outputs['loss'])


@HOOKS.register_module(force=True)
class Spoils(Hook):
    """Changes, in a witness, what the name of its work directory says."""
    priority = 0

    def __init__(self):
        self.what = ''

    def before_run(self, runner):
        name = os.path.basename(os.path.dirname(runner.work_dir))
        self.what = name if name in SPOILED and 'MMREPRO_WITNESS' in os.environ else ''

    def before_train(self, runner):
        if self.what == 'lr':
            for group in runner.optim_wrapper.optimizer.param_groups:
                group['lr'] = 0.2
        if self.what == 'optimizer':
            for state in runner.optim_wrapper.optimizer.state.values():
                state['momentum_buffer'].add_(1e-3)
        if self.what == 'averages':
            average = next(hook.ema_model for hook in runner.hooks if hasattr(hook, 'ema_model'))
            next(average.parameters()).data.add_(1e-3)
        if self.what == 'attribute':
            average = next(hook.ema_model for hook in runner.hooks if hasattr(hook, 'ema_model'))
            average.note = 1
        if self.what == 'buffers':
            runner.model.norm.running_mean.add_(1e-3)
        if self.what == 'batch':
            runner.train_dataloader.dataset.factor = 1.5
        if self.what == 'losses':
            runner.model.scale = 1.001

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if self.what == 'parameters':
            next(runner.model.parameters()).data.add_(1e-3)
        if self.what == 'gradients':
            runner.model.first.weight.register_hook(lambda grad: grad + 1e-3)

    def before_val_epoch(self, runner):
        if self.what == 'predictions':
            self.handle = runner.model.last.register_forward_hook(
                lambda module, given, out: out + 1e-3)
        if self.what == 'metrics':
            metric = runner.val_loop.evaluator.metrics[0]
            metric.compute_metrics = lambda results: dict(mean=0.5)

    def after_val_epoch(self, runner, metrics=None):
        if self.what == 'predictions':
            self.handle.remove()


@DATASETS.register_module(force=True)
class FollowsAVariable(Numbers):
    """Scaled by a variable of the environment; workers have that of their start."""

    def __getitem__(self, i):
        return dict(x=super().__getitem__(i)['x'] * float(os.environ['SCALE']))


@HOOKS.register_module(force=True)
class SetsTheVariableAhead(Hook):
    """For the next batch, so that a resumed run has it, too; after the first iterations."""

    def before_train(self, runner):
        os.environ['SCALE'] = str(1 + max(0, runner.iter - 5))

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        os.environ['SCALE'] = str(1 + max(0, runner.iter - 4))


@DATASETS.register_module(force=True)
class NotInWorkers(Numbers):
    def __getitem__(self, i):
        assert torch.utils.data.get_worker_info() is None
        return super().__getitem__(i)


SPOILED = ('batch', 'losses', 'buffers', 'gradients', 'lr', 'optimizer', 'parameters', 'averages',
           'attribute', 'predictions', 'metrics')


def config(work_dir, epochs=3, **changes):
    """Return the config of a run of four iterations an epoch, with a checkpoint after each."""
    def loader(shuffle):
        return dict(batch_size=4, num_workers=0, dataset=dict(type='Numbers'),
                    sampler=dict(type='DefaultSampler', shuffle=shuffle),
                    collate_fn=dict(type='default_collate'))
    cfg = Unformatted(dict(
        model=dict(type='Layers'), work_dir=str(work_dir), log_level='INFO',
        randomness=dict(seed=1, deterministic=True, self_checks=dict(witness=True)),
        train_dataloader=loader(True), train_cfg=dict(by_epoch=True, max_epochs=epochs),
        val_dataloader=loader(False), val_cfg=dict(), val_evaluator=dict(type='Mean'),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1, momentum=0.9)),
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=1)), custom_hooks=[],
        default_scope='mmengine'))
    cfg.merge_from_dict(changes)
    return cfg


def train(cfg):
    """Train a config in this process; returns its runner."""
    runner = Runner.from_cfg(cfg)
    runner.train()
    return runner


def log_of(work_dir):
    """Return the text of the newest log of a work directory."""
    logs = sorted(work_dir.glob('*/*.log'))
    return logs[-1].read_text()


@HOOKS.register_module(force=True)
class Clamps(Hook):
    """Changes weights whenever a checkpoint is written."""

    def before_save_checkpoint(self, runner, checkpoint):
        for parameter in runner.model.parameters():
            parameter.data.mul_(0.5)
        checkpoint['state_dict'] = {name: value.cpu()
                                    for name, value in runner.model.state_dict().items()}


class SavesTwice(Runner):
    saves = 0

    def save_checkpoint(self, *args, **kwargs):
        self.saves += 1
        super().save_checkpoint(*args, **kwargs)


@HOOKS.register_module(force=True)
class Snapshots(Hook):
    """Saves as the documentation of MMEngine shows it, in the middle of an epoch."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter + 1 == 6:
            runner.save_checkpoint(runner.work_dir, 'snapshot.pth')

    def after_val_epoch(self, runner, metrics=None):
        if runner.epoch == 2:
            runner.save_checkpoint(runner.work_dir, 'validated.pth')


@HOOKS.register_module(force=True)
class SetsAlways(Hook):
    """Sets an attribute anew before each iteration, as rates of dropout are scheduled."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        runner.model.scale = 1 - runner.iter / 100


@MODELS.register_module(force=True)
class Closing(Layers):
    """Lets the optimizer compute the loss, as the documentation of LBFGS asks for."""

    def train_step(self, data, optim_wrapper):
        data, optimizer = self.data_preprocessor(data, True), optim_wrapper.optimizer

        def closure():
            optimizer.zero_grad()
            loss = self._run_forward(data, mode='loss')['loss']
            loss.backward()
            return loss

        return dict(loss=optimizer.step(closure))
