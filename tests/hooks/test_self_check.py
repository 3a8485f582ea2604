"""Steps of a run are repeated: what differs stops it by name, and no bit of training changes."""
from __future__ import annotations

import copy
import functools
import json
import random
import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from demo_runs import MODELS as DETECTORS
from demo_runs import small
from faults import tiny
from harness import Child, digest, train
from mmengine.hooks import Hook
from mmengine.logging import MessageHub
from mmengine.optim import OptimWrapper
from mmengine.registry import MODELS, OPTIM_WRAPPERS
from mmengine.runner import Runner
from mmengine.runner.amp import autocast
from ranks import on_ranks
from torch.utils.checkpoint import checkpoint

from mmrepro import determinism
from mmrepro.checkpoint import adapters
from mmrepro.config import RandomnessConfig
from mmrepro.facts.compatibility import HARMLESS
from mmrepro.fingerprint.difference import first_divergence
from mmrepro.fingerprint.manifest import compare_manifests, read_manifest
from mmrepro.fingerprint.reader import read_run
from mmrepro.hooks import SelfCheckHook
from mmrepro.hooks.self_check import is_due
from mmrepro.step_check.check import StepDiffersError
from mmrepro.step_check.state import StepState


@pytest.fixture(autouse=True)
def clean():
    yield
    determinism.disable()


def config(work_dir, model='Tiny', checks=1000, **changes):
    cfg = tiny.tiny(work_dir)
    cfg.model.type = model
    cfg.randomness.check_steps = checks
    cfg.env_cfg = dict()
    cfg.merge_from_dict(copy.deepcopy(changes))
    return cfg


def bits(runner):
    return [digest(value) for value in (
        runner.model.state_dict(), runner.optim_wrapper.state_dict(), torch.get_rng_state(),
        random.getstate(), np.random.get_state()[1])]


def finish(cfg):
    runner = Runner.from_cfg(cfg)
    runner.train()
    return runner


def stopped(cfg, **expected):
    """The message with which a run stops."""
    with pytest.raises(StepDiffersError) as caught:
        finish(cfg)
    return str(caught.value)


def registered(cls):
    """A variant of the tiny network, under its own name."""
    return MODELS.register_module(force=True)(cls)


# ------------------------------------------------------------------------------ which steps

def test_iterations_1_2_4_8_and_every_nth_are_due():
    assert [i + 1 for i in range(40) if is_due(i, 12)] == [1, 2, 4, 8, 12, 16, 24, 32, 36]


def test_a_resumed_run_checks_the_same_iterations(tmp_path, monkeypatch):
    due = []
    monkeypatch.setattr(SelfCheckHook, '_done', lambda self, runner, problem: due.append(
        runner.iter + 1))
    changes = dict(default_hooks=dict(checkpoint=dict(
        _delete_=True, type='CheckpointHook', interval=1, by_epoch=False, max_keep_ckpts=-1)))
    whole = finish(config(tmp_path, checks=7, **changes))
    assert due == [1, 2, 4, 7, 8]
    due.clear()
    resumed = finish(config(tmp_path, checks=7, resume=True,
                            load_from=str(tmp_path / 'iter_3.pth'), **changes))
    assert due == [4, 7, 8] and bits(whole) == bits(resumed)


@pytest.mark.parametrize('value', [-1, True, 1.5, '10', None])
def test_the_interval_is_validated(tmp_path, value):
    with pytest.raises(ValueError, match=r'randomness.check_steps=.*allowed is an int from 0'):
        Runner.from_cfg(config(tmp_path, checks=value))


# ---------------------------------------------------------------- no bit of training changes

class InPlacePreprocessor(tiny.TinyPreprocessor):
    """Changes the batch of the loader."""

    def forward(self, data, training=False):
        data['inputs'][0].mul_(2)
        data['label'].append(data['label'].pop() * 1)
        return super().forward(data, training)


