"""What the recorder sees, where it says it happened, and that it changes nothing."""
import contextlib
import copy
import gc
import json
import os
import random
import secrets
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from faults import tiny
from harness import python
from numpy.random import RandomState
from torch import nn

from mmrepro.errors import FingerprintError
from mmrepro.fingerprint import generator_states
from mmrepro.fingerprint.operator_recorder import OperatorRecorder
from mmrepro.fingerprint.records import UNINITIALIZED, read_records, write_records
from mmrepro.localise.diagnosis import diagnose


def step(record=True):
    """Records of a training step, and weights, gradients and generator states after it."""
    torch.manual_seed(0)
    net = tiny.Tiny()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    x, label = torch.rand(2, 3, 8, 8), torch.tensor([0, 2])
    recorder = OperatorRecorder(net)
    with recorder if record else contextlib.nullcontext():
        net(x, label, mode='loss')['loss'].backward()
        optimizer.step()
    return recorder.records(), [
        *net.state_dict().values(), *(p.grad for p in net.parameters()), torch.get_rng_state(),
        torch.tensor(random.getstate()[1]),
        torch.from_numpy(np.random.get_state()[1].astype(np.int64))]


@pytest.fixture(scope='module')
def records():
    return step()[0]


def named(records, **wanted):
    return [r for r in records if all(getattr(r, key) == value for key, value in wanted.items())]


def test_recording_changes_no_bit_and_draws_nothing():
    for plain, recorded in zip(step(record=False)[1], step()[1]):
        assert plain.dtype == recorded.dtype and torch.equal(plain, recorded)


def test_two_recordings_agree(records):
    # other threads of this process may ask the clock in between
    first, second = ([r._replace(stack=(), calls=()) for r in rows]
                     for rows in (records, step()[0]))
    assert first == second


@pytest.mark.parametrize('phase, path, operator', [
    ('forward', 'backbone.0', 'aten.convolution.default'),
    ('forward', 'backbone.1', 'aten.native_batch_norm.default'),
    ('forward', 'neck', 'aten.mul.Tensor'),
    ('loss', 'head.loss', 'aten.nll_loss_forward.default'),
    ('backward', 'head.loss', 'aten.nll_loss_backward.default'),
    ('backward', 'neck', 'aten.mul.Tensor'),
    ('backward', 'backbone.1', 'aten.native_batch_norm_backward.default'),
    ('backward', 'backbone.0', 'aten.convolution_backward.default'),
])
def test_operators_belong_to_a_phase_and_a_module(records, phase, path, operator):
    assert named(records, phase=phase, path=path, name=operator)


def test_optimizer_operators_name_the_parameter_and_random_ones_are_marked(records):
    changed = named(records, phase='optimizer', name='aten.addcdiv_.default')
    assert [r.labels[0] for r in changed] == [name for name, _ in tiny.Tiny().named_parameters()]
    assert {r.name for r in records if r.drew} == {'aten.bernoulli_.float'}


def test_the_line_of_a_custom_backward_is_the_innermost_call(records):
    record, = named(records, phase='backward', path='neck', name='aten.mul.Tensor')
    file, _, function = record.stack[0]
    assert file == tiny.__file__ and function == 'backward'
    assert any('DoubledBackward' in call[2] for call in record.stack)


def test_what_is_written_in_place_counts_as_result(records):
    record, = named(records, name='aten.native_batch_norm.default')
    assert len(record.outputs) == 5  # result, saved mean and deviation, both running statistics
    assert record.inputs[3:] != record.outputs[3:]
    add, = named(records, name='aten.add_.Tensor', path='backbone.1')
    assert add.labels[0] == 'backbone.1.num_batches_tracked' and add.inputs[0] != add.outputs[0]


def recorded(function):
    recorder = OperatorRecorder(nn.Linear(1, 1))
    with recorder:
        function()
    return recorder.records()


def test_memory_that_nothing_has_written_has_no_digest():
    def read_garbage():
        torch.empty(3) + 1
        torch.empty(3).fill_(2) + 1

    empty, bad, empty_again, fill, good = recorded(read_garbage)
    assert empty.outputs == () and empty_again.outputs == ()
    assert bad.labels == (UNINITIALIZED,) and bad.inputs == ('',) and bad.outputs != ('',)
    assert good.labels == ('',) and good.inputs == fill.outputs != ('',)


def test_memory_that_is_filled_in_parts_counts_when_it_is_whole():
    def fill_parts(size):
        x = torch.empty(size)
        x[:2] = 1
        x[2:4] = 2
        x[:3] + 0
        return x * 1

    *_, part, whole = recorded(lambda: fill_parts(4))
    assert part.labels == whole.labels == ('',) and whole.inputs != ('',)
    *_, part, whole = recorded(lambda: fill_parts(5))
    assert part.labels == ('',) and part.inputs != ('',)
    assert whole.labels == (UNINITIALIZED,) and whole.inputs == ('',)


def test_memory_that_is_filled_by_indices_gives_no_false_alarm():
    """Its digest is not known, and what is computed from it is."""
    def fill_by_index():
        x = torch.empty(4)
        x[torch.tensor([0, 2, 1, 3])] = 1.
        return x * 2

    last = recorded(fill_by_index)[-1]
    assert last.labels == (UNINITIALIZED,) and last.outputs == recorded(
        lambda: torch.full((4,), 1.) * 2)[-1].outputs


