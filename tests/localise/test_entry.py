"""Two trained runs as the input: what is missing is named, and no folder is used twice."""
import json

import pytest

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
        folder = tmp_path / name / 'mmrepro'
        folder.mkdir(parents=True)
        lines = [dict(kind='start', format=1, level='step', rank=0, world_size=1, iteration=0),
                 dict(kind='step', iteration=0, losses=dict(loss=name))]
        (folder / 'fingerprints.rank0.jsonl').write_text('\n'.join(map(json.dumps, lines)) + '\n')
    with pytest.raises(FingerprintError, match='a: has no manifest, so the run cannot be repeated'):
        localise_runs(str(tmp_path / 'a'), str(tmp_path / 'b'), str(tmp_path))
