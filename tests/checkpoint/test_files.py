"""Checkpoint files are whole or absent, cannot run code, and hold all that a run resumes from."""
import collections
import datetime
import errno
import io
import os
import shutil
import threading
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer
from mmengine.runner import CheckpointLoader, Runner
from small_runs import hook_with, warnings_of
from validated_runs import killed, trained, validated

from mmrepro.checkpoint import files, safe_loading
from mmrepro.checkpoint.choosing import newest_good
from mmrepro.checkpoint.fit import has_schedules, lacks
from mmrepro.checkpoint.safe_loading import check_readable
from mmrepro.errors import CheckpointError, RandomnessError, ResumeError
from mmrepro.util.files import partial_of

pytestmark = pytest.mark.usefixtures('no_pause_between_passes')


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
    open(partial_of(str(tmp_path / 'last_good.pth')), 'w').close()
    newer = str(tmp_path / 'iter_2.pth')
    torch.save(dict(meta=dict(epoch=0, iter=2)), newer + '.partial')
    files.replace_with(newer + '.partial', newer)
    assert os.path.samefile(tmp_path / files.LAST_GOOD, newer)


@pytest.mark.parametrize('number', [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_file_system_that_does_not_flush_folders_ends_no_run(number, good, monkeypatch):
    def fsync(descriptor, flush=os.fsync):
        if os.path.isdir(f'/proc/self/fd/{descriptor}'):
            raise OSError(number, os.strerror(number))
        flush(descriptor)

    monkeypatch.setattr(os, 'fsync', fsync)
    os.rename(good, good + '.partial')
    torch.save(dict(meta=dict(epoch=0, iter=2)), good + '.partial')
    if number == errno.EIO:
        with pytest.raises(OSError, match='Input/output'):
            files.replace_with(good + '.partial', good)
    else:
        files.replace_with(good + '.partial', good)
        assert files.load(good)['meta']['iter'] == 2


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


def test_a_device_without_memory_left_is_no_damage_of_a_file(good, monkeypatch):
    def load(*args):
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(files, 'safe_load', load)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        files.load(good)


def test_newest_good_passes_over_what_is_damaged_and_says_so(good, tmp_path):
    for name, content in (('iter_2.pth', b''), ('iter_3.pth', b'PK\x03\x04 cut off')):
        (tmp_path / name).write_bytes(content)
        os.utime(tmp_path / name, ns=(2**62, 2**62))  # newer than the good one
    (tmp_path / 'iter_4.pth').mkdir()
    (tmp_path / 'latest.pth').symlink_to('gone.pth')
    (tmp_path / 'last_checkpoint').write_text(str(tmp_path / 'iter_3.pth'))
    path, passed = newest_good(str(tmp_path))
    assert os.path.samefile(path, good)
    assert 'iter_3.pth' in passed[0] and any('iter_2.pth is empty' in text for text in passed)
    assert any('iter_4.pth cannot be read (Is a directory)' in text for text in passed)
    (tmp_path / 'last_checkpoint').write_text('')  # an empty pointer is not the end
    assert os.path.samefile(newest_good(str(tmp_path))[0], good)


def test_a_file_that_is_removed_meanwhile_is_passed_over(good, tmp_path, monkeypatch):
    """Another process, or a user, cleans up."""
    gone, look = str(tmp_path / 'iter_2.pth'), os.stat
    shutil.copy(good, gone)
    here = [gone]

    def exists(path):
        if path in here:
            os.remove(here.pop())
            return True
        return os.path.lexists(path)

    def stat(path, *args, **kwargs):
        if path in here:
            os.remove(here.pop())
        return look(path, *args, **kwargs)
    monkeypatch.setattr(os.path, 'exists', exists)
    monkeypatch.setattr(os, 'stat', stat)
    path, _ = newest_good(str(tmp_path))
    assert os.path.samefile(path, good) and not here


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


def settings(work_dir, **checkpoint):
    """Five epochs of four iterations; the error is lower than ever after each of the first."""
    cfg = validated(work_dir, True)
    cfg.custom_hooks = [dict(type='EMAHook', momentum=0.2)]
    cfg.optim_wrapper.optimizer = dict(type='Adam', lr=0.05)
    cfg.default_hooks.checkpoint = dict(
        type='CheckpointHook', **{**dict(save_best='error', rule='less'), **checkpoint})
    return cfg


def again(cfg, path=None):
    cfg.resume, cfg.load_from = True, path and str(path)
    return cfg


def test_a_best_checkpoint_is_never_what_a_run_resumes_from(tmp_path):
    """The only file: no checkpoint of the run had been due."""
    expected = trained(settings(tmp_path / 'whole', interval=2))
    killed(settings(tmp_path / 'killed', interval=2), iteration=5)
    assert list((tmp_path / 'killed').glob('best_*')) and not newest_good(
        str(tmp_path / 'killed'))[0]
    assert trained(again(settings(tmp_path / 'killed', interval=2))) == expected


def test_the_last_good_file_is_not_given_up_for_a_best_checkpoint(tmp_path):
    """CheckpointHook has removed the old checkpoint, written the best, and not yet the new one."""
    options = dict(interval=2, max_keep_ckpts=1)
    expected = trained(settings(tmp_path / 'whole', **options))
    # written: best of 1; epoch 2, best of 2, epoch 2 again; best of 3; killed before epoch 3
    killed(settings(tmp_path / 'killed', **options), write=6)
    good = torch.load(tmp_path / 'killed' / '.last_good.pth', weights_only=False)
    assert lacks(good) is None and good['meta']['iter'] == 8
    assert trained(again(settings(tmp_path / 'killed', **options))) == expected


@pytest.mark.parametrize('option, missing', [('save_optimizer', 'optimizer'),
                                             ('save_param_scheduler', 'schedules')])
def test_an_incomplete_checkpoint_is_refused_and_announced(option, missing, tmp_path, caplog):
    cfg = settings(tmp_path, interval=1, **{option: False})
    cfg.train_cfg.max_epochs = 1
    runner = Runner.from_cfg(cfg)
    assert any(f'{option}=False of CheckpointHook: a run cannot be resumed' in text
               for text in warnings_of(runner))
    assert not (tmp_path / '.last_good.pth').exists()
    cfg = again(settings(tmp_path, interval=1, **{option: False}), tmp_path / 'epoch_1.pth')
    cfg.train_cfg.max_epochs = 1
    with pytest.raises(ResumeError, match=f'epoch_1.pth holds no {missing}.*not resumed'):
        Runner.from_cfg(cfg)
    cfg.randomness.resume_strict = False
    assert any('may not be that of the uninterrupted run' in line
               for line in Runner.from_cfg(cfg).lifecycle.resume.passed_over)
    runner = Runner.from_cfg(again(cfg))
    resuming = runner.lifecycle.resume
    assert resuming.point is None and f'no {missing}' in resuming.passed_over[0]
    assert 'starts from the beginning' in resuming.passed_over[-1]
    runner.train()
    assert runner.iter == 4


def test_schedules_of_a_checkpoint_of_stock_mmengine_are_known_from_its_config():
    for text, expected in (("param_scheduler = [dict(type='LinearLR')]", True),
                           ("param_scheduler = dict(a=dict(type='LinearLR'))", True),
                           ('param_scheduler = []', False), ('param_scheduler = None', False),
                           ('x = 1', False), ('', False)):
        assert has_schedules(dict(cfg=text)) is expected, text


def test_the_folder_of_checkpoints_is_searched_too(tmp_path):
    """``out_dir``, one file kept, killed while the next one was written."""
    options = dict(interval=1, max_keep_ckpts=1, save_best=None)
    expected = trained(settings(tmp_path / 'whole', **options))
    options['out_dir'] = str(tmp_path / 'elsewhere')
    cfg = settings(tmp_path / 'killed', **options)
    killed(cfg, write=3)
    assert not list((tmp_path / 'killed').glob('*.pth'))
    point = Runner.from_cfg(again(cfg)).lifecycle.resume.point
    assert point.path.endswith('.last_good.pth') and point.iteration == 8
    assert trained(again(cfg)) == expected


@pytest.mark.parametrize('content', [dict(weight=torch.zeros(1)), dict(state_dict={}),
                                     dict(meta=dict(epoch=1)), [1]])
def test_other_files_are_passed_over_by_name(content, tmp_path):
    torch.save(content, tmp_path / 'export.pth')
    runner = Runner.from_cfg(again(settings(tmp_path)))
    assert runner.lifecycle.resume.point is None
    assert 'export.pth is no checkpoint of a run' in runner.lifecycle.resume.passed_over[0]
    with pytest.raises(CheckpointError, match='export.pth is no checkpoint of a run'):
        Runner.from_cfg(again(settings(tmp_path), tmp_path / 'export.pth'))


def test_two_averages_of_weights_are_refused_by_name(tmp_path):
    """MMEngine keeps one of them in a checkpoint, and swaps them with each other."""
    cfg = settings(tmp_path)
    cfg.custom_hooks = [dict(type='EMAHook', momentum=0.1),
                        dict(type='EMAHook', ema_type='StochasticWeightAverage')]
    runner = Runner.from_cfg(cfg)
    with pytest.raises(RandomnessError, match=r"EMAHook\(.*'momentum': 0.1.* and "
                                              r"EMAHook\(.*StochasticWeightAverage.*"
                                              'One EMAHook is allowed'):
        runner.train()
    assert runner.iter == 0


UNREADABLE = {
    'path': PurePosixPath('/x'), 'date': datetime.datetime(2020, 1, 1),
    'default': collections.defaultdict(int, a=1), 'frozen': frozenset([1]),
    'function': lambda: 0, 'lock': threading.Lock()}


@pytest.mark.parametrize('name', UNREADABLE)
def test_what_no_resume_could_read_is_refused_when_it_is_written(name, tmp_path):
    runner = Runner.from_cfg(settings(tmp_path, interval=1))
    runner.register_hook(hook_with(before_save_checkpoint=lambda runner, checkpoint:
                                   checkpoint.update(mine=dict(mine=[1, UNREADABLE[name]]))))
    with pytest.raises(CheckpointError, match=r"checkpoint\['mine'\]\['mine'\]\[1\] is a .*"
                                              f"{type(UNREADABLE[name]).__name__}"):
        runner.train()
    assert not list(tmp_path.glob('*.pth')) and not list(tmp_path.glob('.*partial'))


@pytest.mark.parametrize('name', ['path', 'function'])
def test_only_what_pickle_takes_can_be_trusted(name):
    with pytest.raises(CheckpointError) as refused:
        check_readable(dict(mine=UNREADABLE[name]))
    assert ('if you trust it' in str(refused.value)) is (name == 'path')


def test_what_can_be_read_is_written():
    check_readable(dict(a=torch.ones(1), b=[np.float64(1), np.complex64(1), np.ones(2)],
                        c=collections.Counter('a'), d={1, 2}, e=torch.float32,
                        f=collections.OrderedDict(a=torch.Size([1]))))


@pytest.mark.parametrize('by_epoch', [True, False])
def test_a_remote_file_is_fetched_and_judged_as_a_local_one(by_epoch, tmp_path, monkeypatch):
    """``last_checkpoint`` names a remote file: none of the local ones is taken instead."""
    cfg = validated(tmp_path, by_epoch)
    expected = trained(cfg)
    kept, best = tmp_path / ('epoch_1.pth' if by_epoch else 'iter_4.pth'), *tmp_path.glob('best_*')
    content = {'s3://kept.pth': kept.read_bytes(), 's3://best.pth': best.read_bytes()}
    monkeypatch.setattr(CheckpointLoader, '_schemes', {
        's3://': lambda name, device: torch.load(io.BytesIO(content[name]), weights_only=False),
        **CheckpointLoader._schemes})
    for changes in (dict(load_from='s3://kept.pth'), {}):
        (tmp_path / 'last_checkpoint').write_text('s3://kept.pth')
        assert trained(validated(tmp_path, by_epoch, resume=True, **changes)) == expected
    (tmp_path / 'last_checkpoint').write_text('s3://best.pth')
    with pytest.raises(ResumeError, match='holds no optimizer'):
        Runner.from_cfg(validated(tmp_path, by_epoch, resume=True))
    with pytest.raises(ResumeError, match='optim_wrapper.*lr'):
        Runner.from_cfg(validated(tmp_path, by_epoch, resume=True, load_from='s3://kept.pth',
                                  **{'optim_wrapper.optimizer.lr': 0.5}))


@pytest.mark.parametrize('pointer, said', [
    (None, '{} has no checkpoint to resume from'), ('', '{} has no checkpoint to resume from'),
    ('epoch_7.pth', 'nothing is left to resume from')])
def test_without_a_checkpoint_a_resume_begins_at_the_beginning_and_says_so(pointer, said, tmp_path):
    if pointer is not None:
        (tmp_path / 'last_checkpoint').write_text(pointer)
    cfg = again(settings(tmp_path))
    cfg.train_cfg.max_epochs = 1
    runner = Runner.from_cfg(cfg)
    assert runner.lifecycle.resume.passed_over[-1] == (
        f'{said.format(tmp_path)}: the run starts from the beginning')
    assert not runner._resume
    runner.train()
    assert runner.iter == 4
