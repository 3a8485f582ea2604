"""Checkpoint files are whole or absent, and cannot run code."""
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer

from mmrepro.checkpoint import files, safe_loading
from mmrepro.checkpoint.choosing import newest_good


@pytest.fixture(params=['of torch', 'of Python'])
def unpickler(request, monkeypatch):
    """What loads: torch's own from 2.6 on, ours before."""
    if request.param == 'of Python':
        monkeypatch.setattr(safe_loading, '_takes_names', lambda: False)


@pytest.fixture
def good(tmp_path):
    """Return a sealed checkpoint with what MMEngine puts into one."""
    path = str(tmp_path / 'iter_1.pth')
    history = HistoryBuffer([1.0, 2.0], [1, 1])
    content = dict(state_dict=dict(w=torch.arange(1000.)), meta=dict(epoch=0, iter=1, seed=3),
                   message_hub=dict(log_scalars=dict(loss=history), n=np.float64(2.5)))
    torch.save(content, path + '.partial')
    files.replace_with(path + '.partial', path)
    return path


def test_a_link_that_a_killed_process_left_does_not_keep_the_last_good_file_old(good, tmp_path):
    (tmp_path / f'{files.LAST_GOOD}.partial').touch()
    newer = str(tmp_path / 'iter_2.pth')
    torch.save(dict(meta=dict(epoch=0, iter=2)), newer + '.partial')
    files.replace_with(newer + '.partial', newer)
    assert os.path.samefile(tmp_path / files.LAST_GOOD, newer)


def flip(path, position):
    content = bytearray(Path(path).read_bytes())
    content[position] ^= 1
    Path(path).write_bytes(content)


def test_every_flipped_byte_is_noticed(good):
    size = os.path.getsize(good)
    for position in {*range(0, size, 97), 0, size - 1, size - 70, size - 101}:
        flip(good, position)
        assert files.check_file(good) is not None, position
        flip(good, position)
    assert files.check_file(good) is None


def test_a_checkpoint_of_stock_mmengine_is_accepted_and_a_missing_file_is_named(tmp_path):
    path = str(tmp_path / 'epoch_1.pth')
    with pytest.raises(FileNotFoundError, match='epoch_1.pth does not exist'):
        files.load(path)
    torch.save(dict(a=1), path)
    assert files.check_file(path) is None and files.load(path) == dict(a=1)


class Code:
    def __reduce__(self):
        return os.system, ('touch pwned', )


class Attribute:
    def __reduce__(self):
        return getattr, (HistoryBuffer, '__init__')


@pytest.mark.parametrize('payload', [Code, Attribute])
def test_a_checkpoint_that_runs_code_is_refused(tmp_path, monkeypatch, payload, unpickler):
    monkeypatch.chdir(tmp_path)
    torch.save(dict(a=payload()), 'bad.pth')
    with pytest.raises(files.CheckpointError, match='bad.pth holds something that is not data'):
        files.load('bad.pth')
    assert not os.path.exists('pwned')


def test_newest_good_passes_over_what_is_damaged_and_says_so(good, tmp_path):
    for name, content in (('iter_2.pth', b''), ('iter_3.pth', b'PK\x03\x04 cut off')):
        (tmp_path / name).write_bytes(content)
        os.utime(tmp_path / name, ns=(2**62, 2**62))  # newer than the good one
    (tmp_path / 'last_checkpoint').write_text(str(tmp_path / 'iter_3.pth'))
    path, passed = newest_good(str(tmp_path))
    assert os.path.samefile(path, good)
    assert 'iter_3.pth' in passed[0] and any('iter_2.pth is empty' in text for text in passed)
    (tmp_path / 'last_checkpoint').write_text('')  # an empty pointer is not the end
    assert os.path.samefile(newest_good(str(tmp_path))[0], good)


def test_the_newest_file_survives_the_hook_that_removes_it(good, tmp_path):
    """CheckpointHook(max_keep_ckpts=1) removes the old file before it writes the new one."""
    os.remove(good)
    path, _ = newest_good(str(tmp_path))
    assert files.load(path)['meta']['iter'] == 1
    os.remove(path)
    assert newest_good(str(tmp_path)) == (None, [])
    assert newest_good(str(tmp_path / 'missing')) == (None, [])


def test_a_copy_of_a_work_directory_stands_on_its_own(good, tmp_path):
    original, copied = tmp_path / 'original', tmp_path / 'copied'
    original.mkdir()
    shutil.copy(good, original / 'iter_1.pth')
    (original / 'last_checkpoint').write_text(str(original / 'iter_1.pth'))
    shutil.copytree(original, copied)
    shutil.copy(good, original / 'iter_2.pth')  # the original has trained on
    path, said = newest_good(str(copied))
    assert path == str(copied / 'iter_1.pth')
    assert len(said) == 1 and str(original / 'iter_1.pth') in said[0] and path in said[0]
    assert newest_good(str(original)) == (str(original / 'iter_1.pth'), [])
    (copied / 'iter_1.pth').rename(copied / 'iter_0.pth')  # the last checkpoint was not copied
    assert newest_good(str(copied))[0] == str(copied / 'iter_0.pth')
    (copied / 'iter_0.pth').unlink()
    (copied / 'iter_1.pth').write_bytes(b'')
    assert newest_good(str(copied))[0] is None  # never one of the original's
    shutil.rmtree(original)
    shutil.copy(good, copied / 'iter_1.pth')
    assert newest_good(str(copied))[0] == str(copied / 'iter_1.pth')


def test_a_folder_of_checkpoints_apart_is_no_copy(good, tmp_path):
    """CheckpointHook(out_dir=...); an earlier run has left a file of the same name."""
    work, out = tmp_path / 'work', tmp_path / 'out' / 'work'
    for folder in (work, out):
        folder.mkdir(parents=True)
        shutil.copy(good, folder / 'iter_1.pth')
    (work / 'last_checkpoint').write_text(str(out / 'iter_1.pth'))
    assert newest_good(str(work)) == (str(out / 'iter_1.pth'), [])


def test_what_mmengine_saves_is_loaded_with_every_release_and_by_plain_torch(good, unpickler):
    assert files.check_file(good) is None and not os.path.exists(good + '.partial')
    for mapped in (False, True):
        assert torch.load(good, weights_only=False, mmap=mapped)['meta']['iter'] == 1
        content = files.load(good, mapped=mapped)
        assert torch.equal(content['state_dict']['w'], torch.arange(1000.))
        hub = content['message_hub']
        assert hub['n'] == 2.5 and isinstance(hub['n'], np.float64)
        assert hub['log_scalars']['loss'].mean() == 1.5


@pytest.mark.parametrize('core', ['numpy.core', 'numpy._core'])
def test_arrays_of_both_generations_of_numpy_are_known(core, unpickler):
    array = np.arange(3.)
    known = {one[1]: one[0] for one in safe_loading.allow_list() if isinstance(one, tuple)}
    rebuild = known[f'{core}.multiarray._reconstruct']
    assert rebuild is array.__reduce__()[0]
    assert safe_loading._known()[f'{core}.multiarray.scalar'] is np.float64(1).__reduce__()[0]


def test_a_class_that_a_user_trusts_is_loaded(tmp_path, unpickler):
    path = str(tmp_path / 'own.pth')
    torch.save(dict(a=Own()), path)
    with pytest.raises(files.CheckpointError, match='add_safe_globals'):
        files.load(path)
    with torch.serialization.safe_globals([Own]):
        assert files.load(path)['a'].value == 3


class Own:
    def __init__(self):
        self.value = 3
