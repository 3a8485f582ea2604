"""Runs A and B: how they are trained, where they diverge, how far they are apart, what is said."""
import json
import os
import types
from pathlib import Path

import pytest
import torch
from launches import text_of, write_steps

from mmrepro.errors import FingerprintError
from mmrepro.fingerprint.reader import RankLog, RecordedRun
from mmrepro.fingerprint.records import Record, write_records
from mmrepro.localise import search
from mmrepro.localise.compare_modules import compare_tensors
from mmrepro.localise.differing_settings import (
    Variable,
    different_by_design,
    not_known_equal,
    settings_without_effect,
)
from mmrepro.localise.recording import RecordingPlan, RunSpec, record, trainings_of
from mmrepro.localise.search import (
    Localiser,
    first_iteration,
    localise_runs,
    positions_of,
    unused_folder,
)
from mmrepro.run.hooks.fingerprint import FingerprintHook


def test_a_folder_with_files_is_not_used_again(tmp_path):
    folder = tmp_path / 'runs'
    assert unused_folder(str(folder)) == str(folder)
    for number in ('', '.1'):
        used = tmp_path / f'runs{number}'
        used.mkdir()
        assert unused_folder(str(folder)) == str(used), 'an empty folder is used'
        (used / 'config.py').touch()
    assert unused_folder(str(folder)) == f'{folder}.2'


def test_a_run_without_manifest_cannot_be_repeated(tmp_path):
    for name in 'ab':
        write_steps(str(tmp_path / name), [dict(losses=dict(loss=name))])
    with pytest.raises(FingerprintError, match='a: has no manifest, so the run cannot be repeated'):
        localise_runs(str(tmp_path / 'a'), str(tmp_path / 'b'), str(tmp_path))


def test_a_run_that_is_resumed_is_two_trainings():
    spec = RunSpec('B', 'c.py', resume_at=4)
    first, second = trainings_of(spec, 'w', RecordingPlan('w', 6, 5))
    assert (first.given['stop'], first.save, first.given['record']) == (3, 'localise.pth', None)
    assert (second.given['stop'], second.checkpoint) == (6, 'w/localise.pth')
    assert second.given['record'] == 5 and second.resume and not first.resume
    first, second = trainings_of(spec, 'w', RecordingPlan('w', 6, 2))
    assert first.given['record'] == 2 and second.given['record'] is None
    assert len(trainings_of(spec, 'w', RecordingPlan('w', 2))) == 1


def run_of(*losses, positions=(0, 1), ranks=(0,), notes=()):
    steps = {i: dict(kind='step', iteration=i, batch=dict(data='d', positions=list(positions)),
                     losses=dict(loss=loss), lr={}, gradients='', parameters='', buffers='',
                     optimizer='') for i, loss in enumerate(losses)}
    logs = {rank: RankLog('', [], steps, [], True, []) for rank in ranks}
    return RecordedRun('somewhere', [], logs, list(notes))


def test_positions_of_both_runs_are_recorded_and_none_when_one_run_does_not_know_them():
    runs = run_of('1', positions=(0, 1)), run_of('1', positions=(1, 2))
    assert positions_of(*runs, 0) == (0, 1, 2)
    runs[1].ranks[0].steps[0]['batch'].pop('positions')
    assert positions_of(*runs, 0) is None


def test_equal_runs_and_runs_that_cannot_be_compared():
    assert first_iteration(run_of('1', '2'), run_of('1')) == (1, None)
    with pytest.raises(ValueError, match='no iteration in common'):
        first_iteration(run_of(), run_of('1'))
    with pytest.raises(ValueError, match=r'ranks \[0\], somewhere has ranks \[0, 1\]'):
        first_iteration(run_of('1'), run_of('1', ranks=(0, 1)))


class Scripted:
    """Replaces the processes: writes the fingerprints and records that a test gives."""

    def __init__(self, losses, records):
        self.losses, self.records, self.plans = losses, records, []

    def __call__(self, spec, folder, plan):
        self.plans.append((spec.name, plan))
        steps = run_of(*self.losses[spec.name].pop(0)).ranks[0].steps
        write_steps(folder, list(steps.values())[:plan.stop + 1])
        if plan.record is not None:
            Path(folder, 'batch.rank0.json').write_text('null')
            record = Record('forward', 'fc', 'aten.mm.default', inputs=('1',),
                            outputs=(self.records[spec.name].pop(0),))
            write_records(os.path.join(folder, 'operators.rank0.jsonl'), [record])


