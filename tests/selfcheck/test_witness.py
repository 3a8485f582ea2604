"""A second process repeats and resumes a run while it trains, and the bits are compared."""
import fcntl
import importlib
import json
import os
import pathlib
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import witnessed
from children import Child
from harness import environment
from mmengine.dataset import BaseDataset
from mmengine.hooks import CheckpointHook, EmptyCacheHook, Hook
from mmengine.logging import MessageHub
from mmengine.registry import DATASETS, FUNCTIONS, HOOKS
from mmengine.runner import Runner
from small_runs import hook_with
from warm import Warm
from witnessed import SPOILED, SavesTwice, config, log_of, train

import mmrepro
from mmrepro import on_virtual_ranks, verbs
from mmrepro.errors import FingerprintError, RunError, WitnessDiffersError
from mmrepro.fingerprint.digest import value_digest
from mmrepro.objects.digests import state_digest
from mmrepro.run.hooks.witness_records import _data_of, attribute_texts
from mmrepro.runs.witness import _OF_EVERY_TRAINING, _in_fork, _other_workers, _protect
from mmrepro.selfcheck import recipe, witness, witness_process, witness_verdict
from mmrepro.selfcheck.witness import Witness
from mmrepro.selfcheck.witness_process import Start, WitnessProcess
from mmrepro.util.scoped import replaced

pytestmark = pytest.mark.usefixtures('witness_has_time')


@pytest.fixture(scope='module', autouse=True)
def warm():
    """Fork witnesses from a process that has made the imports of one."""
    registered = {entry.target.partition(':')[0] for entry in recipe._registered()}
    process = Warm(['mmrepro.runs.witness', *_OF_EVERY_TRAINING, *sorted(registered)],
                   {**environment(), 'PYTHONPATH': os.pathsep.join(sys.path)}, sys.path)
    stand_in = SimpleNamespace(Popen=process.popen, DEVNULL=subprocess.DEVNULL,
                               STDOUT=subprocess.STDOUT)
    with replaced(witness_process, subprocess=stand_in):
        yield
    process.close()


@pytest.mark.parametrize('first', [
    198, 203, *(pytest.param(first, marks=pytest.mark.nightly)
                for first in (199, 200, 201, 202, 204, 205))])
def test_a_witness_has_open_files_under_their_numbers(first, tmp_path):
    process, null = witness_process.subprocess, os.open(os.devnull, os.O_RDONLY)
    # numbers that are free here, of which the second is the smaller one
    files = [fcntl.fcntl(null, fcntl.F_DUPFD, first) for _ in range(2)][::-1]
    try:
        with open(tmp_path / 'output.txt', 'w+') as output:
            started = process.Popen(
                [sys.executable, '-c', 'import os, sys; [os.fstat(int(n)) for n in sys.argv[1:]]',
                 *map(str, files)], stdout=output, stderr=process.STDOUT, pass_fds=files)
            assert started.wait(60) == 0, (tmp_path / 'output.txt').read_text()
    finally:
        for number in (null, *files):
            os.close(number)


@pytest.fixture(scope='module')
def base(tmp_path_factory):
    """Return the work directory of a run whose witness had nothing to object to."""
    folder, scratch = (tmp_path_factory.mktemp(name) for name in ('base', 'scratch'))
    with replaced(tempfile, tempdir=str(scratch)):
        train(config(folder, custom_hooks=[dict(type='EMAHook'), dict(type='Spoils')]))
    assert not [*scratch.glob('mmrepro-*')]
    return folder


def test_a_run_says_what_its_witness_has_resumed(base):
    last = log_of(base).strip().splitlines()[-1]
    assert 'the first 4 iterations were repeated by a witness: same bits' in last, last
    assert 'resumed by a witness at iterations 4, 8: same bits' in last, last
    assert 'does not restore' not in last, last


def test_the_witness_leaves_no_file_behind(base):
    assert {path.name for path in base.iterdir() if path.is_file()} == {
        'epoch_1.pth', 'epoch_2.pth', 'epoch_3.pth', 'last_checkpoint', '.last_good.pth'} | {
            path.name for path in base.glob('*.py')}


def test_the_witness_changes_no_bit(base, tmp_path):
    cfg = config(tmp_path, custom_hooks=[dict(type='EMAHook'), dict(type='Spoils')])
    cfg.randomness.self_checks = False
    train(cfg)
    first, second = (torch.load(folder / 'epoch_3.pth', weights_only=False)
                     for folder in (base, tmp_path))
    for part in ('state_dict', 'ema_state_dict', 'optimizer'):
        assert state_digest(first[part]) == state_digest(second[part])
    assert not [*(tmp_path / 'mmrepro').glob('witness.*')]


@pytest.mark.nightly
def test_the_folder_for_temporary_files_may_lie_in_the_work_directory(tmp_path, monkeypatch):
    """A witness may write there, and nowhere else in the work directory."""
    (tmp_path / 'tmp').mkdir()
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path / 'tmp'))
    train(config(tmp_path))
    assert 'resumed by a witness at iterations 4, 8: same bits' in log_of(tmp_path)
    assert not list((tmp_path / 'tmp').iterdir())


@pytest.mark.nightly
def test_no_checkpoint_of_its_own_calls_what_may_change_the_run(tmp_path):
    bits = []
    for name, wanted in (('with', True), ('without', False)):
        cfg = config(tmp_path / name, epochs=5, custom_hooks=[dict(type='Clamps')])
        cfg.default_hooks.checkpoint.interval = 3  # the early checkpoint is another one
        cfg.randomness.self_checks.witness = wanted
        bits.append(state_digest(train(cfg).model.state_dict()))
    assert bits[0] == bits[1]
    # and it acts where the witness, too, would write the run's next checkpoint
    last = log_of(tmp_path / 'with').splitlines()[-1]
    assert 'no early checkpoint: Clamps.before_save_checkpoint would run once more' in last
    assert 'resumed by a witness at iteration 12: same bits' in last

    runner = SavesTwice.from_cfg(config(tmp_path / 'own', epochs=5))
    runner.train()
    assert runner.saves == 5
    assert 'SavesTwice.save_checkpoint would run' in log_of(tmp_path / 'own').splitlines()[-1]


