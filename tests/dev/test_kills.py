"""A run that is interrupted at random moments has the bits of an uninterrupted run."""
import json
import os
import random
import sys

import pytest
import torch
from command import exit_code_of
from mmengine.hooks import CheckpointHook
from preempted_runs import Small, settings

from dev.kills import __main__ as command
from dev.kills import attempt
from dev.kills.attempt import Attempt, Interruption
from dev.kills.campaign import Campaign, CampaignSettings, interruptible
from dev.kills.kinds import KINDS, allowed
from dev.kills.moments import FILE
from dev.kills.report import NOT_VERIFIED, campaign_report
from mmrepro.run.runner import ReproRunner
from mmrepro.runs import startup

pytestmark = pytest.mark.usefixtures('forked')


def campaign(tmp_path, kills, ranks=1, kinds=(), seed=0, processes=(), memory=None, **changes):
    cfg = settings(tmp_path, **{
        'train_dataloader.num_workers': 2, 'train_dataloader.persistent_workers': True,
        'train_cfg.max_epochs': 12, 'randomness.deterministic': True, **changes})
    if processes:
        cfg.randomness.virtual_ranks = dict(ranks=ranks, memory=memory)
    interruptible(cfg, 3)
    return Campaign(cfg, CampaignSettings(
        str(tmp_path / 'kills'), kills, seed, ranks,
        kinds or allowed(max(processes or [ranks]), 2), 20, processes))


@pytest.mark.nightly
def test_three_kinds_of_interruption(tmp_path):
    kinds = ('SIGKILL while writing', 'SIGTERM to all', 'SIGKILL of a worker')
    runs = campaign(tmp_path, 3, kinds=kinds)
    assert runs.run(), runs.problems
    assert sorted(kill.kind for kill in runs.kills) == sorted(kinds)
    outcome = json.loads(json.dumps(runs.outcome()))
    said = str(campaign_report(outcome))
    assert outcome['equal'] and 'all bits equal' in said
    assert 'control: a resume without the state of the optimizer was seen as different' in said


@pytest.mark.nightly
def test_one_rank_of_two(tmp_path):
    runs = campaign(tmp_path, 1, ranks=2, kinds=('SIGKILL of a rank', ),
                    **{'train_dataloader.dataset.size': 32})
    assert runs.run(), runs.problems
    assert not runs.kills[0].ended_by_us, 'the other rank ended by itself'


@pytest.mark.nightly
def test_virtual_ranks_go_on_with_other_numbers_of_processes(tmp_path):
    runs = campaign(tmp_path, 2, ranks=3, kinds=('SIGKILL', 'SIGKILL of a rank'),
                    processes=(1, 2, 3), **{'train_dataloader.dataset.size': 24,
                                            'train_dataloader.num_workers': 0,
                                            'train_dataloader.persistent_workers': False})
    assert runs.run(), runs.problems
    assert [kill.processes for kill in runs.kills] == [2, 3]
    assert set(runs._expected) == {0, 1, 2}
    said = str(campaign_report(json.loads(json.dumps(runs.outcome()))))
    assert '3 virtual ranks on 1, 2, 3 processes' in said and 'all bits equal' in said


@pytest.mark.nightly
@pytest.mark.parametrize('ranks, processes, memory', [
    (1, (), None), (2, (), None), (3, (), None),
    (4, (4, 2, 1, 3), None), (4, (4, 2, 1, 3), 'sharded')])
def test_many_interruptions(ranks, processes, memory, tmp_path):
    runs = campaign(tmp_path, 40, ranks=ranks, seed=ranks, processes=processes, memory=memory,
                    **{'train_dataloader.dataset.size': 16 * ranks})
    assert runs.run(), runs.problems
    assert {kill.kind for kill in runs.kills} == set(allowed(ranks, 2))
    assert {kill.processes for kill in runs.kills} == {*(processes or [ranks])}
    for kill in runs.kills:
        if kill.codes == [75] * kill.processes:
            assert kill.resumed == kill.done, 'pre-emption repeats nothing'


@pytest.mark.nightly
def test_a_resume_that_is_wrong_is_noticed(tmp_path, monkeypatch):
    stock = ReproRunner.resume

    def nearly(self, *args, **kwargs):
        stock(self, *args, **kwargs)
        with torch.no_grad():
            self.model.layers[0].weight[0, 0] += 1e-6

    monkeypatch.setattr(ReproRunner, 'resume', nearly)
    runs = campaign(tmp_path, 2, kinds=('SIGTERM', ),
                    **{'train_dataloader.num_workers': 0, 'train_cfg.max_epochs': 25,
                       'train_dataloader.persistent_workers': False,
                       'randomness.self_checks.witness': False})  # it takes longer than the runs
    assert not runs.run()
    assert runs.problems[0].startswith('run 1: iteration ')


@pytest.mark.nightly
def test_a_checkpoint_without_its_pointer_is_noticed(tmp_path, monkeypatch):
    """A damaged file that last_checkpoint names."""
    stock = CheckpointHook._save_checkpoint_with_step

    def damages(self, runner, step, meta):
        stock(self, runner, step, meta)
        with open(self.last_ckpt, 'r+b') as file:
            file.truncate(1000)

    monkeypatch.setattr(CheckpointHook, '_save_checkpoint_with_step', damages)
    runs = campaign(tmp_path, 1, kinds=('SIGKILL', ), **{'train_cfg.max_epochs': 30})
    assert not runs.run()
    assert 'last_checkpoint names' in runs.problems[0] and 'truncated' in runs.problems[0]


