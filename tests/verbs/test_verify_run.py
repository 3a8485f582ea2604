"""Checkpoints in a work directory, as ``mmrepro verify WORK_DIR`` finds them."""
import os

import pytest
import torch

from mmrepro.verbs.verify import _resumes


@pytest.mark.parametrize('content', [
    dict(meta=dict(epoch=0, iter='5')), dict(meta=dict(epoch=0, iter=None)), dict(meta=None),
    dict(state_dict={}), [1]])
def test_a_file_that_no_run_has_written_is_named(content, tmp_path, monkeypatch):
    torch.save(content, tmp_path / 'iter_5.pth')
    (tmp_path / 'empty.pth').touch()
    monkeypatch.setattr(os, 'listdir', lambda path: ['iter_5.pth', 'empty.pth'])
    trials = _resumes(str(tmp_path), {5, 6})
    assert [trial.title for trial in trials] == [
        'resumed from empty.pth', 'resumed from iter_5.pth']
    assert all(trial.start is None and trial.why_not for trial in trials)