def test_what_a_hook_saves_in_the_middle_of_an_epoch_can_be_resumed(tmp_path):
    cfg = config(tmp_path / 'run', custom_hooks=[dict(type='Snapshots')])
    cfg.default_hooks.checkpoint.interval = 3
    ended = state_digest(train(cfg).model.state_dict())
    last = log_of(tmp_path / 'run').splitlines()[-1]
    assert 'resumed by a witness at iterations 4, 6, 8: same bits' in last, last
    for name, position in (('snapshot', (1, 6)), ('validated', (2, 8))):
        again = cfg.copy()
        again.randomness.self_checks = False
        again.update(work_dir=str(tmp_path / name), resume=True,
                     load_from=str(tmp_path / 'run' / f'{name}.pth'))
        meta = torch.load(again.load_from, weights_only=False)['meta']
        assert (meta['epoch'], meta['iter']) == position
        assert state_digest(train(again).model.state_dict()) == ended


@HOOKS.register_module(force=True)
class NamedSaves(CheckpointHook):
    """A hook of the user's with an argument of its own, that has no default."""

    def __init__(self, owner, **kwargs):
        super().__init__(**kwargs)
        self.owner = owner


def test_checkpoints_may_have_hooks_and_folders_of_their_own(tmp_path):
    saves = dict(type='NamedSaves', owner='us', interval=1, filename_tmpl='files/epoch_{}.pth',
                 max_keep_ckpts=2)
    cfg = config(tmp_path / 'run', default_hooks=dict(checkpoint=saves))
    ended = state_digest(train(cfg).model.state_dict())
    last = log_of(tmp_path / 'run').splitlines()[-1]
    assert 'resumed by a witness at iterations 4, 8: same bits' in last, last
    assert {path.name for path in (tmp_path / 'run' / 'files').glob('*.pth')} == {
        'epoch_2.pth', 'epoch_3.pth', '.last_good.pth'}
    (tmp_path / 'run' / 'files' / 'epoch_3.pth').unlink()
    (tmp_path / 'run' / 'files' / '.last_good.pth').unlink()
    cfg.update(resume=True)
    cfg.randomness.self_checks = False
    assert state_digest(train(cfg).model.state_dict()) == ended
    assert 'epoch_2.pth: epoch 2, iteration 8' in log_of(tmp_path / 'run')


@DATASETS.register_module(force=True)
class OddlyNamed(BaseDataset):
    """Files whose names are not UTF-8, and samples that no one can copy."""

    def load_data_list(self):
        return [dict(img_path=f'p\udce9re_{number}.jpg', x=float(number)) for number in range(16)]

    def __getitem__(self, i):
        info = self.get_data_info(i)
        return dict(x=torch.full((3, ), info['x']), lock=threading.Lock(), path=info['img_path'],
                    odd=UnreadableInSlots())


class Unreadable:
    def __getattr__(self, name):
        raise RuntimeError(name)


class UnreadableInSlots:
    __slots__ = ('value', )
    __hash__ = None
    __getattr__ = Unreadable.__getattr__

    def __init__(self):
        self.value = 0

    def __eq__(self, other):
        raise TypeError('compares with nothing')

    def __repr__(self):
        raise RuntimeError('no text')

    __bool__ = __len__ = __repr__


class LazyCache(dict):
    def items(self):
        raise RuntimeError('loads files')


@HOOKS.register_module(force=True)
class Odds(Hook):
    """Has, and gives a model, what raises errors when it is looked at."""

    def __init__(self):
        self.odds = [LazyCache(a=1), weakref.proxy(Unreadable()), Unreadable(), np.ma.masked,
                     UnreadableInSlots()]
        self.lazy, self.gone, self.proxy, self.masked, self.slots = self.odds

    def before_run(self, runner):
        vars(runner.model).update(vars(self))


@FUNCTIONS.register_module(force=True)
def stacked(samples):
    return dict(x=torch.stack([sample['x'] for sample in samples]))


def test_names_in_any_encoding_and_samples_that_cannot_be_copied_end_no_run(tmp_path):
    cfg = config(tmp_path)
    cfg.train_dataloader.update(dataset=dict(type='OddlyNamed'), collate_fn=dict(type='stacked'))
    cfg.custom_hooks = [dict(type='FingerprintHook', interval=1), dict(type='Odds')]
    train(cfg)
    assert 'resumed by a witness at iterations 4, 8: same bits' in log_of(tmp_path).splitlines()[-1]


def test_an_attribute_that_a_hook_sets_anew_is_restored(tmp_path):
    train(config(tmp_path, custom_hooks=[dict(type='SetsAlways'), dict(type='Patience')]))
    last = log_of(tmp_path).splitlines()[-1]
    assert 'a resume does not restore Patience.seen, Patience.values' in last
    assert 'scale' not in last


def test_an_optimizer_that_calls_a_closure_is_resumed(tmp_path):
    cfg = config(tmp_path, model=dict(type='Closing'))
    cfg.optim_wrapper = dict(optimizer=dict(type='LBFGS', max_iter=3))
    train(cfg)
    log = log_of(tmp_path)
    assert 'resumed by a witness at iterations 4, 8: same bits' in log.splitlines()[-1]
    assert '0 steps were repeated' in log
    assert 'the optimizer computes the losses itself, by a closure' in log


