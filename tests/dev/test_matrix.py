"""What the suites of versions and libraries say of a row."""
from __future__ import annotations

import pytest

from dev import matrix, matrix_suite
from dev.libraries.data import DATASETS
from dev.libraries.rows import ROWS
from dev.matrix_suite import SUITES


def test_only_what_went_well_is_called_equal():
    assert matrix.outcome({'train': 'same bits', 'audit': 'named'}) == 'equal'
    assert matrix.outcome({'train': 'same bits', 'resume': 'DIFFERENT'}) == 'resume: DIFFERENT'
    assert matrix.outcome({}) == 'not run'


def test_rows_name_environments_and_data_that_exist():
    for row in ROWS.values():
        assert row.environment in matrix.ROWS and row.data in DATASETS


def test_rows_of_versions_name_a_suite_and_what_it_must_not_find():
    for row in matrix.ROWS.values():
        assert ('pycocotools' in row.requirements) == (row.suite == 'detector')
        assert not set(SUITES[row.suite].absent) & {
            word.partition('==')[0] for word in row.requirements}
    assert '--no-binary onedl-mmcv' in ' '.join(matrix.ROWS['onedl forks'].requirements)
    with pytest.raises(SystemExit, match='mmdet, mmcv, pycocotools must not be installed'):
        matrix_suite.main('classifier', '')
