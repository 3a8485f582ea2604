"""Fixtures of the tests of developers' instruments."""
import launches
import pytest

from dev.kills import attempt


@pytest.fixture
def forked(monkeypatch):
    """Return the class that stands for all launched trainings: forks of this process."""
    made = launches.forked(monkeypatch)
    monkeypatch.setattr(attempt, 'LaunchedTraining', made)
    return made