def test_each_of_several_validations_after_an_iteration_is_compared_with_its_own(tmp_path):
    cfg = config(tmp_path, val_cfg=dict(type='ValidatesTwice'),
                 val_evaluator=dict(type='MeanAsTensor'))
    train(cfg)
    assert 'resumed by a witness at iterations 4, 8: same bits' in log_of(tmp_path)
    noted = witness_verdict.noted_lines(str(tmp_path / 'mmrepro'))
    first, second = witness_verdict.metrics_of(noted)[4]
    assert first != second


def test_virtual_ranks_have_one_witness_process(tmp_path):
    cfg = config(tmp_path)
    cfg.randomness.virtual_ranks = 2
    on_virtual_ranks(2, lambda: train(cfg.copy()))
    logs = [path.read_text() for path in tmp_path.glob('*/*.log')]
    assert any('resumed by a witness at iterations 2, 4: same bits' in log for log in logs)


@pytest.fixture(scope='module')
def spoiled(base):
    """Return, by what a witness has spoiled on purpose, what the comparison found."""
    cfg = config(base, custom_hooks=[dict(type='EMAHook'), dict(type='Spoils')])
    cfg.randomness.self_checks = dict(witness=False)
    made = recipe.recipe_of(witnessed.Runner, dict(cfg=cfg), dict(os.environ))
    noted = witness_verdict.noted_lines(str(base / 'mmrepro'))
    starts = [Start(name, 4, 6, str(base / 'epoch_1.pth'),
                    metrics=witness_verdict.metrics_of(noted)) for name in ('nothing', *SPOILED)]
    process = WitnessProcess(made, starts, cfg.randomness, [], str(base), quiet=False)
    try:
        while not process.ended():
            time.sleep(0.1)
        results = {result.name: result for result in process.results()}
        assert not [result.error for result in results.values() if result.error]
        yield {name: witness_verdict.compare(str(base / 'mmrepro'), result.lines, 4, 6)
               for name, result in results.items()}
    finally:
        process.kill()


@pytest.mark.parametrize('what', SPOILED)
def test_each_comparison_sees_what_was_spoiled(spoiled, what):
    assert spoiled['nothing'] is None
    found = spoiled[what]
    expected = dict(attribute='averages', predictions='validation', metrics='validation')
    assert found is not None
    assert found.field.partition('.')[0] == expected.get(what, what)


NIGHTLY = pytest.mark.nightly  # a few seconds each, and of kinds that others show


@pytest.mark.parametrize('changes, named', [
    pytest.param(dict(train_dataloader=dict(dataset=dict(type='Keeping', how='static'))),
                 'workers', id='function attribute'),
    pytest.param(dict(train_dataloader=dict(dataset=dict(type='Keeping', how='default'))),
                 'workers', id='default', marks=NIGHTLY),
    pytest.param(dict(train_dataloader=dict(dataset=dict(type='Keeping', how='module'))),
                 'workers', id='module transform', marks=NIGHTLY),
    pytest.param(dict(model=dict(keeps='module in a list')), 'Layers.hidden[0].first',
                 id='module in a list'),
    pytest.param(dict(model=dict(keeps='function')), 'register_buffer', id='static variable',
                 marks=NIGHTLY),
    pytest.param(dict(model=dict(keeps='forward hook')), 'register_buffer', id='forward hook',
                 marks=NIGHTLY),
    pytest.param(dict(custom_hooks=[dict(type='SetsOnce')]), 'dataset.factor',
                 id='hook that sets once'),
    pytest.param(dict(custom_hooks=[dict(type='Reweights')],
                      train_dataloader=dict(sampler=dict(_delete_=True, type='Weighted'))),
                 'sampler.weights', id='sampler that a hook reweights', marks=NIGHTLY),
    pytest.param(dict(custom_hooks=[dict(type='EMAHook', ema_type='Counting')]),
                 'EMAHook.ema_model:updates', id='counter of an average'),
    pytest.param(dict(custom_hooks=[dict(type='ActsRarely')]), 'ActsRarely.seen', id='rare effect',
                 marks=NIGHTLY),
    pytest.param(dict(custom_hooks=[dict(type='OffsetOfPredictions')]), 'Layers.offset',
                 id='attribute that predictions read'),
    pytest.param(dict(val_dataloader=dict(dataset=dict(type='Keeping', how='module'))),
                 'number of workers that load the validation data', id='validation data'),
])
def test_state_that_another_process_lacks_ends_the_run(tmp_path, changes, named):
    with pytest.raises(WitnessDiffersError) as raised:
        train(config(tmp_path, **changes))
    assert named in str(raised.value)
    assert 'to do: ' in str(raised.value)


def test_state_that_a_resume_loses_is_named_where_the_bits_are_equal_for_now(tmp_path):
    train(config(tmp_path, custom_hooks=[dict(type='Patience')]))
    log = log_of(tmp_path)
    assert 'a resume does not restore Patience.seen, Patience.values' in log.splitlines()[-1]
    warning, = (line for line in log.splitlines() if 'WARNING' in line and 'Patience' in line)
    assert "register it: mmrepro.keep_attributes(Class, 'attribute')" in warning


@pytest.mark.parametrize('hook', [
    dict(type='KeepsAFile'), dict(type='KeepsAFile', large=True),
    dict(type='KeepsAFile', name='scale_{}.pth'), dict(type='ReadsTheLastCheckpoint')])
def test_a_witness_has_the_files_of_the_work_directory(hook, tmp_path):
    train(config(tmp_path, custom_hooks=[hook]))
    assert 'resumed by a witness at iterations 4, 8: same bits' in log_of(tmp_path)


