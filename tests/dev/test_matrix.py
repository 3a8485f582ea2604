"""What the suites of versions and libraries say of a row."""
from __future__ import annotations

import argparse
import json

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


def test_rows_are_kept_one_by_one_and_a_folder_of_the_user_stays(tmp_path, capsys):
    out, folder = tmp_path / 'rows.json', tmp_path / 'folder'
    out.write_text('[{"name": "b", "steps": {"train": "same bits"}}]')
    (folder / 'env-a').mkdir(parents=True)
    (folder / 'mine').mkdir()

    def run_row(name, where, keep):
        assert where == str(folder) and not keep
        return dict(name=name, steps=dict(train='DIFFERENT'))
    code = matrix.run_rows(['--rows', 'a', '--out', str(out), '--folder', str(folder)],
                           argparse.ArgumentParser(), ('a', 'b'), '', '', run_row, repr)
    assert code == 1
    assert [(one['name'], matrix.outcome(one['steps'])) for one in json.loads(out.read_text())] == [
        ('a', 'train: DIFFERENT'), ('b', 'equal')]
    assert [path.name for path in folder.iterdir()] == ['mine']
