"""A rank that has ended is named by those that wait for it, within seconds, with its reason."""
import multiprocessing
import os
import re
import signal
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from children import LIMIT
from harness import ROOT, Child
from torch.distributed import distributed_c10d as c10d

from mmrepro import on_virtual_ranks
from mmrepro.distributed import agreement, lost_ranks
from mmrepro.distributed.agreement import agree
from mmrepro.distributed.control import GlooControl
from mmrepro.distributed.lost_ranks import naming_lost_ranks
from mmrepro.errors import RankEnded

pytestmark = pytest.mark.filterwarnings('ignore')

SECONDS = 2  # the timeout of a group in which a rank does not come
KILLED = r'was killed or has crashed \(process \d+ on '


class Planted(Exception):
    pass


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise Planted('here')


def leave():
    sys.exit('here')


def of_rank(rank, world, ports, story, *args):
    """Run a process that returns the error that its story ends with."""
    os.environ.update(GLOO_SOCKET_IFNAME='lo')
    store = dist.TCPStore('127.0.0.1', ports.get(), is_master=False)
    dist.init_process_group('gloo', store=store, rank=rank, world_size=world,
                            timeout=timedelta(seconds=SECONDS) if story is unanswered else None)
    try:
        return story(rank, *args)
    except (RankEnded, Planted, SystemExit) as error:
        return f'{type(error).__name__}: {error}'


def on_ranks(world, story, *args, killed=None):
    """Return what each rank returned; None of the killed one. The store outlives all ranks."""
    ports = multiprocessing.get_context('fork').SimpleQueue()
    children = [Child(of_rank, rank, world, ports, story, *args) for rank in range(world)]
    # when all are forked: its thread locks libc's resolver, and a fork would keep the lock
    store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    for _ in children:
        ports.put(store.port)
    if killed is not None:
        children[killed].process.join(LIMIT)
        assert children[killed].process.exitcode == -signal.SIGKILL
    return [None if rank == killed else child.result() for rank, child in enumerate(children)]


def named(rank, ending, how):
    with naming_lost_ranks(f'rank {rank}'):
        agree('start', 0, max)
        if rank == ending:
            how()
        agree('checkpoint', 0, max)


@pytest.mark.parametrize('ending', [0, 1])
@pytest.mark.parametrize('how, text, own', [
    (kill, KILLED, None), (fail, 'has ended with Planted: here\n', 'Planted: here'),
    (leave, 'has ended with SystemExit: here\n', 'SystemExit: here')],
    ids=['killed', 'error', 'exit'])
def test_a_rank_that_has_ended_is_named_with_its_reason(ending, how, text, own):
    found = on_ranks(3, named, ending, how, killed=ending if how is kill else None)
    assert found.pop(ending) == own
    for said in found:
        assert re.match(f'RankEnded: rank {ending} {text}', said), said


def in_a_container(rank, killed, namespaces):
    lost_ranks._pid_namespace = lambda: namespaces[rank]  # of this process, and of no other
    return named(rank, killed, kill)


@pytest.mark.parametrize('namespaces, said', [
    (['a', 'a'], KILLED), (['a', 'b'], r'has not answered within 5 s \(process \d+ on')])
def test_processes_are_looked_for_where_their_numbers_count(namespaces, said):
    """Containers may share the name of their host and not its processes."""
    found, _ = on_ranks(2, in_a_container, 1, namespaces, killed=1)
    assert re.match(f'RankEnded: rank 1 {said}', found), found


def test_an_earlier_block_does_not_count():
    """A process group that lost nobody in one block may lose somebody in the next."""
    def story(rank):
        with naming_lost_ranks(f'rank {rank}'):
            agree('start', 0, max)
        return named(rank, 1, fail)

    found = on_ranks(2, story)
    assert found[0].startswith('RankEnded: rank 1 has ended with Planted: here\n')
    assert found[1] == 'Planted: here'


def test_another_error_stays_what_it_is():
    def story(rank):
        with naming_lost_ranks(f'rank {rank}'):
            raise Planted('both')

    assert on_ranks(2, story) == ['Planted: both'] * 2


def unanswered(rank):
    agree('start', 0, max)
    store = c10d._get_default_store()
    if rank == 1:
        return store.wait(['rank 0 has given up'], timedelta(seconds=LIMIT))
    try:
        with naming_lost_ranks(f'rank {rank}'):
            agree('checkpoint', 0, max)
    finally:
        store.set('rank 0 has given up', '')


def test_an_agreement_waits_as_long_as_the_process_group():
    """A user who gives a group a timeout means what mmrepro waits for as well."""
    assert re.match('RankEnded: rank 1 has not come\n.*2000ms', on_ranks(2, unanswered)[0])


def in_an_operation(how):
    agree('start', 0, max)
    dist.barrier()
    if dist.get_rank() == 2:
        how()
    dist.all_reduce(torch.zeros(3))


ENDS = {'killed': (kill, f'the process of virtual ranks 2, 3 {KILLED}'),
        'error': (fail, 'virtual rank 2 of 4 has ended with Planted: here'),
        'exit': (leave, 'virtual rank 2 of 4 has ended with SystemExit: here')}


@pytest.mark.parametrize('end', ENDS)
def test_the_ranks_of_another_process_say_who_has_ended_and_who_waits_where(end):
    how, text = ENDS[end]
    def story(rank):
        on_virtual_ranks(4, lambda: in_an_operation(how), 'pytorch')

    found = on_ranks(2, story, killed=1 if how is kill else None)[0]
    assert re.match(f'RankEnded: {text}', found), found
    assert 'virtual rank 1 waits in all_reduce SUM((3,) torch.float32)' in found


def listening():
    """Return the ports that this process listens on, of all protocols."""
    files = set()
    for descriptor in os.listdir('/proc/self/fd'):
        with suppress(FileNotFoundError):
            files.add(os.readlink(f'/proc/self/fd/{descriptor}'))
    rows = [line.split() for table in ('tcp', 'tcp6')
            for line in Path(f'/proc/self/net/{table}').read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == '0A' and f'socket:[{row[9]}]' in files}


def agreeing(rank):
    """Return the ports and threads that came with agreements, beside those of a group of gloo."""
    group = dist.new_group(backend='gloo')  # as mmrepro makes one
    dist.barrier(group=group)
    before, threads = listening(), threading.active_count()
    with mock.patch.object(agreement, 'control', lambda: GlooControl(group)), \
            naming_lost_ranks('rank'):
        agree('start', 0, max)
        flag = agreement.RepeatedFlag(1)
        assert not flag.up(False) and not flag.up(False)
    found = listening() - before, threading.active_count() - threads
    dist.barrier()
    return found


def test_mmrepro_does_not_listen_and_starts_no_thread():
    assert on_ranks(2, agreeing) == [(set(), 0)] * 2


def test_no_module_opens_a_socket():
    words = ('create_server', '.listen(', 'import selectors', 'import socketserver')
    for path in (ROOT / 'mmrepro').rglob('*.py'):
        text = path.read_text(encoding='utf-8')
        assert not [word for word in words if word in text], path