def removes_links(folder):
    """Remove and replace links to files of a run, then change such a file."""
    run, scratch = folder / 'run', folder / 'scratch'
    for path in (run, scratch):
        path.mkdir()
    for name in 'abc':
        (run / name).write_text(name)
        (scratch / name).symlink_to(run / name)
    _protect(str(run), str(scratch))
    (scratch / 'a').unlink()
    (scratch / 'new').write_text('')
    (scratch / 'new').replace(scratch / 'b')
    for change in (lambda: (scratch / 'c').write_text(''), lambda: (run / 'c').unlink(),
                   lambda: os.truncate(scratch / 'c', 0), lambda: (run / 'c').rename(run / 'd')):
        with pytest.raises(PermissionError, match='may not change'):
            change()


def test_a_witness_removes_its_links_and_no_files_of_the_run(tmp_path):
    Child(removes_links, tmp_path).result(60)
    assert {path.name: path.read_text() for path in (tmp_path / 'run').iterdir()} == {
        name: name for name in 'abc'}


def test_a_file_that_is_written_again_is_named(tmp_path):
    with pytest.raises(WitnessDiffersError, match='copies of scale.txt in the work directory'):
        train(config(tmp_path, custom_hooks=[dict(type='KeepsAFile', name='scale.txt')]))


def test_the_last_checkpoint_that_iterations_follow_is_resumed(tmp_path):
    train(config(tmp_path, epochs=6))
    assert 'resumed by a witness at iterations 4, 8, 16, 20: same bits' in log_of(tmp_path)


def test_checkpoints_that_were_written_since_are_not_resumed_instead(tmp_path):
    """A run that stops early has none of its end, from which nobody would resume."""
    train(config(tmp_path, epochs=6, custom_hooks=[dict(
        type='EarlyStoppingHook', monitor='mean', rule='greater', patience=2, min_delta=1e9)]))
    last = log_of(tmp_path).splitlines()[-1]
    assert 'after 12 iterations' in last
    assert 'resumed by a witness at iterations 4, 8: same bits' in last, last


def test_what_reaches_workers_late_is_found_after_the_first_iterations(tmp_path, monkeypatch):
    monkeypatch.setenv('SCALE', '1')
    cfg = config(tmp_path, train_dataloader=dict(dataset=dict(type='FollowsAVariable')),
                 custom_hooks=[dict(type='SetsTheVariableAhead')])
    with pytest.raises(WitnessDiffersError, match='depends on the number of workers') as error:
        train(cfg)
    assert 'with as many as the run, it got the same' in str(error.value)


def test_data_that_workers_cannot_load_are_resumed_without_workers(tmp_path):
    train(config(tmp_path, train_dataloader=dict(dataset=dict(type='NotInWorkers'))))
    last = log_of(tmp_path).splitlines()[-1]
    assert 'a repetition of the first iterations was not compared' in last
    assert 'resumed by a witness at iterations 4, 8: same bits' in last, last


def test_what_is_only_logged_is_no_difference(tmp_path):
    cfg = config(tmp_path, model=dict(logs=True))
    cfg.randomness.self_checks.steps = 0
    train(cfg)
    assert 'same bits' in log_of(tmp_path).splitlines()[-1]


def test_a_difference_can_be_a_warning(tmp_path):
    cfg = config(tmp_path, epochs=13, custom_hooks=[dict(type='SetsOnce')])
    cfg.randomness.self_checks.witness = 'warn'
    train(cfg)
    assert 'is not this run' in log_of(tmp_path)


def test_a_short_run_is_not_witnessed_and_says_so(tmp_path):
    cfg = config(tmp_path)
    cfg.randomness.pop('self_checks')
    runner = train(cfg)
    assert runner.lifecycle.records.attributes == {}  # looking for them takes time
    last = log_of(tmp_path).strip().splitlines()[-1]
    assert 'shorter than 50 iterations' in last
    assert f'mmrepro verify {tmp_path}' in last


def test_a_run_of_objects_says_why_it_is_not_witnessed(tmp_path):
    cfg = config(tmp_path)
    mmrepro.set_random_seed(cfg.randomness.seed)
    cfg.model = witnessed.Layers()
    train(cfg)
    last = log_of(tmp_path).strip().splitlines()[-1]
    assert 'no resume was tried (model is an object of witnessed.Layers' in last
    assert 'mmrepro verify' not in last  # could not build the model either


@pytest.mark.parametrize('name, hooks', [
    ('custom_hooks[0]', dict(custom_hooks=[EmptyCacheHook()])),
    ('default_hooks.checkpoint', dict(default_hooks=dict(checkpoint=CheckpointHook(interval=1))))])
def test_hooks_that_are_given_as_objects_are_named(name, hooks, tmp_path):
    made = witnessed.Runner(**{**config(tmp_path), **hooks})
    assert made.lifecycle.witness.not_tried.startswith(f'{name} is an object of mmengine.hooks.')


def test_a_step_that_code_has_compiled_is_not_compiled_again(tmp_path):
    runner = witnessed.Runner.from_cfg(config(tmp_path))
    step = runner.model.train_step
    runner.model.train_step = partial(step)
    runner.model.train_step._torchdynamo_orig_callable = step  # as torch.compile leaves it
    runner.train()
    last = log_of(tmp_path).strip().splitlines()[-1]
    assert 'no resume was tried (a second process would compile the model again)' in last, last


class AddsNoise(Hook):
    """Registered by code: the config does not have it, and a start of the script does."""
    amount = 1e-3

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        next(runner.model.parameters()).data.add_(self.amount)


def test_hooks_that_code_registers_go_along(tmp_path):
    runner = witnessed.Runner.from_cfg(config(tmp_path))
    runner.register_hook(AddsNoise())
    runner.train()
    assert 'resumed by a witness at iterations 4, 8: same bits' in log_of(tmp_path)