@pytest.mark.parametrize('kind, codes, killed, expected', [
    ('SIGUSR1', [-10], [], '[0, 75]'), ('SIGTERM', [-9], [0], '[0, 75]'),
    ('SIGTERM to one rank', [75, -9], [1], ''),
    ('SIGTERM to one rank', [-9, -9], [0, 1], '[0, 75]'),
    ('SIGKILL of a worker', [3, -9], [1], '[0, 1]')])
def test_another_exit_code_is_noticed_and_a_process_that_hangs_unless_it_waits_for_a_rank(
        tmp_path, kind, codes, killed, expected):
    runs = campaign(tmp_path, 1, ranks=len(codes))
    runs._note_kill(1, Interruption(kind, 1, 0.), Attempt([], codes, 1., killed), str(tmp_path))
    assert [f'the processes ended with {codes}, expected {expected};' in problem
            for problem in runs.problems] == [True] * bool(expected)


class Finishing:
    """A training without workers, that writes a torn line and a moment, and ends by itself."""
    pids, kill = [0], print

    def __init__(self, folder):
        self.file, self.ends = folder / FILE, iter([None, None, None, 0])

    def codes(self):
        lines = '["train", 0\n["train", 1, 0, 1.5, 0, [], 0]\n'
        self.file.write_text(self.file.read_text() + lines)
        return [next(self.ends)]


def test_a_strike_without_a_victim_interrupts_nothing_and_torn_moments_are_left_out(
        tmp_path, monkeypatch):
    monkeypatch.setattr(attempt, 'LaunchedTraining', Finishing)
    plan = Interruption('SIGKILL of a worker', 1, 0.)
    found = attempt.watch(tmp_path, str(tmp_path), plan, dict(step=0.), random.Random(0))
    assert found.seconds_to_end is None and {moment.iteration for moment in found.moments} == {1}


def test_what_is_possible_depends_on_ranks_and_workers():
    assert set(allowed(2, 2)) == set(KINDS)
    assert {'SIGKILL of a worker', 'SIGTERM to all'} & set(allowed(1, 0)) == set()


def test_wrong_arguments_are_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(startup, 'restart_if_incomplete', lambda *args: None)
    config = tmp_path / 'config.py'
    settings(tmp_path).dump(config)
    (tmp_path / 'full').mkdir()
    (tmp_path / 'full' / 'epoch_1.pth').touch()
    for arguments, message in {
            ('nowhere.py', ): 'nowhere.py: no such config',
            (str(config), '--work-dir', str(tmp_path / 'full')): 'full: is not empty',
            (str(config), '--work-dir', str(tmp_path / 'new'), '--kinds', 'flood'):
                "--kinds 'flood': with 1 process(es) and 0 worker(s), possible are 'SIGKILL'",
            (str(config), '--processes', '2,0'): '--processes 2,0: must be numbers of 1 or more',
            (str(config), '--processes', '1,4', '--virtual-ranks', '3', '--work-dir',
             str(tmp_path / 'new')): '--processes 1,4: must be numbers from 1 to 3, the number of',
            (str(config), '--processes', '1,2', '--ranks', '2', '--work-dir',
             str(tmp_path / 'new')): '--ranks 2: a process for each rank'}.items():
        assert exit_code_of(command.COMMAND, command.main, *arguments) == 2
        assert message in capsys.readouterr().err


def test_the_command_trains_the_config_as_it_is(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, 'restart_for', lambda config: print('here', file=sys.stderr))
    cfg = settings('work', **{'train_dataloader.dataset.size': 16, 'train_cfg.max_epochs': 2,
                              'randomness.deterministic': True})
    cfg.dump('config.py')
    assert command.main(['config.py', '--virtual-ranks', '2', '--kills', '1', '--kinds', 'SIGKILL',
                         '--interval', '2', '--span', '2']) == 0
    # not before the process may start again, which would say it twice
    out, err = capfd.readouterr()
    assert 'here\nchanged: a checkpoint every 2 iterations' in err
    assert '2 virtual ranks on 1 processes' in out and 'all bits equal' in out


def test_a_finding_of_a_self_check_is_a_verdict(tmp_path, monkeypatch):
    stock = Small.forward
    monkeypatch.setattr(Small, 'forward', lambda self, x, mode='tensor': stock(
        self, [part + os.urandom(1)[0] for part in x], mode))
    runs = campaign(tmp_path, 1)
    assert not runs.run()
    report = campaign_report(json.loads(json.dumps(runs.outcome())))
    assert report.exit_code == 1 and 'was repeated' in report.verdict


def test_equal_bits_are_not_verified_where_the_control_was_not_seen():
    outcome = dict(settings=dict(ranks=1, processes=[]), iterations_of_a_run=3, runs=1, compared=4,
                   equal=True, problems=[], kills=[], control=None)
    assert campaign_report(outcome).exit_code == NOT_VERIFIED
    unseen, seen = (dict(text='control: ...', iteration=iteration) for iteration in (None, 2))
    assert campaign_report(dict(outcome, control=unseen)).exit_code == NOT_VERIFIED
    assert campaign_report(dict(outcome, control=seen)).exit_code == 0
