"""Faults in real detectors, named by the command line in processes of its own."""
import os

import pytest
from faults import real, results
from faults.planted import FAULTS

from mmrepro.demo import write_dataset


@pytest.fixture(scope='module')
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp('real')
    write_dataset(str(folder / 'data' / 'demo'))
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize('name', real.FAULTS)
def test_fault_in_a_real_detector_is_named(name, root, tmp_path):
    row = real.row_of(name, real.search(name, root))
    results.write(os.environ.get('MMREPRO_RESULTS', str(tmp_path)), name, row)
    assert row['right'], '\n'.join(row['wrong'])


def test_every_planted_file_belongs_to_a_row_and_no_name_to_both_tables():
    """The two tables share a file of results."""
    assert not set(real.FAULTS) & set(FAULTS)
    files = {path.stem for path in (real.HERE / 'detectors').glob('*.py')}
    assert files == {fault.module for fault in real.FAULTS.values()}


def test_what_is_named_wrongly_is_not_right(tmp_path):
    finding = dict(
        iteration=0, rank=0, kind='argument', phase='loss', operator='aten.mul.Tensor', shapes='',
        path='roi_head.bbox_head.loss_bbox', differs=['other=1 / 2'], cause='entropy', sentence='',
        stack=[['/a/entropy_loss.py', 12, 'forward']], fix='', evidence=['entropy: urandom'],
        sample='', mover='', extra=[], record_a=1, record_b=1)
    row = real.row_of('entropy_in_a_loss', dict(finding=finding, exit_code=1))
    assert row['right'] and row['line'] == 'entropy_loss.py:12'
    results.write(tmp_path, 'entropy_in_a_loss', row)
    assert '1 of 1 right' in (tmp_path / 'planted_faults.md').read_text()
    row = real.row_of('entropy_in_a_loss', dict(finding=dict(finding, cause='clock'), exit_code=1))
    assert row['wrong'] == ["cause: 'clock', not 'entropy'"]
    row = real.row_of('entropy_in_a_loss', dict(finding=None, exit_code=0))
    assert not row['right'] and 'nothing was named' in row['wrong'][0]
    harmless = 'a_hook_that_draws_and_is_harmless'
    assert real.row_of(harmless, dict(localise=None, exit_code=0))['right']
    assert not real.row_of(harmless, dict(localise=dict(finding=finding), exit_code=1))['right']
