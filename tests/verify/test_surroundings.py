"""What surrounds a training is changed for one run, and for nothing else."""
import glob
import os
import platform
from pathlib import Path

import pytest
from harness import python

from mmrepro.determinism.cpu_level import CPU_LEVELS
from mmrepro.verify import surroundings


@pytest.fixture
def reversed_listings(monkeypatch):
    for name in ('listdir', 'scandir'):
        monkeypatch.setattr(os, name, getattr(os, name))  # put back at the end
    surroundings.reverse_listings()


def test_files_are_listed_in_the_opposite_order_however_they_are_listed(tmp_path, request):
    for name in 'abcd':
        (tmp_path / name).mkdir()
        (tmp_path / name / 'file').touch()
    ways = dict(
        listdir=lambda: os.listdir(tmp_path), by_name=lambda: os.listdir(path=tmp_path),
        scandir_by_name=lambda: [entry.name for entry in os.scandir(path=tmp_path)],
        glob=lambda: glob.glob(f'{tmp_path}/*'),
        scandir=lambda: [entry.name for entry in os.scandir(tmp_path)],
        walk=lambda: next(os.walk(tmp_path))[1], path=lambda: list(Path(tmp_path).iterdir()),
        deep=lambda: glob.glob(f'{tmp_path}/**/file', recursive=True))
    before = {name: way() for name, way in ways.items()}
    request.getfixturevalue('reversed_listings')
    assert {name: way()[::-1] for name, way in ways.items()} == before
    with os.scandir(tmp_path) as entries:
        assert len(list(entries)) == 4


def test_relative_paths_lead_to_the_same_files_from_the_linked_folder(tmp_path):
    original, other = tmp_path / 'here', tmp_path / 'there'
    (original / 'data').mkdir(parents=True)
    (original / 'data' / 'x.txt').write_text('x')
    for _ in 'ab':  # a second time, nothing is in the way
        surroundings.linked_folder(str(other), str(original))
    assert (other / 'data' / 'x.txt').read_text() == 'x'


def test_burners_end_with_the_process_that_started_them():
    code = 'from mmrepro.verify.surroundings import burn_other_cores; burn_other_cores()'
    # the pipe is at its end when the last process that holds it has ended
    python('-c', code)


@pytest.mark.parametrize('capability, expected', [
    ('AVX512', CPU_LEVELS['avx2']), ('AVX2', surroundings.LESS_THAN_AVX2)])
def test_instruction_sets_of_the_level_below_are_asked_for(capability, expected, monkeypatch):
    monkeypatch.setattr(platform, 'machine', lambda: 'x86_64')
    monkeypatch.setattr(surroundings, 'cpu_instructions', lambda: capability)
    found = surroundings.instruction_sets()
    assert {name: found[name] for name in expected} == expected
    # what loads data keeps AVX2, which batches are promised for
    assert 'AVX2' not in found.get('OPENCV_CPU_DISABLE', '').split(',')
    assert found.get('OPENCV_IPP', 'avx2') == 'avx2'
    monkeypatch.setattr(platform, 'machine', lambda: 'aarch64')
    assert surroundings.instruction_sets() == {}
