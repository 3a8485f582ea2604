"""Planted faults: each has to be named, with where it is and its cause."""
import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from demo_runs import narrow, small
from faults import real, results
from faults.planted import FAULTS
from faults.tiny import Head, QuietHook, TinyJitter, tiny, validating
from harness import Child
from launches import text_of

from mmrepro import localise
from mmrepro.demo import write_dataset
from mmrepro.localise.recording import RecordingPlan, RunSpec, trainings_of
from mmrepro.localise.search import Localiser, localise_runs
from mmrepro.report.comparison import compare_paths as compare
from mmrepro.runs.child import train_here
from mmrepro.runs.launcher import free_port, rank_variables

ITERATIONS = 6
DETECTOR_ITERATIONS = 2


def run_planted(job, env, plant, run):
    for name in [name for name, value in env.items() if value is None]:
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in env.items() if value is not None})
    torch.set_num_threads(1)
    if plant is not None:
        plant(run)
    train_here(job)


class Forks:
    """Starts runs in forked children of this warm process.

    Run A without a fault is the same for many faults: it runs once.
    """

    def __init__(self, fault, cache):
        self.fault, self.cache = fault, cache

    def __call__(self, spec, folder, plan):
        plant = self.fault.plant if spec.name in self.fault.runs else None
        key = plant or (spec.config, plan._replace(folder=''), spec.ranks)
        known = self.cache.get(repr(key))
        if plant is None and known:
            shutil.copytree(known, folder, dirs_exist_ok=True)
            return
        env, port = dict(spec.env, GLOO_SOCKET_IFNAME='lo'), free_port()
        for job in trainings_of(spec, folder, plan):
            job = job._replace(launcher='pytorch' if spec.ranks > 1 else 'none')
            children = [Child(run_planted, job, {**env, **rank_variables(rank, spec.ranks, port)},
                              plant, spec.name) for rank in range(spec.ranks)]
            for child in children:
                child.result()
        if plant is None:
            self.cache[repr(key)] = folder


@pytest.fixture(scope='session')
def configs(tmp_path_factory, data_root):
    # what a training imports, so that no child has to: seconds each
    import mmdet.datasets  # noqa: F401
    import mmdet.models  # noqa: F401
    import mmdet.utils  # noqa: F401
    import torch._dynamo  # noqa: F401
    paths = {}

    def path_of(fault):
        key = json.dumps([fault.randomness, fault.model, bool(fault.validate_at)])
        if key not in paths:
            folder = tmp_path_factory.mktemp('config')
            cfg = small(fault.model, data_root) if fault.model else tiny(folder)
            if fault.model:
                cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
                narrow(cfg)
            else:
                cfg.randomness.update(fault.randomness)
                cfg.env_cfg = dict(dist_cfg=dict(backend='gloo'))
                if fault.validate_at:
                    validating(cfg)
            paths[key] = str(folder / 'config.py')
            cfg.dump(paths[key])
        return paths[key]

    return path_of


@pytest.fixture(scope='session')
def runs():
    """Folders of run A without a fault; no global, which would differ between runs A and B."""
    return {}


def search(name, folder, configs, runs):
    fault = FAULTS[name]
    iterations = DETECTOR_ITERATIONS if fault.model else ITERATIONS
    path = configs(fault)
    specs = (RunSpec('A', path, ranks=fault.ranks),
             RunSpec('B', path, fault.env, fault.ranks, fault.resume_at,
                  validate_at=fault.validate_at))
    return Localiser(specs, str(folder), Forks(fault, runs)).search(iterations, False)


def check_named(name, result, folder):
    assert result.verdict == 'found', text_of(result)
    expect = dict(FAULTS[name].expect)
    mentions = expect.pop('mentions', ())
    found = {key: getattr(result.diagnosis, key) for key in expect}
    assert found == expect, text_of(result)
    for text in [mentions] if isinstance(mentions, str) else mentions:
        assert text in text_of(result), text_of(result)
    folder = os.environ.get('MMREPRO_RESULTS', str(folder))
    results.add(folder, name, FAULTS[name], result.diagnosis)
    with open(os.path.join(folder, 'planted_faults.json')) as file:
        assert json.load(file)[name]['cause'] == result.diagnosis.cause


