"""Virtual ranks of one process that share weights have the bits of ranks that do not."""
import copy
import gc

import pytest
import torch
import torch.distributed as dist
from demo_runs import changed
from faults import tiny as tiny_run
from harness import Child
from mmengine.dist import all_reduce
from mmengine.hooks import EMAHook, Hook
from mmengine.optim import OptimWrapper
from mmengine.registry import HOOKS, MODELS, OPTIM_WRAPPERS
from small_runs import trained_runner
from torch import nn
from virtual_runs import run

from mmrepro import keep_attributes, on_virtual_ranks
from mmrepro.config import with_virtual_ranks
from mmrepro.objects.digests import state_digest
from mmrepro.virtual.gradients import VirtualDataParallel


@pytest.fixture(scope='module')
def cfg(tmp_path_factory):
    """Momentum, statistics of batch norm that differ between ranks, and validation."""
    cfg = tiny_run.validating_and_saving(tmp_path_factory.mktemp('tiny'))
    cfg.custom_hooks = []
    return cfg


def averages(cfg):
    cfg.custom_hooks = [dict(type='EMAHook', momentum=0.1, update_buffers=True)]


@MODELS.register_module(force=True)
class TeachingModel(tiny_run.Tiny):
    """The logits of a teacher, whose weights are an average, move the loss."""

    def __init__(self, data_preprocessor=None):
        super().__init__(data_preprocessor)
        self.student = self.head.fc
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, inputs, label, mode='tensor'):
        found = super().forward(inputs, label, mode)
        if mode == 'loss':
            features = self.neck(self.backbone(inputs)).mean((2, 3))
            found['loss'] = found['loss'] + self.teacher(features).square().mean()
        return found


