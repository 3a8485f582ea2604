"""Whatever users bring: the same bits, refused by name, or found by a self-check.

Each row trains a tiny network with code or settings that no list of causes foresaw. None of them
may go wrong without a word; where it cannot be known whether they do, there is a warning.
"""
import pytest
from harness import Child
from user_code import in_loading, in_runs, in_samples, in_steps  # noqa: F401  they fill SETUPS
from user_code.setup import FOUND, REFUSED, SAME, SETUPS, WARNED, run


def trained(name, folder, variation=None):
    return Child(run, name, str(folder), variation).result()


@pytest.mark.parametrize('name', [name for name in SETUPS if SETUPS[name].outcome == SAME])
def test_the_same_bits(name, tmp_path):
    expected = trained(name, tmp_path)
    assert not expected['error'], expected['error']
    assert len(expected['iterations']) >= 4
    for variation in SETUPS[name].variations:
        found = trained(name, tmp_path, variation)
        assert not found['error'], f'{variation}: {found["error"]}'
        assert found['iterations'], f'{variation}: trained nothing'
        for iteration, values in found['iterations'].items():
            for key, value in values.items():
                if iteration in expected['iterations']:
                    assert value == expected['iterations'][iteration][key], (
                        f'{variation}: {key} differs first, at iteration {iteration}')


@pytest.mark.parametrize('name', [name for name in SETUPS if SETUPS[name].outcome == REFUSED])
def test_refused_by_name(name, tmp_path):
    row = SETUPS[name]
    found = trained(name, tmp_path)
    for variation in row.variations:
        assert not found['error'], found['error']
        found = trained(name, tmp_path, variation)
    message = found['error'].rpartition('\n\n')[2]
    assert message, 'trained without a word'
    assert all(part in message for part in row.says), message


@pytest.mark.parametrize('name', [name for name in SETUPS if SETUPS[name].outcome == FOUND])
def test_found_by_a_self_check(name, tmp_path):
    error = trained(name, tmp_path)['error']
    assert 'DiffersError' in error, error or 'trained without a word'
    assert all(part in error for part in SETUPS[name].says), error


@pytest.mark.parametrize('name', [name for name in SETUPS if SETUPS[name].outcome == WARNED])
def test_warned_of_by_name(name, tmp_path):
    found = trained(name, tmp_path)
    assert not found['error'], found['error']
    warnings = [line for log in tmp_path.glob('*/*.log') for line in log.read_text().splitlines()
                if 'WARNING' in line]
    assert any(all(part in line for part in SETUPS[name].says) for line in warnings), warnings
