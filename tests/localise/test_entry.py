"""Two trained runs as the input: what is missing is named, and no folder is used twice."""
import pytest
from launches import write_steps

from mmrepro.errors import FingerprintError
from mmrepro.localise.entry import localise_runs, unused_folder


def test_a_folder_with_files_is_not_used_again(tmp_path):
    folder = tmp_path / 'runs'
    assert unused_folder(str(folder)) == str(folder)
    for number in ('', '.1'):
        used = tmp_path / f'runs{number}'
        used.mkdir()
        assert unused_folder(str(folder)) == str(used), 'an empty folder is used'
        (used / 'config.py').touch()
    assert unused_folder(str(folder)) == f'{folder}.2'


def test_a_run_without_manifest_cannot_be_repeated(tmp_path):
    for name in 'ab':
        write_steps(str(tmp_path / name), [dict(losses=dict(loss=name))])
    with pytest.raises(FingerprintError, match='a: has no manifest, so the run cannot be repeated'):
        localise_runs(str(tmp_path / 'a'), str(tmp_path / 'b'), str(tmp_path))
