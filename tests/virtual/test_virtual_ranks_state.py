"""What belongs to a process, and what a rank reads of it: the same on any number of processes."""
import contextvars
import copy
import functools
import io
import os
import queue
import signal
import threading
import time
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from demo_runs import changed
from faults import tiny as tiny_run
from harness import Child
from mmengine.dataset import pseudo_collate
from mmengine.dist import get_world_size, is_main_process
from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.registry import DATASETS, HOOKS
from mmengine.runner import Runner
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader
from virtual_processes import alone, same_for_every_number
from virtual_runs import run

from mmrepro import on_virtual_ranks
from mmrepro.data import generators
from mmrepro.distributed import scheduler
from mmrepro.distributed.scheduler import LAUNCHED
from mmrepro.errors import AgreementError, RandomnessError, VirtualRanksError
from mmrepro.objects.digests import state_digest
from mmrepro.virtual.entry import refuse_cached_ranks
from mmrepro.virtual.gradients import VirtualDataParallel


@pytest.fixture
def cfg(tmp_path):
    cfg = tiny_run.tiny(tmp_path)
    cfg.train_dataloader.batch_size = 1
    cfg.train_cfg.max_epochs = 1
    return cfg


def told():
    return {name: os.environ.get(name) for name in LAUNCHED}


def told_around_a_barrier():
    before = told()
    dist.barrier()
    group = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        dist.barrier(group)
    assert told() == before
    return before


def test_the_environment_tells_the_virtual_rank():
    found = same_for_every_number(told_around_a_barrier, 3)
    assert found == [dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE='3',
                          LOCAL_WORLD_SIZE='3') for rank in range(3)]


@pytest.mark.parametrize('before', [{}, dict(RANK='0', WORLD_SIZE='1', LOCAL_RANK='7')])
def test_the_environment_is_as_before_after_the_run(before, monkeypatch):
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    alone(dist.barrier, 2)
    assert {name: value for name, value in told().items() if value is not None} == before


def logs(directory):
    """As on a machine with one GPU, where LOCAL_RANK is no number of a device."""
    with mock.patch('torch.cuda.is_available', lambda: True), \
            mock.patch('torch.cuda.device_count', lambda: 1), \
            mock.patch('torch.cuda.current_device', lambda: 0):
        MMLogger('log', log_file=f'{directory}/log.txt', distributed=True)


def test_more_ranks_than_devices_have_logs(tmp_path, monkeypatch):
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    alone(functools.partial(logs, tmp_path), 3)
    assert len(list(tmp_path.iterdir())) == 3
    assert all('_device0_rank' in path.name for path in tmp_path.iterdir())


def types_around_a_sum():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if dist.get_rank() % 2 else before)
    try:
        dist.all_reduce(torch.ones(1, dtype=torch.float32))
        return str(torch.tensor(.1).dtype)
    finally:
        torch.set_default_dtype(before)


def test_each_rank_has_its_default_dtype():
    found = same_for_every_number(types_around_a_sum, 3, (1, 2, 3))
    assert found == ['torch.float32', 'torch.float64', 'torch.float32']
    assert torch.get_default_dtype() is torch.float32


VARIABLE = contextvars.ContextVar('a variable of the test', default='at first')


def of_the_thread():
    dist.barrier()
    return (np.geterr()['over'], VARIABLE.get(), torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(), str(torch.empty(0).device))


@pytest.mark.parametrize('mode, gradients', [
    (torch.enable_grad, (True, False)), (torch.no_grad, (False, False)),
    (torch.inference_mode, (False, True))])
def test_each_rank_begins_with_what_holds_for_the_thread_that_begins(mode, gradients):
    token = VARIABLE.set('changed')
    try:
        with np.errstate(over='raise'), mode(), torch.device('cpu'):
            torch.set_default_device('meta')
            found = alone(of_the_thread, 3)
    finally:
        torch.set_default_device(None)
        VARIABLE.reset(token)
    assert found == [('raise', 'changed', *gradients, 'meta')] * 3


def test_autocast_around_the_ranks_is_refused():
    with torch.autocast('cpu', torch.bfloat16), \
            pytest.raises(VirtualRanksError, match='inside of torch.autocast'):
        alone(dist.barrier, 2)


def changed_in_a_block():
    """Meet in the block, and tell what other ranks have in theirs."""
    found = []

    def look():
        found.append((
            torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cudnn.benchmark, torch.backends.mkldnn.enabled,
            torch.get_deterministic_debug_mode(), warnings.filters[0][0] == 'error'))

    rank = dist.get_rank()
    dist.barrier()  # all ranks have begun
    before = torch.get_deterministic_debug_mode()
    look()
    if rank == 1:
        look()
        dist.barrier()
        look()
        return found
    with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(benchmark=True), \
            torch.backends.mkldnn.flags(enabled=False), warnings.catch_warnings():
        torch.set_deterministic_debug_mode(1)
        warnings.simplefilter('error')
        dist.barrier()
        look()
        torch.set_deterministic_debug_mode(before)
    look()
    return found


