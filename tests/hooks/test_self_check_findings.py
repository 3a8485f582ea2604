"""Steps of a run are repeated: what differs stops it by name."""
import functools
import json
import re

import pytest
import torch
from checked_runs import config, finish, registered, stopped
from faults import tiny
from mmengine.runner import Runner

from mmrepro.checkpoint import adapters
from mmrepro.errors import StepDiffersError


@pytest.mark.parametrize('model, attribute', [
    ('GeneratorMadeInAStep', 'model.rng'), ('CountedSteps', 'model.steps')])
def test_an_attribute_that_no_checkpoint_keeps_is_named(model, attribute, tmp_path):
    message = stopped(config(tmp_path, model=model))
    assert 'The step of iteration 0 (counted from 0)' in message
    assert f'reach the loss and that no checkpoint keeps: {attribute}' in message
    assert 'first difference: loss extra: ' in message


@registered
class Freezing(tiny.Tiny):
    """Freezes its head once it has been called twice."""
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
    monkeypatch.setitem(adapters.ADAPTERS, 'Sampler', adapters.Adapter(('seen',), 'a test'))
    runner = finish(config(tmp_path, model='Sampling'))
    state = adapters.collect(runner.model, [])
    assert state == {'model:head:sampler.negatives': {'seen': tiny.ITERATIONS * 2}}
    runner.model.head.sampler = CombinedSampler()
    assert adapters.restore(runner.model, [], state) == []
    assert adapters.collect(runner.model, []) == state


def test_a_generator_made_in_the_step_is_found_with_its_line(tmp_path):
    message = stopped(config(tmp_path, model='GeneratorFromEntropy'))
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


class SumInAnyOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx, numbers):
        ctx.size = numbers.shape
        return torch.ops.self_check_test.sum(numbers.flatten())

    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(ctx.size)


@registered
class AnyOrder(tiny.Tiny):
    def forward(self, inputs, label, mode='tensor'):
        losses = super().forward(inputs, label, mode)
        return dict(losses, loss_sum=SumInAnyOrder.apply(self.backbone(inputs) * 1e-3))


def test_an_order_of_threads_is_found(tmp_path):
    assert re.search(r'forward, \(?.*self_check_test\.sum',
                     stopped(config(tmp_path, model='AnyOrder')))


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
    message = stopped(config(tmp_path, model='CountedSteps'))
    path = tmp_path / 'mmrepro' / 'step_check.iteration0.rank0.json'
    assert str(path) in message
    content = json.loads(path.read_text())
    assert content['attributes'] == ['model.steps'] and content['diagnosis']['path'] == ''
    first, second = content['passes']['first'], content['passes']['second']
    assert set(first) == {'losses', 'gradients', 'sums'} and first != second
    # in the order of the backward pass
    assert list(first['gradients'])[0].startswith('head.fc')
