"""Weights that are divided among virtual ranks have the bits of whole ones."""
import functools
from contextlib import contextmanager
from pkgutil import resolve_name
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from harness import Child
from mmengine.hooks import Hook
from mmengine.registry import HOOKS, MODELS
from mmengine.runner import Runner
from sharded_runs import RANKS, settings
from virtual_processes import alone
from virtual_runs import run

from mmrepro.errors import RandomnessError
from mmrepro.fingerprint.divergence import first_divergence
from mmrepro.fingerprint.reader import read_run
from mmrepro.objects.digests import local_part
from mmrepro.virtual import fsdp2
from mmrepro.virtual.sharded import Sharding

OPTIONS = {
    'AdamW, clipping, averages': dict(
        optim_wrapper__optimizer=dict(_delete_=True, type='AdamW', lr=0.01),
        optim_wrapper__clip_grad=dict(max_norm=0.05), custom_hooks=[dict(type='EMAHook')]),
    'accumulation, a teacher, SyncBN': dict(
        # four iterations: a pass that is not averaged, one that is, and again
        optim_wrapper__accumulative_counts=2, train_cfg__max_epochs=4,
        model__type='Taught', sync_bn='torch',
        custom_hooks=[dict(type='mmdet.MeanTeacherHook', momentum=0.3)]),
    'three ranks, clipped values, averaged statistics, checkpointing': dict(
        randomness__virtual_ranks__ranks=3, model__type='Checkpointed',
        optim_wrapper__clip_grad=dict(type='value', clip_value=1e-3),
        custom_hooks=[dict(type='mmdet.SyncNormHook')]),
}
AVERAGES, ACCUMULATION = list(OPTIONS)[:2]


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """Return a function that trains once for all tests: the folder, and what each rank saw."""
    @functools.cache
    def train(options, memory, processes=1):
        folder = tmp_path_factory.mktemp(memory)
        cfg = settings(folder, memory, **OPTIONS[options])
        return folder, run(cfg, None, processes, folder)

    return train


@pytest.mark.parametrize('options', [
    ACCUMULATION, *(pytest.param(name, marks=pytest.mark.nightly)
                    for name in OPTIONS if name != ACCUMULATION)])
def test_the_bits_are_those_of_whole_weights_on_any_number_of_processes(options, trained):
    _, expected = trained(options, 'separate')
    for processes in (1, 2):
        assert trained(options, 'sharded', processes)[1] == expected, processes


@pytest.mark.parametrize('options, before, after', [
    pytest.param(AVERAGES, ('sharded', 1), ('sharded', 2), marks=pytest.mark.nightly),
    pytest.param(AVERAGES, ('sharded', 2), ('shared', 1), marks=pytest.mark.nightly),
    (AVERAGES, ('separate', 1), ('sharded', 1)), (ACCUMULATION, ('sharded', 1), ('sharded', 2)),
    (ACCUMULATION, ('sharded', 2), ('separate', 1))])
def test_a_run_moves_between_kinds_of_memory_and_numbers_of_processes(
        options, before, after, trained, tmp_path):
    folder, expected = trained(options, *before)
    memory, processes = after
    found = run(settings(tmp_path, memory, **OPTIONS[options]), None, processes, tmp_path,
                folder / 'iter_1.pth')
    assert [[line for line in rank if line['iteration'] >= 1][-len(found[0]):]
            for rank in expected] == found


def test_a_scaled_loss_skips_the_same_steps(tmp_path, amp_on_cpu):
    scaled = dict(
        model__type='Overflowing', optim_wrapper__type='AmpOptimWrapper',
        optim_wrapper__dtype='bfloat16',
        optim_wrapper__loss_scale=dict(init_scale=2.**125),
        optim_wrapper__clip_grad=dict(max_norm=0.05))
    expected, found = (run(settings(tmp_path / memory, memory, **scaled), None, 1, tmp_path)
                       for memory in ('separate', 'sharded'))
    weights = [line['weights'] for line in expected[0] if 'data' in line]
    assert 1 < len(set(weights)) < len(weights)  # some steps were skipped
    assert found == expected


