"""Detectors on virtual ranks, with every number of processes: see dev/virtual_ranks_matrix.py."""
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from virtual_faults import FAULTS

from dev import virtual_ranks_matrix as matrix

REPORT = Path(__file__).resolve().parents[2] / 'docs' / 'results' / 'virtual_ranks_matrix.json'


def filled(rows, data_root, folder, fault=None):
    done = []
    with FAULTS[fault]() if fault else nullcontext():
        matrix.fill(rows, data_root, folder, done.append)
    assert len(done) == len(rows)
    return {row['difference'] for row in done}


@pytest.mark.nightly
@pytest.mark.parametrize('ranks', matrix.RANKS)
@pytest.mark.parametrize('name', matrix.CONFIGS)
def test_every_number_of_processes(name, ranks, data_root, tmp_path):
    rows = matrix.rows([name], [ranks], list(matrix.PROCESSES))
    assert filled(rows, data_root, tmp_path) == {''}


@pytest.mark.nightly
@pytest.mark.parametrize('fault', [None, *FAULTS])
def test_a_planted_fault_makes_it_red(fault, data_root, tmp_path):
    rows = [row for row in matrix.rows(list(matrix.FOR_FAULTS), [4], [1, 2])
            if row['processes'] == 2 and not row['resumed_from']]
    (difference, ) = filled(rows, data_root, tmp_path, fault)
    assert bool(difference) == bool(fault)


def test_the_published_matrix_is_whole_and_equal():
    rows = json.loads(REPORT.read_text())['rows']
    wanted = matrix.rows(list(matrix.CONFIGS), list(matrix.RANKS), list(matrix.PROCESSES))
    found = {tuple(row[key] for key in matrix.KEYS) for row in rows}
    assert {tuple(row.values()) for row in wanted} <= found
    assert [row for row in rows if row['difference']] == []


def test_a_difference_is_named():
    line = dict(iteration=2, data='a', weights='w')
    expected = [[dict(line, iteration=1), line]] * 2
    assert matrix.difference(expected, [[line], [dict(line, weights='v')]], 2) == (
        'rank 1, iteration 2: weights')
    assert matrix.difference(expected, expected, 0) == ''
    assert matrix.difference(expected, [[line]] * 2, 1) == 'rank 0: 1 lines instead of 2'
