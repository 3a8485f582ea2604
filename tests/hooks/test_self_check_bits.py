"""Steps of a run are repeated, and no bit of training changes."""
import gc
import itertools
import random

import numpy as np
import pytest
import torch
from checked_runs import bits, config, finish, registered
from faults import tiny
from harness import Child, digest
from mmengine.hooks import Hook
from mmengine.logging import MessageHub
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
from mmengine.runner import Runner
from mmengine.runner.amp import autocast
from torch.utils.checkpoint import checkpoint

from mmrepro.errors import DeterminismError, StepDiffersError
from mmrepro.step_check.state import StepState


class InPlacePreprocessor(tiny.TinyPreprocessor):
    """Changes the batch of the loader."""

    def forward(self, data, training=False):
        data['inputs'][0].mul_(2)
        data['label'].append(data['label'].pop() * 1)
        return super().forward(data, training)


@registered
class Stateful(tiny.Tiny):
    """Keeps all sorts of things in attributes, of which none reaches the loss."""
    passes = itertools.count()  # no self-check puts it back

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.calls, self.seen, self.table = 0, [], dict(last=None)
        self.stepping, self.stepped = False, []
        self.array, self.kept = np.zeros(3), torch.zeros(3)
        self.rng = np.random.default_rng(1)
        self.register_buffer('count', torch.zeros(()), persistent=False)
        self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.toggled = torch.nn.Parameter(torch.ones(2))
        self.data_preprocessor = InPlacePreprocessor()
        # reached along other ways as well
        self.also, self.head.owner = [self.frozen, self.count], dict(kept=self.kept)

    def train_step(self, data, optim_wrapper):
        """While the optimizer steps, an attribute is another one."""
        self.stepping = True
        losses = super().train_step(data, optim_wrapper)
        self.stepped.append(self.stepping)
        self.stepping = False
        return losses

    def forward(self, inputs, label, mode='tensor'):
        next(self.passes)
        self.calls += 1
        self.seen.append(inputs)
        self.table.update(last=self.calls, more=(label, ))
        self.array += 1
        self.kept.add_(1)
        self.rng.random()
        self.count += 1
        self.frozen.data.mul_(0.5)
        self.toggled.requires_grad_(not self.toggled.requires_grad)
        self.late = set([self.calls])
        MessageHub.get_current_instance().update_scalar('train/mean', float(inputs.mean()))
        MessageHub.get_current_instance().update_info('calls', self.calls)
        torch.rand(1), random.random(), np.random.rand()
        return super().forward(inputs, label, mode)


VARIANTS = {
    'plain': {},
    'in memory': dict(model='Stateful'),
    'a buffer that reaches the loss': dict(model='Averaging'),
    'accumulating': dict(optim_wrapper=dict(accumulative_counts=3)),
    'clipped': dict(optim_wrapper=dict(clip_grad=dict(max_norm=0.1))),
    'zeros kept': dict(optim_wrapper=dict(type='ZeroingWrapper')),
    'bfloat16 and scaled': dict(optim_wrapper=dict(type='HostAmpWrapper')),
    "MMEngine's streams": dict(randomness=dict(worker_seed='mmengine')),
    'checkpointed': dict(model='Checkpointed'),
    'by iterations': dict(train_cfg=dict(
        _delete_=True, by_epoch=False, max_iters=4, val_interval=100)),
}


@OPTIM_WRAPPERS.register_module(force=True)
class ZeroingWrapper(OptimWrapper):
    def zero_grad(self, **kwargs):
        super().zero_grad(set_to_none=False)


