"""Runs A and B: their trainings, and what a failure reports."""
import pytest

from mmrepro.localise.compared_runs import RunSpec, start, trainings_of
from mmrepro.localise.recording import RecordingPlan
from mmrepro.runs.launcher import TrainingFailed


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
