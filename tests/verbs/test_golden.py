"""Goldens: what is kept, what is compared, and what is said; prepared runs stand for processes."""
import functools
import json
import os

import pytest
from command import exit_code
from faults import tiny
from harness import ROOT, python
from launches import EndedTraining, folder_of, stand_in, training_of, write_steps
from mmengine.config import Config

from mmrepro.demo.dataset import demo_config
from mmrepro.fingerprint.manifest import read_manifest
from mmrepro.verbs import golden as module


@pytest.fixture(scope='module')
def manifest(original):
    return read_manifest(str(original)).content


class Recorded(EndedTraining):
    """Facts, the iteration that is ``wrong``, the field and the count are what a test changes."""

    def __init__(self, launch):
        super().__init__(launch)
        training, folder = training_of(launch), folder_of(launch)
        write_steps(folder, [{self.field: 'other' if self.wrong == i else 'same'}
                             for i in range(training.iterations)][:self.count])
        content = dict(self.manifest, facts={**self.manifest['facts'], **self.facts})
        with open(f'{folder}/mmrepro/manifest.json', 'w') as file:
            json.dump(content, file)


@pytest.fixture
def process(manifest, monkeypatch):
    return stand_in(monkeypatch, Recorded, manifest=manifest, facts={}, wrong=None,
                    field='gradients', count=None)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.validating_and_saving('work').dump('detector.py')
    return functools.partial(exit_code, 'golden')


def test_the_same_bits(process, run, capsys, tmp_path):
    lr, workers = 'optim_wrapper.optimizer.lr=0.2', 'train_dataloader.num_workers=0'
    assert run('record', 'detector.py', '--cfg-options', lr, '--cfg-options', workers) == 0
    kept = os.path.join('goldens', 'detector')
    assert sorted(os.listdir(kept))[-1] == 'recipe.json'
    recipe = json.loads((tmp_path / kept / 'recipe.json').read_text())
    assert recipe['config'] == 'detector.py' and recipe['iterations'] == 3
    assert recipe['options'] == [lr, workers]
    assert run('check') == 0
    assert 'EQUAL: detector, 3 iterations' in capsys.readouterr().out
    # the recorded options are those of the check; nothing is evaluated or saved
    cfg = Config.fromfile(training_of(process.launches[1]).config)
    assert cfg.optim_wrapper.optimizer.lr == .2 and cfg.val_cfg is None
    assert training_of(process.launches[1]).iterations == 3
    # on the same machine, it is recorded over
    assert run('record', 'detector.py', '--cfg-options', lr, workers) == 0
    assert len(os.listdir(kept)) == 2


def test_batches_do_not_say_where_the_repository_is(process, run, data_root):
    """Their paths are part of the bits, and another checkout has the same golden."""
    demo_config('faster-rcnn_r50_fpn', data_root).dump('detector.py')
    assert run('record', 'detector.py', '--demo-data') == 0
    cfg = Config.fromfile(training_of(process.launches[0]).config)
    assert cfg.train_dataloader.dataset.data_root == os.path.join('data', 'demo')


def test_a_difference_says_where_and_what_has_changed(process, run, capsys):
    run('record', 'detector.py')
    process.wrong, process.facts = 2, {'env.MKL_CBWR': 'COMPATIBLE', 'version.mmrepro': '9'}
    capsys.readouterr()
    assert run('check', 'detector.py') == 1
    said = capsys.readouterr().out
    assert 'DIFFERENT after 2 equal iterations: detector, iteration 2, gradients: same' in said
    assert 'env.MKL_CBWR' in said and 'mmrepro compare goldens' in said
    assert run('check', '--json') == 1
    out = json.loads(capsys.readouterr().out)
    assert out['goldens'][0]['difference']['iteration'] == 2 and out['exit_code'] == 1


def test_what_the_golden_has_and_the_run_lacks_is_a_difference(process, run, capsys):
    run('record', 'detector.py')
    process.count = 2
    assert run('check') == 1 and 'number of iterations: 3 and 2' in capsys.readouterr().out
    process.count, process.field = None, 'parameters'
    assert run('check') == 1 and 'gradients: a value and nothing' in capsys.readouterr().out


