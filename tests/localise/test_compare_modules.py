"""compare --trace: the module that a change is planted in is named, and nothing where none is."""
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command import exit_code
from harness import ROOT, Child

from mmrepro.errors import CheckpointError
from mmrepro.localise import compare_modules

SUPPORT = Path(__file__).parents[1] / 'support'
CONFIG = '''
custom_imports = dict(imports=['traced_model'], allow_failed_imports=False)
model = dict(type='Traced')
train_dataloader = dict(batch_size=4, num_workers=2, persistent_workers=True,
                        dataset=dict(type='Noise'),
                        sampler=dict(type='DefaultSampler', shuffle=True))
'''
# an interpreter without mmrepro, which finds other modules first
PYTHON = '''#!/bin/sh
PYTHONPATH={folder} exec {python} "$@"
'''


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('PYTHONPATH', f'{ROOT}{os.pathsep}{SUPPORT}')
    Path('a.py').write_text(CONFIG)
    return tmp_path


@pytest.fixture
def forked(monkeypatch):
    """Run the model in forks of this process, which saves the imports of fresh ones."""
    def run(job):
        sys.argv = [compare_modules.SCRIPT, json.dumps(job)]
        runpy.run_path(str(ROOT / compare_modules.SCRIPT), run_name='__main__')

    def record(python, job):
        Child(run, job).result()
        return compare_modules.load(job['out'])

    monkeypatch.setattr(compare_modules, '_record', record)


def planted(**changes):
    Path('b.py').write_text(f'{CONFIG}model = dict(type=\'Traced\', **{changes!r})\n')
    return 'b.py'


def other_python(factor=None):
    """Return an interpreter of B, and the line of traced_model.py that is another one there."""
    env = Path('env')
    env.mkdir()
    (env / 'sitecustomize.py').write_text("import sys\nsys.modules['mmrepro'] = None\n")
    text = (SUPPORT / 'traced_model.py').read_text()
    (env / 'traced_model.py').write_text(
        text if factor is None else text.replace('FACTOR = 1.', f'FACTOR = {factor}'))
    python = Path('python-b')
    python.write_text(PYTHON.format(folder=env.absolute(), python=sys.executable))
    python.chmod(0o755)
    return str(python.absolute())


def traced(capsys, *words):
    code = exit_code('compare', '--trace', *words)
    captured = capsys.readouterr()
    said = [line for line in captured.out.splitlines() if line.startswith(('DIFF', 'NOTHING'))]
    return code, said[0] if said else '', captured.out, captured.err


@pytest.mark.usefixtures('forked')
@pytest.mark.parametrize('change, found', [
    (dict(eps=1e-3), 'the output of body.norm (BatchNorm2d; mode predict, call 0) differs first, '
     'and its input agrees; '),
    (dict(stride=2), 'the output of body.conv (Conv2d; mode predict, call 0) differs first, and '
     'its input agrees; its shape is [4, 4, 14, 14] in A, [4, 4, 7, 7] in B'),
    (dict(norm='GroupNorm', groups=(2, )), 'the output of body.norm (BatchNorm2d; mode predict, '
     'call 0), which is GroupNorm in B, differs first'),
    (dict(factor=1.001), 'the input of head (Linear; mode predict, call 0) differs first, and all '
     'outputs before it agree: it comes from code of the model after act; ')])
def test_a_planted_change_is_named(capsys, change, found):
    code, verdict, out, _ = traced(capsys, 'a.py', planted(**change), '--json', 'said.json')
    assert code == 1 and verdict.startswith(f'DIFFERENT: {found}')
    said = json.loads(Path('said.json').read_text())
    assert said['losses'][0] != said['losses'][1] and said['first'] in verdict
    assert ('weights that do not fit: body.norm.running_mean: not in this model' in out) == (
        'norm' in change)


@pytest.mark.usefixtures('forked')
def test_a_difference_within_the_tolerance_is_said_to_be_one(capsys, monkeypatch):
    words = 'a.py', planted(factor=1 + 1e-6), '--tolerance', '1e-4'
    code, verdict, *_ = traced(capsys, *words)
    assert code == 0 and 'are at most ' in verdict
    # beyond the tolerance, without a step at any module
    monkeypatch.setattr(compare_modules, '_first_difference',
                        lambda a, b, tolerance: (None, 24, .5))
    code, verdict, *_ = traced(capsys, *words)
    assert code == 1 and verdict == (
        'DIFFERENT: no module stands out: the difference grows from module to module, up to 0.5')


def test_another_interpreter_needs_no_mmrepro_and_its_difference_is_named(capsys):
    python = other_python(factor=1.01)
    done = subprocess.run([python, '-c', 'import mmrepro'], capture_output=True, text=True)
    assert 'import of mmrepro halted' in done.stderr
    code, verdict, *_ = traced(capsys, 'a.py', 'a.py', '--python', python)
    assert code == 1 and 'the input of head (Linear' in verdict


