"""SIGTERM and SIGUSR1: a checkpoint at the end of the iteration, exit code 75, and nothing lost."""
import multiprocessing
import os
import resource
import signal
import threading

import pytest
from harness import Child
from mmengine.runner import Runner
from preempted_runs import Signals, run, settings
from small_runs import hook_with

from mmrepro import determinism
from mmrepro.errors import ConfigError
from mmrepro.run.hooks import PreemptHook

pytestmark = [pytest.mark.filterwarnings('ignore'),
              pytest.mark.usefixtures('workers_end_soon', 'no_pause_between_passes')]


LOOPS = {
    'epochs': {},
    'iterations': {'train_cfg': dict(by_epoch=False, max_iters=12, val_interval=4),
                   'train_dataloader.sampler.type': 'InfiniteSampler'},
}


@pytest.mark.parametrize('loop', LOOPS)
def test_at_every_turn_nothing_is_lost(loop, tmp_path):
    """In an epoch, at its end, in a validation, in a cycle of gradient accumulation."""
    whole, _ = run(settings(tmp_path / 'whole', **LOOPS[loop]))
    assert whole.events == 12 + 3 * 3
    for event in range(whole.events):
        cfg = settings(tmp_path / str(event), **LOOPS[loop])
        number = signal.SIGUSR1 if event % 2 else signal.SIGTERM
        first, preempted = run(cfg, hook=Signals(event, [number]))
        second, rest = run(cfg, resume=True)
        assert preempted.code == 75 and rest is None
        assert first.events == event + 1, 'it left in the same event'
        iterations = [key for key in second.records if key[0] == 'loss']
        assert len(iterations) == 12 - preempted.iteration, 'no iteration twice'
        assert {**first.records, **second.records} == whole.records, f'signal in event {event}'


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    return run(settings(tmp_path_factory.mktemp('whole')))[0].records


def test_again_and_again(whole, tmp_path):
    found, preempted, resume = {}, True, False
    while preempted:
        hook, preempted = run(settings(tmp_path / 'pieces'), resume, Signals(3))
        found.update(hook.records)
        resume = True
    assert found == whole
    assert sorted(p.name for p in (tmp_path / 'pieces').glob('[!.]*.pth')) == ['preempted.pth']
    assert (tmp_path / 'pieces' / 'last_checkpoint').read_text().endswith('/preempted.pth')
    assert not list((tmp_path / 'pieces').glob('*partial'))


@pytest.mark.parametrize('randomness, event, refused', [
    (dict(seed=1), 1, False), (dict(seed=1, worker_seed='worker'), 1, True),
    (dict(seed=1, worker_seed='worker', resume_strict=False), 1, False),
    (dict(seed=1, worker_seed='mmengine'), 1, True)])
def test_that_a_resume_will_be_refused_is_said_when_the_run_leaves(randomness, event, refused,
                                                                   tmp_path, caplog):
    cfg = settings(tmp_path, log_level='WARNING')
    cfg.randomness = randomness
    with caplog.at_level('WARNING'):
        run(cfg, hook=Signals(event))
    log = ''.join(path.read_text() for path in tmp_path.glob('*/*.log'))
    assert ('continue with --resume. Leaving' in log) is not refused
    assert (f"--resume will refuse it with worker_seed={randomness.get('worker_seed')!r}" in log) \
        is refused


class Impatient(Signals):
    """More signals while the checkpoint is written, which do nothing."""

    def before_save_checkpoint(self, runner, checkpoint):
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)


class Early(Signals):
    """A signal before the first iteration, which is kept."""

    def before_train(self, runner):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize('kind, event, iteration', [(Impatient, 7, 5), (Early, None, 1)])
def test_signals_at_other_moments_lose_nothing(kind, event, iteration, whole, tmp_path):
    first, preempted = run(settings(tmp_path), hook=kind(event))
    second, _ = run(settings(tmp_path), resume=True)
    assert preempted.iteration == iteration
    assert {**first.records, **second.records} == whole


@pytest.mark.parametrize('end', ['done', 'pre-empted', 'error'])
def test_handlers_are_what_they_were(end, tmp_path):
    class Fails(Signals):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            raise ZeroDivisionError

    def own(number, frame):
        pass

    hooks = {'done': Signals(), 'pre-empted': Signals(2), 'error': Fails()}
    hook = hooks[end]
    before = signal.signal(signal.SIGTERM, own), signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        if end == 'error':
            with pytest.raises(ZeroDivisionError):
                run(settings(tmp_path), hook=hook)
        else:
            run(settings(tmp_path), hook=hook)
        assert signal.getsignal(signal.SIGTERM) is own
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before[0]), signal.signal(signal.SIGUSR1, before[1])
    assert not [t for t in threading.enumerate() if t.name == 'mmrepro stop']


