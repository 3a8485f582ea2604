"""The matrices of dev/: resumes on one to three ranks, virtual ranks on any number of processes."""
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from virtual_faults import FAULTS

from dev import matrix
from dev import resume_matrix as resumes
from dev import virtual_ranks_matrix as virtual
from dev.children import ChildFailed
from dev.libraries.data import DATASETS
from dev.libraries.rows import ROWS

RESULTS = Path(__file__).resolve().parents[2] / 'docs' / 'results'


def test_rows_of_versions_and_libraries_name_environments_and_data_that_exist():
    for row in ROWS.values():
        assert row.environment in matrix.ROWS and row.data in DATASETS


@pytest.mark.nightly
@pytest.mark.parametrize('ranks', [1, 2, 3])
@pytest.mark.parametrize('name', resumes.CONFIGS)
def test_every_resume_point(name, ranks, data_root, tmp_path):
    done = []
    resumes.fill(resumes.rows([name], [ranks]), data_root, tmp_path, done.append)
    assert len(done) == resumes.ITERATIONS
    assert {row['difference'] for row in done} == {''}, done


@pytest.mark.parametrize('name, wanted', [
    ('resume_matrix', resumes.rows(list(resumes.CONFIGS), [1, 2, 3], all_loading=True)),
    ('virtual_ranks_matrix', virtual.rows(
        list(virtual.CONFIGS), list(virtual.RANKS), list(virtual.PROCESSES)))])
def test_a_published_matrix_is_whole_and_equal(name, wanted):
    rows, wanted = json.loads((RESULTS / f'{name}.json').read_text())['rows'], list(wanted)
    found = {tuple(row[key] for key in wanted[0]) for row in rows}
    assert {tuple(row.values()) for row in wanted} <= found
    assert [row for row in rows if row['difference']] == []


def test_a_difference_of_a_resume_is_named():
    line = dict(iteration=4, data='a', losses=dict(loss='0x1p+0'), weights='w')
    expected = dict(ranks=[[dict(line, iteration=3), line]], logged={4: 1, 5: 2})
    found = dict(ranks=[[dict(line, weights='v')]], logged={5: 2})
    assert resumes.first_difference(expected, found, 4) == 'rank 0, iteration 4: weights'
    found['ranks'][0][0]['weights'] = 'w'
    assert resumes.first_difference(expected, found, 4) == ''
    found['logged'] = {5: 3}
    assert resumes.first_difference(expected, found, 4) == 'logged line of step 5'
    assert resumes.first_difference(expected, dict(ranks=[[]], logged={}), 4) == (
        'rank 0: 0 lines instead of 1')


def filled(rows, data_root, folder, fault=None):
    done = []
    with FAULTS[fault]() if fault else nullcontext():
        virtual.fill(rows, data_root, folder, done.append)
    assert len(done) == len(rows)
    return {row['difference'] for row in done}


@pytest.mark.nightly
@pytest.mark.parametrize('ranks', virtual.RANKS)
@pytest.mark.parametrize('name', virtual.CONFIGS)
def test_every_number_of_processes(name, ranks, data_root, tmp_path):
    rows = virtual.rows([name], [ranks], list(virtual.PROCESSES))
    assert filled(rows, data_root, tmp_path) == {''}


@pytest.mark.nightly
@pytest.mark.parametrize('fault', [None, *FAULTS])
def test_a_planted_fault_makes_it_red(fault, data_root, tmp_path):
    rows = [row for row in virtual.rows(list(virtual.FOR_FAULTS), [4], [1, 2])
            if row['processes'] == 2 and not row['resumed_from']]
    try:
        (difference, ) = filled(rows, data_root, tmp_path, fault)
    except ChildFailed as error:  # of a self-check, which sees a validation that shares buffers
        difference = str(error)
        assert 'ValidationChangesError' in difference
    assert bool(difference) == bool(fault)


def test_a_difference_of_virtual_ranks_is_named():
    line = dict(iteration=2, data='a', weights='w')
    expected = [[dict(line, iteration=1), line]] * 2
    assert virtual.difference(expected, [[line], [dict(line, weights='v')]], 2) == (
        'rank 1, iteration 2: weights')
    assert virtual.difference(expected, expected, 0) == ''
    assert virtual.difference(expected, [[line]] * 2, 1) == 'rank 0: 1 lines instead of 2'
