"""A varied setting without effect is reported, with the value that both runs used."""
import pytest

from mmrepro.fingerprint.reader import RecordedRun
from mmrepro.localise.compared_runs import RunSpec
from mmrepro.localise.variation_effect import (
    different_by_design,
    not_known_equal,
    settings_without_effect,
)


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
}


@pytest.mark.parametrize('name', EFFECTS)
def test_a_setting_without_effect_is_named(name, monkeypatch):
    varied, variables, runs, expected = EFFECTS[name]
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert settings_without_effect(varied, runs) == expected


def test_nothing_is_reported_without_manifests_or_variations():
    lacking = RecordedRun('a', [], {}, [])
    assert settings_without_effect(specs(dict(OMP_NUM_THREADS='2')), (lacking, run_with())) == []
    assert settings_without_effect(specs(), (run_with(), run_with())) == []
    # variables of two repeated runs, which were not varied
    repeated = [RunSpec(name, 'a.py', dict(PYTHONHASHSEED='0')) for name in 'AB']
    assert settings_without_effect(repeated, (run_with(), run_with())) == []


KNOWN = dict(variables={'GAIN': dict(value='1', read='/m.py:3')}, code={'r': dict(commit='1')},
             data=dict(samples=1))
UNEQUAL = {
    'nothing': ({}, {}, []),
    'a variable': ({}, dict(variables={'GAIN': dict(value=None, read='/m.py:3')}),
                   ['GAIN is 1 in A, not set in B; read at /m.py:3']),
    'a variable that one run reads': ({}, dict(variables={}), []),
    'the code': ({}, dict(code={'r': dict(commit='2')}),
                 ['code.r.commit: 1 / 2 (another version of the code)']),
    'code without a repository': (dict(code={}), dict(code={}), [
        'the code, which is in no git repository: not recorded in somewhere'] * 2),
    'a manifest of an earlier version': (dict(variables=None), {}, [
        'environment variables that the code reads: not recorded in somewhere']),
}


@pytest.mark.parametrize('name', UNEQUAL)
def test_what_is_not_known_to_be_equal_is_listed(name):
    *changes, expected = UNEQUAL[name]
    runs = [run_with() for _ in changes]
    for run, change in zip(runs, changes):
        run.manifests[0].update(KNOWN, **change)
    assert not_known_equal(runs) == expected


def test_runs_that_differ_by_design_are_named_before_they_are_repeated():
    runs = [run_with(config=f'optim_wrapper = dict(lr={lr})\n', **{'randomness.seed': seed})
            for lr, seed in ((1, 0), (2, 5))]
    line, = different_by_design(runs)
    assert line == (
        'the runs differ by design: config.optim_wrapper.lr: 1 / 2 (different training), '
        'randomness.seed: 0 / 5 (different order of data, different random numbers)')
    assert different_by_design([runs[0], runs[0]]) == []
    # what is harmless is no reason
    assert different_by_design([run_with(config=f'log_level = {n!r}\n') for n in 'ab']) == []
    assert different_by_design([runs[0], RecordedRun('a', [], {}, [])]) == []
