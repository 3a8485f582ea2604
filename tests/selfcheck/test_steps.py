"""Steps of a run are repeated: what differs stops it by name, and no bit of training changes."""
import errno
import functools
import gc
import itertools
import json
import os
import random
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checked_runs import bits, config, finish, registered, stopped
from demo_runs import MODELS as DETECTORS
from demo_runs import small
from faults import tiny
from harness import Child, digest, train
from mmengine.hooks import Hook
from mmengine.logging import MessageHub
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
from mmengine.runner import Runner
from ranks import on_ranks
from small_runs import hook_with, warnings_of
from torch.utils.checkpoint import checkpoint

import dev.user_setups.chance  # noqa: F401  registers set-ups
from dev.user_setups.setup import SETUPS
from mmrepro.checkpoint import kept_attributes
from mmrepro.errors import DeterminismError, StepDiffersError
from mmrepro.facts.compatibility import HARMLESS
from mmrepro.fingerprint.divergence import first_divergence
from mmrepro.fingerprint.manifest import compare_manifests, read_manifest
from mmrepro.fingerprint.reader import read_run
from mmrepro.run.hooks import SelfCheckHook
from mmrepro.run.hooks.self_check import self_checks
from mmrepro.selfcheck import forked, steps

pytestmark = [pytest.mark.copies, pytest.mark.usefixtures('no_pause_between_passes')]


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


def last_lines(work_dir):
    """Return what the log says of the checks and of the outcome, without the time."""
    log, = work_dir.glob('*/*.log')
    return [line.split(' - ')[-1] for line in log.read_text().rstrip().splitlines()[-2:]]


@pytest.mark.parametrize('checks, says', [
    (1000, '5 samples and 4 steps were repeated: same bits (not repeated: QuietHook)'),
    (0, '5 samples and 0 steps were repeated: same bits (steps are not repeated: '
        'randomness.self_checks.steps=0; not repeated: QuietHook)')])
def test_the_log_counts_at_its_end(checks, says, tmp_path):
    finish(config(tmp_path, checks=checks, log_level='INFO'))
    assert last_lines(tmp_path)[0] == says


def test_nothing_repeated_is_not_called_the_same_bits(tmp_path):
    finish(config(tmp_path, log_level='INFO', train_cfg=dict(max_epochs=0),
                  param_scheduler=None))
    assert last_lines(tmp_path)[0] == (
        'no sample and no step was repeated (not repeated: QuietHook)')


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
    assert not any(one.name.startswith('self_checks') for one in differences)


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
    assert last_lines(tmp_path)[0] == (
        '5 samples and 0 steps were repeated: same bits (steps are not repeated: a batch cannot be '
        'copied: TypeError: it holds a lock; not repeated: QuietHook, Odd)')


@registered
class Lopsided(tiny.Tiny):
    """An attribute changes on one rank only, and reaches nothing."""
    calls = 0

    def forward(self, inputs, label, mode='tensor'):
        self.calls += dist.get_rank()
        return super().forward(inputs, label, mode)


def test_no_bit_changes_on_ranks(tmp_path):
    runs = [on_ranks(3, config(tmp_path / str(checks), model='Lopsided', checks=checks,
                               optim_wrapper=dict(accumulative_counts=2)), tmp_path / str(checks))
            for checks in (1, 0)]
    assert runs[0] == runs[1] and len(runs[0][0]['step']) == 4


def test_all_ranks_stop_and_the_one_that_differs_is_named(tmp_path):
    messages = on_ranks(2, config(tmp_path, model='RankDiffers'), tmp_path)
    for message in messages:
        assert 'StepDiffersError' in message and 'of iteration 0 (' in message
        assert 'rank 1: first difference: loss_noise: ' in message
        assert 'Ranks that differ: 1 of 2.' in message
        assert 'Rank 1: A and B are two more passes' in message and 'entropy' in message
        assert 'rank 0: first difference: loss' not in message
    assert {path.name for path in (tmp_path / 'mmrepro').glob('step_check.*')} == {
        'step_check.iteration0.rank0.json', 'step_check.iteration0.rank1.json'}


@pytest.mark.nightly
@pytest.mark.parametrize('name', [*DETECTORS, 'retinanet_r50_fpn'])
def test_detectors_repeat_their_steps_and_change_no_bit(name, data_root, tmp_path):
    import mmdet.models  # noqa: F401
    runs = []
    for checks in (1, 0):
        cfg = small(name, data_root)
        cfg.randomness.self_checks = dict(steps=checks)
        runs.append(Child(train, cfg, tmp_path / str(checks), False).result())
    assert runs[0] == runs[1]