def scripted(tmp_path, losses, records):
    launch = Scripted(losses, records)
    return launch, Localiser(specs(), str(tmp_path), launch).search(3, values=False)


def test_equal_runs_run_once(tmp_path):
    launch, result = scripted(tmp_path, dict(A=['123'], B=['123']), {})
    assert result.verdict == 'equal' and len(launch.plans) == 2
    assert text_of(result).splitlines()[0] == 'SAME BITS: 3 iterations compared'


def test_runs_that_differ_in_a_validation_only_are_not_called_equal(tmp_path):
    runs = [run_of('1', '2') for _ in 'ab']
    for run, metric in zip(runs, ((0.5).hex(), (0.25).hex())):
        run.ranks[0].vals.append(dict(iteration=2, metrics={'coco/bbox_mAP': metric}))
    result = Localiser(specs(), str(tmp_path), None).explain(*runs)
    assert result.verdict == 'metrics'
    assert text_of(result).splitlines()[0] == (
        'DIFFERENT BITS: training agrees for 2 iterations, and iteration 2, metric coco/bbox_mAP '
        'of the validation: 0.5 (0x1.0000000000000p-1) and 0.25 (0x1.0000000000000p-2)')
    assert result.as_dict()['divergence']['iteration'] == 2


def test_a_difference_is_recorded_where_it_is(tmp_path):
    launch, result = scripted(tmp_path, dict(A=['123', '123'], B=['129', '129']),
                               dict(A=['2'], B=['3']))
    assert result.verdict == 'found' and result.diagnosis.operator == 'aten.mm.default'
    assert [(name, plan.stop, plan.record) for name, plan in launch.plans[2:]] == [
        ('A', 2, 2), ('B', 2, 2)]
    assert text_of(result).splitlines()[0] == (
        'DIFFERENT BITS: the runs first differ at iteration 2, in losses')
    found = json.loads(json.dumps(result.as_dict()))
    assert found['divergence'] == dict(iteration=2, positions=[0, 1], fields={'0': ['losses']})
    assert found['finding']['cause'] == 'operator' and found['finding']['fix']


def test_a_variable_that_the_user_varies_is_not_named_as_the_cause(tmp_path, monkeypatch):
    monkeypatch.setattr(search, 'differing_variables', lambda runs: [
        Variable('GAIN', '1', '2', '/m.py:3')])
    launch = Scripted(dict(A=['123', '123'], B=['129', '129']), dict(A=['2'], B=['3']))
    result = Localiser(specs(dict(GAIN='2')), str(tmp_path), launch).search(3, values=False)
    assert result.diagnosis.cause == 'operator'


def test_a_difference_that_is_not_reproduced_is_not_invented(tmp_path):
    launch, result = scripted(tmp_path, dict(A=['123'] * 3, B=['193', '123', '123']),
                               dict(A=['2', '2'], B=['2', '2']))
    assert result.verdict == 'flaky' and result.diagnosis is None
    assert len(launch.plans) == 2 + 2 * 2  # at most two more runs of A and of B
    assert 'NOT REPRODUCED' in text_of(result) and 'has no manifest' in text_of(result)
    assert 'intermittent' not in text_of(result)  # chance is blamed where all else is known
    assert 'intermittent' in text_of(result._replace(unequal=()))
    unequal = text_of(result._replace(unequal=('GAIN is 1 in A, 2 in B', )))
    assert 'GAIN is 1 in A' in unequal and 'race' not in unequal and 'hardware' not in unequal


def test_a_repetition_that_differs_earlier_is_not_said_to_agree(tmp_path):
    _, result = scripted(tmp_path, dict(A=['123'] * 3, B=['129', '193', '12']),
                         dict(A=['2', '2'], B=['2', '2']))
    assert result.verdict == 'flaky'
    assert '; before what was recorded, they differed at iteration 1.' in text_of(result)