def test_another_class_of_machines_has_no_golden_until_it_is_recorded(process, run, capsys):
    run('record', 'detector.py')
    process.facts = {'hardware.cpu': 'slide rule'}
    capsys.readouterr()
    assert run('check') == 3
    said = capsys.readouterr().out
    assert 'NO GOLDEN for this machine: detector, slide-rule_torch-' in said
    assert 'hardware.cpu' in said and 'the nearest is' in said
    assert run('check', '--missing', 'pass') == 0
    assert run('check') == 3
    assert run('check', '--missing', 'record') == 0
    assert run('check') == 0
    process.facts = {}
    assert run('check') == 0


@pytest.mark.parametrize('name, value, another', [
    ('version.torch', '1.0', True), ('hardware.cpu_instructions', 'none', True),
    ('torch.num_threads', 99, True), ('version.numpy', '0', True),
    *((name, 'x', False) for name in ('version.mmrepro', 'version.python', 'randomness.seed',
                                      'env.PYTHONHASHSEED', 'version.driver'))])
def test_what_makes_another_class(manifest, name, value, another):
    facts = manifest['facts']
    assert name in facts or not another
    assert (module.class_name({**facts, name: value}) != module.class_name(facts)) is another


def test_what_cannot_be_used_is_one_clear_line(process, run, capsys, tmp_path):
    def said(*arguments):
        assert run(*arguments) == 2
        line, = [line for line in capsys.readouterr().err.splitlines() if 'golden: ' in line]
        return line

    assert 'goldens: no golden at all' in said('check')
    assert 'record needs a config' in said('record')
    assert 'no.py: no such config' in said('record', 'no.py')
    assert '--iters 0: must be 1 or more' in said('record', 'detector.py', '--iters', '0')
    assert 'randomness.seed=None: a golden needs' in said(
        'record', 'detector.py', '--cfg-options', 'randomness.seed=None')
    assert "randomness.deterministic='warn'" in said(
        'record', 'detector.py', '--cfg-options', 'randomness.deterministic=warn')
    run('record', 'detector.py')
    assert 'no golden of other' in said('check', 'other.py')
    assert '--iters is for record' in said('check', '--iters', '2')
    assert 'recipe.json has iterations=3, and now it is 4' in said(
        'record', 'detector.py', '--iters', '4')
    golden = next((tmp_path / 'goldens' / 'detector').glob('*_torch-*'))
    log = golden / 'mmrepro' / 'fingerprints.rank0.jsonl'
    lines = log.read_text().splitlines(True)
    log.write_text(''.join(lines[:-1]))
    assert 'has 2 of 3 iterations; record it again' in said('check')
    log.write_text(''.join(lines))
    process.count = 2
    assert 'has 2 of 3 iterations; the training ended early' in said('record', 'detector.py')
    process.count = None
    (golden / 'facts.json').write_text('{}')
    assert 'facts.json: lacks facts' in said('check')


def test_the_goldens_of_the_repository_can_be_read():
    """They are checked by CI, where there is one for its machine."""
    for recipe in module.read_recipes(os.path.join(ROOT, 'tests', 'goldens')):
        assert os.path.isfile(os.path.join(ROOT, recipe.config))


def test_the_portable_golden_is_that_of_this_cpu(tmp_path):
    """Recorded on an Intel CPU with AVX-512; the command as it is typed in the repository."""
    for name in ('configs', 'tests'):
        os.symlink(os.path.join(ROOT, name), tmp_path / name)
    said = python('-m', 'mmrepro', 'golden', 'check', 'configs/demo/rtmdet_tiny_demo.py',
                  '--goldens', 'tests/goldens', cwd=tmp_path)
    assert 'EQUAL: rtmdet_tiny_demo, 3 iterations, x86-64_torch-2.13.0-cpu_' in said


def test_edited_code_and_other_versions_are_named_beside_a_difference(process, run, capsys):
    process.facts = {'source.own/model.py': 'one', 'version.timm': '1.0'}
    run('record', 'detector.py')
    process.facts = {'source.own/model.py': 'two', 'version.timm': '1.1'}
    capsys.readouterr()
    assert run('check') == 0  # they do not make another class of machines
    process.wrong = 1
    capsys.readouterr()
    assert run('check') == 1
    said = capsys.readouterr().out
    assert 'different since it was recorded' in said
    assert 'source.own/model.py' in said and 'version.timm' in said
    assert run('check', '--json') == 1
    facts = json.loads(capsys.readouterr().out)['goldens'][0]['facts']
    assert {'source.own/model.py': 'may change bits', 'version.timm': 'may change bits'}.items() \
        <= {fact['name']: fact['severity'] for fact in facts}.items()