@HOOKS.register_module(force=True)
class ReadingHook(Hook):
    """A hook of a user, of whom nobody knows that it writes to no weight; what it reads matters."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        weight = runner.model.module.head.fc.weight
        runner.optim_wrapper.param_groups[0]['lr'] = 0.1 * weight.abs().mean().item()


def reading(cfg):
    averages(cfg)
    cfg.custom_hooks.append(dict(type='ReadingHook'))


CHANGES = {
    'a teacher': lambda cfg: cfg.merge_from_dict({
        'model.type': 'TeachingModel',
        'custom_hooks': [dict(type='mmdet.MeanTeacherHook', momentum=0.25)]}),
    'averages': averages, 'a hook that reads': reading,
    # a copy until they begin
    'averages of parameters': lambda cfg: cfg.update(
        custom_hooks=[dict(type='EMAHook', momentum=0.1, begin_iter=3)]),
    'clipping': lambda cfg: cfg.optim_wrapper.update(
        accumulative_counts=2, clip_grad=dict(max_norm=0.1)),
    'AdamW': lambda cfg: setattr(cfg.optim_wrapper, 'optimizer', dict(type='AdamW', lr=1e-3)),
    # autocast and loss scaling need a GPU in MMEngine; a schedule does not
    'a schedule': lambda cfg: cfg.update(
        param_scheduler=[dict(type='MultiStepLR', by_epoch=False, milestones=[2])]),
}


def shared(change, memory='shared'):
    def both(cfg):
        change(cfg)
        cfg.randomness['virtual_ranks'] = dict(memory=memory)
    return both


@pytest.mark.parametrize('name', [
    name if name in ('a teacher', 'a hook that reads') else
    pytest.param(name, marks=pytest.mark.nightly) for name in CHANGES])
def test_shared_weights_have_the_bits_of_separate_ones(cfg, name, tmp_path):
    mine = changed(cfg, shared(CHANGES[name]))
    expected = run(changed(cfg, shared(CHANGES[name], 'separate')), 3, 1, tmp_path / '1')
    assert any('metrics' in line for line in expected[0])
    assert run(mine, 3, 1, tmp_path / '2') == expected
    # two ranks share, one has its own
    assert run(mine, 3, 2, tmp_path / '3') == expected
    found = run(mine, 3, 1, tmp_path / '4', resume=tmp_path / '3' / 'iter_1.pth')
    assert found == [lines[1:] for lines in expected]


def test_half_precision_with_loss_scaling(cfg, tmp_path, amp_on_cpu):
    def scaled(cfg):
        cfg.model.type = 'MeetingModel'
        cfg.optim_wrapper.update(type='AmpOptimWrapper', clip_grad=dict(max_norm=0.1))
        cfg.optim_wrapper.loss_scale = dict(
            init_scale=2.**127, growth_interval=2)  # the first steps overflow

    expected = run(changed(cfg, shared(scaled, 'separate')), 3, 1, tmp_path / '1')
    scales = {line['weights'] for line in expected[0] if 'data' in line}
    assert 1 < len(scales) < len([line for line in expected[0] if 'data' in line])
    assert run(changed(cfg, shared(scaled)), 3, 1, tmp_path / '2') == expected


@MODELS.register_module(force=True)
class MeetingModel(tiny_run.Tiny):
    """Its loss has a factor over all ranks; the number of its passes reaches the loss as well."""
    passes = 0

    def forward(self, inputs, label, mode='tensor'):
        found = super().forward(inputs, label, mode)
        if mode == 'loss':
            factor = inputs.abs().mean().detach()
            all_reduce(factor, 'mean')
            self.passes += 1
            found['loss'] = found['loss'] * factor * (1 + self.passes / 4)
        return found


keep_attributes(MeetingModel, 'passes')


@MODELS.register_module(force=True)
class NotingModel(tiny_run.Tiny):
    """Keeps something of its last pass, as the heads of most detectors do."""

    def forward(self, inputs, label, mode='tensor'):
        self.head.last = dict(label=label, mean=[float(inputs.mean())])
        return super().forward(inputs, label, mode)


# changes, and the number of ranks
MORE = {
    'repeated steps': (lambda cfg: cfg.merge_from_dict({'model.type': 'NotingModel'}), 2),
    'the last step before a checkpoint, repeated': (lambda cfg: cfg.merge_from_dict(
        {'model.type': 'NotingModel', 'train_cfg.max_epochs': 1}), 2),
    # it averages weights that are equal; with seven ranks, that rounds
    'a hook that may round equal weights': (
        lambda cfg: cfg.update(custom_hooks=[dict(type='mmdet.SyncNormHook')]), 7),
    # the last step before a validation, and the averages that it validates
    'nothing makes ranks wait between two changes of averages': (
        lambda cfg: (averages(cfg), cfg.default_hooks.update(checkpoint=None)), 3),
}


@pytest.mark.parametrize('name', MORE)
def test_shared_weights_of_one_process_have_the_bits_of_separate_ones(cfg, name, tmp_path):
    change, ranks = MORE[name]
    expected = run(changed(cfg, shared(change, 'separate')), ranks, 1, tmp_path / '1')
    assert run(changed(cfg, shared(change)), ranks, 1, tmp_path / '2') == expected


def _alive(ranks):
    """Count, at each rank's first forward pass, the tensors that have the shape of the weight."""
    counts = []

    class Counting(nn.Linear):
        def forward(self, x):
            counts.append(sum(isinstance(one, torch.Tensor) and one.shape == (37, 41)
                              for one in gc.get_objects()))
            return super().forward(x)

    def main():
        model = VirtualDataParallel(Counting(41, 37))
        dist.barrier()
        model(torch.ones(1, 41)).sum().backward()

    on_virtual_ranks(ranks, main)
    return counts


def test_ranks_that_wait_keep_no_gradients():
    counts = Child(_alive, 8).result()
    # eight weights, then memory for a product, and for as many sums as the tree has had at a time
    assert [count - counts[0] for count in counts] == [0, 2, 2, 3, 3, 3, 3, 4]


def trained(cfg, work_dir, look, change=lambda cfg: None, ranks=2):
    """``look(runner)`` of every rank behind a training, in a process of its own."""
    cfg, found = changed(cfg, change), []
    cfg.work_dir, cfg.randomness = str(work_dir), with_virtual_ranks(cfg.randomness, ranks)

    return Child(lambda: on_virtual_ranks(
        ranks, lambda: found.append(look(trained_runner(cfg)))) or found).result()


def addresses(runner):
    model, optimizer = runner.model.module, runner.optim_wrapper.optimizer
    average = [hook.ema_model.module.head.fc.weight for hook in runner.hooks
               if isinstance(hook, EMAHook)]
    weight = model.head.fc.weight
    return [one.data_ptr() for one in
            (weight, optimizer.state[weight]['momentum_buffer'], *average)]


def test_one_copy_whatever_hooks_there_are(cfg, tmp_path):
    first, second = trained(cfg, tmp_path, addresses, reading)
    assert len(first) == 3 and first == second


@HOOKS.register_module(force=True)
class StepNotingHook(Hook):
    """Counts the parameters of the optimizer before and behind its steps."""

    def before_train(self, runner):
        optimizer, runner.counts = runner.optim_wrapper.optimizer, []
        for watch in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
            watch(lambda optimizer, *_: runner.counts.append(
                sum(len(group['params']) for group in optimizer.param_groups)))