@registered
class Freezing(tiny.Tiny):
    calls = 0

    def forward(self, *args, **kwargs):
        self.calls += 1
        if self.calls == 2:
            self.head.requires_grad_(False)
        return super().forward(*args, **kwargs)


def test_a_model_that_freezes_a_part_is_no_race(tmp_path):
    message = stopped(config(tmp_path, model='Freezing'))
    assert 'first difference: gradient of head.' in message
    assert 'no checkpoint keeps: model.calls' in message and 'race' not in message


class Sampler:
    """Counts in a part of a part, as the sampler for negatives of Libra R-CNN does."""

    def __init__(self):
        self.seen = 0


class CombinedSampler:
    def __init__(self):
        self.negatives = Sampler()


@registered
class Sampling(tiny.Tiny):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.head.sampler = CombinedSampler()

    def forward(self, inputs, label, mode='tensor'):
        self.head.sampler.negatives.seen += 1
        return super().forward(inputs * self.head.sampler.negatives.seen, label, mode)


def test_checkpoints_keep_parts_of_parts(tmp_path, monkeypatch):
    monkeypatch.setitem(kept_attributes.KEPT, 'Sampler',
                        kept_attributes.KeptAttributes(('seen',), 'a test'))
    runner = finish(config(tmp_path, model='Sampling'))
    state = kept_attributes.collect(kept_attributes.model_owners(runner.model))
    assert state == {'model:head:sampler.negatives': {'seen': tiny.ITERATIONS * 2}}
    runner.model.head.sampler = CombinedSampler()
    assert kept_attributes.restore(kept_attributes.model_owners(runner.model), state) == []
    assert kept_attributes.collect(kept_attributes.model_owners(runner.model)) == state


def test_a_generator_made_in_the_step_is_found_with_its_line(tmp_path):
    message = stopped(config(tmp_path, model=SETUPS['GeneratorFromEntropy'].change))
    assert 'aten.mul.Tensor' in message and 'default_rng' not in message.split('calls')[0]
    assert re.search(r'cause +entropy: ', message) and 'steps.py' in message


_library = torch.library.Library('self_check_test', 'DEF')
_library.define('sum(Tensor numbers) -> Tensor')
_turns = [False]


def sum_in_any_order(numbers):
    """Add up in the order in which threads arrive, without threads."""
    _turns[0] = not _turns[0]
    large = torch.tensor([1e6, -1e6])
    order = [large, numbers] if _turns[0] else [large[:1], numbers, large[1:]]
    return functools.reduce(torch.add, torch.cat(order).unbind())


_library.impl('sum', sum_in_any_order, 'CPU')


@registered
class AnyOrder(tiny.Tiny):
    def forward(self, inputs, label, mode='tensor'):
        losses = super().forward(inputs, label, mode)
        numbers = self.backbone(inputs).detach().flatten() * 1e-3
        return dict(losses, loss_sum=torch.ops.self_check_test.sum(numbers))


def test_an_order_of_threads_is_found(tmp_path):
    assert re.search(r'forward, \(?.*self_check_test\.sum',
                     stopped(config(tmp_path, model='AnyOrder')))


@registered
class Flaky(tiny.Tiny):
    """One bit of one gradient is wrong, once: ``wrong`` counts passes, without those that copies
    of the process have run.
    """
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


@pytest.mark.parametrize('wrong, which', [(1, 'second'), (2, 'first'), (5, 'first')])
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
    assert stepped == list(range(max(0, wrong - 2)))
    assert 'first difference: gradient of head.fc' in message
    assert f'have the same bits as the {which}' in message and 'silent data corruption' in message


def test_both_digests_lie_in_the_work_directory(tmp_path):
    message = stopped(config(tmp_path, model=SETUPS['CountedSteps'].change))
    path = tmp_path / 'mmrepro' / 'step_check.iteration0.rank0.json'
    assert str(path) in message
    content = json.loads(path.read_text())
    assert content['attributes'] == ['model.steps'] and content['diagnosis']['path'] == ''
    first, second = content['passes']['first'], content['passes']['second']
    assert set(first) == {'losses', 'gradients', 'sums'} and first != second
    # in the order of the backward pass
    assert list(first['gradients'])[0].startswith('head.fc')


class InPlacePreprocessor(tiny.TinyPreprocessor):
    def forward(self, data, training=False):
        data['inputs'][0].mul_(2)
        data['label'].append(data['label'].pop() * 1)
        return super().forward(data, training)