def test_what_a_block_changes_counts_in_that_rank_alone():
    found = same_for_every_number(changed_in_a_block, 3, (1, 2, 3))
    outside, inside, after = found[0]
    assert inside == (False, True, True, False, 1, True) and after == outside
    assert found == [[outside, inside, outside], [outside] * 3, [outside, inside, outside]]


def test_flags_that_a_rank_has_set_before_others_begin_are_theirs():
    """As a module that the first rank imports, and no other one."""
    before = torch.backends.mkldnn.deterministic

    def main():
        if dist.get_rank() == 0:
            torch.backends.mkldnn.deterministic = True
        dist.barrier()
        return torch.backends.mkldnn.deterministic

    try:
        assert alone(main, 3) == [True] * 3
    finally:
        torch.backends.mkldnn.deterministic = before


def test_flags_that_differ_when_the_training_begins_are_named(cfg):
    def main():
        runner = Runner.from_cfg(cfg)
        if dist.get_rank() == 1:
            torch.backends.cuda.enable_math_sdp(False)
        try:
            runner.train()
        finally:
            torch.backends.cuda.enable_math_sdp(True)

    with pytest.raises(AgreementError, match='rank 1: torch.backends.cuda.math_sdp_enabled'):
        alone(main, 2)


def by_attribute():
    return dist.get_rank() + 1


def by_variable():
    return os.environ['LOCAL_RANK']


def by_getenv():
    return int(os.getenv('RANK', '0'))


def inside():
    return [is_main_process() for _ in range(1)]


def same_on_all():
    return get_world_size(), os.environ.get('WORLD_SIZE')


CACHED = {by_attribute: 'test_virtual_ranks_state.by_attribute reads get_rank',
          by_variable: 'by_variable reads LOCAL_RANK', by_getenv: 'by_getenv reads RANK',
          inside: 'inside reads is_main_process',
          dist.get_rank: 'distributed_c10d.get_rank reads get_rank', same_on_all: 'None'}


def _begin_with_cache(function, cfg=None, ranks=2):
    cache = functools.lru_cache(maxsize=None)(function)
    begin = refuse_cached_ranks if cfg is None else lambda: Runner.from_cfg(cfg).train()
    try:
        on_virtual_ranks(ranks, begin)
    except RandomnessError as error:
        return str(error)
    finally:
        del cache


@pytest.mark.parametrize('function', CACHED, ids=lambda one: one.__name__)
def test_a_cached_rank_is_refused_by_name_and_what_all_ranks_read_is_allowed(function):
    assert CACHED[function] in str(Child(_begin_with_cache, function).result())
    assert Child(_begin_with_cache, function, ranks=None).result() is None, 'no virtual ranks'


def test_a_training_refuses_a_cached_rank(cfg):
    found = changed(cfg, lambda cfg: cfg.randomness.update(virtual_ranks=2))
    assert 'by_attribute reads get_rank' in Child(_begin_with_cache, by_attribute, found).result()
    assert Child(_begin_with_cache, same_on_all, found).result() is None


@HOOKS.register_module(force=True)
class AverageOfClass(Hook):
    """Steps as far as an average says that all hooks of its class share, in a process."""
    average = 1.

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        cls = type(self)
        cls.average = cls.last = .8 * cls.average + .2 * float(outputs['loss'].detach())
        for group in runner.optim_wrapper.param_groups:
            group['lr'] = .02 * cls.last


def test_each_rank_has_the_attributes_of_a_class_to_itself(cfg, tmp_path):
    cfg.train_cfg.max_epochs = 2
    cfg.custom_hooks = [dict(type='AverageOfClass')]
    cfg.randomness.virtual_ranks = dict(memory='separate')  # its rates differ between the ranks
    assert run(cfg, 3, 2, tmp_path / '2') == run(cfg, 3, 1, tmp_path / '1')
    alone(lambda: scheduler.isolate_class_attributes([AverageOfClass()]), 2)
    assert not scheduler._classes


def rebound():
    scheduler.isolate_class_attributes([AverageOfClass()])
    if dist.get_rank():
        AverageOfClass.average, AverageOfClass.extra = dist.get_rank(), 1
    dist.barrier()
    return AverageOfClass.average, hasattr(AverageOfClass, 'extra')


def test_attributes_of_a_class_are_as_before_after_the_run():
    assert same_for_every_number(rebound, 3) == [(1., False), (1, True), (2, True)]
    assert (AverageOfClass.average, hasattr(AverageOfClass, 'extra')) == (1., False)


def loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {'deepcopy': copy.deepcopy, 'torch.save': loaded}