@OPTIM_WRAPPERS.register_module(force=True)
class HostAmpWrapper(OptimWrapper):
    """MMEngine's AmpOptimWrapper refuses the CPU: autocast to bfloat16, and a scaler that skips
    steps until its scale is small enough.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.loss_scaler = torch.amp.GradScaler('cpu', init_scale=2. ** 126, growth_interval=2)

    def optim_context(self, model):
        return autocast(device_type='cpu', dtype=torch.bfloat16)

    def backward(self, loss, **kwargs):
        self.loss_scaler.scale(loss).backward(**kwargs)
        self._inner_count += 1

    def step(self, **kwargs):
        self.loss_scaler.step(self.optimizer, **kwargs)
        self.loss_scaler.update()


@registered
class Checkpointed(tiny.Tiny):
    def forward(self, inputs, label, mode='tensor'):
        features = checkpoint(self.backbone, inputs, use_reentrant=False)
        logits = self.head(self.neck(features).mean((2, 3)))
        return dict(loss=self.head.loss(logits, label)) if mode == 'loss' else logits


class Look(Hook):
    priority = 100

    def __init__(self):
        self.seen = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        scalars = {name: buffer.data[0].tolist()
                   for name, buffer in runner.message_hub.log_scalars.items() if 'time' not in name}
        model = runner.model
        self.seen.append(digest([data_batch, outputs, scalars, runner.message_hub.get_info(
            'calls', 0), {
            name: vars(model).get(name)
            for name in ('calls', 'table', 'array', 'kept', 'late', 'stepped')},
            getattr(model, 'rng', None) and model.rng.bit_generator.state]))


def trained(cfg):
    torch.set_num_threads(1)
    look = Look()
    runner = Runner.from_cfg(cfg)
    runner.register_hook(look)
    runner.train()
    return bits(runner), look.seen, next(Stateful.passes)


@pytest.mark.parametrize('name', VARIANTS)
def test_no_bit_changes(name, tmp_path):
    """A step that is repeated is two passes, or three where attributes have changed before; what it
    counts is counted once.
    """
    *with_checks, passes = Child(trained, config(tmp_path / '1', checks=1, **VARIANTS[name])
                                 ).result()
    *without, once = Child(trained, config(tmp_path / '0', checks=0, **VARIANTS[name])).result()
    assert with_checks == without and passes == (3 * once - 1 if once else 0)
    assert once == (2 * tiny.ITERATIONS if name == 'in memory' else 0)


@pytest.mark.parametrize('level', ['module', pytest.param('operator', marks=pytest.mark.nightly)])
def test_fingerprints_are_the_same_with_checks(level, tmp_path):
    lines = []
    for checks in (1, 0):
        finish(config(tmp_path / str(checks), checks=checks, train_cfg=dict(max_epochs=1),
                      custom_hooks=[dict(type='FingerprintHook', level=level)]))
        path = tmp_path / str(checks) / 'mmrepro' / 'fingerprints.rank0.jsonl'
        lines.append([line for line in path.read_text().splitlines() if '"step"' in line])
    assert len(lines[0]) == 4 and lines[0] == lines[1]


def test_a_step_without_the_buffers_put_back_would_differ(tmp_path, monkeypatch):
    put_back = StepState.put_back

    def forgetful(self, unsaved=True):
        running = {name: value.clone() for name, value in buffers}
        put_back(self, unsaved)
        for name, value in buffers:
            value.copy_(running[name])

    cfg = config(tmp_path, model='Averaging')
    runner = Runner.from_cfg(cfg)
    buffers = list(runner.model.named_buffers())
    monkeypatch.setattr(StepState, 'put_back', forgetful)
    with pytest.raises(StepDiffersError):
        runner.train()


@registered
class Averaging(tiny.Tiny):
    """Its loss reads a buffer that the forward pass writes, as SeesawLoss does."""

    def forward(self, inputs, label, mode='tensor'):
        self.head.temperature.mul_(0.9)
        return super().forward(inputs, label, mode)


SIZE = 12_347  # elements of a weight; no other tensor has as many


@registered
class Watching(tiny.Tiny):
    """Counts the tensors of its large weight's size in each pass: copies, gradients, moments."""
    found = []

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.large = torch.nn.Parameter(torch.zeros(SIZE))
        self.calls = 0  # a state that no checkpoint keeps is kept as well

    def forward(self, inputs, label, mode='tensor'):
        self.calls += 1
        self.found.append(self.count())
        losses = super().forward(inputs, label, mode)
        return dict(losses, loss_large=self.large.sum() * 0) if mode == 'loss' else losses

    def connect(self, optimizer):
        optimizer.register_step_pre_hook(lambda *args: self.found.append(self.count()))

    @staticmethod
    def count():
        gc.collect()
        return len({one.data_ptr() for one in gc.get_objects()
                    if isinstance(one, torch.Tensor) and one.numel() == SIZE})


class Connect(Hook):
    """Gives the model the optimizer."""

    def before_train(self, runner):
        runner.model.connect(runner.optim_wrapper.optimizer)


def connected(tmp_path, model, **changes):
    runner = Runner.from_cfg(config(tmp_path, model=model, train_cfg=dict(max_epochs=1), **changes))
    runner.register_hook(Connect())
    return runner


def test_a_repeated_step_copies_weights_once_and_nothing_of_the_optimizer(tmp_path, monkeypatch):
    monkeypatch.setattr(Watching, 'found', [])
    connected(tmp_path, 'Watching', optim_wrapper=dict(
        optimizer=dict(_delete_=True, type='AdamW', lr=0.01))).train()
    # two passes, with a copy of the weight; the optimizer's step, with a gradient instead; then
    # the moments are there
    assert Watching.found[:6] == [2, 2, 2, 4, 4, 4]


@registered
class Meddling(tiny.Tiny):
    def connect(self, optimizer):
        self.moments = lambda: [state['momentum_buffer'] for state in optimizer.state.values()]

    def forward(self, inputs, label, mode='tensor'):
        for moment in self.moments():
            moment.mul_(0.9)
        return super().forward(inputs, label, mode)


def test_a_pass_that_changes_the_optimizer_is_refused(tmp_path):
    with pytest.raises(DeterminismError, match="'momentum_buffer' in the state of the optimizer"):
        connected(tmp_path, 'Meddling').train()
