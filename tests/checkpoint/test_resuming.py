"""The checkpoint of a resume: checked once, and taken from a copy of a work directory."""
import shutil

import pytest
import torch
from counted import Counted
from harness import Child
from mmengine.runner import Runner
from small_runs import finish, small_run


def counted_checks(cfg, check=False):
    counted = Counted()
    runner = Runner.from_cfg(cfg)
    if check:
        runner.lifecycle.resume.read(runner.lifecycle.resume.point.path, 'cpu')
    runner.train()
    return counted.calls['check'], counted.calls['load']


def resumed(work_dir, path=None):
    return small_run(work_dir, resume=True, load_from=path and str(path),
                     **{'default_hooks.checkpoint': None})


@pytest.mark.parametrize('again', [False, True])
def test_a_resume_checks_the_checkpoint_once(again, base, tmp_path):
    """Its content is loaded twice: mapped, for the choice, and with its tensors."""
    cfg = resumed(tmp_path, base / 'iter_3.pth')
    assert Child(counted_checks, cfg, again).result() == (1 + again, 2 + again)


def test_an_automatic_resume_checks_each_candidate_once(tmp_path):
    finish(small_run(tmp_path))
    (tmp_path / '.last_good.pth').unlink()  # a hard link to the newest file
    (tmp_path / 'iter_8.pth').write_bytes((tmp_path / 'iter_8.pth').read_bytes()[:-9])
    # the damaged file, and the one before it
    assert Child(counted_checks, resumed(tmp_path)).result() == (2, 2)


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
