"""verify: what it varies, what it says; tests/docs/test_tutorials.py types it."""
import glob
import json
import os
import platform
import sys
from pathlib import Path

import launches
import pytest
from command import exit_code
from faults import tiny
from harness import python
from launches import EndedTraining, folder_of, training_of, write_steps
from mmengine.config import Config

from mmrepro.determinism.cpu_level import CPU_LEVELS
from mmrepro.exit_codes import NOTHING_TO_COMPARE
from mmrepro.localise import entry
from mmrepro.localise.search import LocaliseResult
from mmrepro.runs import launcher
from mmrepro.runs.config_edits import virtual_ranks
from mmrepro.verify import surroundings
from mmrepro.verify import variations as module


class Recorded(EndedTraining):
    """Writes the iterations of its training; one of them may differ."""

    def __init__(self, launch):
        super().__init__(launch)
        training, folder = training_of(launch), folder_of(launch)
        name = os.path.basename(folder)
        first = 2 if training.resume else 0
        ranks = virtual_ranks(Config.fromfile(training.config)) or launch.ranks
        steps = [dict(batch=dict(data=self.value(f'{name}.data', i)), gradients=self.value(name, i))
                 for i in range(first, min(training.kill_after or training.iterations, 8))]
        for rank in range(ranks):
            write_steps(folder, steps, rank, ranks, first)

    def value(self, key, iteration):
        return 'other' if key.startswith('control') or self.wrong.get(key) == iteration else 'same'


@pytest.fixture
def stand_in(monkeypatch):
    return launches.stand_in(monkeypatch, Recorded, wrong={})


@pytest.fixture
def config(tmp_path):
    path = str(tmp_path / 'config.py')
    cfg = tiny.validating_and_saving(tmp_path)
    cfg.val_cfg = dict(type='ValLoop')
    cfg.dump(path)
    return path


def run(config, tmp_path, *arguments):
    return exit_code('verify', config, '--work-dir', tmp_path / 'w', *arguments)


def test_all_equal(config, stand_in, tmp_path, capsys):
    assert run(config, tmp_path) == 0
    out, err = capsys.readouterr()
    for name in module.USUAL:
        assert any(line.split()[0] == name and line.endswith('equal')
                   for line in out.splitlines() if line.strip())
    assert 'SAME BITS' in out and '6 of 6 runs' in err


def test_a_difference_names_variation_iteration_and_field(config, stand_in, tmp_path, capsys):
    stand_in.wrong.update(workers=3)
    assert run(config, tmp_path, '--vary', 'process,workers') == 1
    out = capsys.readouterr().out
    assert 'DIFFERENT  iteration 3, gradients: same and other' in out
    assert 'DIFFERENT BITS in 1 of 2 variations' in out
    assert f'mmrepro compare {tmp_path / "w" / "reference"} {tmp_path / "w" / "workers"}' in out
    assert run(config, tmp_path, '--vary', 'process,workers', '--json') == 1
    found = json.loads(capsys.readouterr().out)
    assert [one['equal'] for one in found['variations']] == [True, False]
    assert found['variations'][1]['difference'] == dict(iteration=3, field='gradients',
                                                        first='same', second='other')
    assert not found['same'] and found['iterations'] == 5


def test_what_is_varied(config, stand_in, tmp_path):
    run(config, tmp_path, '--vary', 'all')
    started = {os.path.basename(folder_of(one)): one for one in stand_in.launches}
    trainings = {name: training_of(one) for name, one in started.items()}
    configs = {name: Config.fromfile(training.config) for name, training in trainings.items()}
    loaders = {name: cfg.train_dataloader.num_workers for name, cfg in configs.items()}
    assert loaders.pop('workers') == 2 and set(loaders.values()) == {0}
    assert {name for name, one in started.items() if one.env['PYTHONHASHSEED'] == '1'} == {
        'hashseed'}
    assert {name for name, cfg in configs.items() if cfg.val_cfg} == {'validation'}
    assert trainings['validation'].validate_after == 2
    kill, resume = (one for one in stand_in.launches if folder_of(one).endswith('resume'))
    assert -9 in kill.codes and -9 not in resume.codes
    assert training_of(kill).kill_after == 3 and not training_of(kill).resume
    assert training_of(resume).kill_after is None and training_of(resume).resume
    spoiled = trainings.pop('control')  # the first two iterations after the resume
    assert spoiled.resume and spoiled.iterations == 4
    assert spoiled.checkpoint == str(tmp_path / 'w' / 'resume' / 'iter_2.pth')
    assert configs['resume'].default_hooks.checkpoint.interval == 2
    for name, cfg in configs.items():
        assert cfg.custom_hooks[-1].type == 'FingerprintHook'
        if name != 'resume':
            assert cfg.default_hooks.checkpoint.interval == -1