def test_hooks_of_steps_see_the_parameters_of_the_optimizer_on_every_rank(cfg, tmp_path):
    first, second = trained(cfg, tmp_path, lambda runner: runner.counts, lambda cfg: cfg.update(
        custom_hooks=[dict(type='StepNotingHook')]))
    assert first == second and len(set(first)) == 1 and first[0] > 0


def test_a_second_training_of_a_runner_is_refused(cfg, tmp_path):
    with pytest.raises(RuntimeError, match="train.. was called before.*virtual_ranks.memory='sepa"):
        trained(cfg, tmp_path, lambda runner: runner.train(), averages)


@HOOKS.register_module(force=True)
class OwnEMAHook(EMAHook):
    pass


@OPTIM_WRAPPERS.register_module(force=True)
class OwnWrapper(OptimWrapper):
    pass


REASONS = [
    (lambda cfg: cfg.update(custom_hooks=[dict(type='OwnEMAHook')]),
     'the hook OwnEMAHook may change weights in a way of its own'),
    (lambda cfg: cfg.optim_wrapper.update(type='OwnWrapper'),
     'the optimizer wrapper OwnWrapper may step in a way of its own')]


@pytest.mark.parametrize('change, text', [
    *REASONS, (lambda cfg: cfg.randomness.update(virtual_ranks=dict(memory='separate')),
               "randomness.virtual_ranks.memory='separate'")])
def test_a_copy_for_each_rank_otherwise(cfg, change, text, tmp_path):
    def logged(cfg):
        change(cfg)
        cfg.log_level = 'INFO'

    first, second = trained(cfg, tmp_path, addresses, logged)
    assert not set(first) & set(second)
    log, = tmp_path.glob('*/*.log')
    assert f'virtual ranks of a process have weights of their own: {text}\n' in log.read_text()


@pytest.mark.parametrize('change, text', [
    *REASONS, (lambda cfg: setattr(cfg.optim_wrapper, 'optimizer', dict(type='LBFGS')),
               'the optimizer LBFGS')])
def test_what_cannot_be_shared_is_refused_by_name(cfg, change, text, tmp_path):
    with pytest.raises(RuntimeError, match=f"virtual_ranks.memory='shared', and {text}.* allowed"):
        trained(cfg, tmp_path, addresses, shared(change))


def hook(moment):
    """Make a hook of a function of the runner, called at a moment of the run."""
    def register(function):
        name = function.__name__
        HOOKS.register_module(name=name, force=True, module=type(name, (Hook, ), {
            moment: lambda self, runner, *args, **kwargs: function(runner)}))
    return register


@hook('before_train_iter')
def shrinks_a_weight_before_the_step(runner):
    weight = runner.model.module.head.fc.weight

    def shrink(gradient):
        weight.data.mul_(0.99)

    weight.register_hook(shrink)


@hook('before_train_iter')
def sets_a_rate_for_each_rank(runner):
    runner.optim_wrapper.param_groups[0]['lr'] = 0.01 * (1 + dist.get_rank())


@hook('before_train_iter')
def replaces_memory_on_rank_1(runner):
    weight = runner.model.module.head.fc.weight
    if dist.get_rank() == 1:
        weight.data = weight.data.clone()


@hook('after_train_iter')
def steps_once_more_on_rank_1(runner):
    if dist.get_rank() == 1:
        runner.optim_wrapper.optimizer.step()


@hook('before_train_iter')
def comes_to_another_change_on_rank_0(runner):
    averaging = next(hook for hook in runner.hooks if isinstance(hook, EMAHook))
    if dist.get_rank() == 0:
        averaging._swap_ema_parameters()
    else:
        averaging.after_train_iter(runner, 0)


@hook('before_train_iter')
def adds_a_parameter(runner):
    if runner.iter == 1:
        runner.optim_wrapper.optimizer.add_param_group(dict(params=[nn.Parameter(torch.ones(5))]))


@pytest.mark.parametrize('name, text', [
    ('shrinks_a_weight_before_the_step',
     'between step 0 .* something else has changed the parameter head.fc.weight'),
    ('sets_a_rate_for_each_rank',
     'parameter groups .* are not the same on all virtual ranks.*memory=.separate'),
    ('replaces_memory_on_rank_1', 'head.fc.weight does not have the memory.*memory=.separate'),
    ('adds_a_parameter', r'the optimizer, of torch.Size\(\[5\]\) does not have the memory'),
    ('steps_once_more_on_rank_1', '(?s)Deadlock.*virtual rank 1 waits in step 2 of the optimizer'),
    ('comes_to_another_change_on_rank_0',
     'CollectiveMismatch.* come to the update of the averaged weights, virtual rank 0 waits in the '
     'exchange of weights and averages')])
