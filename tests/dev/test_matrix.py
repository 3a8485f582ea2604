"""What the suites of versions and libraries say of a row."""
from dev import matrix
from dev.libraries.data import DATASETS
from dev.libraries.rows import ROWS


def test_rows_name_environments_and_data_that_exist():
    for row in ROWS.values():
        assert row.environment in matrix.ROWS and row.data in DATASETS