def test_an_iteration_without_fingerprints_is_found_in_the_repetition(tmp_path):
    runs = run_of('1', '2', '3'), run_of('1', '9', '9')
    for run in runs:
        del run.ranks[0].steps[1]  # FingerprintHook(interval=2)
    hook = FingerprintHook(interval=2)
    record(types.SimpleNamespace(hooks=[hook], lifecycle=types.SimpleNamespace(),
                                 register_hook=lambda hook, priority: None),
           **RecordingPlan('', 1)._asdict())
    assert hook.interval == 1
    launch = Scripted(dict(A=['123'] * 2, B=['199'] * 2), dict(A=['2', '2'], B=['2', '3']))
    result = Localiser(specs(), str(tmp_path), launch).explain(*runs, values=False)
    assert result.diagnosis.iteration == 1 and 'intermittent' not in text_of(result)


def test_an_earlier_difference_in_the_repetition_is_followed(tmp_path):
    launch, result = scripted(tmp_path, dict(A=['123'] * 3, B=['129', '199', '199']),
                               dict(A=['2', '2'], B=['2', '3']))
    assert result.verdict == 'found' and result.diagnosis.iteration == 1
    assert 'the cause is intermittent' in text_of(result)
    assert launch.plans[-1][1].record == 1


@pytest.mark.parametrize('oldest', [False, True])
def test_values_tell_rounding_from_more(oldest, monkeypatch):
    if oldest:
        monkeypatch.delattr(torch, 'unravel_index', raising=False)  # torch 2.0 does not have it
    a = torch.rand(4, 5)
    b = a.clone()
    b[2, 3] += 1e-7
    found = compare_tensors(a, b)
    assert (found.elements, found.of, found.first) == (1, 20, (2, 3))
    assert 'rounding' in found.text()
    b[0, 0] = float('nan')
    assert compare_tensors(a, b).first == (0, 0)
    assert compare_tensors(a, a.clone()) is None
    assert compare_tensors(torch.tensor([0.]), torch.tensor([-0.])).elements == 1
    assert compare_tensors(torch.tensor(0.), torch.tensor(1.)).first == ()


def run_with(threads=2, config='lr = 1\n', **facts):
    content = dict(config=dict(text=config), facts={'torch.num_threads': threads, **facts})
    return RecordedRun('somewhere', [content], {}, [])


def specs(env=None, settings=None):
    env = env or {}
    return RunSpec('A', 'a.py'), RunSpec('B', 'b.py', env, asked={**env, **(settings or {})})


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS'):
        monkeypatch.delenv(name, raising=False)


WITHOUT_MANIFEST = RecordedRun('a', [], {}, [])
TWO = dict(OMP_NUM_THREADS='2')
# what is varied, the environment of both runs, the runs, and what is said
EFFECTS = {
    'threads that both runs have anyway': (
        specs(TWO), {}, (run_with(2), run_with(2)),
        ['both runs used 2 threads: OMP_NUM_THREADS=2 had no effect']),
    'threads': (specs(TWO), {}, (run_with(1), run_with(2)), []),
    'a variable that another one overrides': (
        specs(TWO), dict(MKL_NUM_THREADS='1'), (run_with(1), run_with(1)),
        ['both runs used 1 thread: OMP_NUM_THREADS=2 had no effect (both had MKL_NUM_THREADS=1)']),
    'a setting that the config has already': (
        specs(settings={'lr': 1}), {}, (run_with(), run_with()),
        ['both runs used lr=1: varying it had no effect']),
    'a setting': (specs(settings={'lr': 1}), {}, (run_with(), run_with(config='lr = 2\n')), []),
    'the effective value of randomness counts': (
        specs(settings={'randomness.numerics.num_threads': 2}), {},
        [run_with(2, **{'randomness.numerics.num_threads': number}) for number in (None, 2)],
        ['both runs used 2 threads: randomness.numerics.num_threads=2 had no effect']),
    'another variable': (specs(dict(MY_SWITCH='on')), {}, (run_with(), run_with()), []),
    'another variable that both runs have': (
        specs(dict(MY_SWITCH='on')), dict(MY_SWITCH='on'), (run_with(), run_with()),
        ['both runs used MY_SWITCH=on: varying it had no effect']),
    'variables of repeated runs, which were not varied': (
        [RunSpec(name, 'a.py', dict(MY_SWITCH='on')) for name in 'AB'], {},
        (run_with(), run_with()), []),
    'a run without a manifest': (specs(TWO), {}, (WITHOUT_MANIFEST, run_with()), []),
}


