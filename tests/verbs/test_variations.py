"""verify: what it varies, what it says; tests/docs/test_tutorials.py types it."""
import glob
import json
import os
import platform
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import launches
import pytest
import small_runs
from command import exit_code
from fake_runs import write_run
from faults import tiny
from harness import python
from launches import EndedTraining, folder_of, training_of, write_steps
from mmengine.config import Config

from mmrepro.determinism.cpu_level import CPU_LEVELS
from mmrepro.errors import NOTHING_TO_COMPARE, ConfigError
from mmrepro.localise import search
from mmrepro.localise.search import LocaliseResult
from mmrepro.runs import launcher, surroundings
from mmrepro.runs.config_edits import virtual_ranks
from mmrepro.verbs import variations as module


class Recorded(EndedTraining):
    """Writes the iterations of its training; one may be ``wrong``, all but two may be lacking."""

    def __init__(self, launch):
        super().__init__(launch)
        training, folder = training_of(launch), folder_of(launch)
        name = os.path.basename(folder)
        first = 2 if training.resume else 0
        ranks = virtual_ranks(Config.fromfile(training.config)) or launch.ranks
        steps = [dict(batch=dict(data=self.value(f'{name}.data', i)), gradients=self.value(name, i))
                 for i in range(first, min(training.kill_after or training.iterations, 8))]
        for rank in range(ranks):
            count = 2 if self.short == (name, rank) else None
            write_steps(folder, steps[:count], rank, ranks, first)

    def value(self, key, iteration):
        return 'other' if self.wrong.get(key) == iteration else 'same'


@pytest.fixture
def stand_in(monkeypatch):
    return launches.stand_in(monkeypatch, Recorded, wrong={}, short=None)


@pytest.fixture
def started(stand_in):
    """Return what was started, by the names of the folders; of a resumed run, the last process."""
    return lambda: {os.path.basename(folder_of(launch)): SimpleNamespace(
        launch=launch, training=training_of(launch),
        cfg=Config.fromfile(training_of(launch).config)) for launch in stand_in.launches}


@pytest.fixture
def run(stand_in, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, 'BETWEEN_LINES', 0)  # every line is shown
    cfg = tiny.validating_and_saving(tmp_path)
    cfg.val_cfg = dict(type='ValLoop')
    cfg.dump('config.py')
    return partial(exit_code, 'verify', 'config.py', '--work-dir', 'w')


@pytest.fixture
def instruction_sets(monkeypatch):
    """Let this machine have instruction sets that can be switched off, whatever it is."""
    monkeypatch.setattr(surroundings, 'instruction_sets', lambda: {'MKL_CBWR': 'AVX2'})


def test_all_equal(run, capsys):
    assert run() == 0
    out, err = capsys.readouterr()
    for name in module.USUAL:
        assert any(line.split()[0] == name and line.endswith('equal')
                   for line in out.splitlines() if line.strip())
    assert 'SAME BITS' in out and '6 of 6 runs' in err


def test_a_difference_names_variation_iteration_and_field(run, stand_in, capsys):
    stand_in.wrong.update(workers=3)
    assert run('--vary', 'process,workers') == 1
    out = capsys.readouterr().out
    assert 'DIFFERENT  iteration 3, gradients: same and other' in out
    assert 'DIFFERENT BITS in 1 of 2 variations' in out
    assert 'mmrepro compare w/reference w/workers' in out
    assert run('--vary', 'process,workers', '--json') == 1
    found = json.loads(capsys.readouterr().out)
    assert [one['equal'] for one in found['variations']] == [True, False]
    assert found['variations'][1]['difference'] == dict(iteration=3, field='gradients',
                                                        first='same', second='other')
    assert not found['same'] and found['iterations'] == 5


def test_what_is_varied(run, started, stand_in, tmp_path):
    run('--vary', 'all')
    runs = started()
    loaders = {name: run.cfg.train_dataloader.num_workers for name, run in runs.items()}
    assert loaders.pop('workers') == 2 and set(loaders.values()) == {0}
    assert {name for name, run in runs.items() if run.launch.env['PYTHONHASHSEED'] == '1'} == {
        'hashseed'}
    assert {name for name, run in runs.items() if run.cfg.val_cfg} == {'validation'}
    assert runs['validation'].training.validate_after == 2
    kill, resume = (one for one in stand_in.launches if folder_of(one).endswith('resume'))
    assert -9 in kill.codes and -9 not in resume.codes
    assert training_of(kill).kill_after == 3 and not training_of(kill).resume
    assert training_of(resume).kill_after is None and training_of(resume).resume
    assert {name: run.cfg.default_hooks.checkpoint.interval for name, run in runs.items()} == {
        **dict.fromkeys(runs, -1), 'resume': 2}
    assert all(run.cfg.custom_hooks[-1].type == 'FingerprintHook' for run in runs.values())