@registered
class Stateful(tiny.Tiny):
    """Keeps all sorts of things in attributes, of which none reaches the loss."""
    passes = itertools.count()  # nothing puts it back

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
    # steps are skipped until the scale is small enough
    'bfloat16 and scaled': dict(optim_wrapper=dict(
        type='AmpOptimWrapper', dtype='bfloat16',
        loss_scale=dict(init_scale=2. ** 126, growth_interval=2))),
    "MMEngine's streams": dict(randomness=dict(worker_seed='mmengine')),
    'checkpointed': dict(model='CheckpointedTiny'),
    'by iterations': dict(train_cfg=dict(
        _delete_=True, by_epoch=False, max_iters=4, val_interval=100)),
}


@OPTIM_WRAPPERS.register_module(force=True)
class ZeroingWrapper(OptimWrapper):
    def zero_grad(self, **kwargs):
        super().zero_grad(set_to_none=False)


@registered
class CheckpointedTiny(tiny.Tiny):
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


@pytest.mark.parametrize('name', ['in memory', 'accumulating', 'bfloat16 and scaled'])
def test_no_bit_changes_where_the_process_cannot_be_copied(name, tmp_path, monkeypatch, amp_on_cpu):
    """As on GPUs and several ranks: what the model holds is put back, other places count twice."""
    monkeypatch.setattr(forked, 'is_possible', lambda model: False)
    *with_checks, passes = Child(trained, config(tmp_path / '1', checks=1, **VARIANTS[name])
                                 ).result()
    *without, once = Child(trained, config(tmp_path / '0', checks=0, **VARIANTS[name])).result()
    assert with_checks == without and passes == 2 * once


@pytest.mark.parametrize('name', VARIANTS)
def test_no_bit_changes(name, tmp_path, amp_on_cpu):
    """And what a copy of the process counts in its second pass, in whatever place, is gone."""
    *with_checks, passes = Child(trained, config(tmp_path / '1', checks=1, **VARIANTS[name])
                                 ).result()
    *without, once = Child(trained, config(tmp_path / '0', checks=0, **VARIANTS[name])).result()
    assert with_checks == without and passes == once
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


def connected(tmp_path, model, **changes):
    runner = Runner.from_cfg(config(tmp_path, model=model, train_cfg=dict(max_epochs=1), **changes))
    runner.register_hook(hook_with(
        before_train=lambda runner: runner.model.connect(runner.optim_wrapper.optimizer)))
    return runner


def test_a_repeated_step_copies_weights_once_and_nothing_of_the_optimizer(tmp_path, monkeypatch):
    monkeypatch.setattr(Watching, 'found', [])
    connected(tmp_path, 'Watching', optim_wrapper=dict(
        optimizer=dict(_delete_=True, type='AdamW', lr=0.01))).train()
    # a pass, with a copy of the weight; the optimizer's step, with a gradient instead; then the
    # moments are there
    assert Watching.found[:4] == [2, 2, 4, 4]


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


def warming_up():
    """A warm-up that counts in an attribute of a function."""
    warming_up.calls = getattr(warming_up, 'calls', 0) + 1
    return warming_up.calls > 5


COUNTS = dict(calls=0)


@registered
class CountsElsewhere(tiny.Tiny):
    """Counts where no walk over a model looks, and its losses change with the sixth pass."""

    def __init__(self, where, **kwargs):
        super().__init__(**kwargs)
        self.where, passes = where, itertools.count()
        if where == 'a hook':
            self.head.register_forward_hook(
                lambda module, args, output: output * (1 + (next(passes) > 4)))

    def forward(self, inputs, label, mode='tensor'):
        losses = super().forward(inputs, label, mode)
        scale = 1.
        if self.where == 'a function':
            scale += warming_up()
        if self.where == 'a module':
            COUNTS['calls'] += 1
            scale += COUNTS['calls'] > 5
        if self.where == 'a generator of the module':
            scale += len(COUNTS.setdefault('seen', [])) > 4
            COUNTS['seen'].append(float(losses['loss']))
        return {name: loss * scale for name, loss in losses.items()}


@pytest.mark.parametrize('threads', [1, 2])
@pytest.mark.parametrize('where', ['a function', 'a module', 'a generator of the module', 'a hook'])
def test_a_step_that_is_repeated_counts_once_wherever_it_counts(where, threads, tmp_path):
    changes = {'model.where': where}
    checked, plain = (Child(counted, config(tmp_path / str(n), 'CountsElsewhere', n, **changes),
                            threads).result() for n in (1000, 0))
    assert checked[0] == plain[0]
    assert (checked[1], plain[1]) == (4, 0)


def test_a_difference_that_such_a_count_makes_is_no_mystery(tmp_path):
    message = stopped(config(tmp_path, 'CountsElsewhere', 1, **{'model.where': 'a module'}))
    assert 'of iteration 4 (' in message and 'keeps outside of the model' in message