@registered
class Stateful(tiny.Tiny):
    """Keeps all sorts of things in attributes, of which none reaches the loss."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.calls, self.seen, self.table = 0, [], dict(last=None)
        self.array, self.kept = np.zeros(3), torch.zeros(3)
        self.rng = np.random.default_rng(1)
        self.register_buffer('count', torch.zeros(()), persistent=False)
        self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.data_preprocessor = InPlacePreprocessor()
        # reached along other ways as well
        self.also, self.head.owner = [self.frozen, self.count], dict(kept=self.kept)

    def forward(self, inputs, label, mode='tensor'):
        self.calls += 1
        self.seen.append(inputs)
        self.table.update(last=self.calls, more=(label, ))
        self.array += 1
        self.kept.add_(1)
        self.rng.random()
        self.count += 1
        self.frozen.data.mul_(0.5)
        self.late = set([self.calls])
        MessageHub.get_current_instance().update_scalar('train/mean', float(inputs.mean()))
        MessageHub.get_current_instance().update_info('calls', self.calls)
        torch.rand(1), random.random(), np.random.rand()
        return super().forward(inputs, label, mode)


VARIANTS = {
    'plain': {},
    'in memory': dict(model='Stateful'),
    'accumulating': dict(optim_wrapper=dict(accumulative_counts=3)),
    'clipped': dict(optim_wrapper=dict(clip_grad=dict(max_norm=0.1))),
    'zeros kept': dict(optim_wrapper=dict(type='ZeroingWrapper')),
    'bfloat16 and scaled': dict(optim_wrapper=dict(type='HostAmpWrapper')),
    'no step seed': dict(randomness=dict(step_seed=False)),
    'checkpointed': dict(model='Checkpointed'),
    'by iterations': dict(train_cfg=dict(
        _delete_=True, by_epoch=False, max_iters=4, val_interval=100)),
}


@OPTIM_WRAPPERS.register_module(force=True)
class ZeroingWrapper(OptimWrapper):
    """Gradients stay, filled with zeros."""

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
    """The batch and the logs, after every step."""
    priority = 100

    def __init__(self):
        self.seen = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        scalars = {name: buffer.data[0].tolist()
                   for name, buffer in runner.message_hub.log_scalars.items() if 'time' not in name}
        model = runner.model
        self.seen.append(digest([data_batch, outputs, scalars, runner.message_hub.get_info(
            'calls', 0), {
            name: vars(model).get(name) for name in ('calls', 'table', 'array', 'kept', 'late')},
            getattr(model, 'rng', None) and model.rng.bit_generator.state]))


def trained(cfg):
    torch.set_num_threads(1)
    look = Look()
    runner = Runner.from_cfg(cfg)
    runner.register_hook(look)
    runner.train()
    return bits(runner), look.seen


@pytest.mark.parametrize('name', VARIANTS)
def test_no_bit_changes(name, tmp_path):
    with_checks, without = (Child(trained, config(
        tmp_path / str(checks), checks=checks, **VARIANTS[name])).result() for checks in (1, 0))
    assert with_checks == without


@pytest.mark.parametrize('level', [
    'module', pytest.param('operator', marks=pytest.mark.nightly)])
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


def test_a_buffer_that_reaches_the_loss_is_no_difference(tmp_path):
    finish(config(tmp_path, model='Averaging', checks=1))


# ------------------------------------------------------------------------------ what it finds

class FaultyLoss(tiny.Tiny):
    """Adds a number to the logits."""

    def number(self):
        return 0.

    def forward(self, inputs, label, mode='tensor'):
        features = self.neck(self.backbone(inputs)).mean((2, 3))
        logits = self.head(features) * (1 + self.number())
        return dict(loss=self.head.loss(logits, label)) if mode == 'loss' else logits


@registered
class OwnGenerator(FaultyLoss):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.rng = np.random.default_rng(1)

    def number(self):
        return float(self.rng.random())


@registered
class LazyGenerator(FaultyLoss):
    def number(self):
        return float(np.random.default_rng().random())


@registered
class Counting(FaultyLoss):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.head.calls = 0

    def number(self):
        self.head.calls += 1
        return self.head.calls * 1e-3


@registered
class CountingLate(Counting):
    """The counter begins to matter at the fourth call."""

    def number(self):
        return max(0., super().number() - 3e-3)


@registered
class Remembering(FaultyLoss):
    memory = None

    def forward(self, inputs, label, mode='tensor'):
        if self.memory is None:
            self.memory = []
        self.memory.append(float(inputs.mean()))
        return super().forward(inputs, label, mode)

    def number(self):
        return sum(self.memory)


@pytest.mark.parametrize('model, attribute', [
    ('OwnGenerator', 'model.rng'), ('Counting', 'head.calls'), ('Remembering', 'model.memory')])
def test_an_attribute_that_no_checkpoint_keeps_is_named(model, attribute, tmp_path):
    message = stopped(config(tmp_path, model=model))
    assert 'The step of iteration 0 (counted from 0)' in message
    assert f'reach the loss and that no checkpoint keeps: {attribute}' in message
    assert 'first difference: loss loss: ' in message


def test_a_counter_that_matters_later_is_found_when_it_does(tmp_path):
    assert 'iteration 3 (' in stopped(config(tmp_path, model='CountingLate'))


def test_an_attribute_that_checkpoints_keep_is_no_difference(tmp_path, monkeypatch):
    monkeypatch.setitem(adapters.ADAPTERS, 'Head', adapters.Adapter(('calls', ), 'a test'))
    plain, checked = (bits(finish(config(tmp_path / str(n), model='Counting', checks=n)))
                      for n in (0, 1))
    assert plain == checked


def test_a_generator_made_in_the_step_is_found_with_its_line(tmp_path):
    message = stopped(config(tmp_path, model='LazyGenerator'))
    assert 'aten.mul.Tensor' in message and 'default_rng' not in message.split('calls')[0]
    assert re.search(r'cause +entropy: ', message) and 'test_self_check.py' in message


_library = torch.library.Library('self_check_test', 'DEF')
_library.define('sum(Tensor numbers) -> Tensor')
_turns = [False]


def sum_in_any_order(numbers):
    """The order in which threads arrive, without threads: one, then the other."""
    _turns[0] = not _turns[0]
    large = torch.tensor([1e6, -1e6])
    order = [large, numbers] if _turns[0] else [large[:1], numbers, large[1:]]
    return functools.reduce(torch.add, torch.cat(order).unbind())


_library.impl('sum', sum_in_any_order, 'CPU')


class SumInAnyOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx, numbers):
        ctx.size = numbers.shape
        return torch.ops.self_check_test.sum(numbers.flatten())

    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(ctx.size)


@registered
class AnyOrder(FaultyLoss):
    def forward(self, inputs, label, mode='tensor'):
        losses = super().forward(inputs, label, mode)
        return dict(losses, loss_sum=SumInAnyOrder.apply(self.backbone(inputs) * 1e-3))


@registered
class Threaded(FaultyLoss):
    """A thread computes a part of the loss; its count stands for the order in which it comes."""
    count = [0]

    def number(self):
        thread = threading.Thread(target=lambda: self.count.append(self.count[-1] + 1))
        thread.start()
        thread.join()
        return self.count[-1] * 1e-3


@pytest.mark.parametrize('model, says', [
    ('AnyOrder', r'forward, \(?.*self_check_test\.sum'),
    ('Threaded', 'first difference: loss loss')])
def test_an_order_of_threads_is_found(model, says, tmp_path):
    assert re.search(says, stopped(config(tmp_path, model=model)))


@registered
class Flaky(tiny.Tiny):
    """One bit of one gradient is wrong, once: ``wrong`` counts passes."""
    wrong, passes = 2, 0

    def forward(self, inputs, label, mode='tensor'):
        result = super().forward(inputs, label, mode)
        type(self).passes += 1
        if self.passes == self.wrong:
            def flip(gradient):
                gradient = gradient.clone()
                gradient.view(torch.int32).view(-1)[0] ^= 1
                return gradient
            result['loss'].register_hook(flip)
        return result


@pytest.mark.parametrize('wrong, which', [(1, 'second'), (2, 'first'), (4, 'first')])
def test_a_flipped_bit_is_found_before_the_optimizer_uses_it(wrong, which, tmp_path, monkeypatch):
    monkeypatch.setattr(Flaky, 'wrong', wrong)
    monkeypatch.setattr(Flaky, 'passes', 0)
    runner = Runner.from_cfg(config(tmp_path, model='Flaky'))
    stepped = []
    optimizer = runner.build_optim_wrapper(runner.optim_wrapper)
    runner.optim_wrapper = optimizer
    optimizer.optimizer.register_step_pre_hook(lambda *args: stepped.append(runner.iter))
    with pytest.raises(StepDiffersError) as caught:
        runner.train()
    message = str(caught.value)
    assert stepped == list(range((wrong - 1) // 2))
    assert 'first difference: gradient of head.fc' in message
    assert f'have the same bits as the {which}' in message and 'silent data corruption' in message


def test_both_digests_lie_in_the_work_directory(tmp_path):
    message = stopped(config(tmp_path, model='Counting'))
    path = tmp_path / 'mmrepro' / 'step_check.iteration0.rank0.json'
    assert str(path) in message
    content = json.loads(path.read_text())
    assert content['attributes'] == ['head.calls'] and content['diagnosis']['path'] == ''
    first, second = content['passes']['first'], content['passes']['second']
    assert set(first) == {'losses', 'gradients', 'sums'} and first != second
    # in the order of the backward pass
    assert list(first['gradients'])[0].startswith('head.fc')


# ------------------------------------------------------------------------ what a run says of it

def last_line(work_dir):
    """Of the log, without the time."""
    log, = work_dir.glob('*/*.log')
    return log.read_text().rstrip().splitlines()[-1].split(' - ')[-1]


@pytest.mark.parametrize('checks, says', [
    (1000, '5 samples and 4 steps were repeated: same bits'),
    (0, '5 samples and 0 steps were repeated: same bits (steps are not repeated: '
        'randomness.check_steps=0)')])
def test_the_last_line_of_the_log_counts(checks, says, tmp_path):
    finish(config(tmp_path, checks=checks, log_level='INFO'))
    assert last_line(tmp_path) == says


def test_thousands_have_separators(monkeypatch):
    hook = SelfCheckHook()
    monkeypatch.setattr(hook, 'counts', lambda runner: dict(samples=12345, steps=1034))
    runner = SimpleNamespace(repro=RandomnessConfig(check_samples=0))
    assert hook.summary(runner) == ('12,345 samples and 1,034 steps were repeated: same bits '
                                    '(samples are not repeated: randomness.check_samples=0)')


def test_nothing_is_said_without_deterministic(tmp_path):
    runner = finish(config(tmp_path, randomness=dict(deterministic=False)))
    assert not any(isinstance(hook, SelfCheckHook) for hook in runner.hooks)


def test_the_count_is_in_manifest_and_fingerprints_and_no_difference(tmp_path):
    for checks in (1, 1000):
        finish(config(tmp_path / str(checks), checks=checks,
                      custom_hooks=[dict(type='FingerprintHook')]))
    runs = [read_run(str(tmp_path / str(checks))) for checks in (1, 1000)]
    assert [run.manifests[0]['self_checks']['steps'] for run in runs] == [8, 4]
    ends = [json.loads((tmp_path / str(checks) / 'mmrepro' / 'fingerprints.rank0.jsonl')
                       .read_text().splitlines()[-1]) for checks in (1, 1000)]
    assert [end['self_checks']['steps'] for end in ends] == [8, 4]
    assert first_divergence(runs[0].ranks, runs[1].ranks) is None
    differences = compare_manifests(*(read_manifest(run.work_dir) for run in runs))
    assert {one.severity for one in differences} == {HARMLESS}
    assert not any('self_checks' in one.name for one in differences)


@registered
class TwoSteps(tiny.Tiny):
    """A step of its own, with two optimizer steps; the second depends on the first."""
    passes = 0

    def train_step(self, data, optim_wrapper):
        type(self).passes += 1
        for _ in range(2):
            losses = super().train_step(data, optim_wrapper)
        return losses


def test_of_a_step_of_its_own_what_comes_before_the_first_update_is_repeated(tmp_path):
    plain, checked = (bits(finish(config(
        tmp_path / str(n), model='TwoSteps', checks=n, log_level='INFO'))) for n in (0, 1))
    assert plain == checked and TwoSteps.passes == 8 + 2 * 8
    log, = (tmp_path / '1').glob('*/*.log')
    assert 'TwoSteps has a train_step of its own: what comes before its first' in log.read_text()


class NoCopy:
    def __deepcopy__(self, memo):
        raise TypeError('it holds a lock')


def test_a_batch_that_cannot_be_copied_is_said(tmp_path):
    cfg = config(tmp_path, log_level='INFO')

    class Odd(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            data_batch['label'].append(NoCopy())
            data_batch['label'].pop() if runner.iter else None

    runner = Runner.from_cfg(cfg)
    runner.model.data_preprocessor.register_forward_pre_hook(
        lambda module, args: args[0]['label'].__delitem__(slice(2, None)))
    runner.register_hook(Odd())
    runner.train()
    assert last_line(tmp_path) == (
        '5 samples and 0 steps were repeated: same bits (steps are not repeated: a batch cannot be '
        'copied: TypeError: it holds a lock)')


# ------------------------------------------------------------------------------ several ranks

@registered
class Lopsided(tiny.Tiny):
    """An attribute changes on one rank only, and reaches nothing."""
    calls = 0

    def forward(self, inputs, label, mode='tensor'):
        self.calls += dist.get_rank()
        return super().forward(inputs, label, mode)


@registered
class OneRankDiffers(tiny.Tiny):
    """In a value that is logged: the sum over ranks brings nothing of it to the other."""

    def forward(self, inputs, label, mode='tensor'):
        losses = super().forward(inputs, label, mode)
        number = float(np.random.default_rng().random()) if dist.get_rank() == 1 else 1.
        return dict(losses, noise=losses['loss'].detach() * number)


def test_no_bit_changes_on_ranks(tmp_path):
    runs = [on_ranks(3, config(tmp_path / str(checks), model='Lopsided', checks=checks,
                               optim_wrapper=dict(accumulative_counts=2)), tmp_path / str(checks))
            for checks in (1, 0)]
    assert runs[0] == runs[1] and len(runs[0][0]['step']) == 4


def test_all_ranks_stop_and_the_one_that_differs_is_named(tmp_path):
    messages = on_ranks(2, config(tmp_path, model='OneRankDiffers'), tmp_path)
    for message in messages:
        assert 'StepDiffersError' in message and 'of iteration 0 (' in message
        assert 'rank 1: first difference: loss noise: ' in message
        assert 'Ranks that differ: 1 of 2.' in message
        assert 'Rank 1: A and B are two more passes' in message and 'entropy' in message
        assert 'rank 0: first difference: loss' not in message
    assert {path.name for path in (tmp_path / 'mmrepro').iterdir()} == {
        'step_check.iteration0.rank0.json', 'step_check.iteration0.rank1.json'}


# -------------------------------------------------------------------------- real detectors

@pytest.mark.nightly
@pytest.mark.parametrize('name', [*DETECTORS, 'retinanet_r50_fpn'])
def test_detectors_repeat_their_steps_and_change_no_bit(name, data_root, tmp_path):
    import mmdet.models  # noqa: F401
    runs = []
    for checks in (1, 0):
        cfg = small(name, data_root)
        cfg.randomness.check_steps = checks
        runs.append(Child(train, cfg, tmp_path / str(checks), False).result())
    assert runs[0] == runs[1]
