"""Planted faults: each has to be named, with where it is and its cause."""
import json
import os
import shutil

import pytest
import torch
from demo_runs import narrow, small
from faults import results
from faults.planted import FAULTS
from faults.tiny import tiny, validating
from harness import Child
from launches import text_of

from mmrepro.localise import entry
from mmrepro.localise.compared_runs import RunSpec, trainings_of
from mmrepro.localise.recording import RecordingPlan
from mmrepro.localise.search import Localiser
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
        for job in trainings_of(spec, folder, plan):
            self.run(spec, job, plant)
        if plant is None:
            self.cache[repr(key)] = folder

    def run(self, spec, job, plant):
        if spec.ranks == 1:
            Child(run_planted, job, spec.env, plant, spec.name).result()
            return
        job = job._replace(launcher='pytorch')
        env, port = dict(spec.env, GLOO_SOCKET_IFNAME='lo'), free_port()
        children = [Child(run_planted, job, {**env, **rank_variables(rank, spec.ranks, port)},
                          plant, spec.name) for rank in range(spec.ranks)]
        for child in children:
            child.result()


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


def check(name, result, folder):
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


@pytest.mark.parametrize('recorded', [True, False])
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

    def start(spec, folder, plan, say):
        say('1/2; about 3 s left')
        launch(spec, folder, plan)

    monkeypatch.setattr(entry, 'start', start)
    (tmp_path / 'localise').mkdir()
    result = entry.localise_runs(*map(str, folders), str(tmp_path / 'localise'), values=False)
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
    check(name, search(name, tmp_path, configs, runs), tmp_path)
