"""mmcv's own tests of its operators pass with mmrepro's operators."""
import os
import subprocess
from pathlib import Path

import pytest

from dev.mmcv_tests import failed

REPOSITORY, VERSION = 'https://github.com/open-mmlab/mmcv', 'v2.1.0'


@pytest.fixture
def checkout(tmp_path):
    """The folder that MMREPRO_MMCV_CHECKOUT names, or a clone."""
    given = os.environ.get('MMREPRO_MMCV_CHECKOUT')
    if given:
        return Path(given)
    done = subprocess.run(['git', 'clone', '-q', '--depth', '1', '-b', VERSION, REPOSITORY, 'mmcv'],
                          cwd=tmp_path, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f'{REPOSITORY} cannot be cloned, and MMREPRO_MMCV_CHECKOUT names no checkout: '
                    f'{done.stderr.strip()}')
    return tmp_path / 'mmcv'


@pytest.mark.nightly
def test_the_tests_of_mmcv_pass(checkout):
    found, ran = failed(checkout)
    assert not found and ran >= 70


def test_a_test_that_fails_is_named_and_skipped_ones_do_not_count(tmp_path):
    folder = tmp_path / 'tests' / 'test_ops'
    folder.mkdir(parents=True)
    (tmp_path / 'mmcv.py').write_text('raise AssertionError("the checkout was imported")')
    (folder / 'test_some.py').write_text("""
import pytest, torch
from mmcv.ops import bbox_overlaps
def test_passes():
    assert bbox_overlaps(torch.ones(1, 4), torch.ones(1, 4)).shape == (1, 1)
def test_fails():
    assert not bbox_overlaps.__name__
@pytest.mark.skip
def test_is_skipped():
    pass
""")
    assert failed(tmp_path) == ({'tests.test_ops.test_some::test_fails'}, 2)
