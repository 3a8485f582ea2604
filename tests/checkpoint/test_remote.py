"""Checkpoints on the web and in object stores resume as local ones do, and run no code."""
import contextlib
import functools
import os
import shutil
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from mmengine.fileio import LocalBackend
from mmengine.fileio.backends import registry_utils
from mmengine.runner import CheckpointLoader, Runner
from small_runs import config
from validated_runs import trained, validated

from mmrepro.checkpoint import files
from mmrepro.checkpoint.files import load
from mmrepro.errors import CheckpointError, TrainingError

pytestmark = pytest.mark.usefixtures('no_pause_between_passes')


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@contextlib.contextmanager
def served(folder):
    """Serve a folder on the loopback; yields its address."""
    server = ThreadingHTTPServer(('127.0.0.1', 0), functools.partial(Quiet, directory=folder))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f'http://127.0.0.1:{server.server_port}'
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class InFolder(LocalBackend):
    """A backend whose files have names like ``s3://bucket/a.pth``."""
    folder = ''

    def get(self, filepath):
        name = str(filepath).rpartition('://')[2].lstrip('/')
        return super().get(os.path.join(self.folder, name))


@pytest.fixture(params=['http', 's3', 'cluster:s3', 'petrel', 'own'])
def remote(request, tmp_path, monkeypatch):
    """Return the address of a folder, by a backend of MMEngine or of a user."""
    monkeypatch.setattr(torch.hub, '_hub_dir', str(tmp_path / 'hub'))
    folder = tmp_path / 'remote'
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        if request.param == 'http':
            yield folder, stack.enter_context(served(folder))
            return
        monkeypatch.setattr(InFolder, 'folder', str(folder))
        backends = {**registry_utils.prefix_to_backends,
                    **dict.fromkeys(('s3', 'petrel', 'own'), InFolder)}
        for name, value in backends.items():
            monkeypatch.setitem(registry_utils.prefix_to_backends, name, value)
        yield folder, f'{request.param}://'


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path, )


def test_a_remote_checkpoint_resumes_and_starts_a_run_as_a_local_one(remote, tmp_path):
    folder, address = remote
    expected = trained(validated(folder, False))
    trained(validated(tmp_path / 'new', False, load_from=f'{address}/iter_4.pth'))
    # torch keeps files of the web by their names, which the files of another run have as well
    kept = tmp_path / 'hub' / 'checkpoints' / 'iter_4.pth'
    if kept.exists():
        shutil.copy(folder / 'iter_8.pth', kept)
    cfg = validated(tmp_path / 'resumed', False, resume=True, load_from=f'{address}/iter_4.pth')
    assert Runner.from_cfg(cfg).lifecycle.resume.point.iteration == 4
    assert trained(cfg) == expected


@pytest.mark.parametrize('name, said', [('a.pth', 1), ('a_20200130-047c8118.pth', 0)])
def test_a_file_in_the_cache_of_torch_is_read_and_nothing_is_written(
        name, said, tmp_path, monkeypatch):
    """Users share a cache that they may only read. A name without a hash may be that of others."""
    lines = []
    monkeypatch.setattr(files, 'print_log', lambda text, *options: lines.append(text))
    monkeypatch.setattr(torch.hub, '_hub_dir', str(tmp_path))
    (tmp_path / 'checkpoints').mkdir()
    torch.save(dict(weight=torch.ones(1)), tmp_path / 'checkpoints' / name)
    assert load(f'http://nowhere.invalid/{name}') == dict(weight=torch.ones(1))
    assert [path.name for path in (tmp_path / 'checkpoints').iterdir()] == [name]
    assert len(lines) == said
    assert all(line.startswith(f'http://nowhere.invalid/{name} is not fetched') for line in lines)


def test_an_address_without_a_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, '_hub_dir', str(tmp_path))
    with pytest.raises(CheckpointError, match='invalid/ cannot be fetched .the address'):
        load('http://nowhere.invalid/')


