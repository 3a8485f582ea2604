"""The search: where two runs part, what runs again, what is said when nothing is found."""
import json
import os
import pickle
import random
import subprocess
import sys
import types

import pytest
import torch
from faults.tiny import tiny
from harness import ROOT, Child, digest, environment
from mmcv.transforms.utils import cache_randomness
from mmengine.runner import Runner

from mmrepro.cli import localise
from mmrepro.fingerprint.reader import RankLog, Run
from mmrepro.fingerprint.records import Record, write_records
from mmrepro.localise import run_state
from mmrepro.localise.compared_runs import Side, start, trainings_of
from mmrepro.localise.diagnosis import find, find_on_ranks
from mmrepro.localise.recording import Plan, attach, read_stream
from mmrepro.localise.sample_recorder import Samples, read_samples
from mmrepro.localise.search import Localiser, first_iteration
from mmrepro.localise.values import compare_tensors
from mmrepro.runs.launcher import TrainingFailed
from mmrepro.runs.stopping import StopTraining


def run_of(*losses, positions=(0, 1), ranks=(0,), notes=()):
    steps = {i: dict(kind='step', iteration=i, batch=dict(data='d', positions=list(positions)),
                     losses=dict(loss=loss), lr={}, gradients='', parameters='', buffers='',
                     optimizer='') for i, loss in enumerate(losses)}
    logs = {rank: RankLog('', [], steps, [], True, []) for rank in ranks}
    return Run('somewhere', [], logs, list(notes))


def test_the_first_differing_iteration_with_what_differs():
    compared, parting = first_iteration(run_of('1', '2', '3'), run_of('1', 'x', 'y', '4'))
    assert compared == 3
    assert (parting.iteration, parting.fields) == (1, {0: ('losses',)})
    assert parting.places == (0, 1)


def test_equal_runs_and_runs_that_cannot_be_compared():
    assert first_iteration(run_of('1', '2'), run_of('1')) == (1, None)
    with pytest.raises(ValueError, match='no iteration in common'):
        first_iteration(run_of(), run_of('1'))
    with pytest.raises(ValueError, match=r'ranks \[0\], somewhere has ranks \[0, 1\]'):
        first_iteration(run_of('1'), run_of('1', ranks=(0, 1)))


class Scripted:
    """Stands for processes: writes the fingerprints and records that a test gives."""

    def __init__(self, losses, records):
        self.losses, self.records, self.plans = losses, records, []

    def __call__(self, side, folder, plan):
        self.plans.append((side.name, plan))
        os.makedirs(os.path.join(folder, 'mmrepro'))
        runs = self.losses[side.name]
        steps = run_of(*runs.pop(0)).ranks[0].steps.values()
        lines = [dict(kind='start', format=1, level='step', rank=0, world_size=1, iteration=0),
                 *list(steps)[:plan.stop + 1]]
        with open(os.path.join(folder, 'mmrepro', 'fingerprints.rank0.jsonl'), 'w') as file:
            file.writelines(json.dumps(line) + '\n' for line in lines)
        if plan.record is not None:
            with open(os.path.join(folder, 'batch.rank0.json'), 'w') as file:
                json.dump(None, file)
            record = Record('forward', 'fc', 'aten.mm.default', inputs=('1',),
                            outputs=(self.records[side.name].pop(0),))
            write_records(os.path.join(folder, 'operators.rank0.jsonl'), [record])


def scripted(tmp_path, losses, records):
    launch = Scripted(losses, records)
    sides = Side('A', 'a.py'), Side('B', 'b.py')
    return launch, Localiser(sides, str(tmp_path), launch).search(3, values=False)


def test_equal_runs_run_once(tmp_path):
    launch, outcome = scripted(tmp_path, dict(A=['123'], B=['123']), {})
    assert outcome.verdict == 'equal' and len(launch.plans) == 2
    assert 'SAME BITS: 3 iterations' in outcome.text()


