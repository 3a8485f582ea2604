"""Text files that are written whole."""
import os

from mmrepro.util import files


def test_two_processes_write_one_file(tmp_path, monkeypatch):
    """The other one writes all of it between two steps of this one."""
    path, processes, flush = tmp_path / 'result.json', [os.getpid(), os.getpid() + 1], os.fsync

    def fsync(descriptor):
        flush(descriptor)
        if len(processes) > 1:
            other = processes.pop()
            monkeypatch.setattr(os, 'getpid', lambda: other)
            files.write_whole(str(path), 'of the other')
            monkeypatch.undo()
    monkeypatch.setattr(os, 'fsync', fsync)
    files.write_whole(str(path), 'of this one')
    assert path.read_text() == 'of this one' and os.listdir(tmp_path) == ['result.json']


def test_a_write_that_fails_leaves_the_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / 'result.json'
    files.write_whole(str(path), 'old')

    def full(descriptor):
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(os, 'fsync', full)
    try:
        files.write_whole(str(path), 'new')
    except OSError:
        pass
    assert path.read_text() == 'old' and os.listdir(tmp_path) == ['result.json']
