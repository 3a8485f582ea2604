"""Every resume point of seven configs, on one to three ranks: see resume_matrix.py."""
import json
from pathlib import Path

import pytest

from dev import resume_matrix as matrix

REPORT = Path(__file__).resolve().parents[2] / 'docs' / 'results' / 'resume_matrix.json'


@pytest.mark.nightly
@pytest.mark.parametrize('ranks', [1, 2, 3])
@pytest.mark.parametrize('name', matrix.CONFIGS)
def test_every_point(name, ranks, data_root, tmp_path):
    done = []
    matrix.fill(matrix.rows([name], [ranks]), data_root, tmp_path, done.append)
    assert len(done) == matrix.ITERATIONS
    assert {row['difference'] for row in done} == {''}, done


def test_the_published_matrix_is_whole_and_equal():
    rows = json.loads(REPORT.read_text())['rows']
    wanted = {tuple(row.values())
              for row in matrix.rows(list(matrix.CONFIGS), [1, 2, 3], all_loading=True)}
    keys = ('config', 'ranks', 'point', 'workers', 'persistent')
    assert wanted <= {tuple(row[key] for key in keys) for row in rows}
    assert [row for row in rows if row['difference']] == []


def test_a_difference_is_named():
    line = dict(iteration=4, data='a', losses=dict(loss='0x1p+0'), weights='w')
    expected = dict(ranks=[[dict(line, iteration=3), line]], logged={4: 1, 5: 2})
    found = dict(ranks=[[dict(line, weights='v')]], logged={5: 2})
    assert matrix.first_difference(expected, found, 4) == 'rank 0, iteration 4: weights'
    found['ranks'][0][0]['weights'] = 'w'
    assert matrix.first_difference(expected, found, 4) == ''
    found['logged'] = {5: 3}
    assert matrix.first_difference(expected, found, 4) == 'logged line of step 5'
    assert matrix.first_difference(expected, dict(ranks=[[]], logged={}), 4) == (
        'rank 0: 0 lines instead of 1')
