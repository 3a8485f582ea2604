"""Replay; prepared files stand for the fresh processes."""
import copy
import json
import os
import shutil
from pathlib import Path

import launches
import pytest
from command import exit_code
from launches import EndedTraining, folder_of, training_of
from mmengine.config import Config

from mmrepro.errors import FingerprintError
from mmrepro.fingerprint.manifest import read_manifest
from mmrepro.fingerprint.reader import read_run
from mmrepro.fingerprint.writer import Writer
from mmrepro.runs.launcher import TrainingFailed
from mmrepro.verify.replay import prepare


def main(words):
    return exit_code('replay', *words)


class Recorded(EndedTraining):
    """Stands for a process: every look at it finds one more line of a prepared run."""
    name = 'fingerprints.rank0.jsonl'

    def __init__(self, launch):
        super().__init__(launch)
        self.launch, self.killed = launch, False
        self._lines = list(self.content)
        folder = os.path.join(folder_of(launch), 'mmrepro')
        self._writer = Writer(f'{folder}/{self.name}')
        Path(folder, 'manifest.json').write_text(json.dumps(self.manifest))

    def poll(self):
        if not self._lines:
            return True
        line = self._lines.pop(0)
        if line == 'fail':
            Path(self.launch.log).write_text('it broke')
            raise TrainingFailed(1, self.launch.log)
        self._writer.write(line)
        return False

    def kill(self):
        self.killed = True
        self._writer.close()


@pytest.fixture
def stand_in(original, monkeypatch):
    lines = (original / 'mmrepro' / 'fingerprints.rank0.jsonl').read_text().splitlines()
    content = list(map(json.loads, lines))
    manifest = read_manifest(str(original)).content
    return launches.stand_in(monkeypatch, Recorded, content=content, manifest=manifest)


def test_the_same_bits(original, stand_in, tmp_path, capsys):
    assert main([str(original), '--work-dir', str(tmp_path / 'r')]) == 0
    assert 'SAME BITS: 8 iterations' in capsys.readouterr().out
    (launch, ) = stand_in.launches
    training = training_of(launch)
    assert training.iterations is None and launch.ranks == 1
    cfg = Config.fromfile(training.config)
    assert cfg.randomness.seed == 3 and cfg.work_dir == str(tmp_path / 'r') and not cfg.resume
    assert cfg.default_hooks.checkpoint.interval == -1
    assert launch.env['OMP_NUM_THREADS'] == '1'


def test_it_stops_at_the_first_difference(original, stand_in, tmp_path, capsys):
    stand_in.content = copy.deepcopy(stand_in.content)
    stand_in.content[4]['gradients'] = 'x' * 16
    stand_in.content[6:] = ['fail']
    assert main([str(original), '--work-dir', str(tmp_path / 'r')]) == 1
    out = capsys.readouterr().out
    assert 'DIFFERENT after 3 equal iterations: iteration 3, gradients: ' in out


def test_a_shorter_replay_as_json(original, stand_in, tmp_path, capsys):
    stand_in.content = stand_in.content[:4]
    stand_in.manifest = dict(stand_in.manifest, initial_weights='0' * 16)
    assert main([str(original), '--work-dir', str(tmp_path / 'r'), '--iters', '3', '--json']) == 0
    found = json.loads(capsys.readouterr().out)
    assert found['same'] and found['compared'] == 3 and found['difference'] is None
    (row, ) = found['environment']
    assert row['name'] == 'initial_weights' and row['severity'] == 'changes bits'
    assert training_of(stand_in.launches[0]).iterations == 3


@pytest.mark.parametrize('content, said', [
    (slice(4), 'iteration 3, number of iterations: 8 and 3'), (None, 'it broke')])
def test_a_training_that_ends_early_is_a_difference(original, stand_in, tmp_path, capsys, content,
                                                    said):
    stand_in.content = stand_in.content[content] if content else ['fail']
    assert main([str(original), '--work-dir', str(tmp_path / 'r')]) == 1
    assert said in ''.join(capsys.readouterr())


def test_options_are_checked_as_those_of_other_verbs(original, stand_in, tmp_path, capsys):
    words = [str(original), '--work-dir', str(tmp_path / 'r'), '--cfg-options']
    assert main([*words, 'train_dataloader.num_worker=1']) == 2
    assert 'did you mean train_dataloader.num_workers?' in capsys.readouterr().err
    assert main([*words, '+train_dataloader.num_worker=1']) == 0
    (launch, ) = stand_in.launches
    assert Config.fromfile(training_of(launch).config).train_dataloader.num_worker == 1


def test_a_run_without_the_fingerprints_of_rank_0(original, stand_in, tmp_path, capsys):
    copied = tmp_path / 'copied'
    shutil.copytree(original, copied)
    (copied / 'mmrepro' / 'fingerprints.rank0.jsonl').rename(
        copied / 'mmrepro' / 'fingerprints.rank1.jsonl')
    stand_in.name = 'fingerprints.rank1.jsonl'
    assert main([str(copied), '--work-dir', str(tmp_path / 'r')]) == 0
    assert 'no fingerprints of rank 0' in capsys.readouterr().out


@pytest.mark.parametrize(('arguments', 'message'), [
    (['nowhere'], 'nowhere: no such run'), ([], 'RUN'), (['x', '--iters', '0'], '--iters 0'),
    (['RUN', '--work-dir', 'RUN'], 'is the run itself')])
def test_wrong_usage(arguments, message, original, capsys):
    assert main([original if word == 'RUN' else word for word in arguments]) == 2
    assert message in capsys.readouterr().err
    assert len(read_run(str(original)).ranks[0].steps) == 8


def test_a_run_that_began_at_a_lost_checkpoint(original, tmp_path):
    manifest = read_manifest(str(original))
    content = dict(manifest.content, resumed_from='/gone/epoch_1.pth')
    with pytest.raises(FingerprintError, match='from /gone/epoch_1.pth, which does not exist'):
        prepare(manifest._replace(content=content), str(tmp_path))