def test_a_hook_that_breaks_shared_weights_ends_the_run(cfg, name, text, tmp_path):
    def change(cfg):
        averages(cfg)
        cfg.custom_hooks.append(dict(type=name))
        # a repeated step would find a shrinking weight before the owner
        cfg.randomness.self_checks = False

    with pytest.raises(RuntimeError, match=text):
        trained(cfg, tmp_path, addresses, change)


def weight(runner):
    runner.model.module.head.fc.weight.data.mul_(0.99)


def element(runner):
    if runner.iter == 1:
        values = runner.model.module.head.fc.weight.data
        values[0, 1] = torch.nextafter(values[0, 1], values.new_tensor(9.))


def momentum(runner):
    weight = runner.model.module.head.fc.weight
    runner.optim_wrapper.optimizer.state[weight]['momentum_buffer'].mul_(0.5)


def average(runner):
    averaging = next(hook for hook in runner.hooks if isinstance(hook, EMAHook))
    averaging.ema_model.module.head.fc.weight.data.mul_(0.99)


WEIGHT, LAST = 'the parameter head.fc.weight', 4  # the steps of a training
# what writes, when, behind which step it is found, its name, and what would use it otherwise; HIGH:
# before other hooks
VALIDATES = 'mmengine.runner.loops.ValLoop.run_iter'
WRITERS = [
    (weight, 'before_train_epoch', 0, WEIGHT, ''),
    (weight, 'after_train_iter', 1, WEIGHT, ''),
    (element, 'after_train_iter', 2, WEIGHT, ''),
    (momentum, 'after_train_iter', 1, 'the state of head.fc.weight in the optimizer', ''),
    (average, 'after_train_iter', 1, 'the average head.fc.weight', ''),
    (weight, 'before_save_checkpoint', 1, WEIGHT, ''),  # the checkpoint that would hold it
    *((weight, f'before_val_epoch{high}', 2, WEIGHT, VALIDATES) for high in ('', ' HIGH')),
    (weight, 'after_val_epoch', 2, WEIGHT, ''),
    (weight, 'after_train', LAST, WEIGHT, 'mmrepro.run.lifecycle.outcome'),
    (weight, 'after_run', LAST, WEIGHT, 'mmengine.runner.loops.TestLoop.run'),
    (weight, 'before_test_epoch', LAST, WEIGHT, 'mmengine.runner.loops.TestLoop.run_iter')]


def checkpoints(folder):
    states = [torch.load(path, weights_only=False) for path in folder.glob('*.pth')]
    return {state_digest([state[part] for part in ('state_dict', 'ema_state_dict', 'optimizer')])
            for state in states}


def norms_and_averages(cfg):
    cfg.custom_hooks = [dict(type='mmdet.SyncNormHook'), dict(type='EMAHook', momentum=0.1)]


@pytest.fixture(scope='module')
def right(cfg, tmp_path_factory):
    folder = tmp_path_factory.mktemp('right')
    trained(cfg, folder, lambda runner: None, norms_and_averages)
    return checkpoints(folder)


@pytest.mark.parametrize('write, moment, step, what, unreached', WRITERS)
def test_a_hook_that_writes_is_named_and_leaves_no_checkpoint(
        cfg, write, moment, step, what, unreached, right, tmp_path, monkeypatch):
    def change(cfg):
        norms_and_averages(cfg)
        cfg.custom_hooks.append(dict(type=write.__name__, priority=priority or 'LOW'))
        cfg.update(test_dataloader=cfg.val_dataloader, test_evaluator=cfg.val_evaluator,
                   test_cfg=dict())

    moment, _, priority = moment.partition(' ')
    hook(moment)(write)
    if unreached:
        monkeypatch.setattr(unreached, None)
    with pytest.raises(RuntimeError) as raised:
        trained(cfg, tmp_path, lambda runner: runner.test(), change)
    assert (f'between step {step} of the optimizer and the next one, something else has changed '
            f'{what}.') in str(raised.value)
    assert f'MMDetection or mmrepro: {__name__}.{write.__name__}. Give' in str(raised.value)
    assert "randomness.virtual_ranks=dict(ranks=2, memory='separate')" in str(raised.value)
    assert checkpoints(tmp_path) <= right and len(right) == LAST
