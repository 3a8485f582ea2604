"""What was varied and changed nothing is said, with what both sides really ran with."""
import pytest

from mmrepro.fingerprint.reader import RecordedRun
from mmrepro.localise.compared_runs import Side
from mmrepro.localise.variation_effect import effects


def run_with(threads=2, config='lr = 1\n', **facts):
    content = dict(config=dict(text=config), facts={'torch.num_threads': threads, **facts})
    return RecordedRun('somewhere', [content], {}, [])


def sides(env=None, settings=None):
    env = env or {}
    return Side('A', 'a.py'), Side('B', 'b.py', env, asked={**env, **(settings or {})})


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS'):
        monkeypatch.delenv(name, raising=False)


def test_threads_that_are_what_the_machine_has_anyway():
    both = sides(dict(OMP_NUM_THREADS='2'))
    assert effects(both, (run_with(2), run_with(2))) == [
        'both sides ran with 2 threads: OMP_NUM_THREADS=2 changed nothing']
    assert effects(both, (run_with(1), run_with(2))) == []


def test_a_variable_that_another_one_overrules(monkeypatch):
    monkeypatch.setenv('MKL_NUM_THREADS', '1')
    assert effects(sides(dict(OMP_NUM_THREADS='2')), (run_with(1), run_with(1))) == [
        'both sides ran with 1 thread: OMP_NUM_THREADS=2 changed nothing '
        '(MKL_NUM_THREADS=1 was set on both)']


def test_settings_that_are_in_the_config_already():
    both = sides(settings={'lr': 1})
    assert effects(both, (run_with(), run_with())) == [
        'both sides ran with lr=1: the variation changed nothing']
    assert effects(both, (run_with(), run_with(config='lr = 2\n'))) == []


def test_the_effective_value_of_randomness_counts():
    both = sides(settings={'randomness.num_threads': 2})
    runs = (run_with(2, **{'randomness.num_threads': None}),
            run_with(2, **{'randomness.num_threads': 2}))
    assert effects(both, runs) == [
        'both sides ran with 2 threads: randomness.num_threads=2 changed nothing']


def test_other_variables(monkeypatch):
    both = sides(dict(MY_SWITCH='on'))
    assert effects(both, (run_with(), run_with())) == []
    monkeypatch.setenv('MY_SWITCH', 'on')
    assert effects(both, (run_with(), run_with())) == [
        'both sides ran with MY_SWITCH=on: the variation changed nothing']


def test_nothing_is_said_without_manifests_or_variations():
    lacking = RecordedRun('a', [], {}, [])
    assert effects(sides(dict(OMP_NUM_THREADS='2')), (lacking, run_with())) == []
    assert effects(sides(), (run_with(), run_with())) == []
    # variables of two runs that are repeated; nobody varied them
    repeated = [Side(name, 'a.py', dict(PYTHONHASHSEED='0')) for name in 'AB']
    assert effects(repeated, (run_with(), run_with())) == []