@pytest.mark.parametrize('resume', [False, True])
def test_a_remote_file_that_was_damaged_on_its_way_is_refused(resume, remote, tmp_path):
    folder, address = remote
    trained(validated(folder, False))
    content = bytearray((folder / 'iter_4.pth').read_bytes())
    content[len(content) // 2] ^= 1
    (folder / 'iter_4.pth').write_bytes(content)
    cfg = validated(tmp_path / 'run', False, resume=resume, load_from=f'{address}/iter_4.pth')
    with pytest.raises(CheckpointError, match='iter_4.pth is damaged .its digest does not match'):
        Runner.from_cfg(cfg).load_or_resume()


@pytest.mark.parametrize('resume', [False, True])
def test_no_code_of_a_remote_file_runs(resume, remote, tmp_path):
    folder, address = remote
    torch.save(dict(meta=dict(epoch=0, iter=1), mine=Malicious(str(tmp_path / 'code ran'))),
               folder / 'malicious.pth')
    cfg = validated(tmp_path / 'run', False, resume=resume, load_from=f'{address}/malicious.pth')
    with pytest.raises(CheckpointError, match='malicious.pth holds something that is not data'):
        Runner.from_cfg(cfg).load_or_resume()
    assert not (tmp_path / 'code ran').exists()


def test_nor_that_of_a_file_which_a_loader_of_the_user_reads(tmp_path, monkeypatch):
    torch.save(dict(mine=Malicious(str(tmp_path / 'code ran'))), tmp_path / 'malicious.pth')
    monkeypatch.setattr(CheckpointLoader, '_schemes', {
        'mine://': lambda name, device: torch.load(
            tmp_path / name.rpartition('/')[2], weights_only=False),
        **CheckpointLoader._schemes})
    cfg = validated(tmp_path / 'run', False, load_from='mine://malicious.pth')
    with pytest.raises(CheckpointError, match='mine://malicious.pth holds something'):
        Runner.from_cfg(cfg).load_or_resume()
    assert not (tmp_path / 'code ran').exists()


def test_a_file_that_is_not_there_is_named(tmp_path):
    with served(tmp_path) as address, pytest.raises(
            CheckpointError, match='none.pth cannot be fetched .*404'):
        Runner.from_cfg(validated(tmp_path / 'run', False, resume=True,
                                  load_from=f'{address}/none.pth'))


def test_what_a_backend_lacks_or_raises_is_named(monkeypatch):
    class Lacking(LocalBackend):
        def __init__(self):
            raise ImportError('Please install lacking_client')

    class Refusing(LocalBackend):
        def get(self, filepath):
            class NoSuchBucket(Exception):  # as clients of object stores have them
                pass

            raise NoSuchBucket('The specified bucket does not exist')

    monkeypatch.setitem(registry_utils.prefix_to_backends, 'lacking', Lacking)
    monkeypatch.setitem(registry_utils.prefix_to_backends, 'refusing', Refusing)
    for url, why in (('lacking://b/a.pth', 'ImportError: Please install lacking_client'),
                     ('refusing://b/a.pth', 'NoSuchBucket: The specified bucket does not exist'),
                     ('nosuch://b/a.pth', "no file backend .* is registered for 'nosuch'")):
        with pytest.raises(CheckpointError, match=f'{url} cannot be fetched .{why}'):
            load(url)


def test_a_remote_file_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    # MMEngine writes with another table of prefixes, which lacks this one
    monkeypatch.setitem(registry_utils.prefix_to_backends, 'own', LocalBackend)
    runner = Runner.from_cfg(config(tmp_path))
    with pytest.raises(TrainingError, match='checkpoint own://b/a.pth cannot be written .ValueErr'):
        runner.save_checkpoint('own://b', 'a.pth', save_optimizer=False,
                               save_param_scheduler=False)