@pytest.mark.parametrize('recorded', [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_variable_that_two_finished_runs_read_is_named(recorded, tmp_path, configs, monkeypatch,
                                                         capsys):
    fault = FAULTS['a_variable_of_the_environment']
    launch, folders = Forks(fault, {}), [tmp_path / run for run in 'AB']
    for folder, value in zip(folders, ('1.0', '1.00001')):
        folder.mkdir()
        launch(RunSpec(folder.name, configs(fault), dict(TINY_GAIN=value)), str(folder),
               RecordingPlan(str(folder), 0))
        path = folder / 'mmrepro' / 'manifest.json'
        manifest = json.loads(path.read_text())
        if not recorded:  # by an earlier version
            del manifest['variables']
        path.write_text(json.dumps(manifest))

    def start(spec, folder, plan, on_progress):
        on_progress('1/2; about 3 s left')
        launch(spec, folder, plan)

    monkeypatch.setattr(localise.search, 'start', start)
    (tmp_path / 'localise').mkdir()
    result = localise_runs(*map(str, folders), str(tmp_path / 'localise'), values=False)
    assert 'about 3 s left' in capsys.readouterr().err
    if recorded:
        assert result.diagnosis.cause == 'environment variable', text_of(result)
        assert 'TINY_GAIN is 1.0 in A, 1.00001 in B; read at ' in text_of(result)
    else:
        assert result.verdict == 'flaky' and 'environment variables that the code reads: not ' \
            f'recorded in {folders[0]}' in text_of(result) and 'race' not in text_of(result)


@pytest.mark.parametrize('name', [
    name if fault.fast else pytest.param(name, marks=pytest.mark.nightly)
    for name, fault in FAULTS.items()])
def test_fault_is_named(name, tmp_path, configs, runs):
    check_named(name, search(name, tmp_path, configs, runs), tmp_path)


RANKS, RANK, SINCE = 4, 2, 1
SIZE = 32  # samples; an epoch of four iterations on four ranks


def replace(owner, name, function, calls_per_iteration=1):
    """Replace a method in one virtual rank, from the second iteration on."""
    original, calls = getattr(owner, name), [0]

    def method(*args, **kwargs):
        if dist.get_rank() == RANK:
            calls[0] += 1
            if calls[0] > SINCE * calls_per_iteration:
                return function(original, *args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, method)


def in_a_hook(run, moment='after_train_iter'):
    def change(original, self, runner, *args, **kwargs):
        runner.model.module.head.fc.bias.detach().numpy()[0] += 0.5

    replace(QuietHook, moment, change)


def in_a_hook_before_the_step(run):
    in_a_hook(run, 'before_train_iter')


def in_a_transform(run):
    def brighter(original, self, results):
        results = original(self, results)
        results['img'] = results['img'] * 1.5
        return results

    replace(TinyJitter, 'transform', brighter, calls_per_iteration=2)  # images of a batch


def in_an_operator(run):
    def rounded(original, self, x):
        return original(self, x + torch.full((), 1e-4))

    replace(Head, 'forward', rounded)


ON_RANKS = {  # -> processes of run B, what is named
    in_a_hook: (1, dict(phase='hook', path='QuietHook.after_train_iter',
                        cause='hook changes the state')),
    in_a_hook_before_the_step: (2, dict(phase='hook', path='QuietHook.before_train_iter',
                                        cause='hook changes the state')),
    in_a_transform: (2, dict(phase='data', operator='TinyJitter', cause='noise in a transform')),
    in_an_operator: (1, dict(phase='forward', path='head', operator='aten.full.default')),
}


@pytest.fixture
def rank_config(tmp_path):
    cfg = tiny(tmp_path)
    # the hooks write to weights, which would end a run whose ranks share them
    cfg.randomness.virtual_ranks = dict(ranks=RANKS, memory='separate')
    cfg.train_dataloader.dataset.size = SIZE
    cfg.env_cfg = dict(dist_cfg=dict(backend='gloo'))
    cfg.dump(str(tmp_path / 'config.py'))
    return str(tmp_path / 'config.py')


def localised(plant, config, folder, processes):
    specs = RunSpec('A', config), RunSpec('B', config, ranks=processes)
    launch = Forks(SimpleNamespace(plant=plant, runs='B'), {})
    found = Localiser(specs, str(folder), launch).search(3, values=False)
    return found, compare(*(str(folder / name / 'fingerprints') for name in 'AB'))


@pytest.mark.parametrize('fault', [
    in_a_transform, *(pytest.param(fault, marks=pytest.mark.nightly) for fault in (
        in_a_hook, in_an_operator, in_a_hook_before_the_step))], ids=lambda one: one.__name__)
def test_the_virtual_rank_is_named(fault, rank_config, tmp_path):
    processes, expected = ON_RANKS[fault]
    found, comparison = localised(fault, rank_config, tmp_path / 'runs', processes)
    text = text_of(found)
    assert found.verdict == 'found', text
    expected = dict(expected, rank=RANK, iteration=SINCE)
    assert {name: getattr(found.diagnosis, name) for name in expected} == expected, text
    assert '(rank 2)' in text
    if fault is in_a_transform:  # what differs before ranks exchange anything
        assert 'iteration 1, rank 2: batch.data' in comparison.verdict()
    else:
        assert not comparison.equal


def test_without_a_fault_the_number_of_processes_changes_nothing(rank_config, tmp_path):
    found, comparison = localised(None, rank_config, tmp_path / 'runs', 3)
    assert found.verdict == 'equal' and found.compared == 3, text_of(found)
    assert comparison.equal and comparison.exact
    row, = [row for row in comparison.manifest if row.name == 'processes']
    assert (row.then, row.now, row.severity) == (1, 3, 'harmless')


@pytest.fixture(scope='module')
def real_root(tmp_path_factory):
    folder = tmp_path_factory.mktemp('real')
    write_dataset(str(folder / 'data' / 'demo'))
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize('name', real.FAULTS)
def test_fault_in_a_real_detector_is_named(name, real_root, tmp_path):
    row = real.row_of(name, real.search(name, real_root))
    results.write(os.environ.get('MMREPRO_RESULTS', str(tmp_path)), name, row)
    assert row['right'], '\n'.join(row['wrong'])


def test_every_planted_file_belongs_to_a_row_and_no_name_to_both_tables():
    """The two tables share a file of results."""
    assert not set(real.FAULTS) & set(FAULTS)
    files = {path.stem for path in (real.HERE / 'detectors').glob('*.py')}
    assert files == {fault.module for fault in real.FAULTS.values()}


def test_what_is_named_wrongly_is_not_right(tmp_path):
    finding = dict(
        iteration=0, rank=0, kind='argument', phase='loss', operator='aten.mul.Tensor', shapes='',
        path='roi_head.bbox_head.loss_bbox', differs=['other=1 / 2'], cause='entropy', sentence='',
        stack=[['/a/entropy_loss.py', 12, 'forward']], fix='', evidence=['entropy: urandom'],
        sample='', mover='', extra=[], record_a=1, record_b=1)
    row = real.row_of('entropy_in_a_loss', dict(finding=finding, exit_code=1))
    assert row['right'] and row['line'] == 'entropy_loss.py:12'
    results.write(tmp_path, 'entropy_in_a_loss', row)
    assert '1 of 1 right' in (tmp_path / 'planted_faults.md').read_text()
    row = real.row_of('entropy_in_a_loss', dict(finding=dict(finding, cause='clock'), exit_code=1))
    assert row['wrong'] == ["cause: 'clock', not 'entropy'"]
    row = real.row_of('entropy_in_a_loss', dict(finding=None, exit_code=0))
    assert not row['right'] and 'nothing was named' in row['wrong'][0]
    harmless = 'a_hook_that_draws_and_is_harmless'
    assert real.row_of(harmless, dict(localise=None, exit_code=0))['right']
    assert not real.row_of(harmless, dict(localise=dict(finding=finding), exit_code=1))['right']