def test_what_surrounds_the_runs_is_varied(run, started, instruction_sets, tmp_path, monkeypatch):
    monkeypatch.setattr(module.os, 'cpu_count', lambda: 2)
    assert run('--vary', 'all') == 0
    runs = started()
    for name, function in (('files', 'reverse_listings'), ('load', 'burn_other_cores')):
        where, _, called = runs[name].training.prepare.partition(':')
        assert called == function and callable(getattr(sys.modules[where], function))
    found = {name: run.launch for name, run in runs.items()}
    assert found['folder'].cwd == str(tmp_path / 'w' / 'folder' / 'elsewhere')
    assert found['locale'].env['TZ'] == 'XXX-5:45' and found['locale'].env['LC_ALL'] == 'C'
    assert found['cpu'].env['MKL_CBWR'] == 'AVX2' != found['load'].env.get('MKL_CBWR')
    assert [found[name].ranks for name in ('reference', 'ranks.reference', 'ranks')] == [1, 2, 2]
    assert {name for name, launch in found.items() if launch.cwd} == {'folder'}


@pytest.mark.parametrize('given, varied', [(0, 2), (1, 2), (2, 0), (4, 0)])
def test_one_of_the_runs_has_several_workers(run, started, given, varied):
    run('--vary', 'workers', '--cfg-options', f'train_dataloader.num_workers={given}')
    counts = [started()[name].cfg.train_dataloader.num_workers for name in ('reference', 'workers')]
    assert counts == [given, varied] and max(counts) > 1


def test_a_config_without_a_seed_gets_one(run, started, capsys):
    assert run('--vary', 'process', '--cfg-options', 'randomness.seed=None') == 0
    assert 'the config has no seed' in capsys.readouterr().out
    assert {name: run.cfg.randomness.seed for name, run in started().items()} == dict.fromkeys(
        ('reference', 'process'), 0)


@pytest.mark.parametrize('wrong, code, said', [
    ({}, 0, 'equal (weights agree as well)'),
    ({'cpu': 2}, 0, 'equal (gradients differ from iteration 2 on, as on another CPU)'),
    ({'cpu.data': 2}, 1, 'DIFFERENT  iteration 2, batch.data: same and other')])
def test_other_instruction_sets_promise_the_same_batches(
        run, stand_in, instruction_sets, monkeypatch, capsys, wrong, code, said):
    stand_in.wrong.update(wrong)
    assert run('--vary', 'cpu') == code
    assert said in capsys.readouterr().out
    monkeypatch.setattr(surroundings, 'instruction_sets', dict)
    assert run('--vary', 'cpu,process') == 0
    assert 'not run: instruction sets can be switched off on x86-64' in capsys.readouterr().out


def test_two_ranks_are_compared_with_two_ranks(run, stand_in, monkeypatch, capsys):
    monkeypatch.setattr(module.os, 'cpu_count', lambda: 2)
    stand_in.wrong.update(reference=0)  # a single rank adds in another order
    assert run('--vary', 'ranks') == 0
    stand_in.wrong.update(ranks=1)
    assert run('--vary', 'ranks') == 1
    assert 'mmrepro compare w/ranks.reference w/ranks' in capsys.readouterr().out
    monkeypatch.setattr(module.os, 'cpu_count', lambda: 1)
    assert run('--vary', 'ranks') == NOTHING_TO_COMPARE
    out = capsys.readouterr().out
    assert 'NOTHING WAS COMPARED' in out and 'not run: it takes 2 cores; there is one' in out


@pytest.mark.parametrize('cores, processes', [(1, 2), (2, 2), (3, 3), (8, 4)])
def test_virtual_ranks_are_compared_on_other_numbers_of_processes(
        run, started, stand_in, monkeypatch, capsys, cores, processes):
    monkeypatch.setattr(module.os, 'cpu_count', lambda: cores)
    assert run('--virtual-ranks', '4') == 0
    assert {name: run.launch.ranks for name, run in started().items()} == {
        **dict.fromkeys(('reference', *module.USUAL), 1), 'ranks': processes}
    assert {run.cfg.randomness.virtual_ranks for run in started().values()} == {4}
    assert f'4 virtual ranks on {processes} processes' in capsys.readouterr().out
    stand_in.wrong.update(ranks=1)
    assert run('--vary', 'ranks', '--virtual-ranks', '4') == 1
    assert 'mmrepro compare w/reference w/ranks' in capsys.readouterr().out


