"""Workers end with the trainer, also when it is killed while large batches are on their way."""
import multiprocessing
import os
import select
import signal
import threading

import numpy as np
import pytest
import torch
from harness import Child
from loaders import Noisy, adopted
from torch.utils.data import DataLoader

from mmrepro.data import worker_processes

pytestmark = pytest.mark.usefixtures('workers_end_soon')

DEADLINE = 30  # seconds; PyTorch's own workers look for their parent every 5, and then stay


class Masks(Noisy):
    """Samples that do not fit into a pipe."""

    def __getitem__(self, i):
        return np.zeros(2**21, np.uint8)


def train_and_wait(send, method, threaded):
    """Stop in the middle of a pass, as a trainer may; ``send`` gets the workers' process ids."""
    made = adopted(DataLoader(Masks(), 2, num_workers=2, collate_fn=list, persistent_workers=True,
                              multiprocessing_context=method))
    batches = iter(made)
    if threaded:
        start = threading.Thread(target=next, args=(batches, ))
        start.start()
        start.join()
    next(batches)
    send.send([worker.pid for worker in made._iterator._workers])
    signal.pause()


def ended(pid, deadline):
    """Whether a process that is nobody's child any more ends before the deadline."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(1000 * deadline))
    finally:
        os.close(handle)


@pytest.mark.skipif(not hasattr(os, 'pidfd_open'), reason='waits for processes by pidfd_open')
@pytest.mark.parametrize('method, threaded, kernel', [
    ('fork', False, True),
    ('fork', False, False),
    ('fork', True, True),
    pytest.param('spawn', False, True, marks=pytest.mark.nightly),
    pytest.param('forkserver', False, True, marks=pytest.mark.nightly)])
def test_workers_do_not_survive_a_trainer_that_is_killed(method, threaded, kernel, monkeypatch):
    if not kernel:
        monkeypatch.setattr(worker_processes, '_killed_by_kernel', lambda: False)
    receive, send = multiprocessing.Pipe(duplex=False)
    child = Child(train_and_wait, send, method, threaded)
    try:
        assert receive.poll(300)
        workers = receive.recv()
        assert len(workers) == 2
    finally:
        os.kill(child.process.pid, signal.SIGKILL)
        child.process.join()
    try:
        assert [pid for pid in workers if not ended(pid, DEADLINE)] == []
    finally:
        for pid in workers:
            if not ended(pid, 0):
                os.kill(pid, signal.SIGKILL)


class Records(torch.utils.data.Dataset):
    """Records of one byte in a file that is opened before there are workers."""

    def __init__(self, path):
        self.file = open(path, 'rb', buffering=0)
        self.both = multiprocessing.Barrier(2)

    def __len__(self):
        return 2

    def __getitem__(self, i):
        self.both.wait(60)
        self.file.seek(i)
        self.both.wait(60)  # the other worker has moved its position, too
        return self.file.read(1)


def test_workers_do_not_move_the_position_of_each_other_s_files(tmp_path):
    path = tmp_path / 'records'
    path.write_bytes(b'ab')
    dataset = Records(path)
    dataset.file.seek(1)
    made = adopted(DataLoader(dataset, 1, num_workers=2, collate_fn=list),
                   self_checks=dict(samples=0))
    assert list(made) == [[b'a'], [b'b']]
    assert dataset.file.tell() == 1


@pytest.mark.parametrize('method', worker_processes.METHODS)
def test_an_error_arrives_in_place_of_a_batch_that_is_not_sent(method):
    queue = worker_processes.METHODS[method]().Queue()
    queue._on_queue_feeder_error(TypeError('the reason'), (3, 'batch'))
    number, error = queue.get(timeout=60)
    assert number == 3
    with pytest.raises(TypeError, match='while a batch was pickled for the trainer.*'):
        error.reraise()