def test_objects_that_raise_when_they_are_read_are_left_out(tmp_path):
    class Odd(Hook):
        proxy, masked = Unreadable(), np.ma.masked
        names, bits = {'b', 'a'}, bytearray(b'ab')
        rng = np.random.default_rng(1)

        def __init__(self):
            self.waiting = queue.Queue()
            self.waiting.put('first')

    runner = witnessed.Runner.from_cfg(config(tmp_path))
    runner._train_loop = runner.build_train_loop(runner._train_loop)
    runner.register_hook(Odd())
    runner.seen_by_user = 3
    MessageHub.get_instance('of a user').update_info('seen', 4)
    own = set()
    texts = attribute_texts(runner, own)
    del MessageHub._instance_dict['of a user']
    assert texts['dataset.factor'] == '1.0' and 'Odd.masked' in texts
    # what no list of numbers holds, and what is kept where no checkpoint has it
    assert texts['Odd.names'].startswith('2 items ') and texts['Odd.rng'].startswith('generator ')
    assert texts['Odd.bits'] == "bytearray(b'ab')"
    assert texts['Odd.waiting.queue[0]'] == "'first'"
    assert texts[f'{type(runner).__name__}.seen_by_user'] == '3'
    assert texts["MessageHub of a user['seen']"] == '4'
    assert {'Odd.names', f'{type(runner).__name__}.seen_by_user'} <= own
    assert f'{type(runner).__name__}._hooks' not in texts


def test_numbers_in_predictions_may_be_times():
    predictions = [[dict(scores=torch.ones(2), seconds=seconds, where='a')] for seconds in (1., 2.)]
    assert value_digest(_data_of(predictions[0])) == value_digest(_data_of(predictions[1]))
    predictions[1][0]['scores'][0] = 0
    assert value_digest(_data_of(predictions[0])) != value_digest(_data_of(predictions[1]))


def test_counters_of_schedules_in_an_optimizer_are_no_state_of_a_run(tmp_path):
    seen = {}
    cfg = config(tmp_path, param_scheduler=dict(type='StepLR', step_size=1))
    runner = witnessed.Runner.from_cfg(cfg)
    runner.register_hook(hook_with(after_train=lambda runner: seen.update(attribute_texts(runner))))
    runner.train()
    assert runner.optim_wrapper._global_step > 0
    assert 'optim_wrapper._inner_count' in seen
    assert not [path for path in seen if path.endswith(('_global_step', '_opt_called'))]


class Unpicklable(Hook):
    """Changes weights, and holds what no other process can have."""

    def __init__(self):
        self.lock = threading.Lock()

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter > 5:
            next(runner.model.parameters()).data.add_(1e-3)


@pytest.mark.nightly
def test_a_hook_that_cannot_go_along_is_named_and_ends_no_run(tmp_path):
    runner = witnessed.Runner.from_cfg(config(tmp_path))
    runner.register_hook(Unpicklable())
    runner.train()
    assert 'to the witness, and may be the cause: Unpicklable' in log_of(tmp_path)


def test_a_witness_waits_where_memory_is_short(tmp_path, monkeypatch):
    monkeypatch.setattr(witness, 'free_memory', lambda: 1 << 28)
    train(config(tmp_path))
    assert '0.2 GiB are free on this machine' in log_of(tmp_path).splitlines()[-1]


def test_changes_by_the_script_are_a_warning_and_no_error(tmp_path):
    runner = witnessed.Runner.from_cfg(config(tmp_path))
    runner.model.first.weight.requires_grad_(False)
    runner.train()
    assert 'This run is not what its config trains' in log_of(tmp_path)


@pytest.mark.parametrize('others', [[], [None, 'its process ended with exit code -9']])
def test_nothing_is_said_of_processes_that_were_not_compared(others):
    finding = witness_verdict.Finding('iteration 0, batch.data: 1 and 2', 'batch.data', ('x', ))
    text, certain = witness_verdict.repeated_text(finding, others, 4)
    assert not certain
    assert 'were not compared' in text and ' agree' not in text


def test_how_far_a_sampler_is_ahead_is_no_state_that_is_lost(tmp_path):
    """It depends on the number of workers, of which a witness has another; passes do not."""
    noted = {0: {'sampler.ahead': '1', 'sampler.passes': '1'},
             10: {'sampler.ahead': '4', 'sampler.passes': '3'}}
    (tmp_path / witness_verdict.ATTRIBUTES).write_text(json.dumps(
        witness_verdict.attribute_digests({'sampler.ahead': '8', 'sampler.passes': '1'})))
    assert witness_verdict.not_restored(noted, str(tmp_path), 10, set()) == ['sampler.passes']


def test_verify_repeats_a_run_that_has_ended(base, tmp_path):
    before = sorted((path, path.stat().st_mtime_ns) for path in base.rglob('*'))
    report = verbs.verify_run(str(base))
    assert report.exit_code == 0, str(report)
    assert [row['outcome'] for row in report.data['tries']] == [
        'equal, iterations 0 to 3', 'equal, iterations 4 to 11', 'equal, iterations 8 to 11',
        'no iteration after the checkpoint was noted']
    assert before == sorted((path, path.stat().st_mtime_ns) for path in base.rglob('*'))


def test_verify_finds_what_a_run_has_lost(tmp_path):
    cfg = config(tmp_path, custom_hooks=[dict(type='SetsOnce')])
    cfg.randomness.pop('self_checks')
    train(cfg)
    report = verbs.verify_run(str(tmp_path))
    assert report.exit_code == 1
    assert 'batch.data' in report.verdict


def test_verify_finds_what_reaches_workers_late(tmp_path, monkeypatch):
    monkeypatch.setenv('SCALE', '1')
    cfg = config(tmp_path, train_dataloader=dict(dataset=dict(type='FollowsAVariable')),
                 custom_hooks=[dict(type='SetsTheVariableAhead')])
    cfg.randomness.pop('self_checks')
    train(cfg)
    monkeypatch.setenv('SCALE', '1')
    report = verbs.verify_run(str(tmp_path))
    assert report.exit_code == 1
    assert 'This run depends on the number of workers' in report.verdict
    assert 'with as many as the run, it got the same' in report.verdict