@pytest.mark.parametrize('name, rank, lacking', [('process', 0, ''), ('ranks', 1, ', rank 1')])
def test_an_iteration_that_is_lacking_is_a_difference(run, stand_in, capsys, monkeypatch, name,
                                                      rank, lacking):
    stand_in.short = name, rank
    monkeypatch.setattr(module, '_devices', lambda: (2, 'cores'))
    assert run('--vary', name) == 1
    assert f'iteration 2{lacking}, number of iterations: 5 and 2' in capsys.readouterr().out


@pytest.mark.parametrize(('name', 'expected'), [
    ('workers', ('w/reference', 'w/workers', 'w/localise')),
    ('resume', ('w/reference/config.py', 'w/localise', 5, 'resume_b', 2)),
    ('validation', ('w/validation/config.py', 'w/localise', 5, 'validate_b', 2))])
def test_a_difference_is_localised_on_demand(run, stand_in, monkeypatch, capsys, name, expected):
    called = []

    def localise(*args, **events):
        called.append((*args, *(part for event in events.items() for part in event)))
        return LocaliseResult('equal', 5)

    monkeypatch.setattr(search, 'localise_config', localise)
    monkeypatch.setattr(search, 'localise_runs', localise)
    assert run('--vary', name, '--localise') == 0 and called == []
    stand_in.wrong[name] = 3
    assert run('--vary', name, '--localise') == 1
    assert called == [expected]
    assert 'SAME BITS: 5 iterations compared' in capsys.readouterr().out
    assert run('--vary', name, '--localise', '--json') == 1
    assert json.loads(capsys.readouterr().out)['localise']['verdict'] == 'equal'


@pytest.mark.parametrize('name', ['files', 'folder', 'load', 'cpu'])
def test_what_localise_cannot_repeat_is_said(run, stand_in, instruction_sets, capsys, name):
    stand_in.wrong[f'{name}.data'] = 3
    assert run('--vary', name, '--localise') == 1
    assert f'{name}: mmrepro localise cannot repeat' in capsys.readouterr().err


@pytest.mark.parametrize(('arguments', 'message'), [
    (['--vary', 'all,colour'], '--vary: colour is not allowed; allowed: process,workers'),
    (['--vary', ''], 'nothing is not allowed'), (['--iters', '0'], '--iters 0: must be 1'),
    (['--iters', '9'], '--iters 9: this config, as trained here, ends after 8 iterations'),
    (['--cfg-options', 'train_dataloader.dataset.ann_file=/nowhere/train.json'],
     '/nowhere/train.json does not exist, and train_dataloader')])
def test_wrong_usage(run, capsys, arguments, message):
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err


def test_more_iterations_than_a_training_has_are_refused_before_it_begins(forked, tmp_path):
    cfg = small_runs.config(tmp_path / 'run', randomness=dict(seed=1, deterministic=True))
    with pytest.raises(ConfigError, match='--iters 100000: this config, as trained here, ends '
                       'after 8 iterations'):
        module.train_and_compare(cfg, str(tmp_path / 'w'), ['process'], 100_000, 5, 1, 'step',
                                 print)
    assert not [path for path in (tmp_path / 'w').rglob('fingerprints.*')
                if '"kind":"step"' in path.read_text()]


@pytest.mark.parametrize('settings, name, iterations, reason', [
    ({}, 'resume', 6, ''), (dict(randomness=dict(seed=1)), 'resume', 6, ''),
    ({}, 'resume', 1, 'it takes two iterations to be killed between them'),
    (dict(randomness=dict(worker_seed='worker')), 'resume', 6, 'no run resumes within an epoch'),
    (dict(randomness=dict(worker_seed='mmengine')), 'resume', 6,
     "with worker_seed='mmengine' no run resumes within an epoch"),
    ({}, 'workers', 1, 'it takes two iterations for a second worker to load a batch'),
    ({}, 'validation', 6, ''), (dict(val_cfg=None), 'validation', 6, 'has no validation'),
    ({}, 'cpu', 4, ''),
    (dict(randomness=dict(numerics=dict(cpu='avx2'))), 'cpu', 4,
     'randomness.numerics.cpu pins the instruction sets')])
