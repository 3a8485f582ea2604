"""Reading what a run has recorded: its fingerprints, whole and torn, and its manifest."""
import json
import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fake_runs import changed
from harness import Child
from mmengine.runner import Runner
from small_runs import config

from mmrepro.errors import EmptyFingerprints, FingerprintError
from mmrepro.facts import collect
from mmrepro.facts.compatibility import CHANGES, HARMLESS, MAY
from mmrepro.facts.training_data import training_data
from mmrepro.fingerprint.manifest import Manifest, compare_manifests, read_manifest
from mmrepro.fingerprint.reader import NewLines, read_rank, read_run
from mmrepro.fingerprint.schema import Writer

START = dict(kind='start', format=1, level='step', interval=1, rank=0, world_size=1, scheme=1,
             iteration=0, manifest='manifest.json')


def step(iteration, parameters='00'):
    return dict(kind='step', iteration=iteration, epoch=0, parameters=parameters)


def written(folder, *records, rank=0):
    path = folder / 'mmrepro' / f'fingerprints.rank{rank}.jsonl'
    writer = Writer(str(path))
    for record in records:
        writer.write(record)
    written = path.read_bytes().splitlines()  # what a process leaves that is killed now
    assert list(map(json.loads, written[-len(records):])) == [*records]
    writer.close()
    return path


def test_a_whole_file(tmp_path):
    val = dict(kind='val', iteration=2, epoch=1, metrics=dict(mAP='0x1p-1'))
    written(tmp_path, START, step(0), step(1), val, dict(kind='end', iteration=2))
    run = read_run(str(tmp_path))
    log = run.ranks[0]
    assert list(log.steps) == [0, 1] and log.vals == [val] and log.ended and log.notes == []
    assert run.notes == [f'{tmp_path}/mmrepro: has no manifest.json']
    assert read_run(str(tmp_path / 'mmrepro')).ranks == run.ranks


def test_every_cut_of_a_file_is_readable(tmp_path):
    path = written(tmp_path, START, step(0), step(1))
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        log = read_rank(str(path))
        complete = whole[:length].count(b'\n') + (whole[length:length + 1] == b'\n')
        assert len(log.steps) == max(0, complete - 1) and not log.ended
        torn = length and whole[:length][-1:] != b'\n' and whole[length:length + 1] != b'\n'
        assert bool([note for note in log.notes if 'torn off' in note]) == bool(torn)


def test_a_resumed_run_goes_on_below_a_torn_line(tmp_path):
    path = written(tmp_path, START, step(0), step(1), step(2))
    path.write_bytes(path.read_bytes() + b'{"kind":"step","itera')
    written(tmp_path, dict(START, iteration=1), step(1), step(2), dict(kind='end', iteration=3))
    log = read_rank(str(path))
    assert [start['iteration'] for start in log.starts] == [0, 1] and log.ended
    assert list(log.steps) == [0, 1, 2]
    assert log.notes == [f'{path}, line 5: torn off, the process was killed while writing']


def test_what_was_trained_again_and_differs_is_said(tmp_path):
    path = written(tmp_path, START, step(0), step(1, 'aa'), step(2, 'aa'),
                   dict(START, iteration=1), step(1, 'bb'), step(2, 'aa'))
    log = read_rank(str(path))
    assert log.steps[1]['parameters'] == 'bb'
    assert log.notes == ['1 of the iterations that were trained again after a new start differ '
                         'from the first time, the first is 1']


def test_a_new_training_in_the_same_folder_replaces_the_old_one(tmp_path):
    path = written(tmp_path, START, step(0), step(1), dict(kind='val', iteration=2, metrics={}),
                   START, step(0))
    log = read_rank(str(path))
    assert list(log.steps) == [0] and log.vals == []


def test_validations_that_a_new_start_makes_again_count_once(tmp_path):
    def val(iteration, mAP='0x1p-1'):
        return dict(kind='val', iteration=iteration, epoch=1, metrics=dict(mAP=mAP))
    first, second, later = val(2), val(2, '0x1p-2'), val(4)
    path = written(tmp_path, START, step(0), step(1), first, second, dict(START, iteration=2))
    assert read_rank(str(path)).vals == [first, second]
    path = written(tmp_path, first, second, later)
    assert read_rank(str(path)).vals == [first, second, later]


def test_other_keys_of_a_later_version_are_kept(tmp_path):
    path = written(tmp_path, START, dict(step(0), more=1), dict(kind='new', what=2))
    assert read_rank(str(path)).steps[0]['more'] == 1


@pytest.mark.parametrize(('line', 'message'), [
    (b'{"kind":', 'line 2: not JSON'), (b'[1]', r'line 2: it is \[1\]; allowed: dict'),
    (b'{"kind":"step"}', 'line 2: lacks iteration'),
    (json.dumps(dict(START, format=2)).encode(), 'line 2: format 2 is not known')])