def test_an_interrupt_from_the_keyboard_is_one(tmp_path):
    # a process of pytest-xdist takes no notice of it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        run(settings(tmp_path), hook=Signals(3, [signal.SIGINT]))
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize('loop', ['val', 'test'])
def test_a_validation_or_test_alone_ends_on_a_signal_at_once(tmp_path, loop):
    """The handlers are those of before while it runs, and behind it."""
    before, seen = signal.getsignal(signal.SIGTERM), []

    def look(*args, **kwargs):
        seen.append(signal.getsignal(signal.SIGTERM))

    cfg = settings(tmp_path)
    cfg.test_dataloader, cfg.test_evaluator, cfg.test_cfg = (
        cfg.val_dataloader, cfg.val_evaluator, {})
    runner = Runner.from_cfg(cfg)
    runner.register_hook(hook_with(after_val_iter=look, after_test_iter=look))
    getattr(runner, loop)()
    assert set(seen) == {before} == {signal.getsignal(signal.SIGTERM)}


def test_in_another_thread_signals_are_left_alone(tmp_path):
    before, seen = signal.getsignal(signal.SIGTERM), []

    class Looks(Signals):
        def after_train_iter(self, *args, **kwargs):
            super().after_train_iter(*args, **kwargs)
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=lambda: (
        run(settings(tmp_path), False, Looks()), determinism.disable()))
    thread.start()
    thread.join()
    assert len(seen) == 12 and set(seen) == {before}


@pytest.mark.parametrize('signals, number, code', [
    (('SIGUSR2', ), signal.SIGUSR2, 3), ((), signal.SIGUSR1, None)])
def test_a_hook_of_the_config_replaces_ours_or_turns_it_off(signals, number, code, tmp_path):
    cfg = settings(tmp_path)
    cfg.custom_hooks.append(dict(type='PreemptHook', signals=signals, exit_code=3))
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        hook, preempted = run(cfg, hook=Signals(1, [number]))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (preempted and preempted.code) == code and (code or hook.events == 21)


@pytest.mark.parametrize('name', ['SIGKILL', 'SIGINT', 'TERM'])
def test_signals_that_cannot_announce_an_end_are_refused(name):
    with pytest.raises(ValueError, match=f"{name!r} cannot announce an end"):
        PreemptHook(signals=(name, ))


@pytest.mark.parametrize('interval', ['2', 0, 1.5, True])
def test_intervals_that_count_no_iterations_are_refused(interval):
    with pytest.raises(ConfigError, match=f'interval={interval!r}.: allowed are 1, 2, ... or None'):
        PreemptHook(interval=interval)


def as_leader(function, *args):
    """In a process group of its own, as jobs of schedulers are."""
    os.setsid()
    return function(*args)


def signal_everybody(pid, number):
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    os.killpg(0, number)
    for worker in workers:  # still there, and at work
        assert worker.is_alive()


def signal_workers(pid, number):
    for worker in multiprocessing.active_children():
        os.kill(worker.pid, number)


def signalled(cfg, resume=False, at=None, send=signal_everybody,
              numbers=(signal.SIGUSR1, signal.SIGTERM)):
    hook, preempted = run(cfg, resume, Signals(at, numbers, send))
    return hook.records, preempted and preempted.iteration


@pytest.mark.parametrize('persistent', [False, True])
def test_workers_outlive_a_signal_to_all(persistent, whole, tmp_path):
    cfg = settings(tmp_path / 'cut', **{'train_dataloader.num_workers': 2,
                                        'train_dataloader.persistent_workers': persistent})
    first, iteration = Child(as_leader, signalled, cfg, False, 8).result()
    second, _ = Child(as_leader, signalled, cfg, True).result()
    assert iteration == 6 and {**first, **second} == whole


def test_workers_leave_signals_to_the_trainer(whole, tmp_path):
    """All later epochs need them."""
    cfg = settings(tmp_path / 'signalled', **{'train_dataloader.num_workers': 2,
                                              'train_dataloader.persistent_workers': True})
    numbers = signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2
    assert Child(signalled, cfg, False, 1, signal_workers, numbers).result() == (whole, None)


class FullDisk(Signals):
    """From some iteration on no file of this process may grow beyond 4000 bytes."""

    def __init__(self, iteration, at=None):
        super().__init__(at)
        self.iteration = iteration

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == self.iteration:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))


@pytest.mark.parametrize('signal_in_turn', [None, 12], ids=['checkpoint', 'pre-emption'])
def test_a_full_disk_loses_nothing_and_is_named(signal_in_turn, whole, tmp_path):
    interval = 100 if signal_in_turn else 1
    cfg = settings(tmp_path / 'full', **{'default_hooks.checkpoint': dict(
        type='CheckpointHook', by_epoch=False, interval=interval, max_keep_ckpts=1)})
    if signal_in_turn:  # an older checkpoint, from an earlier pre-emption
        run(cfg, hook=Signals(2))
    with pytest.raises(RuntimeError, match='File too large'):
        Child(lambda: run(cfg, hook=FullDisk(6, signal_in_turn)) and None).result()
    found, _ = run(cfg, resume=True)
    first = min(iteration for kind, iteration in found.records if kind == 'loss')
    assert first == (3 if signal_in_turn else 6), 'from the last good checkpoint on'
    assert found.records.items() <= whole.items()
    assert not list((tmp_path / 'full').glob('.*.partial'))
