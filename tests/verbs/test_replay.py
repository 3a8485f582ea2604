"""Replay and its export; prepared files stand for the fresh processes."""
import copy
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import launches
import pytest
from command import exit_code
from fake_runs import write_run
from launches import EndedTraining, folder_of, training_of
from mmengine.config import Config

from mmrepro.errors import FingerprintError
from mmrepro.fingerprint import divergence
from mmrepro.fingerprint.manifest import read_manifest
from mmrepro.fingerprint.reader import read_run
from mmrepro.fingerprint.schema import Writer, fingerprint_name
from mmrepro.runs.launcher import TrainingFailed
from mmrepro.verbs.replay import _Watch, prepare

run = partial(exit_code, 'replay')


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
    assert run(original, '--work-dir', tmp_path / 'r') == 0
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
    assert run(original, '--work-dir', tmp_path / 'r') == 1
    out = capsys.readouterr().out
    assert 'DIFFERENT after 3 equal iterations: iteration 3, gradients: ' in out


def test_every_line_is_compared_once_however_often_one_looks(tmp_path, monkeypatch):
    """Each look would otherwise take longer than the one before."""
    original = read_run(write_run(tmp_path / 'original', 60))
    written = Path(write_run(tmp_path / 'whole', 60), 'mmrepro', fingerprint_name(0))
    lines, compared = written.read_bytes().splitlines(keepends=True), []
    compare = divergence.divergences
    monkeypatch.setattr(divergence, 'divergences', lambda a, b: compared.extend(
        (len(log.steps), len(b[rank].steps)) for rank, log in a.items()) or compare(a, b))
    target = tmp_path / 'again' / 'mmrepro' / fingerprint_name(0)
    target.parent.mkdir(parents=True)
    watch = _Watch(original, None, str(tmp_path / 'again'), 60, lambda text: None, None)
    watch.environment = []
    for end in range(0, len(lines), 4):
        target.write_bytes(b''.join(lines[:end]))
        assert not watch.look()
    assert max(max(pair) for pair in compared) <= 4
    assert 50 < sum(second for _, second in compared) <= 60


def test_a_shorter_replay_as_json(original, stand_in, tmp_path, capsys):
    stand_in.content = stand_in.content[:4]
    stand_in.manifest = dict(stand_in.manifest, initial_weights='0' * 16)
    assert run(original, '--work-dir', tmp_path / 'r', '--iters', '3', '--json') == 0
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
    assert run(original, '--work-dir', tmp_path / 'r') == 1
    assert said in ''.join(capsys.readouterr())


def test_options_are_checked_as_those_of_other_verbs(original, stand_in, tmp_path, capsys):
    words = original, '--work-dir', tmp_path / 'r', '--cfg-options'
    assert run(*words, 'train_dataloader.num_worker=1') == 2
    assert 'did you mean train_dataloader.num_workers?' in capsys.readouterr().err
    assert run(*words, '+train_dataloader.num_worker=1') == 0
    (launch, ) = stand_in.launches
    assert Config.fromfile(training_of(launch).config).train_dataloader.num_worker == 1


def test_a_run_without_the_fingerprints_of_rank_0(original, stand_in, tmp_path, capsys):
    copied = tmp_path / 'copied'
    shutil.copytree(original, copied)
    (copied / 'mmrepro' / 'fingerprints.rank0.jsonl').rename(
        copied / 'mmrepro' / 'fingerprints.rank1.jsonl')
    stand_in.name = 'fingerprints.rank1.jsonl'
    assert run(copied, '--work-dir', tmp_path / 'r') == 0
    assert 'no fingerprints of rank 0' in capsys.readouterr().out


def test_a_run_that_began_at_a_lost_checkpoint(original, tmp_path):
    manifest = read_manifest(str(original))
    content = dict(manifest.content, resumed_from='/gone/epoch_1.pth')
    with pytest.raises(FingerprintError, match='from /gone/epoch_1.pth, which does not exist'):
        prepare(manifest._replace(content=content), str(tmp_path))


def test_a_run_without_a_config_cannot_be_repeated(original):
    """MMEngine has written what there was: ``randomness`` alone."""
    manifest = read_manifest(str(original))
    manifest.check_repeatable()
    content = dict(manifest.content, config=dict(
        manifest.content['config'], text='randomness = dict(seed=1)'))
    with pytest.raises(FingerprintError, match='built from arguments, not from a config: no'):
        manifest._replace(content=content).check_repeatable()


def test_the_folder_is_a_run_that_replay_reads(original, tmp_path, capsys):
    into = tmp_path / 'to_publish'
    assert run(original, '--export', into) == 0
    assert f'wrote {into}/config.py' in capsys.readouterr().out
    assert read_run(str(into)).ranks[0].steps == read_run(str(original)).ranks[0].steps
    manifest = read_manifest(str(into))
    assert manifest.content == read_manifest(str(original)).content
    assert (into / 'config.py').read_text() == manifest.config_text
    lock = (into / 'requirements.txt').read_text().splitlines()
    assert lock == [f'{name}=={version}' for name, version in manifest.content['packages'].items()]
    assert not [name for name in os.listdir(into) if name.endswith('.pth')]