def test_what_surrounds_the_runs_is_varied(config, stand_in, tmp_path, monkeypatch):
    monkeypatch.setattr(module.surroundings, 'instruction_sets', lambda: {'MKL_CBWR': 'AVX2'})
    monkeypatch.setattr(module.os, 'cpu_count', lambda: 2)
    assert run(config, tmp_path, '--vary', 'all') == 0
    started = {os.path.basename(folder_of(one)): one for one in stand_in.launches}
    for name, function in (('files', 'reverse_listings'), ('load', 'burn_other_cores')):
        where, _, called = training_of(started[name]).prepare.partition(':')
        assert called == function and callable(getattr(sys.modules[where], function))
    assert started['folder'].cwd == str(tmp_path / 'w' / 'folder' / 'elsewhere')
    assert started['locale'].env['TZ'] == 'XXX-5:45' and started['locale'].env['LC_ALL'] == 'C'
    assert started['cpu'].env['MKL_CBWR'] == 'AVX2' != started['load'].env.get('MKL_CBWR')
    assert [started[name].ranks for name in ('reference', 'ranks.reference', 'ranks')] == [1, 2, 2]
    assert {name for name, one in started.items() if one.cwd} == {'folder'}


@pytest.mark.parametrize('given, varied', [(0, 2), (1, 2), (2, 0), (4, 0)])
def test_one_of_the_runs_has_several_workers(config, stand_in, tmp_path, given, varied):
    run(config, tmp_path, '--vary', 'workers', '--cfg-options',
        f'train_dataloader.num_workers={given}')
    reference, other = (Config.fromfile(training_of(one).config).train_dataloader
                        for one in stand_in.launches[:2])
    assert (reference.num_workers, other.num_workers) == (given, varied) and max(given, varied) > 1


def test_a_config_without_a_seed_gets_one(config, stand_in, tmp_path, capsys):
    assert run(config, tmp_path, '--vary', 'process', '--cfg-options', 'randomness.seed=None') == 0
    assert 'the config has no seed' in capsys.readouterr().out
    assert {Config.fromfile(training_of(one).config).randomness.seed
            for one in stand_in.launches} == {0}


@pytest.mark.parametrize('wrong, code, said', [
    ({}, 0, 'equal (weights agree as well)'),
    ({'cpu': 2}, 0, 'equal (gradients differ from iteration 2 on, as on another CPU)'),
    ({'cpu.data': 2}, 1, 'DIFFERENT  iteration 2, batch.data: same and other')])
def test_other_instruction_sets_promise_the_same_batches(config, stand_in, tmp_path, monkeypatch,
                                                         capsys, wrong, code, said):
    monkeypatch.setattr(module.surroundings, 'instruction_sets', lambda: {'MKL_CBWR': 'AVX2'})
    stand_in.wrong.update(wrong)
    assert run(config, tmp_path, '--vary', 'cpu') == code
    assert said in capsys.readouterr().out
    monkeypatch.setattr(module.surroundings, 'instruction_sets', dict)
    assert run(config, tmp_path, '--vary', 'cpu,process') == 0
    assert 'not run: instruction sets can be switched off on x86-64' in capsys.readouterr().out


def test_two_ranks_are_compared_with_two_ranks(config, stand_in, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module.os, 'cpu_count', lambda: 2)
    stand_in.wrong.update(reference=0)  # a single rank adds in another order
    assert run(config, tmp_path, '--vary', 'ranks') == 0
    stand_in.wrong.update(ranks=1)
    assert run(config, tmp_path, '--vary', 'ranks') == 1
    assert f'mmrepro compare {tmp_path}/w/ranks.reference {tmp_path}/w/ranks' in (
        capsys.readouterr().out)
    monkeypatch.setattr(module.os, 'cpu_count', lambda: 1)
    assert run(config, tmp_path, '--vary', 'ranks') == NOTHING_TO_COMPARE
    out = capsys.readouterr().out
    assert 'NOTHING WAS COMPARED' in out and 'not run: it takes 2 cores; there is one' in out