OWN = """
import torch
from mmengine.registry import DATASETS

GAIN = 2.0


@DATASETS.register_module(force=True)
class Edited(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        return dict(x=torch.full((3, ), float(i)) * GAIN)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Return a file of own code with a dataset, which is imported."""
    path = tmp_path / 'edited_while_it_trains.py'
    path.write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module(path.stem)
    yield path
    del sys.modules[path.stem]


class Edits(Hook):
    """Edits a file while the run trains."""

    def __init__(self, path):
        self.path = path

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter == 1:
            path = pathlib.Path(self.path)
            # of another size: Python takes a .pyc for what has its second and size
            path.write_text(path.read_text().replace('2.0', '3.25'))


def edited_run(folder, own, *hooks):
    cfg = config(folder, custom_hooks=[*hooks])
    cfg.train_dataloader.dataset = dict(type='Edited')
    train(cfg)
    return log_of(folder)


def test_code_that_is_edited_while_it_trains_ends_no_run(own, tmp_path):
    HOOKS.register_module(module=Edits, force=True)
    log = edited_run(tmp_path / 'run', own, dict(type='Edits', path=str(own)))
    assert ('a resume at iteration 4 was not compared: code of this run was edited: '
            'edited_while_it_trains.py while it trains') in log.splitlines()[-1]


WRITES = '''
import json, sys
from mmrepro.runs.witness import _write
from mmrepro.selfcheck.witness_process import Start
_write(dict(scratch=sys.argv[1], script=None), Start('', 0, 1, None), '', 0.0, 0.0)
'''


@pytest.mark.nightly
def test_the_text_that_starts_a_witness_is_no_code_of_the_run(tmp_path):
    subprocess.run([sys.executable, '-c', WRITES, str(tmp_path)], check=True, env=environment())
    code = json.loads((tmp_path / 'result.json').read_text())['code']
    assert not [name for name in code if 'started:' in name], code


def test_verify_names_code_that_was_edited_since(own, tmp_path):
    assert 'same bits' in edited_run(tmp_path / 'run', own).splitlines()[-1]
    own.write_text(own.read_text().replace('2.0', '3.25'))
    report = verbs.verify_run(str(tmp_path / 'run'))
    assert report.exit_code == 1
    assert 'code of this run was edited: edited_while_it_trains.py since it' in report.verdict
    assert 'compute it when the dataset is built' not in report.verdict


def test_verify_names_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(RunError, match=r'has no file mmrepro/witness\.json'):
        verbs.verify_run(str(tmp_path))


def test_a_run_of_arguments_is_not_sent_to_a_command_that_has_no_config(tmp_path):
    cfg = config(tmp_path)
    cfg.randomness.self_checks.witness = None
    Runner(**{name: cfg[name] for name in (
        'model', 'train_dataloader', 'train_cfg', 'optim_wrapper', 'randomness', 'work_dir',
        'default_scope')}).train()
    last = log_of(tmp_path).strip().splitlines()[-1]
    assert 'iterations): randomness.self_checks.witness=True tries it; to repeat: start' in last
    with pytest.raises(RunError, match='built again: it was built from arguments, not from'):
        verbs.verify_run(str(tmp_path))


def test_a_resumed_run_is_repeated_from_where_it_began(tmp_path):
    train(config(tmp_path, epochs=2))
    cfg = config(tmp_path, epochs=4)
    cfg.resume = True
    train(cfg)
    last = log_of(tmp_path).strip().splitlines()[-1]
    assert 'the first 4 iterations were repeated by a witness: same bits' in last
    assert 'resumed by a witness at iterations 10, 12: same bits' in last


def test_a_comparison_of_nothing_is_no_success(base):
    lines = str(base / 'mmrepro')
    assert witness_verdict.compare(lines, lines, 4, 12) is None
    with pytest.raises(FingerprintError, match='iteration 12 was not noted, of 4 to 12'):
        witness_verdict.compare(lines, lines, 4, 13)


def test_only_what_samples_leave_is_named_as_left():
    left = {'dataset.first': '1', 'len(dataset.cache)': '2', 'package.module:value': '3'}
    others = {"optim_wrapper.optimizer.state['a:b']": '4', 'train_loop._iter': '5'}
    same = {'dataset.size': '6'}
    assert witness_verdict.left_between(same, {**left, **others, **same}) == [*left]


# --------------------------------------------------------------------------- what may go wrong