def test_an_equal_environment_differs_in_no_module(capsys):
    code, verdict, out, _ = traced(capsys, 'a.py', 'a.py', '--python', other_python())
    # two modes; inputs and outputs of model, preprocessor and four layers; body is not called
    assert code == 0 and verdict == (
        'NOTHING DIFFERS: 24 inputs and outputs of modules have the same values')
    assert 'Losses' in out and 'image 3' in out


@pytest.mark.usefixtures('forked')
def test_a_run_is_taken_with_its_config_and_last_checkpoint(capsys):
    sys.path.insert(0, str(SUPPORT))
    from traced_model import Traced
    Path('run').mkdir()
    shutil.copy('a.py', 'run/20260101_000000.py')
    model = Traced()
    torch.nn.init.constant_(model.head.bias, 1e3)
    torch.save(dict(meta={}, state_dict=model.state_dict()), 'run/epoch_1.pth')
    code, _, _, err = traced(capsys, 'run', planted(eps=1e-3), '--json', 'said.json')
    assert code == 1 and 'weights: run/epoch_1.pth' in err
    said = json.loads(Path('said.json').read_text())
    assert min(losses['loss'] for losses in said['losses']) > 1e5


@pytest.mark.nightly
def test_of_files_of_one_time_the_last_by_name_is_taken(monkeypatch):
    names = ['a.py', 'b.py']
    for name in names:
        Path(name).write_text(CONFIG)
        os.utime(name, (1, 1))
    for found in (names, names[::-1]):
        monkeypatch.setattr(compare_modules.glob, 'glob', lambda pattern, found=found: (
            found if pattern.endswith('*.py') else []))
        assert compare_modules._config('.') == os.path.abspath('b.py')


@pytest.mark.nightly
def test_an_interpreter_with_mmcv_lite_is_told_to_install_mmrepro(capsys):
    python = other_python()
    with open('env/traced_model.py', 'a') as file:
        file.write("raise ModuleNotFoundError(\"The cause\\nNo module named 'mmcv._ext'\")\n")
    code, _, _, err = traced(capsys, 'a.py', 'a.py', '--python', python)
    assert code == 2 and 'ModuleNotFoundError: The cause\n' in err and err.endswith(
        "'mmcv._ext'; with mmcv-lite, install mmrepro there, which provides the operators\n")


@pytest.mark.parametrize('words, message', [
    (('a.py', 'none.py'), 'none.py: no such config'),
    (('a.py', 'empty'), 'empty: has no config'),
    (('old.py', 'a.py'), 'is of MMDetection 2.x'),
    (('a.py', 'a.py', '--python', './no-python'), '--python ./no-python: No such file'),
    (('a.py', 'a.py', '--checkpoint', 'x.pth'), 'checkpoint x.pth does not exist'),
    pytest.param(
        ('a.py', 'bad.py'), "bad.py: its model does not run with {}: KeyError: 'Nothing is not in",
        marks=pytest.mark.nightly),
    (('a.py', 'a.py', '--tolerance', 'nan'), '--tolerance nan: must be 0 or more'),
    (('a.py', 'a.py', '--no-weights'), '--no-weights has no meaning with --trace')])
def test_what_cannot_be_traced_is_said_in_a_line(capsys, words, message):
    Path('empty').mkdir()
    Path('bad.py').write_text(CONFIG.replace('Traced', 'Nothing'))
    Path('old.py').write_text('data = dict(samples_per_gpu=2)\n')
    code, _, _, err = traced(capsys, *words)
    assert code == 2 and 'Traceback' not in err
    assert message.format(sys.executable) in err.splitlines()[-1]


@pytest.mark.nightly
def test_code_between_modules_of_a_detector_is_named(capsys):
    assert exit_code('demo', '--data-only', '--data', 'data/demo') == 0
    base = os.path.join(ROOT, 'configs', 'demo', 'retinanet_r50_fpn_demo.py')
    Path('b.py').write_text(f'_base_ = {base!r}\nmodel = dict(neck=dict(upsample_cfg=dict('
                            'mode="bilinear")))\n')
    code, verdict, *_ = traced(capsys, base, 'b.py')
    assert code == 1 and verdict.startswith(
        'DIFFERENT: the input of neck.fpn_convs.0 (ConvModule; mode predict, call 0) differs '
        'first, and all outputs before it agree: it comes from code of neck after '
        'neck.lateral_convs.2; ')


def test_a_checkpoint_is_fetched_by_the_backend_that_the_config_imports(tmp_path, monkeypatch):
    (tmp_path / 'backend_of_user.py').write_text("""
from mmengine.fileio import LocalBackend, register_backend

@register_backend('of_user', prefixes='ofuser', force=True)
class Backend(LocalBackend):
    def get(self, path):
        raise LookupError(f'asked for {path}')
""")
    (tmp_path / 'config.py').write_text(
        "custom_imports = dict(imports=['backend_of_user'])\nmodel = dict(type='Small')\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = str(tmp_path / 'config.py')
    with pytest.raises(CheckpointError, match='LookupError: asked for ofuser://bucket/a.pth'):
        compare_modules.compare_modules(config, config, checkpoint='ofuser://bucket/a.pth')
