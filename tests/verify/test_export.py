"""`replay --export`: what others need, all from the run's own files."""
import json
import os
import shutil
from pathlib import Path

import pytest
from command import exit_code

from mmrepro.fingerprint.manifest import read_manifest
from mmrepro.fingerprint.reader import read_run
from mmrepro.verify.replay import prepare


def main(words):
    return exit_code('replay', *words)


def test_the_folder_is_a_run_that_replay_reads(original, tmp_path, capsys):
    into = tmp_path / 'to_publish'
    assert main([str(original), '--export', str(into)]) == 0
    assert f'wrote {into}/config.py' in capsys.readouterr().out
    there, run = read_run(str(into)), read_run(str(original))
    assert there.ranks[0].steps == run.ranks[0].steps
    manifest = read_manifest(str(into))
    assert manifest.content == read_manifest(str(original)).content
    assert (into / 'config.py').read_text() == manifest.config_text
    lock = (into / 'requirements.txt').read_text().splitlines()
    assert lock == [f'{name}=={version}' for name, version in manifest.content['packages'].items()]
    assert not [name for name in os.listdir(into) if name.endswith('.pth')]


def test_the_page_says_what_the_manifest_knows_and_no_more(original, tmp_path):
    run = tmp_path / 'run'
    shutil.copytree(original / 'mmrepro', run / 'mmrepro')
    path = run / 'mmrepro' / 'manifest.json'
    content = json.loads(path.read_text())
    content['weights'] = {'/home/me/start.pth': dict(sha256='ab12', size=3),
                          'https://x/other.pth': dict(error='no local file')}
    content['data'] = dict(samples=8, annotations={'/data/a.json': dict(sha256='cd34', size=1)},
                           images=None)
    content['code'] = {'/home/me/project': dict(commit='0123', diff='-a\n+b\n', untracked=[]),
                       '/opt/project': dict(commit='4567', diff='-c\n', untracked=[])}
    path.write_text(json.dumps(content))
    assert main([str(run), '--export', str(tmp_path / 'out')]) == 0
    page = (tmp_path / 'out' / 'README.md').read_text()
    for line in ('- iterations recorded: 8', '- `start.pth`: SHA-256 ab12',
                 '- `other.pth`: not recorded (no local file)', '- `a.json`: SHA-256 cd34',
                 '- names of the images, SHA-256: not recorded', 'commit 0123, with changes',
                 f'- initial weights, digest: {content["initial_weights"]}'):
        assert line in page, line
    assert (tmp_path / 'out' / 'project.diff').read_text() == '-a\n+b\n'
    assert (tmp_path / 'out' / 'project (2).diff').read_text() == '-c\n'
    for name in ('data', 'weights', 'code', 'packages', 'machine', 'created', 'command',
                 'environment'):
        del content[name]
    path.write_text(json.dumps(content))
    assert main([str(run), '--export', str(tmp_path / 'less')]) == 0
    page = (tmp_path / 'less' / 'README.md').read_text()
    assert 'started: not recorded' in page and 'command: `not recorded`' in page
    assert (tmp_path / 'less' / 'requirements.txt').read_text() == ''


def test_settings_say_where_files_lie_on_this_machine(original, tmp_path):
    path = prepare(read_manifest(str(original)), str(tmp_path / 'r'),
                   {'train_dataloader.dataset.root': '/elsewhere'})
    assert '/elsewhere' in Path(path).read_text()


@pytest.mark.parametrize('arguments, message', [
    (['no_run', '--export', 'x'], 'no such run'),
    (['RUN', '--export', 'RUN'], 'is there already; choose a new folder'),
    (['RUN', '--export', 'x', '--iters', '2'], '--iters has no meaning'),
])
def test_what_cannot_be_exported_is_one_line(original, tmp_path, capsys, arguments, message,
                                             monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([original if word == 'RUN' else word for word in arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / 'x').exists()