def test_a_checkpoint_that_cannot_be_opened_ends_no_run(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    (tmp_path / 'here.pth').touch()
    made = Witness(True, recipe.Recipe('', {}, [], [], '', {}, None, []))
    made.begin(8, 100, '', True, {}, resumed_from='~/here.pth')
    assert not made.notes
    made.close()
    made = Witness(True, recipe.Recipe('', {}, [], [], '', {}, None, []))
    made.begin(8, 100, '', True, {}, resumed_from='~/gone.pth')
    made.saved('/nowhere/iter_9.pth', 9)
    assert made.notes == [f'{path} was not tried: No such file or directory'
                          for path in ('~/gone.pth', '/nowhere/iter_9.pth')]
    # nothing is compared with what begins from the seed instead
    assert made._affordable([], 20, ends=True) == []


def test_a_witness_that_is_not_waited_for_is_not_waited_for_again(monkeypatch):
    made, waited = Witness(True, 'switched off'), []
    made._process = SimpleNamespace(kill=lambda: None)
    monkeypatch.setattr(made, '_wait', lambda *args: waited.append(args) or False)
    made.finish(None, 20)
    assert len(waited) == 1 and made.notes == ['the last witness was not waited for']


@pytest.mark.parametrize('count', [0, 4])
def test_the_loader_of_a_witness_can_be_built(count):
    loader = dict(dataset=[1], num_workers=count)
    if count:
        loader.update(timeout=60, multiprocessing_context='spawn', prefetch_factor=2)
    torch.utils.data.DataLoader(**_other_workers(loader))


def test_a_full_disk_ends_no_run(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(tempfile, 'mkdtemp', full)
    train(config(tmp_path))
    assert 'No space left on device' in log_of(tmp_path).splitlines()[-1]


def test_a_result_that_is_no_json_ends_no_run(tmp_path):
    """A witness whose disk has lost it."""
    (tmp_path / 'resumed').mkdir()
    (tmp_path / 'resumed' / 'result.json').write_text('{\0')
    made, warned = Witness(True, 'switched off'), []
    made._process = process = object.__new__(WitnessProcess)
    process.starts, process.folder = [Start('resumed', 4, 6, 'iter_4.pth')], str(tmp_path)
    process.kill = lambda: None
    made._judge(SimpleNamespace(logger=SimpleNamespace(warning=warned.append)))
    assert 'cannot be read' in warned[0] and made.notes == [warned[0].removeprefix('witness: ')]


class Damages(Hook):
    """Writes over the first lines that the run notes for its witness."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter == 6:
            path, = pathlib.Path(runner.work_dir).rglob('witness.rank0.jsonl')
            with path.open('r+b') as file:
                file.write(b'{' * 200)


def test_damaged_notes_end_no_run(tmp_path):
    HOOKS.register_module(module=Damages, force=True)
    train(config(tmp_path, custom_hooks=[dict(type='Damages')]))
    last = log_of(tmp_path).splitlines()[-1]
    assert 'witness.rank0.jsonl' in last and 'same bits' not in last


def test_a_witness_that_is_killed_ends_no_run(tmp_path, monkeypatch):
    started = WitnessProcess.__init__

    def killed(self, *args, **kwargs):
        started(self, *args, **kwargs)
        os.killpg(self._process.pid, signal.SIGKILL)
    monkeypatch.setattr(WitnessProcess, '__init__', killed)
    train(config(tmp_path))
    assert 'its process ended with exit code -9' in log_of(tmp_path).splitlines()[-1]


def test_a_run_that_ignores_its_children_has_a_witness(tmp_path):
    def job():
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        return _in_fork(lambda: os._exit(3), lambda: False, str(tmp_path))

    assert Child(job).result(60) == 3


class KillsItself(Hook):
    """Ends the process of a witness, as the system does where memory is short."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if 'MMREPRO_WITNESS' in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_training_of_a_witness_that_is_killed_is_said_to_be(tmp_path):
    HOOKS.register_module(module=KillsItself, force=True)
    train(config(tmp_path, custom_hooks=[dict(type='KillsItself')]))
    assert 'its process was ended: killed by SIGKILL' in log_of(tmp_path).splitlines()[-1]


def test_imports_are_paid_once_for_all_checkpoints_of_a_process(monkeypatch):
    monkeypatch.setattr(witness, 'FREE_SECONDS', 20.0)
    made = Witness(None, recipe.Recipe('', {}, [], [], '', {}, None, []))
    made.begin(0, 60, '', True, {})
    result = witness_process.Result('resumed10_0', 'no lines', '', seconds=1.5, imports=6.0)
    made._process = SimpleNamespace(results=lambda: [result], kill=lambda: None,
                                    starts=[Start('resumed10_0', 10, 12, 'path')])
    made._judge(SimpleNamespace(logger=SimpleNamespace(warning=lambda text: None)))
    # 20 seconds, less 7.5 that were spent and 6 for the imports, are four trainings
    waiting = [witness_process.Saved(10 * number, '', None) for number in range(6)]
    # the repetition and the newest, where shows what hooks do in an epoch, come before others
    assert [start.begin for start in made._affordable(waiting, 60, ends=True)] == [0, 50, 0, 10]
    # time for one more is left while the run trains
    assert made._affordable(waiting, 60, ends=False) == []


SCRIPT = """
import os, sys
import witnessed
from mmrepro.selfcheck.witness_process import WitnessProcess
ended = WitnessProcess.ended
def shown(self):
    if os.path.exists(os.path.join(self.folder, 'output.txt')):
        print(self._process.pid, flush=True)
    return ended(self)
WitnessProcess.ended = shown
witnessed.train(witnessed.config(sys.argv[1]))
"""


@pytest.mark.nightly
def test_a_witness_ends_with_the_run_that_is_killed(tmp_path):
    scratch = tmp_path / 'scratch'
    scratch.mkdir()
    run = subprocess.Popen(
        [sys.executable, '-c', SCRIPT, str(tmp_path / 'run')], stdout=subprocess.PIPE, text=True,
        env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path), 'TMPDIR': str(scratch)})
    lines = iter(run.stdout.readline, '')
    pid = next(int(line) for line in lines if line.strip().isdigit())
    run.kill()
    run.wait()
    run.stdout.close()
    while os.path.exists(f'/proc/{pid}') and _state(pid) != 'Z':
        time.sleep(0.1)
    assert not [*scratch.glob('mmrepro-*')]  # it was importing, and has not trained on to its end


# a shell keeps the witness from beginning until its run has ended
LATE = """
import subprocess, sys
import witnessed
from mmrepro.selfcheck import witness_process
start = subprocess.Popen
def late(line, **options):
    if line[1:3] != ['-c', witness_process.COMMAND]:
        return start(line, **options)
    waits = 'while kill -0 $PPID; do sleep 0.1; done 2> /dev/null; exec "$@"'
    process = start(['bash', '-c', waits, 'bash', *line], **options)
    print(process.pid, flush=True)
    return process
witness_process.subprocess.Popen = late
witnessed.train(witnessed.config(sys.argv[1]))
"""