def test_a_difference_is_recorded_where_it_is(tmp_path):
    launch, outcome = scripted(tmp_path, dict(A=['123', '123'], B=['12x', '12x']),
                               dict(A=['2'], B=['3']))
    assert outcome.verdict == 'found' and outcome.finding.operator == 'aten.mm.default'
    assert [(name, plan.stop, plan.record) for name, plan in launch.plans[2:]] == [
        ('A', 2, 2), ('B', 2, 2)]
    json.dumps(outcome.as_dict())


def test_what_does_not_come_again_is_not_invented(tmp_path):
    launch, outcome = scripted(tmp_path, dict(A=['123'] * 3, B=['1x3', '123', '123']),
                               dict(A=['2', '2'], B=['2', '2']))
    assert outcome.verdict == 'flaky' and outcome.finding is None
    assert len(launch.plans) == 2 + 2 * 2  # no more than two further runs of each side
    assert 'NOT REPRODUCED' in outcome.text() and 'comes and goes' in outcome.text()


def test_a_difference_that_comes_earlier_the_second_time_is_followed(tmp_path):
    launch, outcome = scripted(tmp_path, dict(A=['123'] * 3, B=['12x', '1xx', '1xx']),
                               dict(A=['2', '2'], B=['2', '3']))
    assert outcome.verdict == 'found' and outcome.finding.iteration == 1
    assert 'does not come in every run' in outcome.text()
    assert launch.plans[-1][1].record == 1


def test_a_side_that_is_resumed_is_two_jobs():
    side = Side('B', 'c.py', resume_at=4)
    first, second = trainings_of(side, 'w', Plan('w', 6, 5))
    assert (first.given['stop'], first.save, first.given['record']) == (3, 'localise.pth', None)
    assert (second.given['stop'], second.checkpoint) == (6, 'w/localise.pth')
    assert second.given['record'] == 5 and second.resume and not first.resume
    first, second = trainings_of(side, 'w', Plan('w', 6, 2))
    assert first.given['record'] == 2 and second.given['record'] is None
    assert len(trainings_of(side, 'w', Plan('w', 2))) == 1


def trained(folder, record):
    torch.set_num_threads(1)
    runner = Runner.from_cfg(tiny(folder))
    attach(runner, Plan(str(folder), 5, record))
    with pytest.raises(StopTraining):
        runner.train()
    import random

    import numpy as np
    return [digest(value) for value in (
        runner.model.state_dict(), runner.optim_wrapper.state_dict(), torch.get_rng_state(),
        random.getstate(), np.random.get_state()[1])]


def test_recording_changes_no_bit_of_the_training(tmp_path):
    plain, *recorded = [Child(trained, tmp_path / str(i), record).result()
                        for i, record in enumerate((None, 2, 4))]
    assert all(one == plain for one in recorded)


@pytest.mark.parametrize('start_method', [
    'fork', pytest.param('spawn', marks=pytest.mark.nightly)])
def test_samples_are_recorded_in_worker_processes(tmp_path, start_method):
    def stream(folder, workers):
        cfg = tiny(folder)
        cfg.train_dataloader.num_workers = workers
        if workers:
            cfg.train_dataloader.multiprocessing_context = start_method
        runner = Runner.from_cfg(cfg)
        attach(runner, Plan(str(folder), 1, 1))
        with pytest.raises(StopTraining):
            runner.train()

    samples = []
    for workers in (0, 2):
        (tmp_path / str(workers)).mkdir()
        Child(stream, tmp_path / str(workers), workers).result()
        found = [record for record in read_stream(str(tmp_path / str(workers)), 0)
                 if record.path.startswith('sample ')]
        samples.append([record._replace(stack=()) for record in found])
    assert [record.name for record in samples[0][:6]] == [
        'TinyData', 'TinyLoad', 'TinyFlip', 'TinyJitter', 'TinyPack', 'TinyData']
    assert samples[0] == samples[1] and len(samples[0]) == 12


class Mixing:
    """As MMDetection's Mosaic: the data set asks it for partners, then calls it."""
    partners = random.Random()

    def __init__(self):
        self.own = random.Random(1)

    @cache_randomness
    def get_indexes(self, dataset):
        return [self.own.randint(0, len(dataset) - 1) for _ in range(3)]

    def __call__(self, results):
        return results


