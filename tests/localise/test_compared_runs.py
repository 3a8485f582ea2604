"""Runs A and B: their segments, and what a failure reports."""
import pytest

from mmrepro.localise.compared_runs import RunFailed, RunSpec, segments_of, start
from mmrepro.localise.recording import RecordingPlan


def test_a_run_that_is_resumed_has_two_segments():
    spec = RunSpec('B', 'c.py', resume_at=4)
    first, second = segments_of(spec, 'w', RecordingPlan('w', 6, 5))
    assert (first.plan.stop, first.save, first.plan.record) == (3, True, None)
    assert (second.plan.stop, second.checkpoint, second.plan.record) == (6, 'w/localise.pth', 5)
    first, second = segments_of(spec, 'w', RecordingPlan('w', 6, 2))
    assert first.plan.record == 2 and second.plan.record is None
    assert len(segments_of(spec, 'w', RecordingPlan('w', 2))) == 1


def test_a_run_that_fails_shows_the_end_of_its_output(tmp_path):
    path = tmp_path / 'config.py'
    path.write_text('raise ValueError("the config is broken")\n')
    with pytest.raises(RunFailed, match='(?s)the config is broken.*run A failed with exit code'):
        start(RunSpec('A', str(path)), str(tmp_path), RecordingPlan(str(tmp_path), 1))