def test_a_checkpoint_is_that_of_whole_weights(trained):
    files = [torch.load(trained(AVERAGES, memory)[0] / 'iter_3.pth', weights_only=False)
             for memory in ('separate', 'sharded')]
    for key in ('state_dict', 'ema_state_dict'):
        assert list(files[0][key]) == list(files[1][key])
        for name, value in files[0][key].items():
            assert type(files[1][key][name]) is torch.Tensor
            assert torch.equal(value, files[1][key][name]), name
    model = MODELS.build(settings('', None).model)
    model.load_state_dict(files[1]['state_dict'])


def test_each_rank_keeps_its_share(tmp_path):
    def shares():
        runner = Runner.from_cfg(settings(tmp_path, 'sharded'))
        whole = sum(value.numel() for value in runner.model.parameters() if value.requires_grad)
        runner.train()
        state = [value for entries in runner.optim_wrapper.optimizer.state.values()
                 for value in entries.values()]
        weights = [value for value in runner.model.parameters() if value.requires_grad]
        return [sum(local_part(value).numel() for value in values if value.ndim) / whole
                for values in (weights, state)]

    for weights, momentum in alone(shares, RANKS):
        assert max(weights, momentum) < 1.01 / RANKS


def test_a_hook_may_make_its_average_later(tmp_path):
    def train():
        runner = Runner.from_cfg(settings(tmp_path, 'sharded'))
        hook = Hook()
        hook.ema_model = None
        runner.register_hook(hook)
        runner.train()
        return runner.iter == runner.max_iters

    assert all(alone(train, RANKS))


@pytest.mark.nightly
def test_fingerprints_do_not_depend_on_the_kind_of_memory(tmp_path):
    memories = 'separate', 'shared', 'sharded'
    for memory in memories:
        folder = tmp_path / memory
        run(settings(folder, memory, custom_hooks=[
            dict(type='FingerprintHook', level='parameter'),
            dict(type='EMAHook', momentum=0.1)]), None, 1, folder)
    separate, *runs = [read_run(tmp_path / memory).ranks for memory in memories]
    assert separate.keys() == set(range(RANKS))
    averages = [step['by_name']['averages'] for step in separate[1].steps.values()]
    for name in ('.head.fc.weight', ':steps'):
        assert len({found[f'EMAHook.ema_model{name}'] for found in averages}) == len(averages) > 1
    for found in runs:
        assert first_divergence(separate, found) is None


@HOOKS.register_module(force=True)
class OwnClipping(Hook):

    def before_train(self, runner):
        runner.optim_wrapper.clip_func = halved


def halved(parameters, max_norm):
    for parameter in parameters:
        parameter.grad.mul_(0.5)


REFUSED = {
    'clips gradients with halved, .*allowed are clip_grad_norm_ and clip_grad_value_': dict(
        optim_wrapper__clip_grad=dict(max_norm=1), custom_hooks=[dict(type='OwnClipping')]),
    'the optimizer LBFGS': dict(optim_wrapper__optimizer=dict(_delete_=True, type='LBFGS')),
    'MeanTeacherHook.skip_buffer=False.': dict(model__type='Taught', custom_hooks=[
        dict(type='mmdet.MeanTeacherHook', skip_buffer=False)]),
}


@pytest.mark.parametrize('text', REFUSED)
def test_what_cannot_be_divided_is_refused_by_name(text, tmp_path):
    with pytest.raises(RuntimeError, match=f"memory='sharded', and .*{text}"):
        run(settings(tmp_path, 'sharded', **REFUSED[text]), None, 1, tmp_path)


def test_a_step_that_differs_is_named(tmp_path):
    with pytest.raises(RuntimeError, match=r'(?s)StepDiffersError: The step of iteration 0 .*'
                       r'first difference: .*model\.generator.*weights are not recorded'):
        run(settings(tmp_path, 'sharded', model__type='Noisy'), None, 1, tmp_path)


class NoGroups:
    """The state of a release that has them elsewhere."""