class Mixed(torch.utils.data.Dataset):
    def __init__(self):
        self.pipeline = [Mixing()]

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        mixing = self.pipeline[0]
        return mixing(dict(partners=mixing.get_indexes(self)))


@pytest.mark.parametrize('travels', [False, True])
def test_the_indexes_of_partners_are_recorded(tmp_path, travels):
    dataset = Mixed()
    Samples(str(tmp_path), 0, None).instrument(dataset)
    if travels:
        dataset = pickle.loads(pickle.dumps(dataset))
    found = dataset[7]
    indexes, mixed = read_samples(str(tmp_path), 0)[1:3]
    assert (indexes.name, mixed.name) == ('Mixing.get_indexes', 'Mixing')
    assert indexes.outputs == (str(found['partners']), )
    assert [text.split('=')[0] for text in indexes.own] == ['partners', 'own']
    assert indexes.stack[0][2] == 'Mixing' and indexes.stack[0][1] < mixed.stack[0][1]


class Warm(torch.nn.Linear):
    calls = 0
    noise = torch.Generator()


def test_attributes_that_only_the_class_has_are_seen():
    runner = types.SimpleNamespace(model=torch.nn.Sequential(Warm(1, 1)), _resume=False, hooks=[])
    before = run_state.attributes(runner)
    assert '0.calls=0' in before and any(t.startswith('0.noise=generator ') for t in before)
    runner.model[0].calls += 1
    assert set(before) ^ set(run_state.attributes(runner)) == {'0.calls=0', '0.calls=1'}


def test_a_sample_that_one_side_turned_down_counts(tmp_path):
    for side, places in dict(a=[[0, 1], [0, 2]], b=[[0, 0], [0, 2]]).items():
        folder = tmp_path / side
        folder.mkdir()
        (folder / 'batch.rank0.json').write_text(json.dumps(places))
        write_records(str(folder / 'samples.rank0.1.jsonl'), [
            Record('data', f'sample 0.{i}/0', 'Load', inputs=(f'{side}{i}',), outputs=('x',))
            for i in (0, 1, 2, 3)[:4 if side == 'a' else 3]])
        write_records(str(folder / 'operators.rank0.jsonl'), [])
    paths = [record.path for record in read_stream(str(tmp_path / 'a'), 0, str(tmp_path / 'b'))]
    assert paths == ['sample 0.0/0', 'sample 0.1/0', 'sample 0.2/0']
    found = find_on_ranks(0, str(tmp_path / 'a'), str(tmp_path / 'b'), [0])
    assert (found.path, found.kind) == ('sample 0.0/0', 'input')


def test_another_sample_of_the_batch_made_nothing_of_this_one():
    def load(place, name):
        return Record('data', f'sample 0.{place}/0', 'Load', inputs=(name, 'height'),
                      outputs=(name, 'height', 'img'))

    a, b = [load(1, 'x'), load(2, 'y')], [load(0, 'y'), load(2, 'z')]
    found = find(0, 0, a, b)
    assert (found.path, found.kind) == ('sample 0.2/0', 'input')


def test_values_tell_rounding_from_more():
    a = torch.rand(4, 5)
    b = a.clone()
    b[2, 3] += 1e-7
    found = compare_tensors(a, b)
    assert (found.elements, found.of, found.place) == (1, 20, (2, 3))
    assert 'rounding' in found.text()
    b[0, 0] = float('nan')
    assert compare_tensors(a, b).place == (0, 0)
    assert compare_tensors(a, a.clone()) is None
    assert compare_tensors(torch.tensor([0.]), torch.tensor([-0.])).elements == 1


# --- the command line -----------------------------------------------------------------------------

