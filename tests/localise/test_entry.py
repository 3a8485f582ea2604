"""Runs A and B: their folders and trainings, and what is said of a run that lacks or fails."""
import pytest
from launches import write_steps

from mmrepro.errors import FingerprintError
from mmrepro.localise.compared_runs import RunSpec, start, trainings_of
from mmrepro.localise.entry import localise_runs, unused_folder
from mmrepro.localise.recording import RecordingPlan
from mmrepro.runs.launcher import TrainingFailed


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


def test_a_run_that_is_resumed_is_two_trainings():
    spec = RunSpec('B', 'c.py', resume_at=4)
    first, second = trainings_of(spec, 'w', RecordingPlan('w', 6, 5))
    assert (first.given['stop'], first.save, first.given['record']) == (3, 'localise.pth', None)
    assert (second.given['stop'], second.checkpoint) == (6, 'w/localise.pth')
    assert second.given['record'] == 5 and second.resume and not first.resume
    first, second = trainings_of(spec, 'w', RecordingPlan('w', 6, 2))
    assert first.given['record'] == 2 and second.given['record'] is None
    assert len(trainings_of(spec, 'w', RecordingPlan('w', 2))) == 1


def test_a_run_that_fails_shows_the_end_of_its_output(tmp_path):
    path = tmp_path / 'config.py'
    path.write_text('raise ValueError("the config is broken")\n')
    with pytest.raises(TrainingFailed, match='(?s)the config is broken.*with exit code 1'):
        start(RunSpec('A', str(path)), str(tmp_path), RecordingPlan(str(tmp_path), 1))
