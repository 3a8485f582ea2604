"""The manifest: what is in it, what never is, and what follows where two differ."""
import copy
import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import Child
from mmengine.runner import Runner
from small_runs import config

from mmrepro.errors import FingerprintError
from mmrepro.facts.compatibility import CHANGES, HARMLESS, MAY
from mmrepro.facts.training_data import training_data
from mmrepro.fingerprint import provenance
from mmrepro.fingerprint.manifest import Manifest, compare_manifests, read_manifest

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
    assert content['code'].keys() == provenance.code(os.getcwd(), provenance.__file__).keys()
    assert all(len(code['commit']) == 40 for code in content['code'].values())
    # a later start has a manifest of its own
    assert read_manifest(f'{run}/mmrepro/manifest.1.json').content['iteration'] == 0


def test_secrets_are_never_written(run):
    for path in filter(Path.is_file, Path(run, 'mmrepro').rglob('*')):
        assert SECRET not in path.read_text()


def changed(manifest, path, value):
    content = copy.deepcopy(manifest.content)
    *parents, last = path
    node = content
    for name in parents:
        node = node[name]
    node[last] = value
    return Manifest('other', content)


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
    found = compare_manifests(manifest, changed(manifest, path, value))
    assert [(one.name, one.severity) for one in found] == [(name, severity)]
    assert found[0].now == value or name == 'command'


def test_files_with_one_name_in_two_folders_are_compared(manifest):
    files = {'/data/a/train.json': dict(sha256='1'), '/data/b/train.json': dict(sha256='2')}
    both = changed(manifest, ('data', 'annotations'), files)
    for path, name in zip(files, ('train.json', 'train.json (2)')):
        other = changed(both, ('data', 'annotations', path), dict(sha256='3'))
        assert [row.name for row in compare_manifests(both, other)] == [
            f'data.annotations.{name}.sha256']


def test_settings_of_the_config_are_compared(manifest):
    text = manifest.config_text.replace('lr=0.1', 'lr=0.2').replace('num_workers=0',
                                                                    'num_workers=4')
    found = compare_manifests(manifest, changed(manifest, ('config', 'text'), text))
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
    (before, ) = provenance.code(str(tmp_path / 'config.py')).values()
    (tmp_path / 'config.py').write_text('a = 2\n')
    (tmp_path / 'new.py').write_text('')
    (after, ) = provenance.code(str(tmp_path / 'config.py'), str(tmp_path)).values()
    assert before['diff'] == '' and before['untracked'] == []
    assert '+a = 2' in after['diff'] and after['untracked'] == ['new.py']
    assert before['commit'] == after['commit'] and before['diff_sha256'] != after['diff_sha256']
    assert provenance.code('/') == {}


def test_data_and_weights_are_recorded_by_content(tmp_path, data_root):
    from mmdet.registry import DATASETS
    from mmengine.dataset import ConcatDataset

    from mmrepro.demo.shipped_configs import demo_config
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
    found = provenance.weights(dict(model=model, load_from=str(tmp_path / 'gone.pth')))
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
