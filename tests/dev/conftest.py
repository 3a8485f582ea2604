"""Fixtures of the tests of developers' instruments."""
import launches
import pytest

from dev.kills import attempt
from dev.zoo.training import VAL_IMAGES, write_extras
from mmrepro.demo.dataset import write_dataset


@pytest.fixture
def forked(monkeypatch):
    """Return the class that stands for all launched trainings: forks of this process."""
    made = launches.forked(monkeypatch)
    monkeypatch.setattr(attempt, 'LaunchedTraining', made)
    return made


@pytest.fixture(scope='session')
def photographs(tmp_path_factory):
    """Return the demonstration dataset with all that a family of the zoo reads."""
    root = str(tmp_path_factory.mktemp('photographs'))
    write_dataset(root, num_val=VAL_IMAGES)
    write_extras(root)
    return root