def test_a_damaged_line_is_an_error_also_when_it_is_the_last(tmp_path, line, message):
    path = written(tmp_path, START)
    for damaged in (line + b'\n', json.dumps(step(0)).encode() + b'\n'):  # then a line below it
        path.write_bytes(path.read_bytes() + damaged)
        with pytest.raises(FingerprintError, match=f'fingerprints.rank0.jsonl, {message}'):
            read_rank(str(path))


def test_missing_files(tmp_path):
    with pytest.raises(FingerprintError, match='nowhere: no such run'):
        read_run(str(tmp_path / 'nowhere'))
    with pytest.raises(FingerprintError, match='has no folder mmrepro; a run writes it'):
        read_run(str(tmp_path))
    (tmp_path / 'epoch_1.pth').touch()
    with pytest.raises(FingerprintError, match=r'it holds epoch_1\.pth, but checkpoints alone'):
        read_run(str(tmp_path))
    (tmp_path / 'mmrepro').mkdir()
    with pytest.raises(FingerprintError, match='has no file fingerprints.rank0.jsonl'):
        read_run(str(tmp_path))
    (tmp_path / 'mmrepro' / 'fingerprints.rank1.jsonl').touch()
    with pytest.raises(EmptyFingerprints, match='rank1.jsonl is empty: the run ended before'):
        read_run(str(tmp_path))
    written(tmp_path, dict(START, world_size=3, rank=1), rank=1)
    (tmp_path / 'mmrepro' / 'manifest.json').write_text(json.dumps(
        dict(kind='manifest', format=1, config=dict(text=''), facts={})))
    assert read_run(str(tmp_path)).notes == [
        f'{tmp_path}/mmrepro: no fingerprints of rank 0, 2 of 3']
    (tmp_path / 'mmrepro' / 'manifest.1.json').write_text('{')
    with pytest.raises(FingerprintError, match='manifest.1.json: not JSON'):
        read_run(str(tmp_path))


SECRET = secrets.token_hex()  # not a literal: the manifest keeps uncommitted changes of this file
SECRETS = {name: SECRET for name in (
    'WANDB_API_KEY', 'NCCL_AUTH_TOKEN', 'TORCH_PASSWORD', 'HOME_TOWN')}


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """Work directory of the tiny model's run, twice, started with secrets around."""
    folder = tmp_path_factory.mktemp('run')

    def job():
        os.environ.update(SECRETS, NCCL_DEBUG='INFO', PYTHONHASHSEED='0')
        sys.orig_argv = ['python', 'train.py', '--token', SECRET, '--cfg-options',
                         f'wandb.api_key={SECRET}', '--seed', '3']
        for _ in range(2):
            Runner.from_cfg(config(folder, custom_hooks=[dict(type='FingerprintHook')])).train()

    Child(job).result()
    return str(folder)


@pytest.fixture(scope='module')
def manifest(run):
    return read_manifest(run)


def test_what_is_in_it(manifest, run):
    content = manifest.content
    assert content['command'][-2:] == ['--seed', '3'] and content['cwd'] == os.getcwd()
    assert content['randomness']['seed'] == 3 and content['world_size'] == 1
    assert content['data']['samples'] == 8
    assert content['packages']['torch'] == content['facts']['version.torch']
    assert content['facts']['hardware.cpu_instructions'] and content['facts']['torch.num_threads']
    assert content['environment']['NCCL_DEBUG'] == 'INFO'
    assert content['machine']['torch_git'] and content['machine']['gpus'] is not None
    assert manifest.facts['config.model.type'] == 'NoisyLine'
    assert len(content['initial_weights']) == 16 and content['resumed_from'] is None
    # a source archive is no repository
    assert content['code'].keys() == collect.code(os.getcwd(), collect.__file__).keys()
    assert all(len(code['commit']) == 40 for code in content['code'].values())
    # a later start has a manifest of its own
    assert read_manifest(f'{run}/mmrepro/manifest.1.json').content['iteration'] == 0


def test_secrets_are_never_written(run):
    for path in filter(Path.is_file, Path(run, 'mmrepro').rglob('*')):
        assert SECRET.encode() not in path.read_bytes()


def other(manifest, *path, value):
    return Manifest('other', changed(manifest.content, *path, value=value))


@pytest.mark.parametrize(('path', 'value', 'name', 'severity'), [
    (('facts', 'randomness.seed'), 4, 'randomness.seed', CHANGES),
    (('facts', 'hardware.cpu_instructions'), 'none', 'hardware.cpu_instructions', CHANGES),
    (('facts', 'version.torch'), '0.1.0', 'version.torch', CHANGES),
    (('facts', 'version.python'), '3.0.0', 'version.python', HARMLESS),
    (('facts', 'env.PYTHONHASHSEED'), '7', 'env.PYTHONHASHSEED', HARMLESS),
    (('initial_weights', ), '0' * 16, 'initial_weights', CHANGES),
    (('data', 'samples'), 9, 'data.samples', CHANGES),
    (('environment', 'NCCL_DEBUG'), 'WARN', 'environment.NCCL_DEBUG', MAY),
    (('machine', 'torch_git'), 'x', 'machine.torch_git', MAY),
    (('packages', 'numpy'), '1.0', 'packages.numpy', HARMLESS),
    (('command', ), 'python', 'command', HARMLESS),
    (('created', ), 'then', 'created', HARMLESS),
])
def test_severity(manifest, path, value, name, severity):
    found = compare_manifests(manifest, other(manifest, *path, value=value))
    assert [(one.name, one.severity) for one in found] == [(name, severity)]
    assert found[0].now == value or name == 'command'