@pytest.mark.parametrize('arguments, message', [
    (['no/such.py'], 'no such config'),
    (['CONFIG', '--b', 'nonsense'], 'must be KEY=VALUE'),
    (['CONFIG', '--iters', '0'], '--iters 0: must be 1 or more'),
    (['CONFIG', '--resume-b', '0'], '--resume-b 0: must be 1 or more'),
    (['CONFIG', '--validate-b', '0'], '--validate-b 0: must be 1 or more'),
    (['CONFIG', '--validate-b', '3'], 'has no val_cfg'),
    (['IMPORTS'], 'Failed to import custom modules'),
    (['no/run', 'no/other'], 'no such folder'),
])
def test_wrong_usage_is_explained(arguments, message, tmp_path, capsys):
    path = str(tmp_path / 'config.py')
    tiny(tmp_path).dump(path)
    imports = tmp_path / 'imports.py'
    imports.write_text("custom_imports = dict(imports=['no_such_module_of_mine'])\n")
    files = dict(CONFIG=path, IMPORTS=str(imports))
    arguments = [files.get(text, text) for text in arguments]
    with pytest.raises(SystemExit) as error:
        localise.main([*arguments, '--work-dir', str(tmp_path / 'out')])
    assert error.value.code == 2 and message in capsys.readouterr().err


def test_settings_and_variables_are_told_apart(tmp_path, monkeypatch):
    path = str(tmp_path / 'config.py')
    tiny(tmp_path).dump(path)
    seen = []

    def search(self, iterations, values):
        seen.extend(self.sides)
        raise ValueError('enough')

    monkeypatch.setattr(Localiser, 'search', search)
    with pytest.raises(SystemExit):
        localise.main([path, '--work-dir', str(tmp_path / 'out'), '--b', 'OMP_NUM_THREADS=2',
                      'train_dataloader.num_workers=4', '--resume-b', '3', '--ranks', '2'])
    a, b = seen
    assert a.env == {} and b.env == dict(OMP_NUM_THREADS='2')
    assert b.asked == {**b.env, 'train_dataloader.num_workers': 4} and a.asked == {}
    assert (a.resume_at, b.resume_at, a.ranks, b.ranks) == (None, 3, 2, 2)
    from mmengine.config import Config
    assert Config.fromfile(a.config).train_dataloader.num_workers == 0
    assert Config.fromfile(b.config).train_dataloader.num_workers == 4


def test_a_side_that_fails_shows_the_end_of_its_output(tmp_path):
    path = tmp_path / 'config.py'
    path.write_text('raise ValueError("the config is broken")\n')
    with pytest.raises(TrainingFailed, match='(?s)the config is broken.*ended with exit code 1'):
        start(Side('A', str(path)), str(tmp_path / 'out'), Plan(str(tmp_path / 'out'), 1))


@pytest.mark.nightly
def test_from_a_config_and_from_two_runs_in_fresh_processes(tmp_path):
    cfg = tiny(tmp_path / 'work')
    cfg.custom_imports = dict(imports=['mmrepro', 'faults.tiny'], allow_failed_imports=False)
    cfg.default_hooks.checkpoint = dict(type='CheckpointHook', interval=1, by_epoch=False)
    path = str(tmp_path / 'config.py')
    cfg.dump(path)
    env = environment()
    env['PYTHONPATH'] = os.pathsep.join([str(ROOT / 'tests' / 'localise'), env['PYTHONPATH']])

    def run(*arguments):
        done = subprocess.run([sys.executable, str(ROOT / 'tools' / 'localise.py'), *arguments],
                              env=env, capture_output=True, text=True, cwd=tmp_path)
        return done.returncode, done.stdout, done.stderr

    code, out, err = run(path, '--iters', '5', '--work-dir', 'same')
    assert code == 0 and 'SAME BITS: 5 iterations agree' in out, out + err
    code, out, err = run(path, '--iters', '5', '--json', '--work-dir', 'other',
                         '--b', 'param_scheduler.gamma=0.25')
    found = json.loads(out)
    assert code == 1 and found['finding']['cause'] == 'another setting', out + err
    code, out, err = run('other/A/fingerprints', 'other/B/fingerprints', '--work-dir', 'runs')
    assert code == 1 and 'StepLR 0 gamma=0.5 / 0.25' in out, out + err
    assert 'continues from' in err