def test_the_page_says_what_the_manifest_knows_and_no_more(original, tmp_path):
    folder = tmp_path / 'run'
    shutil.copytree(original / 'mmrepro', folder / 'mmrepro')
    path = folder / 'mmrepro' / 'manifest.json'
    content = json.loads(path.read_text())
    content['weights'] = {'/home/me/start.pth': dict(sha256='ab12', size=3),
                          'https://x/other.pth': dict(error='no local file')}
    content['data'] = dict(samples=8, annotations={'/data/a.json': dict(sha256='cd34', size=1)},
                           images=None)
    content['code'] = {'/home/me/project': dict(commit='0123', diff='-a\n+b\n', untracked=[]),
                       '/opt/project': dict(commit='4567', diff='-c\n' + ' ' * (2**20 - 3),
                                             untracked=['a.py', 'b.py'])}
    path.write_text(json.dumps(content))
    assert run(folder, '--export', tmp_path / 'out') == 0
    page = (tmp_path / 'out' / 'README.md').read_text()
    for line in ('- iterations recorded: 8', '- `start.pth`: SHA-256 ab12',
                 '- `other.pth`: not recorded (no local file)', '- `a.json`: SHA-256 cd34',
                 '- names of the images, SHA-256: not recorded',
                 'commit 0123, with changes that are in this folder\n',
                 'commit 4567, with changes that are in this folder, cut at 1 MiB; files of no '
                 'commit, which are not in this folder: a.py, b.py\n',
                 f'- initial weights, digest: {content["initial_weights"]}'):
        assert line in page, line
    assert (tmp_path / 'out' / 'project.diff').read_text() == '-a\n+b\n'
    assert (tmp_path / 'out' / 'project (2).diff').read_text().rstrip(' ') == '-c\n'
    for name in ('data', 'weights', 'code', 'packages', 'machine', 'created', 'command',
                 'environment'):
        del content[name]
    path.write_text(json.dumps(content))
    assert run(folder, '--export', tmp_path / 'less') == 0
    page = (tmp_path / 'less' / 'README.md').read_text()
    assert 'started: not recorded' in page and 'command: `not recorded`' in page
    assert (tmp_path / 'less' / 'requirements.txt').read_text() == ''


@pytest.mark.parametrize('arguments, message', [
    ('nowhere', 'nowhere: no such run'), ('', 'RUN'), ('x --iters 0', '--iters 0'),
    ('RUN --work-dir RUN', 'is the run itself'), ('nowhere --export x', 'no such run'),
    ('RUN --export RUN', 'is there already; choose a new folder'),
    ('RUN --export x --iters 2', '--iters has no meaning')])
def test_wrong_usage_leaves_the_run_as_it_is(original, tmp_path, capsys, arguments, message,
                                             monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments.replace('RUN', str(original)).split()) == 2
    assert message in capsys.readouterr().err
    assert os.listdir(tmp_path) == [] and len(read_run(str(original)).ranks[0].steps) == 8


PLUGIN = Path(__file__).resolve().parents[1] / 'support' / 'toy_plugin.py'
FAKE = 'ghp_' + 'x' * 36


@pytest.mark.nightly
def test_an_exported_folder_brings_the_code_that_lies_nowhere_else(tmp_path):
    """An untracked file on the path is what most trainings have, and nobody publishes."""
    folder = tmp_path / 'project'
    folder.mkdir()
    (folder / 'own_plugin.py').write_text(f"{PLUGIN.read_text()}\nTOKEN = '{FAKE}'\n")
    config = PLUGIN.with_name('toy_config.py').read_text().replace('toy_plugin', 'own_plugin')
    (folder / 'config.py').write_text(config)

    def mmrepro(*words):
        path = os.pathsep.join(map(str, filter(Path.exists, [PLUGIN.parents[2], folder])))
        return subprocess.run(
            [sys.executable, '-m', 'mmrepro', *map(str, words)], cwd=tmp_path, text=True,
            capture_output=True, env={**os.environ, 'PYTHONPATH': path, 'PYTHONHASHSEED': '0'})

    done = mmrepro('train', folder / 'config.py', '--work-dir', tmp_path / 'run', '--fingerprint',
                   '--cfg-options', 'train_cfg.max_epochs=1', 'train_cfg.val_interval=9')
    assert done.returncode == 0, done.stderr
    found = read_manifest(str(tmp_path / 'run')).content['sources']
    assert found.keys() == {'own_plugin.py'} and found['own_plugin.py']['module'] == 'own_plugin'
    exported = tmp_path / 'out'
    assert mmrepro('replay', tmp_path / 'run', '--export', exported).returncode == 0
    for path in exported.rglob('*'):
        assert path.is_dir() or FAKE.encode() not in path.read_bytes(), path
    assert 'without what looks like a secret' in (exported / 'README.md').read_text()
    shutil.rmtree(folder)
    shutil.rmtree(tmp_path / 'run')
    done = mmrepro('replay', exported)
    assert 'SAME BITS: 6 iterations' in done.stdout, done.stdout + done.stderr
    assert 'source.own_plugin.py' in done.stdout  # the secret is missing