def test_a_deep_copy_shows_new_memory_and_gives_no_false_alarm():
    x = torch.arange(64.)
    with OperatorRecorder(nn.Linear(1, 1)) as recorder:
        y = copy.deepcopy(x)
        z = y + 1
    assert torch.equal(z, x + 1)
    found = recorder.records()
    shown = [record for record in found if record.name.startswith('aten.set_')]
    assert shown and not any(any(record.inputs) or record.outputs for record in shown)
    assert found[-1].name == 'aten.add.Tensor' and all(found[-1].inputs)  # it is filled by then


def test_values_from_outside_of_torch_enter_as_new_tensors():
    record = recorded(lambda: torch.tensor(0.5))[0]
    assert record.name == 'aten.lift_fresh.default' and record.inputs[0] == record.outputs[0] != ''


class Timed:
    def __del__(self):
        time.time()


def test_calls_that_garbage_collection_makes_are_not_noted():
    """They come at any moment, in one run and not in the other, and no value comes of them."""
    def stamp(phase, info):
        time.perf_counter()

    def collecting():
        ring = Timed()
        ring.ring = ring
        del ring
        gc.collect()
        return torch.ones(2)

    gc.callbacks.append(stamp)
    try:
        record = named(recorded(collecting), name='aten.ones.default')[0]
    finally:
        gc.callbacks.remove(stamp)
    assert record.calls == ()


def jitter():
    return 1 + os.urandom(1)[0] / 1000


def weighted():
    factor = jitter()
    return torch.ones(3).sum() * factor


def test_a_call_counts_for_what_its_function_computes_later():
    first, second = recorded(weighted), recorded(weighted)
    second[-1] = second[-1]._replace(arguments='other=2.0', outputs=('ff', ))
    finding = diagnose(0, 0, first, second)
    assert (finding.operator, finding.cause) == ('aten.mul.Tensor', 'entropy')
    assert any('urandom' in text and 'in jitter' in text for text in finding.evidence)
    # another function's call is no evidence
    apart = [r._replace(stack=((r.stack[0][0], 1, 'elsewhere'), )) for r in second]
    assert diagnose(0, 0, [r._replace(stack=apart[0].stack) for r in first],
                apart).cause == 'number from Python'


class Deep(torch.autograd.Function):
    """Its backward runs a backward; autograd gives another thread to what is deep."""

    @staticmethod
    def forward(ctx, x, depth):
        ctx.depth = depth
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        if ctx.depth:
            with torch.enable_grad():
                y = Deep.apply(torch.ones(1, requires_grad=True), ctx.depth - 1)
            y.backward()
            return grad, None
        threads.add(threading.get_ident())
        return grad * 3, None


threads = set()


def recorded_in_threads():
    records = recorded(lambda: Deep.apply(torch.ones(1, requires_grad=True), 70).backward())
    return dict(threads=len(threads - {threading.get_ident()}),
                operators=[[r.phase, r.name, r.arguments] for r in records])


def test_backward_in_another_thread_is_seen():
    """As on an accelerator, whose backward runs in threads of its own.

    In a fresh process: one in which autograd has started threads cannot fork any more.
    """
    code = ('import json, sys; sys.path[:0] = sys.argv[1:]; import test_operator_recorder as t; '
            'print(json.dumps(t.recorded_in_threads()))')
    found = json.loads(python('-c', code, Path(__file__).parent))
    assert found['threads'], 'autograd used one thread: the test shows nothing'
    assert ['backward', 'aten.mul.Tensor', 'other=3'] in found['operators']


def test_files_hold_what_was_recorded(records, tmp_path):
    path = str(tmp_path / 'records.jsonl')
    write_records(path, records)
    assert read_records(path) == records
    with open(path, 'a') as file:
        file.write('{"phase": "forw')
    with pytest.raises(FingerprintError, match=f'{path}, line .*not a record'):
        read_records(path)


def test_states_of_generators_show_every_draw():
    seen = [generator_states.states()]
    for draw in (lambda: torch.rand(1), np.random.rand, *[np.random.randn] * 2, random.random,
                 *[lambda: random.gauss(0, 1)] * 2):
        draw()
        seen.append(generator_states.states())
    assert len(set(seen)) == len(seen) and generator_states.states() == seen[-1]


seed = 5
UNSEEDED = None
ENTROPY, SEEDED, CLOCK = 'entropy of the operating system', 'a generator is seeded', 'clock'
READS = {
    'a seed': (lambda: np.random.RandomState(5), []),
    'a name': (lambda: RandomState(seed=seed), []),
    'the clock': (lambda: RandomState(int(time.time() * 1000) % 2 ** 32), [CLOCK]),
    'no seed': (lambda: RandomState(), [ENTROPY]),
    'None': (lambda: RandomState(UNSEEDED), [ENTROPY]),
    'a generator without a seed': (lambda: RandomState(np.random.default_rng().integers(9)),
                                   [ENTROPY]),
    'secrets': (lambda: RandomState(secrets.randbits(128) % 9), [ENTROPY]),
    'default_rng': (lambda: np.random.default_rng(), [ENTROPY]),
    'default_rng with a seed': (lambda: np.random.default_rng(5), []),
    'Random': (lambda: random.Random(), [ENTROPY]),
    'Random with a seed': (lambda: random.Random(5), [SEEDED]),
}


@pytest.mark.parametrize('name', READS)
def test_a_seed_is_no_entropy(name):
    """A generator that is given a seed asks for entropy and drops it."""
    function, expected = READS[name]
    watch = generator_states.Watch()
    with watch:
        function()
    assert [call.split(': ')[0] for call in watch.take()] == expected