def step_of_a_copy(way):
    torch.manual_seed(dist.get_rank())
    model = VirtualDataParallel(nn.Linear(3, 2))
    other = COPIES[way](model)
    other(torch.randn(4, 3)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert all(one.grad is None for one in model.parameters())
    return state_digest(model.state_dict()), state_digest(other.state_dict())


@pytest.mark.parametrize('way', COPIES)
def test_a_copy_of_the_wrapped_model_trains_by_itself(way):
    found = same_for_every_number(functools.partial(step_of_a_copy, way), 3)
    (model, other), = set(found)  # the ranks of a copy average as well
    assert model != other


@HOOKS.register_module(force=True)
class CopiesModel(Hook):
    def __init__(self, way):
        self.way = way

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        other = COPIES[self.way](runner.model)
        assert state_digest(other.state_dict()) == state_digest(runner.model.state_dict())
        assert runner.model.sharing is not None
        with torch.no_grad():
            for tensor in other.state_dict().values():
                tensor.zero_()


@pytest.mark.parametrize('way', COPIES)
def test_a_copy_has_no_memory_of_shared_weights(way, cfg, tmp_path):
    expected = run(cfg, 2, 1, tmp_path / 'none')
    cfg.custom_hooks = [dict(type='CopiesModel', way=way)]
    assert run(cfg, 2, 1, tmp_path / 'copies') == expected


def adds_in_a_thread():
    number = torch.ones(1)
    thread = threading.Thread(target=dist.all_reduce, args=(number, ), name='adds')
    thread.start()
    thread.join()
    dist.barrier()


@pytest.mark.filterwarnings('ignore::pytest.PytestUnhandledThreadExceptionWarning')
def test_a_collective_operation_in_another_thread_ends_the_run():
    with pytest.raises(RuntimeError, match="the thread 'adds' is not the thread of a virtual rank"):
        alone(adds_in_a_thread, 2)


class Ahead(threading.Thread):
    """Loads ahead; who waits for it waits forever when it ends with an error."""

    def __init__(self, batches):
        super().__init__(name='ahead', daemon=True)
        self.batches, self.queue = batches, queue.Queue(3)
        self.start()

    def run(self):
        for batch in self.batches:
            self.queue.put(batch)
        self.queue.put(None)

    def __iter__(self):
        return iter(self.queue.get, None)


class LoaderAhead(DataLoader):
    def __iter__(self):
        return iter(Ahead(super().__iter__()))


def _loads_ahead(cfg, ranks=None):
    def main():
        settings = {key: copy.deepcopy(cfg[key]) for key in (
            'model', 'work_dir', 'train_cfg', 'optim_wrapper', 'randomness', 'experiment_name')}
        data = DATASETS.build(cfg.train_dataloader.dataset)
        Runner(**settings, train_dataloader=LoaderAhead(data, collate_fn=pseudo_collate)).train()

    try:
        return on_virtual_ranks(ranks, main)
    except RandomnessError as error:
        return str(error)


@pytest.mark.parametrize('ranks', [None, 2])
def test_a_thread_that_loads_ends_the_training(ranks, cfg):
    found = Child(_loads_ahead, cfg, ranks).result()
    assert "the thread 'ahead' " in found and 'in the process that trains' in found
    assert 'wait forever' not in found


def _trains_in_a_thread(cfg):
    """Return what the loading thread says; nothing can wake a thread that is not the main one."""
    said = queue.Queue()
    threading.excepthook = lambda what: said.put(str(what.exc_value))
    threading.Thread(target=_loads_ahead, args=(cfg, ), daemon=True).start()
    return said.get(timeout=50)


def test_where_the_training_cannot_be_interrupted_the_error_says_so(cfg):
    found = Child(_trains_in_a_thread, cfg).result()
    assert "the thread 'ahead' " in found and 'may now wait forever' in found


def _with_a_handler_of_its_own():
    own = signal.signal(signal.SIGURG, lambda *_: None), signal.getsignal(signal.SIGURG)
    generators.claim_for_this_thread()
    return signal.getsignal(signal.SIGURG) is own[1]


def test_an_interruption_behind_the_end_of_the_first_rank_ends_the_others():
    ended = []

    def main():
        if dist.get_rank() == 1:  # the main thread waits for this one
            # the system may give it to any thread; handlers run in the main one
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            own, end = scheduler.current(), time.monotonic() + 20
            while own.failed is None and time.monotonic() < end:
                time.sleep(0.01)
            own.wait(lambda: True, 'the test')
            ended.append('as if nothing had happened')

    # a process that was started in the background ignores the signal
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            on_virtual_ranks(2, main)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert not ended
    assert not [thread for thread in threading.enumerate() if 'virtual' in thread.name]


def test_a_handler_of_the_user_stays():
    assert Child(_with_a_handler_of_its_own).result()


def _takes_turns(turns):
    generators.claim_for_this_thread(turns=turns)
    dist.barrier()
    generators.check_thread('loads samples')


def test_virtual_ranks_take_turns():
    alone(functools.partial(_takes_turns, True), 3)
    with pytest.raises(RandomnessError, match="the thread .* loads samples"):
        alone(functools.partial(_takes_turns, False), 3)