# what a release of torch may lack, and how the run is refused
LACKING = {
    'older': (lambda: mock.patch.object(fsdp2, 'library', lambda: SimpleNamespace(
        FSDPModule=object)), 'FSDPModule.set_custom_reduce_scatter, .* and 3 more'),
    'the groups': (lambda: mock.patch.object(
        fsdp2.library().FSDPModule, '_get_fsdp_state', lambda self: NoGroups()),
        'NoGroups._fsdp_param_groups'),
    'the end of a group': (lambda: lacking('_fsdp_param_group.FSDPParamGroup', 'post_backward'),
                           'FSDPParamGroup.post_backward'),
    'the function in the graph': (
        lambda: lacking('_fsdp_param_group.FSDPParamGroup', '_register_post_backward_hook'),
        'FSDPParamGroup._register_post_backward_hook'),
    'gathered weights': (lambda: lacking('_fsdp_param.FSDPParam', 'unsharded_param'),
                         'FSDPParam.unsharded_param'),
}


@contextmanager
def lacking(name, attribute):
    cls = resolve_name(f'torch.distributed.fsdp._fully_shard.{name}')
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(cls, attribute)
        yield


@pytest.mark.parametrize('name', LACKING)
def test_a_name_that_torch_does_not_have_is_named_before_the_first_step(name, tmp_path):
    fault, said = LACKING[name]

    def train():
        runner = Runner.from_cfg(settings(tmp_path, 'sharded', randomness__virtual_ranks__ranks=1))
        with fault(), pytest.raises(RandomnessError, match=(
                rf"memory='sharded', and torch \S+ does not have {said}: sharded weights were "
                r'tried with torch 2\.13')):
            runner.train()
        return runner.iter

    assert alone(train, 1) == [0]


def test_nothing_of_torch_is_replaced(tmp_path):
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group, _fsdp_state
    classes = [_fsdp_param.FSDPParam, _fsdp_param_group.FSDPParamGroup, _fsdp_state.FSDPState,
               fsdp2.library().FSDPModule]

    def changed():
        before = [dict(vars(cls)) for cls in classes]
        Runner.from_cfg(settings(tmp_path, 'sharded', randomness__virtual_ranks__ranks=1)).train()
        return [dict(vars(cls)) for cls in classes] != before

    assert alone(changed, 1) == [False]


def test_a_release_that_was_not_tried_is_named(monkeypatch):
    assert fsdp2.remark() == '' or torch.__version__[:4] not in fsdp2.TRIED
    monkeypatch.setattr(torch, '__version__', '2.99.1')
    assert fsdp2.remark() == \
        'sharded weights were tried with torch 2.13, and this is torch 2.99.1'


# ------------------------------------------------------------------------------------ faults


def added_up_in_a_ring(self, output, inputs, opts):
    parts = self._gathered(inputs, 'reduce_scatter')
    output.copy_(sum(parts[self._index + 1:] + parts[:self._index + 1]).view(
        self._count, -1)[self._index].view(output.shape))


def with_function_in_the_graph(stock, group, used):
    theirs = group._register_post_backward_hook
    stock(group, used)
    ours = group._register_post_backward_hook
    group._register_post_backward_hook = lambda args, kwargs: theirs(*ours(args, kwargs))


FAULTS = {
    'sums in the order of a ring': lambda: mock.patch(
        'mmrepro.virtual.world.VirtualGroup.reduce_scatter_single',
        added_up_in_a_ring),
    'a norm of parts': lambda: mock.patch(
        'mmrepro.virtual.sharded.whole_tensor', local_part),
    "FSDP2's function in the graph": lambda: mock.patch.object(
        fsdp2, 'leave_graph_alone', functools.partial(
            with_function_in_the_graph, fsdp2.leave_graph_alone)),
    'zeros for parameters without a gradient': lambda: mock.patch.object(
        Sharding, 'end_backward', lambda self, average: None),
}


@pytest.mark.nightly
def test_planted_faults_are_seen(tmp_path):
    def weights(memory):
        def train():
            runner = Runner.from_cfg(settings(
                tmp_path / memory, memory, default_hooks__checkpoint=None,
                optim_wrapper__clip_grad=dict(max_norm=0.05)))
            runner.train()
            return {name: fsdp2.whole_tensor(value).detach().numpy().tobytes()
                    for name, value in runner.model.module.named_parameters()}
        return alone(train, RANKS)[0]

    def unseen():
        expected = weights('separate')
        assert weights('sharded') == expected
        found = []
        for name, fault in FAULTS.items():
            with fault():
                found += [name] if weights('sharded') == expected else []
        return found

    assert not Child(unseen).result()
