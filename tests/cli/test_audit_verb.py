"""``mmrepro audit``: exit codes, JSON, plain errors."""
import json
import os

import pytest

from mmrepro import cli

CLEAN = """
custom_imports = dict(imports=['mmrepro'], allow_failed_imports=False)
randomness = dict(seed=1, deterministic=True, numerics=dict(num_threads=1))
"""


def run(arguments):
    return cli.main(['audit', *arguments])


@pytest.fixture
def write(tmp_path):
    def to(text, name='my_config.py'):
        path = tmp_path / name
        path.write_text(text)
        return str(path)
    return to


def test_the_exit_code_is_the_verdict(write, capsys):
    for options in ([], ['--strict']):
        assert run([write(CLEAN), '--device', 'cpu', *options]) == 0
        out = ' '.join(capsys.readouterr().out.split())
        assert 'NO CAUSE FOUND' in out
        assert 'not looked at: compiled extensions, code outside of' in out
        assert f'what only a run shows: mmrepro verify {write(CLEAN)}' in out
    only_warns = write(CLEAN.replace('deterministic=True', "deterministic='warn'"))
    for options, code in ([], 0), (['--strict'], 1):
        assert run([only_warns, '--device', 'cpu', *options]) == code
        assert 'CAUSES FOUND THAT MAY CHANGE BITS: 0 that' in capsys.readouterr().out
    assert run([write('randomness = dict(seed=1)\n'), '--device', 'cpu']) == 1
    out = capsys.readouterr().out
    assert "NOT REPRODUCIBLE under MMDetection's own tools/train.py" in out
    assert ('attaches itself: 0 that change bits, 1 that may, 0 hints (not-deterministic)'
            in ' '.join(out.split()))
    assert 'with the two lines of mmrepro: 0 that change bits' in out


def test_json_says_the_same(write, capsys):
    assert run([write('a = 1\n'), '--device', 'cpu', '--json']) == 1
    said = json.loads(capsys.readouterr().out)
    assert said['exit_code'] == 1 and said['attached'] is False
    assert said['findings'][0]['rule'] == 'not-attached'
    assert set(said['findings'][0]) == {'rule', 'severity', 'where', 'what', 'why', 'fix', 'link'}
    assert [f['rule'] for f in said['with_mmrepro_train'] if f['severity'] != 'hint'] == [
        'no-seed', 'not-deterministic']
    assert [f['rule'] for f in said['with_two_lines'] if f['severity'] != 'hint'] == []


@pytest.mark.parametrize('arguments, code, said', [
    (['CLEAN', '--cfg-options', 'runner_type=FlexibleRunner'], 1, ['other-runner']),
    (['IMPORTS'], 0, ["No module named 'no_such_module'", "No module named 'nor_this'"]),
    (['CLEAN', '--ignore', 'no-seed', 'clock'], 0, ['note: left out: --ignore no-seed clock']),
    (['mmdet::retinanet/retinanet_r50_fpn_1x_coco'], 1, ['not-attached', 'with the two lines']),
    (['--rules'], 0, ['foreign-generator'])],
    ids=['options change the config', 'a custom import that fails is a finding',
         'rules that are left out are named',
         'a config of the zoo has a name', 'rules can be listed'])
def test_what_the_command_says(arguments, code, said, write, capsys):
    given = dict(CLEAN=write(CLEAN), IMPORTS=write(
        CLEAN.replace("['mmrepro']", "['no_such_module', 'mmrepro', 'nor_this']"), 'imports.py'))
    assert run([*(given.get(word, word) for word in arguments), '--device', 'cpu']) == code
    out = capsys.readouterr().out
    assert all(words in out for words in said)


@pytest.mark.parametrize('name, said', [
    ('my_confg.py', 'near: my_config.py'),
    ('mmdet::retinanet/retinanet_r50_fpn_2x_koko.py', 'near: retinanet_r50_fpn_2x_coco.py'),
    ('nosuchpackage::a.py', 'not installed'),
])
def test_a_bad_path_is_a_plain_error(name, said, write, capsys):
    path = write(CLEAN)
    name = name if '::' in name else os.path.join(os.path.dirname(path), name)
    assert run([name]) == 2
    error = capsys.readouterr().err
    assert said in error and 'Traceback' not in error


LAZY = """
from mmengine.config import read_base
from mmengine.dataset import DefaultSampler
from mmdet.datasets.transforms import CachedMosaic

{base}
custom_imports = dict(imports=['mmrepro'], allow_failed_imports=False)
randomness = dict(seed=1, deterministic=True, numerics=dict(num_threads=1))
train_dataloader = dict(num_workers=2, sampler=dict(type=DefaultSampler),
                        dataset=dict(pipeline=[dict(type=CachedMosaic, img_scale=(2, 2))]))
"""


def test_a_pure_python_config_names_classes_and_needs_the_runner_type(write, capsys):
    bare = write(LAZY.format(base=''))
    assert run([bare, '--device', 'cpu', '--json']) == 1
    said = {f['rule']: f for f in json.loads(capsys.readouterr().out)['findings']}
    assert 'lazy-import' in said and 'not-attached' not in said
    assert said['known-part']['where'] == 'train_dataloader.dataset.pipeline[0]'
    full = write(LAZY.format(
        base='with read_base():\n    from mmrepro.configs._base_.reproducible import *'))
    assert run([full, '--device', 'cpu', '--json']) == 0
    assert json.loads(capsys.readouterr().out)['findings'] == []
