"""One work directory has one training at a time: the second says who writes there, and stops."""
import os
import re
import signal
import socket
import time

import pytest
from harness import Child
from mmengine.config import Config
from small_runs import finish, hook_with, small_run, trained_runner

from mmrepro.checkpoint import choosing
from mmrepro.errors import WorkDirInUse
from mmrepro.util.files import partial_of


def wait_for(path):
    for _ in range(600):
        if path.exists():
            return
        time.sleep(0.1)
    raise AssertionError(f'{path} does not come')


def waiting(work_dir, workers=0):
    """Train until a file ``go on`` is there."""
    def wait(runner, batch_idx, data_batch=None, outputs=None):
        (work_dir / 'trains').touch()
        wait_for(work_dir / 'go on')

    trained_runner(small_run(work_dir, **{'train_dataloader.num_workers': workers}),
                   hook_with(after_train_iter=wait))
    return 'trained'


@pytest.fixture
def first(tmp_path):
    child = Child(waiting, tmp_path)
    wait_for(tmp_path / 'trains')
    yield child
    (tmp_path / 'go on').touch()
    assert child.result() == 'trained'


def test_the_second_run_names_the_first_and_stops(first, tmp_path):
    with pytest.raises(WorkDirInUse) as caught:
        finish(small_run(tmp_path))
    assert re.match(rf'process {first.process.pid} on {socket.gethostname()} \(since \d{{4}}-.* '
                    rf'trains in {tmp_path}: ', str(caught.value))
    assert not list(tmp_path.glob('*.pth'))


def test_the_config_of_the_first_run_stays(first, tmp_path):
    config = tmp_path / 'exp.py'
    config.write_text('# of the first')
    given = tmp_path / 'given' / 'exp.py'
    given.parent.mkdir()
    small_run(tmp_path).dump(given)
    second = Config.fromfile(str(given))
    with pytest.raises(WorkDirInUse):
        finish(second)
    assert config.read_text() == '# of the first'
    (tmp_path / 'go on').touch()
    first.process.join()
    finish(second)
    assert config.read_text() != '# of the first'


def test_told_so_both_write_and_no_file_is_half(first, tmp_path, monkeypatch):
    monkeypatch.setenv('MMREPRO_SHARE_WORK_DIR', '1')
    finish(small_run(tmp_path))
    assert (tmp_path / 'iter_8.pth').exists()


@pytest.mark.parametrize('workers', [0, 2])
def test_a_killed_run_leaves_the_folder_to_the_next(workers, tmp_path):
    child = Child(waiting, tmp_path, workers)
    wait_for(tmp_path / 'trains')
    for written in ('iter_1.pth', 'mmrepro/witness.json'):
        open(partial_of(str(tmp_path / written)), 'w').close()
    os.kill(child.process.pid, signal.SIGKILL)
    child.process.join()
    finish(small_run(tmp_path, resume=True))
    finish(small_run(tmp_path))  # and again, in this process
    assert not list(tmp_path.rglob('.*.partial'))


def only_read(path, mode='r', **options):
    """Open a file that belongs to somebody else."""
    if '+' in mode and path.endswith(choosing.OWNER):
        raise PermissionError(13, 'Permission denied', path)
    return open(path, mode, **options)


def test_members_of_a_group_train_in_one_folder_after_each_other(tmp_path, monkeypatch):
    finish(small_run(tmp_path))
    monkeypatch.setattr(choosing, 'open', only_read, raising=False)
    assert not choosing.is_written(str(tmp_path))
    finish(small_run(tmp_path))


def test_members_of_a_group_keep_each_other_out(first, tmp_path, monkeypatch):
    monkeypatch.setattr(choosing, 'open', only_read, raising=False)
    assert choosing.is_written(str(tmp_path))
    with pytest.raises(WorkDirInUse, match=f'process {first.process.pid} on '):
        finish(small_run(tmp_path))
