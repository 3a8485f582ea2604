"""A small training with fingerprints, which the tests of replay, export and goldens read."""
import launches
import pytest
from harness import Child
from mmengine.runner import Runner
from small_runs import config


@pytest.fixture
def forked(monkeypatch):
    """Return the class that stands for all launched trainings: forks of this process."""
    return launches.forked(monkeypatch)


@pytest.fixture(scope='session')
def original(tmp_path_factory):
    """Return the work directory; tests that change it make a copy."""
    folder = tmp_path_factory.mktemp('original')

    def job():
        Runner.from_cfg(config(folder, custom_hooks=[dict(type='FingerprintHook')])).train()

    Child(job).result()
    return folder