def test_a_witness_that_begins_when_its_run_has_been_killed_ends(tmp_path):
    run = subprocess.Popen(
        [sys.executable, '-c', LATE, str(tmp_path / 'run')], stdout=subprocess.PIPE, text=True,
        env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path), 'TMPDIR': str(tmp_path)})
    pid = next(int(line) for line in iter(run.stdout.readline, '') if line.strip().isdigit())
    run.kill()
    run.wait()
    run.stdout.close()
    while os.path.exists(f'/proc/{pid}') and _state(pid) != 'Z':
        time.sleep(0.1)
    assert not [*tmp_path.glob('mmrepro-*')]


def _state(pid):
    try:
        with open(f'/proc/{pid}/stat') as file:
            return file.read().rpartition(')')[2].split()[0]
    except FileNotFoundError:
        return 'Z'


@pytest.mark.parametrize('free, said', [
    (1 << 30, 'its process ended with exit code 1: OSError: '), (0, 'no room is left in ')])
def test_a_process_without_a_result_is_explained_in_a_short_text(free, said, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, 'disk_usage', lambda folder: SimpleNamespace(free=free))
    process = WitnessProcess.__new__(WitnessProcess)
    process.starts, process.folder = [Start('repeated', 0, 4, None)], str(tmp_path)
    process._process = SimpleNamespace(returncode=1)
    (tmp_path / 'output.txt').write_text('OSError: ' + 'System environment ' * 1000)
    result, = process.results()
    assert result.error.startswith(said) and len(result.error) < 300


def _budgeted(mode, seconds, set_up):
    """Return a witness behind 100 of 10,000 iterations of so many ``seconds``."""
    made = Witness(mode, recipe.Recipe('', {}, [], [], '', {}, None, []))
    made.begin(0, 10_000, '', True, {})
    made._clock, made._set_up = time.process_time() - 100 * seconds, set_up
    return made


def _tries(mode, seconds, set_up):
    saved = witness_process.Saved(10, 'path', None)
    made = _budgeted(mode, seconds, set_up)
    return [start.name for start in made._affordable([saved], 100, ends=True)]


def test_the_time_of_witnesses_is_bounded(monkeypatch):
    monkeypatch.setattr(witness, 'FREE_SECONDS', 20.0)
    assert _tries(None, 0.001, 1) == ['repeated', 'resumed10_0']
    assert _tries(None, 0.001, 10) == ['resumed10_0']
    assert _tries(None, 0.001, 30) == []
    assert _tries(None, 0.6, 30) == ['repeated', 'resumed10_0']  # 1 % of 6,000 seconds
    assert _tries(True, 0.001, 30) == ['repeated', 'resumed10_0']


def test_the_end_of_a_long_run_is_no_short_run():
    made = _budgeted(None, 1, 1)
    made.begin(36, 72, '', True, {})
    assert '(what was left of the run is shorter than 50 iterations)' in made.summary('W')


@pytest.mark.parametrize('set_up, said', [
    (1, ''), (30, 'not repeated, for lack of memory or to stay within 1% of the time')])
def test_what_there_was_no_time_for_while_the_run_trained_is_repeated_at_its_end(
        set_up, said, monkeypatch):
    """A run whose checkpoints have all been tried has its first iterations repeated, or says so."""
    monkeypatch.setattr(witness, 'FREE_SECONDS', 20.0)
    made, started = _budgeted(None, 0.001, set_up), []
    made.resumed = [10]
    monkeypatch.setattr(made, '_has_memory', lambda runner, ends: True)
    monkeypatch.setattr(made, '_started', lambda runner, starts, quiet: started.append(starts))
    made.advance(None, 100, ends=True)
    made.advance(None, 100, ends=True)
    assert [start.name for starts in started for start in starts] == ['repeated'] * (not said)
    assert said in made.summary('W') and ('not repeated' in made.summary('W')) == bool(said)


@pytest.mark.parametrize('group, files, free', [
    ('0::/job/step\n', {'job/memory.max': '1000', 'job/memory.current': '400',
                        'job/memory.stat': 'anon 1\ninactive_file 100\n',
                        'job/step/memory.max': 'max', 'job/step/memory.current': '300',
                        'job/step/memory.stat': 'inactive_file 0\n'}, [700]),
    ('2:cpu,memory:/job\n0::/\n', {
        'memory/job/memory.limit_in_bytes': '1000', 'memory/job/memory.usage_in_bytes': '900',
        'memory/job/memory.stat': 'total_inactive_file 50\n', 'memory.max': '9'}, [150]),
    ('3:cpuset:/\n', {}, [])])
def test_memory_is_that_of_the_control_groups_too(tmp_path, group, files, free):
    for name, text in {'proc/self/cgroup': group, **{
            f'sys/fs/cgroup/{name}': text for name, text in files.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert [*witness_process.free_in_groups(str(tmp_path))] == free


def test_few_checkpoints_wait_for_memory(tmp_path):
    made = Witness(None, recipe.Recipe('', {}, [], [], '', {}, None, []))
    made.begin(0, 10_000, '', True, {})
    made._clock -= 1000  # no short run, in which they wait for its end
    noted = []
    for number in range(1, 65):
        (tmp_path / f'{number}.pth').touch()
        if made.saved(str(tmp_path / f'{number}.pth'), 20 * number):
            noted.append(number)
    assert [saved.iteration for saved in made._waiting] == [20, 640, 1280]
    assert noted == [1, 2, 4, 8, 16, 32, 64]  # attributes are looked for before these only
    assert made.saved(str(tmp_path / '1.pth'), 9990)  # no other follows
    made.close()
    assert ('checkpoints left out, for lack of memory or to stay within 1% of the time: 4'
            in made.summary(''))