def test_files_with_one_name_in_two_folders_are_compared(manifest):
    files = {'/data/a/train.json': dict(sha256='1'), '/data/b/train.json': dict(sha256='2')}
    both = other(manifest, 'data', 'annotations', value=files)
    for path, name in zip(files, ('train.json', 'train.json (2)')):
        one = other(both, 'data', 'annotations', path, value=dict(sha256='3'))
        assert [row.name for row in compare_manifests(both, one)] == [
            f'data.annotations.{name}.sha256']


def test_settings_of_the_config_are_compared(manifest):
    text = manifest.config_text.replace('lr=0.1', 'lr=0.2').replace('num_workers=0',
                                                                    'num_workers=4')
    found = compare_manifests(manifest, other(manifest, 'config', 'text', value=text))
    assert [(one.name, one.severity) for one in found] == [
        ('config.optim_wrapper.optimizer.lr', CHANGES),
        ('config.train_dataloader.num_workers', HARMLESS)]


@pytest.mark.skipif(shutil.which('git') is None, reason='needs git')
def test_git_commit_and_changes(tmp_path):
    def git(*arguments):
        subprocess.run(['git', '-C', str(tmp_path), '-c', 'user.name=a', '-c', 'user.email=a@b',
                        '-c', 'commit.gpgSign=false', *arguments], check=True, capture_output=True)

    git('init')
    (tmp_path / 'config.py').write_text('a = 1\n')
    git('add', '.')
    git('commit', '-m', 'first')
    (before, ) = collect.code(str(tmp_path / 'config.py')).values()
    (tmp_path / 'config.py').write_text('a = 2\n')
    (tmp_path / 'new.py').write_text('')
    (after, ) = collect.code(str(tmp_path / 'config.py'), str(tmp_path)).values()
    assert before['diff'] == '' and before['untracked'] == []
    assert '+a = 2' in after['diff'] and after['untracked'] == ['new.py']
    assert before['commit'] == after['commit'] and before['diff_sha256'] != after['diff_sha256']
    assert collect.code('/') == {}


def test_data_and_weights_are_recorded_by_content(tmp_path, data_root):
    from mmdet.registry import DATASETS
    from mmengine.dataset import ConcatDataset

    from mmrepro.demo.dataset import demo_config
    cfg = demo_config('faster-rcnn_r50_fpn', data_root).train_dataloader.dataset
    cfg.update(indices=3, pipeline=[], _scope_='mmdet')
    found = training_data(ConcatDataset([DATASETS.build(cfg)]))
    (path, record), = found['annotations'].items()
    assert path.endswith('instances_train2017.json') and len(record['sha256']) == 64
    assert found['samples'] == found['images']['count'] == 3

    (tmp_path / 'w.pth').write_bytes(b'abc')
    model = dict(backbone=dict(init_cfg=dict(checkpoint=str(tmp_path / 'w.pth'))),
                 neck=dict(init_cfg=[dict(type='Kaiming'),
                                     dict(checkpoint='torchvision://no_such_model')]))
    found = collect.weights(dict(model=model, load_from=str(tmp_path / 'gone.pth')))
    assert found[str(tmp_path / 'w.pth')]['sha256'].startswith('ba7816bf')
    assert found['torchvision://no_such_model'] == dict(error='no local file')
    assert found[str(tmp_path / 'gone.pth')] == dict(error='No such file or directory')


@pytest.mark.parametrize(('text', 'message'), [
    ('{"kind": "start"}', 'not a manifest'),
    ('{"kind": "manifest", "format": 7}', 'format 7 is not known'),
    ('{"kind": "manifest", "format": 1, "config": {}, "facts": {}}', 'config lacks text'),
    ('{"kind": "manifest", "format": 1, "config": {"text": ""}, "facts": {}, "variables": "x"}',
     'variables'), (None, 'No such file')])
def test_files_that_are_no_manifest(tmp_path, text, message):
    if text is not None:
        (tmp_path / 'manifest.json').write_text(text)
    with pytest.raises(FingerprintError, match=f'manifest.json: {message}'):
        read_manifest(str(tmp_path))


def test_lines_of_a_growing_file_are_read_once(tmp_path):
    path = tmp_path / 'fingerprints.rank0.jsonl'
    lines = NewLines(str(path))
    assert lines.read() == []  # not written yet
    path.write_bytes(b'first\nsec')
    assert lines.read() == [b'first']
    with open(path, 'ab') as file:
        file.write(b'ond\n')
    assert lines.read() == [b'second']
    assert lines.read() == []
