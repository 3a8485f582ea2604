"""One object owns a resume: a checkpoint is read once, and its content is given away once."""
import collections
import shutil

import pytest
import torch
from counted import Counted
from harness import Child
from mmengine.hooks import Hook
from mmengine.runner import Runner
from small_runs import finish, small_run

from mmrepro.checkpoint import files
from mmrepro.checkpoint.files import copied_to


class ReadsAgain(Hook):
    def __init__(self, read):
        self.read = read

    def before_run(self, runner):
        self.read(runner.lifecycle.resume.point.path)


def counted_reads(cfg, planted=None):
    counted = Counted()
    runner = Runner.from_cfg(cfg)
    if planted is not None:
        runner.register_hook(ReadsAgain(planted))
    runner.train()
    return counted.reads()


def resumed(work_dir, path=None):
    cfg = small_run(work_dir)
    cfg.default_hooks.checkpoint = None
    cfg.resume, cfg.load_from = True, path and str(path)
    return cfg


@pytest.fixture(scope='module')
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp('base')
    finish(small_run(folder))
    return folder


def test_a_resume_reads_the_checkpoint_once(base, tmp_path):
    assert Child(counted_reads, resumed(tmp_path, base / 'iter_3.pth')).result() == (1, 1, 0)


def raw_read(path):
    with open(path, 'rb') as file:
        file.read()


@pytest.mark.parametrize('planted, reads', [
    (lambda path: files.check_file(path), (2, 1, 1)), (lambda path: files.load(path), (2, 2, 2)),
    (raw_read, (1, 1, 1))], ids=['check', 'load', 'read'])
def test_a_second_read_would_be_counted(planted, reads, base, tmp_path):
    cfg = resumed(tmp_path, base / 'iter_3.pth')
    assert Child(counted_reads, cfg, planted).result() == reads


def test_an_automatic_resume_reads_each_candidate_once(tmp_path):
    finish(small_run(tmp_path))
    (tmp_path / '.last_good.pth').unlink()  # a hard link to the newest file
    (tmp_path / 'iter_8.pth').write_bytes((tmp_path / 'iter_8.pth').read_bytes()[:-9])
    checks, loads, _ = Child(counted_reads, resumed(tmp_path)).result()
    assert (checks, loads) == (2, 1)  # the damaged file, and the one before it


def test_the_content_is_given_away_as_a_copy(base, tmp_path):
    """Optimizers keep the tensors that they load; the file may be overwritten."""
    path = tmp_path / 'copy.pth'
    path.write_bytes((base / 'iter_3.pth').read_bytes())
    resuming = Runner.from_cfg(resumed(tmp_path / 'run', path)).lifecycle.resume
    first, second = (resuming.read(str(path), 'cpu')['state_dict']['line.weight'] for _ in '12')
    with open(path, 'r+b') as file:
        file.write(bytes(path.stat().st_size))
    assert torch.equal(first, second) and first.any()


def test_every_tensor_moves_to_the_device():
    class Holder:
        def __init__(self):
            self.inner = torch.ones(1)

    Pair = collections.namedtuple('Pair', 'a b')
    content = dict(a=[torch.ones(2), (torch.ones(1), 'text')], b=collections.deque([torch.ones(1)]),
                   c=Pair(torch.ones(1), 3), d=Holder(), e=torch.Size([2]), f=int)
    moved = copied_to(content, 'meta')
    assert moved is content and moved['e'] == torch.Size([2]) and moved['f'] is int
    tensors = [moved['a'][0], moved['a'][1][0], moved['b'][0], moved['c'].a, moved['d'].inner]
    assert all(tensor.is_meta for tensor in tensors) and moved['c'].b == 3


def test_another_map_location_reads_the_file_again(base, tmp_path):
    runner = Runner.from_cfg(resumed(tmp_path, base / 'iter_3.pth'))
    path = runner.lifecycle.resume.point.path
    found = runner.lifecycle.resume.read(path, lambda storage, location: storage)
    held = runner.lifecycle.resume.read(path, 'cpu')
    assert torch.equal(found['state_dict']['line.weight'], held['state_dict']['line.weight'])


def test_a_copied_run_leaves_the_best_checkpoint_of_the_original_alone(tmp_path):
    """CheckpointHook removes what it takes for the previous best one."""
    original, copied = tmp_path / 'original', tmp_path / 'copied'
    finish(small_run(original))
    checkpoint = torch.load(original / 'iter_3.pth', weights_only=False)
    checkpoint['message_hub']['runtime_info']['best_ckpt'] = str(original / 'best_iter_2.pth')
    torch.save(checkpoint, original / 'iter_3.pth')
    (original / 'best_iter_2.pth').write_bytes(b'best')
    (original / 'last_checkpoint').write_text(str(original / 'iter_3.pth'))
    shutil.copytree(original, copied)
    runner = Runner.from_cfg(resumed(copied))
    runner.train()
    assert runner.message_hub.get_info('best_ckpt') == str(copied / 'best_iter_2.pth')
    assert runner.lifecycle.resume.point.path == str(copied / 'iter_3.pth')
    assert 'copy of' in runner.lifecycle.resume.passed_over[0]