def counted(cfg, threads):
    torch.set_num_threads(threads)
    runner = finish(cfg)
    return bits(runner), self_checks(runner)['steps']


@registered
class EndsInACopy(tiny.Tiny):
    """Ends in a process that is not the one in which it was built, as a dead thread pool may."""

    def __init__(self, how, **kwargs):
        super().__init__(**kwargs)
        self.process, self.how = os.getpid(), how

    def forward(self, inputs, label, mode='tensor'):
        if os.getpid() != self.process:
            dict(hangs=lambda: time.sleep(100), dies=lambda: os.kill(os.getpid(), signal.SIGKILL),
                 raises=lambda: label.missing)[self.how]()
        return super().forward(inputs, label, mode)


def children():
    """Process numbers of the children of this process, those that have ended included."""
    lists = Path('/proc/self/task').glob('*/children')
    return {number for path in lists for number in path.read_text().split()}


@pytest.mark.parametrize('how, says', [
    ('hangs', 'did not answer for'), ('dies', 'was ended by signal 9'),
    ('raises', "ended with AttributeError: 'Tensor' object has no attribute 'missing'")])
def test_a_copy_without_an_answer_ends_no_run(how, says, tmp_path, monkeypatch):
    """The log says so, nothing is left running, and later steps are repeated in the process."""
    monkeypatch.setattr(steps, 'LEAST', .3)
    before = children()
    runner = Runner.from_cfg(config(tmp_path, 'EndsInACopy', 1, **{'model.how': how}))
    said = [line for line in warnings_of(runner) if 'was not repeated' in line]
    assert len(said) == 1 and says in said[0] and 'iteration 0' in said[0]
    assert self_checks(runner)['steps'] == 2 * tiny.ITERATIONS - 1
    assert children() <= before


def test_a_process_that_cannot_be_copied_repeats_its_steps_itself(tmp_path, monkeypatch):
    def refused():
        raise OSError(errno.ENOMEM, 'Cannot allocate memory')

    runner = Runner.from_cfg(config(tmp_path))
    monkeypatch.setattr(os, 'fork', refused)
    files = len(os.listdir('/proc/self/fd'))
    said = [line for line in warnings_of(runner) if 'was not repeated' in line]
    assert len(said) == 1 and 'could not be made: Cannot allocate memory' in said[0]
    assert self_checks(runner)['steps'] > 0
    assert len(os.listdir('/proc/self/fd')) <= files


@registered
class EndsWhenItIsExplained(tiny.Tiny):
    """Differs, and cannot run under a recorder."""

    def forward(self, inputs, label, mode='tensor'):
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        losses = super().forward(inputs, label, mode)
        return {name: loss * os.getpid() for name, loss in losses.items()}


def test_a_difference_ends_the_run_even_where_nothing_can_explain_it(tmp_path):
    cfg = config(tmp_path, 'EndsWhenItIsExplained', custom_hooks=[])
    message = stopped(cfg)
    assert 'first difference: loss: ' in message
    assert 'would name the cause, failed: the copy that repeats it was ended by signal 9' in message


@registered
class Logs(tiny.Tiny):
    def forward(self, inputs, label, mode='tensor'):
        losses = super().forward(inputs, label, mode)
        return dict(losses, time_assign=torch.tensor(time.perf_counter()))


def test_a_number_that_is_only_logged_is_not_compared(tmp_path):
    runner = finish(config(tmp_path, 'Logs', 1))
    assert self_checks(runner)['steps'] == 2 * tiny.ITERATIONS


@registered
class Scratch(tiny.Tiny):
    """As anchor heads do, it keeps inputs of the last pass; and it counts."""
    steps = 0

    def forward(self, inputs, label, mode='tensor'):
        self.head._raw_positive_infos = dict(inputs=inputs * 1, label=[*label])
        self.last, self.steps = inputs.mean(), self.steps + 1
        losses = super().forward(inputs, label, mode)
        return {name: loss * self.steps for name, loss in losses.items()}


@pytest.mark.parametrize('copied', [True, False])
def test_what_each_pass_writes_again_is_not_blamed(copied, tmp_path, monkeypatch):
    if not copied:
        monkeypatch.setattr(forked, 'is_possible', lambda model: False)
    message = stopped(config(tmp_path, 'Scratch'))
    assert re.findall(r'no checkpoint keeps: (.*)\.$', message, re.M) == ['model.steps']


@pytest.mark.parametrize('settings, steps', [
    (dict(disable=True), 4), (dict(backend='eager'), 0), ({}, 4)])
def test_a_model_that_is_not_compiled_is_checked(settings, steps, tmp_path):
    runner = finish(config(tmp_path, compile=settings) if settings else config(tmp_path))
    assert self_checks(runner)['steps'] == steps