def test_a_variation_that_a_config_cannot_have_is_skipped(instruction_sets, settings, name,
                                                          iterations, reason):
    cfg = Config({**dict(val_cfg=dict(), randomness=None), **settings})
    found = module.VARIATIONS[name].impossible(cfg, iterations)
    assert bool(found) == bool(reason) and reason in found


@pytest.fixture
def reversed_listings(monkeypatch):
    for name in ('listdir', 'scandir'):
        monkeypatch.setattr(os, name, getattr(os, name))  # put back at the end
    surroundings.reverse_listings()


def test_files_are_listed_in_the_opposite_order_however_they_are_listed(tmp_path, request):
    for name in 'abcd':
        (tmp_path / name).mkdir()
        (tmp_path / name / 'file').touch()
    ways = dict(
        listdir=lambda: os.listdir(tmp_path), by_name=lambda: os.listdir(path=tmp_path),
        scandir_by_name=lambda: [entry.name for entry in os.scandir(path=tmp_path)],
        glob=lambda: glob.glob(f'{tmp_path}/*'),
        scandir=lambda: [entry.name for entry in os.scandir(tmp_path)],
        walk=lambda: next(os.walk(tmp_path))[1], path=lambda: list(Path(tmp_path).iterdir()),
        deep=lambda: glob.glob(f'{tmp_path}/**/file', recursive=True))
    before = {name: way() for name, way in ways.items()}
    request.getfixturevalue('reversed_listings')
    assert {name: way()[::-1] for name, way in ways.items()} == before
    with os.scandir(tmp_path) as entries:
        assert len(list(entries)) == 4


def test_relative_paths_lead_to_the_same_files_from_the_linked_folder(tmp_path):
    original, other = tmp_path / 'here', tmp_path / 'there'
    (original / 'data').mkdir(parents=True)
    (original / 'data' / 'x.txt').write_text('x')
    for folder in (tmp_path, original, original):  # nothing of an earlier call is in the way
        surroundings.linked_folder(str(other), str(folder))
    assert os.listdir(other) == ['data']
    assert (other / 'data' / 'x.txt').read_text() == 'x'


def test_burners_end_with_the_process_that_started_them():
    code = 'from mmrepro.runs.surroundings import burn_other_cores; burn_other_cores()'
    # the pipe is at its end when the last process that holds it has ended
    assert python('-c', code) == ''


@pytest.mark.parametrize('capability, expected', [
    ('AVX512', CPU_LEVELS['avx2']), ('AVX2', surroundings.LESS_THAN_AVX2)])
def test_instruction_sets_of_the_level_below_are_asked_for(capability, expected, monkeypatch):
    monkeypatch.setattr(platform, 'machine', lambda: 'x86_64')
    monkeypatch.setattr(surroundings, 'cpu_instructions', lambda: capability)
    found = surroundings.instruction_sets()
    assert {name: found[name] for name in expected} == expected
    # what loads data keeps AVX2, which batches are promised for
    assert 'AVX2' not in found.get('OPENCV_CPU_DISABLE', '').split(',')
    assert found.get('OPENCV_IPP', 'avx2') == 'avx2'
    monkeypatch.setattr(platform, 'machine', lambda: 'aarch64')
    assert surroundings.instruction_sets() == {}


@pytest.mark.parametrize('name, then, now, said', [
    ('source.own/model.py', 'one', 'two', 'edited code: own/model.py'),
    ('version.timm', '1.0', '1.1', "version.timm '1.0' -> '1.1'"),
    ('env.GAIN', '1', '2', '')])
def test_what_was_changed_while_the_runs_trained_is_a_note(name, then, now, said, tmp_path):
    """Settings are varied on purpose; code and versions are not."""
    for folder, value in (('reference', then), ('workers', now)):
        write_run(tmp_path / folder, count=3, facts={name: value, 'source.mmrepro': '0'})
    results = [module.VariationResult('workers', 'workers', 3)]
    notes = module.changed_meanwhile(results, str(tmp_path))
    assert notes == ([f'changed while the runs trained: {said}'] if said else [])
    skipped = [module.VariationResult('workers', 'workers', skipped='no data')]
    assert module.changed_meanwhile(skipped, str(tmp_path)) == []