@pytest.mark.parametrize('name', EFFECTS)
def test_a_setting_without_effect_is_named(name, monkeypatch):
    varied, variables, runs, expected = EFFECTS[name]
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert settings_without_effect(varied, runs) == expected


KNOWN = dict(variables={'GAIN': dict(value='1', read='/m.py:3')}, code={'r': dict(commit='1')},
             data=dict(samples=1, annotations={'a.json': dict(size=1)}), environment={})
CODE = {'source.mmrepro': 'a', 'source.own.py': 'b', 'version.torch': '2'}
UNEQUAL = {
    'nothing': ({}, {}, []),
    'a variable': ({}, dict(variables={'GAIN': dict(value=None, read='/m.py:3')}),
                   ['GAIN is 1 in A, not set in B; read at /m.py:3']),
    'a variable that one run reads': ({}, dict(variables={}), []),
    'an edited file': ({}, {'source.own.py': 'c'}, ['source.own.py: b / c (own code)']),
    'a file that one run has': ({}, {'source.own.py': None},
                                ['source.own.py: b / (not set) (own code)']),
    'another commit, and equal files': ({}, dict(code={'r': dict(commit='2')}), []),
    'a package': ({}, {'version.timm': '2'}, []),
    'another package': ({'version.timm': '1'}, {'version.timm': '2'},
                        ['version.timm: 1 / 2 (another implementation)']),
    'code of an earlier version': ({'source.mmrepro': None}, {'source.mmrepro': None}, [
        'the code that was imported: not recorded in somewhere'] * 2),
    'a notebook': ({'source.started:a prompt or notebook': 'not recorded'}, {}, [
        'source.started:a prompt or notebook: not recorded / (not set) (the script that was '
        'started)', 'code that was typed into a prompt or notebook: not recorded in somewhere']),
    'a dataset that names no file': (dict(data=dict(samples=1)), dict(data=dict(samples=1)), [
        'what the dataset holds: not recorded in somewhere'] * 2),
    'a manifest of an earlier version': (dict(variables=None), dict(environment=None), [
        'environment variables that the code reads: not recorded in somewhere',
        'the environment: not recorded in somewhere']),
}


@pytest.mark.parametrize('name', UNEQUAL)
def test_what_is_not_known_to_be_equal_is_listed(name):
    *changes, expected = UNEQUAL[name]
    runs = [run_with() for _ in changes]
    for run, change in zip(runs, changes):
        fields = {name: value for name, value in change.items() if '.' not in name}
        facts = {**CODE, **{name: value for name, value in change.items() if '.' in name}}
        run.manifests[0].update(KNOWN, **fields)
        run.manifests[0]['facts'].update(
            (name, value) for name, value in facts.items() if value is not None)
    assert not_known_equal(runs) == expected


def test_code_that_was_edited_before_a_resume_is_listed():
    runs = [run_with(), run_with()]
    for run in runs:
        run.manifests[0].update(KNOWN, iteration=0)
        run.manifests[0]['facts'].update(CODE)
    assert not_known_equal(runs) == []
    first = runs[1].manifests[0]
    runs[1].manifests.append({**first, 'iteration': 3, 'facts': {
        **first['facts'], 'source.own.py': 'c'}})
    assert not_known_equal(runs) == ['source.own.py: b / c (own code)']


def test_runs_that_differ_by_design_are_named_before_they_are_repeated():
    runs = [run_with(config=f'optim_wrapper = dict(lr={lr})\n', **{'randomness.seed': seed})
            for lr, seed in ((1, 0), (2, 5))]
    line, = different_by_design(runs)
    assert line == (
        'the runs differ by design: config.optim_wrapper.lr: 1 / 2 (another setting), '
        'randomness.seed: 0 / 5 (different order of data, different random numbers)')
    assert different_by_design([runs[0], runs[0]]) == []
    # what is harmless is no reason
    assert different_by_design([run_with(config=f'log_level = {n!r}\n') for n in 'ab']) == []
    assert different_by_design([runs[0], WITHOUT_MANIFEST]) == []
