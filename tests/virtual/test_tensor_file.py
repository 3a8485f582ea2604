"""Tensors that wait in a file, and a checkpoint that is written without a copy in memory."""
import io
import os

import pytest
import torch

from mmrepro.checkpoint import safe_loading
from mmrepro.checkpoint.files import write_content
from mmrepro.errors import CheckpointError
from mmrepro.virtual import sharded
from mmrepro.virtual.sharded import TensorFile

TENSORS = [torch.randn(3, 5), torch.randn(7).bfloat16(), torch.arange(100), torch.zeros(0, 3),
           torch.ones(4, 4, dtype=torch.bool), torch.randn(200, 300).t()]


def saved(value):
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


def kept(folder):
    with TensorFile(folder, TENSORS) as file:
        found = [file.keep(tensor) for tensor in TENSORS]
        file.let_go()
    return found


def test_tensors_keep_their_values_in_a_file_without_a_name(tmp_path):
    folder = tmp_path / 'made'
    found = kept(str(folder))
    assert not os.listdir(folder)
    assert [one is other for one, other in zip(found, TENSORS)] == [
        not tensor.numel() for tensor in TENSORS]
    for one, other in zip(found, TENSORS):
        assert one.dtype == other.dtype and torch.equal(one, other)
    contiguous = [tensor.contiguous() for tensor in TENSORS]
    assert saved(found) == saved(contiguous)


def full(*args):
    raise OSError(28, 'No space left on device')


@pytest.mark.parametrize('why', ['no folder', 'not a folder', 'no room'])
def test_where_there_is_no_file_they_stay_in_memory(why, tmp_path, monkeypatch):
    folder = str(tmp_path)
    if why == 'no folder':
        folder = None
    elif why == 'not a folder':
        folder = os.path.join(folder, 'file', 'below')
        (tmp_path / 'file').write_text('')
    else:
        monkeypatch.setattr(sharded.os, 'pwrite', full)
    assert all(one is other for one, other in zip(kept(folder), TENSORS))


def test_a_checkpoint_has_the_bytes_that_mmengine_writes(tmp_path):
    path, calls = tmp_path / 'folder' / 'a.pth', []
    checkpoint = dict(meta=dict(iter=3), state_dict=dict(w=torch.randn(5000, 5000)))
    write_content(checkpoint, str(path), lambda: calls.append(os.path.getsize(path)),
                  backend_args=None)
    assert path.read_bytes() == saved(checkpoint) and len(calls) == 1


def test_a_full_disk_is_an_error_and_not_an_abort():
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write_content(dict(w=torch.zeros(1 << 20)), '/dev/full', lambda: None)


def test_a_check_of_what_can_be_read_copies_no_tensor(monkeypatch):
    sizes, save = [], torch.save

    def noted(value, file):
        save(value, file)
        sizes.append(len(file.getvalue()))

    monkeypatch.setattr(safe_loading.torch, 'save', noted)
    state = torch.nn.Linear(500, 500).state_dict()
    safe_loading.check_readable(dict(meta={}, state_dict=state))
    assert sizes and max(sizes) < 20_000
    state._metadata['later'] = object()  # what a state dict has beside its items is tried
    with pytest.raises(CheckpointError, match="checkpoint.*state_dict"):
        safe_loading.check_readable(dict(meta={}, state_dict=state))