@pytest.mark.parametrize('cores, processes', [(1, 2), (2, 2), (3, 3), (8, 4)])
def test_virtual_ranks_are_compared_on_other_numbers_of_processes(
        config, stand_in, tmp_path, monkeypatch, capsys, cores, processes):
    monkeypatch.setattr(module.os, 'cpu_count', lambda: cores)
    assert run(config, tmp_path, '--virtual-ranks', '4') == 0
    started = {os.path.basename(folder_of(one)): one for one in stand_in.launches}
    assert {name: one.ranks for name, one in started.items()} == {
        'reference': 1, **dict.fromkeys((*module.USUAL, 'control'), 1), 'ranks': processes}
    assert {Config.fromfile(training_of(one).config).randomness.virtual_ranks
            for one in stand_in.launches} == {4}
    assert f'4 virtual ranks on {processes} processes' in capsys.readouterr().out
    stand_in.wrong.update(ranks=1)
    assert run(config, tmp_path, '--vary', 'ranks', '--virtual-ranks', '4') == 1
    assert f'mmrepro compare {tmp_path}/w/reference {tmp_path}/w/ranks' in capsys.readouterr().out


@pytest.mark.parametrize('name, rank, lacking', [('process', 0, ''), ('ranks', 1, ', rank 1')])
def test_an_iteration_that_is_lacking_is_a_difference(config, stand_in, tmp_path, capsys,
                                                      monkeypatch, name, rank, lacking):
    class Short(stand_in):
        def __init__(self, launch):
            super().__init__(launch)
            path = os.path.join(folder_of(launch), 'mmrepro', f'fingerprints.rank{rank}.jsonl')
            if folder_of(launch).endswith(name) and os.path.exists(path):
                with open(path, 'rb+') as file:
                    file.truncate(len(b''.join(file.readlines()[:3])))  # the start and two steps

    monkeypatch.setattr(launcher, 'LaunchedTraining', Short)
    monkeypatch.setattr(module, '_devices', lambda: (2, 'cores'))
    assert run(config, tmp_path, '--vary', name) == 1
    assert f'iteration 2{lacking}, number of iterations: 5 and 2' in capsys.readouterr().out


@pytest.mark.parametrize(('name', 'expected'), [
    ('workers', ('{w}/reference', '{w}/workers', '{w}/localise')),
    ('resume', ('{w}/reference/config.py', '{w}/localise', 5, 'resume_b', 2)),
    ('validation', ('{w}/validation/config.py', '{w}/localise', 5, 'validate_b', 2))])
def test_a_difference_is_localised_on_demand(config, stand_in, tmp_path, monkeypatch,
                                             capsys, name, expected):
    called = []

    def localise(*args, **events):
        called.append((*args, *(part for event in events.items() for part in event)))
        return LocaliseResult('equal', 5)

    monkeypatch.setattr(entry, 'localise_config', localise)
    monkeypatch.setattr(entry, 'localise_runs', localise)
    assert run(config, tmp_path, '--vary', name, '--localise') == 0 and called == []
    stand_in.wrong[name] = 3
    assert run(config, tmp_path, '--vary', name, '--localise') == 1
    assert called == [tuple(part.format(w=tmp_path / 'w') if isinstance(part, str) else part
                            for part in expected)]
    assert 'SAME BITS: 5 iterations agree' in capsys.readouterr().out
    assert run(config, tmp_path, '--vary', name, '--localise', '--json') == 1
    assert json.loads(capsys.readouterr().out)['localise']['verdict'] == 'equal'


@pytest.mark.parametrize('name', ['files', 'folder', 'load', 'cpu'])
def test_what_localise_cannot_repeat_is_said(config, stand_in, tmp_path, capsys, name, monkeypatch):
    monkeypatch.setattr(module.surroundings, 'instruction_sets', lambda: {'MKL_CBWR': 'AVX2'})
    stand_in.wrong[f'{name}.data'] = 3
    assert run(config, tmp_path, '--vary', name, '--localise') == 1
    assert f'{name}: mmrepro localise cannot repeat' in capsys.readouterr().err


@pytest.mark.parametrize(('arguments', 'message'), [
    (['--vary', 'all,colour'], '--vary: colour is not allowed; allowed: process,workers'),
    (['--vary', ''], 'nothing is not allowed'), (['--iters', '0'], '--iters 0: must be 1'),
    (['--iters', '9'], '--iters 9: this config, as trained here, ends after 8 iterations'),
    (['--cfg-options', 'train_dataloader.dataset.ann_file=/nowhere/train.json'],
     '/nowhere/train.json does not exist, and train_dataloader')])
def test_wrong_usage(config, stand_in, tmp_path, capsys, arguments, message):
    assert run(config, tmp_path, *arguments) == 2
    assert message in capsys.readouterr().err


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
def test_a_variation_that_a_config_cannot_have_is_skipped(monkeypatch, settings, name, iterations,
                                                          reason):
    monkeypatch.setattr(module.surroundings, 'instruction_sets', lambda: {'MKL_CBWR': 'AVX2'})
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
    code = 'from mmrepro.verify.surroundings import burn_other_cores; burn_other_cores()'
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
