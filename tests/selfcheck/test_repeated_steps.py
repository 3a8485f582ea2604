"""Repeated steps of models with counters, with several optimizers, and on virtual ranks."""
import os
import re
import resource
import signal
from contextlib import suppress

import checked_runs
import numpy as np
import pytest
import torch
from checked_runs import bits, registered, stopped
from faults import tiny
from harness import Child
from mmengine.logging import MessageHub
from validated_runs import TwoPlayers, settings
from virtual_runs import run as on_virtual_ranks

import dev.user_setups.chance  # noqa: F401  registers set-ups
from dev.user_setups.setup import SETUPS
from mmrepro.selfcheck import forked

pytestmark = pytest.mark.copies


def config(work_dir, model, checks, **changes):
    return checked_runs.config(work_dir, model, checks, train_cfg=dict(max_epochs=1), **changes)


@registered
class Counter(tiny.Tiny):
    """Counts, and what it counts reaches a buffer, the logs and a generator, not the loss."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.calls = 0
        self.register_buffer('total', torch.zeros(()))

    def forward(self, inputs, label, mode='tensor'):
        self.calls += 1
        self.total += self.calls
        MessageHub.get_current_instance().update_scalar('train/calls', self.calls)
        result = super().forward(inputs, label, mode)
        torch.rand(self.calls)
        return result


@registered
class HarmlessCounterAndEntropy(Counter):
    def forward(self, inputs, label, mode='tensor'):
        losses = super().forward(inputs, label, mode)
        return {name: loss * (1 + float(np.random.default_rng().random()))
                for name, loss in losses.items()}


def test_a_counter_that_reaches_nothing_is_not_blamed(tmp_path):
    message = stopped(config(tmp_path, 'HarmlessCounterAndEntropy', 1))
    assert 'entropy' in message and 'calls' not in message.split('calls  ')[0]
    assert 'no checkpoint keeps' not in message


def test_the_number_of_the_process_is_seen_beside_fingerprints(tmp_path):
    model = SETUPS['NumberOfTheProcessInAStep'].change
    assert 'its bits differ' in stopped(config(
        tmp_path, model, 1, custom_hooks=[dict(type='FingerprintHook')]))


@registered
class Players(TwoPlayers):
    calls = 0

    def train_step(self, data, optim_wrapper):
        self.calls += 1
        return super().train_step(data, optim_wrapper)


@registered
class NoisyPlayers(TwoPlayers):
    def forward(self, x, mode='tensor'):
        return dict(loss=super().forward(x, 'loss')['loss'] * np.random.default_rng().random())


def players(work_dir, model, checks, **changes):
    return settings(work_dir, **{
        'model.type': model, 'model.own_steps': True,
        'optim_wrapper': dict(constructor='OnePerPart'),
        'randomness': dict(deterministic=True, self_checks=dict(steps=checks)), **changes})


def played(cfg):
    torch.set_num_threads(1)
    runner = checked_runs.finish(cfg)
    return bits(runner), runner.model.calls


def test_several_optimizers(tmp_path):
    """Until the first of them steps; the log says so."""
    checked, plain = (Child(played, players(tmp_path / str(n), 'Players', n, log_level='INFO')
                            ).result() for n in (1, 0))
    assert checked == plain and plain[1] == 12
    log, = (tmp_path / '1').glob('*/*.log')
    text = log.read_text()
    assert 'Players has a train_step of its own: only the part before its first' in text
    assert 'and 12 steps were repeated: same bits' in text


def test_a_fault_before_the_first_of_several_optimizers_is_found(tmp_path):
    assert re.search('loss .backward.', stopped(players(tmp_path, 'NoisyPlayers', 1)))


@pytest.mark.parametrize('accumulated', [1, 2])
def test_no_bit_changes_on_virtual_ranks(accumulated, tmp_path):
    """A gradient of an earlier iteration is part of what the ranks add up."""
    counts = {'optim_wrapper.accumulative_counts': accumulated}
    checked, plain = (on_virtual_ranks(config(tmp_path, 'Counter', n, **counts), 2, 1,
                                       tmp_path / str(n)) for n in (1, 0))
    assert checked == plain and [len(lines) for lines in checked] == [2, 2]


@registered
class OwnStep(tiny.Tiny):
    def train_step(self, data, optim_wrapper):
        raise AssertionError('nobody calls it on several ranks')


def test_a_step_that_mmengine_does_not_call_on_several_ranks_is_named(tmp_path):
    on_virtual_ranks(config(tmp_path, 'OwnStep', 1, log_level='WARNING'), 2, 1, tmp_path)
    log, = tmp_path.glob('*/*.log')
    text = log.read_text()
    assert 'on several ranks, nothing calls the train_step of OwnStep' in text
    assert 'only the part before' not in text


def test_one_virtual_rank_that_differs_ends_all_and_is_named(tmp_path):
    with pytest.raises(RuntimeError) as caught:
        on_virtual_ranks(config(tmp_path, 'RankDiffers', 1), 2, 1, tmp_path)
    assert all(text in str(caught.value) for text in (
        'StepDiffersError', 'Ranks that differ: 1 of 2.',
        'rank 1: first difference: loss_noise: '))


@registered
class Momentum(tiny.Tiny):
    """As MoCo does, it moves the weights of a key encoder in its forward pass."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.key = torch.nn.Linear(1, 4)
        self.key.requires_grad_(False)

    def forward(self, inputs, label, mode='tensor'):
        with torch.no_grad():
            self.key.weight.mul_(.9).add_(self.head.fc.weight.mean())
        losses = super().forward(inputs, label, mode)
        return {name: loss * self.key.weight.mean().exp() for name, loss in losses.items()}


def test_weights_that_a_model_moves_itself_need_a_copy_for_each_rank(tmp_path):
    with pytest.raises(RuntimeError, match="(?s)has changed .*key.weight.*memory='separate'"):
        on_virtual_ranks(config(tmp_path / '1', 'Momentum', 1), 2, 1, tmp_path / '1')
    separate = {'randomness.virtual_ranks': dict(memory='separate')}
    checked, plain = (on_virtual_ranks(
        config(tmp_path / f'separate {n}', 'Momentum', n, **separate), 2, 1, tmp_path)
        for n in (1, 0))
    assert checked == plain


def reap(*args):
    with suppress(ChildProcessError):
        while os.waitpid(-1, 0)[0]:
            pass


@pytest.mark.parametrize('handler', [signal.SIG_IGN, reap], ids=['ignores', 'reaps'])
def test_code_of_the_user_may_ignore_or_reap_all_children(handler):
    def job():
        signal.signal(signal.SIGCHLD, handler)
        with forked.Copy() as copy:
            if copy.inside:
                copy.answer(lambda: ['bits'])
            assert copy.next(60) == 'bits'
        with forked.Copy() as copy:
            if copy.inside:
                os._exit(3)
            with pytest.raises(forked.CopyFailed, match='ended'):
                copy.next(60)

    Child(job).result(120)


def test_a_copy_answers_where_more_than_1024_files_are_open():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    opened = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while opened[-1] < 1100:
            opened.append(os.dup(opened[0]))
        with forked.Copy() as copy:
            if copy.inside:
                copy.answer(lambda: ['bits'])
            assert copy.next(60) == 'bits'
    finally:
        for number in opened:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
