"""A rank that has ended is an error for those that wait for it; one that is slow is not."""
from __future__ import annotations

import io
import logging
import os
import re
import signal
import socket
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from harness import Child
from ranks import free_port

from mmrepro import on_virtual_ranks
from mmrepro.distributed import presence, waiting
from mmrepro.distributed.agreement import AgreementError, settle
from mmrepro.distributed.common_stop import CommonStop
from mmrepro.distributed.connections import Hub, own_addresses
from mmrepro.distributed.presence import RankEnded

pytestmark = pytest.mark.filterwarnings('ignore')

LONG = 20  # seconds; whoever waits so long has not noticed
KILLED = r'was killed or has crashed \(process \d+ on '


def rank_of(rank, world, port, story, *args):
    """A process that returns the text of the error that its story ends with."""
    os.environ.update(GLOO_SOCKET_IFNAME='lo')
    waiting.PRESENT_TIMEOUT = LONG
    store = dist.TCPStore('127.0.0.1', port, is_master=False)
    dist.init_process_group('gloo', store=store, rank=rank, world_size=world)
    try:
        return story(rank, *args)
    except (AgreementError, RankEnded) as error:
        sys.last_value = error  # as the interpreter does
        return f'{type(error).__name__}: {error}'


def on_ranks(world, story, *args, killed=None):
    """What each rank returned; None of the killed one. The store outlives all ranks."""
    store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    children = [Child(rank_of, rank, world, store.port, story, *args) for rank in range(world)]
    if killed is not None:  # what it leaves behind may keep its pipe open
        children[killed].process.join()
        assert children[killed].process.exitcode == -signal.SIGKILL
    return [None if rank == killed else child.result() for rank, child in enumerate(children)]


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def matches(pattern, text):
    assert re.search(pattern, text), text
    return True


# ------------------------------------------------------------------------------ real ranks


def beside_a_checkpoint(rank, killed, at_end=kill):
    settle('start', 0, max)
    if rank == killed:
        others = {0, 1, 2} - {killed}
        dist.distributed_c10d._get_default_store().wait(
            [f'mmrepro/checkpoint/3/0/rank{other}' for other in others])
        return at_end()
    settle('checkpoint', 0, max, timeout=LONG)


@pytest.mark.parametrize('killed', [0, 1])
def test_a_killed_rank_is_named_by_those_that_wait_for_it(killed):
    found = on_ranks(3, beside_a_checkpoint, killed, killed=killed)
    for rank in {0, 1, 2} - {killed}:
        matches(f'AgreementError: .*rank {killed} {KILLED}', found[rank])
    waiting = 'The ranks compare their checkpoint, and these wait for it: 0, 2' if killed else \
        'Rank 2 waits for it: the ranks compare their checkpoint'
    assert waiting in found[2]


def with_a_worker(rank, workers):
    """The killed rank leaves a process behind, which has all that it had open."""
    settle('start', 0, max)
    if rank == 1:
        if os.fork():
            kill()
        os.read(workers, 1)
        os._exit(0)
    settle('checkpoint', 0, max, timeout=LONG)


def test_what_a_killed_rank_leaves_behind_does_not_count_as_the_rank():
    read, write = os.pipe()
    try:
        matches(f'rank 1 {KILLED}', on_ranks(2, with_a_worker, read, killed=1)[0])
    finally:
        os.write(write, b'x')
        os.close(read)
        os.close(write)


def test_a_rank_that_has_ended_is_named_like_a_killed_one():
    found = on_ranks(3, beside_a_checkpoint, 1, int)
    assert found[1] == 0
    assert all(matches('AgreementError: .*rank 1 has ended. ', found[rank]) for rank in (0, 2))


def logged(rank):
    """Also where nothing waits in the store."""
    settle('start', 0, max)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(['rank 0 listens'])
        kill()
    log, written = io.StringIO(), threading.Event()
    handler = logging.StreamHandler(log)
    handler.flush = written.set
    logging.getLogger('mmrepro').addHandler(handler)
    store.set('rank 0 listens', '')
    written.wait(LONG)
    return log.getvalue()


def test_the_log_names_a_killed_rank():
    matches(f'^rank 1 {KILLED}', on_ranks(2, logged, killed=1)[0])


def slow(rank):
    """Rank 1 comes when rank 0 has waited for longer than for a rank of which it knows nothing."""
    settle('start', 0, max)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(['rank 0 has waited'])
    else:
        ranks = presence.of_run()
        with ranks._changed:
            ranks._changed.wait_for(lambda: ranks.known(1))
        allowed = waiting._Wait._allowed

        def waited(self, missing):
            store.set('rank 0 has waited', '')
            return allowed(self, missing)

        waiting._Wait._allowed = waited
    log = io.StringIO()
    logging.getLogger('mmrepro').addHandler(logging.StreamHandler(log))
    return settle('checkpoint', rank, max, timeout=0.01), (
        'for ranks that have not ended: 1 (rank1)' in log.getvalue())


def test_a_slow_rank_is_waited_for():
    (first, said), (second, _) = on_ranks(2, slow)
    assert first == second == 1 and said


def in_time(rank):
    """Rank 1 ends as soon as it has answered; rank 0 looks when that has happened."""
    settle('start', 0, max)
    ranks = presence.of_run()
    if rank == 0:
        with ranks._changed:
            ranks._changed.wait_for(lambda: 1 in ranks.ended)
    else:
        store = dist.distributed_c10d._get_default_store()
        store.set('answer', '')
        return None
    waiting.wait_in_store(dist.distributed_c10d._get_default_store(), {'answer': 1},
                          waiting.timedelta(seconds=LONG), ranks)


def test_what_a_rank_has_said_before_it_ended_counts():
    assert on_ranks(2, in_time) == [None, None]


def where_to_stop(rank):
    """Rank 1 is killed, and the signal of the launcher reaches rank 0."""
    settle('start', 0, max)
    stop = CommonStop(lambda: rank == 0, interval=0.01, timeout=LONG)
    if rank == 1:
        stop._closed.set()
        kill()
    try:
        while not stop.end_event():
            pass
    finally:
        stop.close()


def test_a_killed_rank_does_not_delay_the_end_of_the_others():
    matches(f'AgreementError: rank 1 {KILLED}.*before the ranks agreed where to stop',
            on_ranks(2, where_to_stop, killed=1)[0])


# ------------------------------------------------------------------------------ virtual ranks


def on_virtual(rank, story, *args):
    on_virtual_ranks(4, lambda: story(*args), 'pytorch')


def in_an_operation(end):
    settle('start', 0, max)
    dist.barrier()
    if dist.get_rank() == 2:
        end()
    dist.all_reduce(torch.zeros(3))


def raises():
    raise KeyError('planted')


def leaves_a_worker():
    if os.fork():
        kill()
    threading.Event().wait(LONG)  # it keeps the connections of gloo open
    os._exit(0)


ENDS = {'killed': (kill, f'rank 2 {KILLED}.*; rank 3 {KILLED}'),
        'killed beside a worker': (leaves_a_worker, f'rank 2 {KILLED}'),
        'error': (raises, "rank 2 has ended with KeyError: 'planted'")}


@pytest.mark.parametrize('end', ENDS)
def test_the_ranks_of_another_process_say_who_has_ended_and_who_waits_where(end):
    how, text = ENDS[end]
    found = on_ranks(2, caught, in_an_operation, how, killed=None if how is raises else 1)[0]
    matches(f'RankEnded: {text}', found)
    assert 'virtual rank 1 waits in all_reduce SUM((3,) torch.float32)' in found


def caught(rank, story, *args):
    try:
        on_virtual(rank, story, *args)
    except KeyError:
        assert rank == 1


def one_returns_early(between):
    settle('start', 0, max)
    dist.barrier()
    if dist.get_rank() in (2, 3):
        return
    between()


@pytest.mark.parametrize('operation', ['store', 'collective'])
def test_a_rank_that_returned_early_is_named(operation):
    between = {'store': lambda: settle('checkpoint', 0, max),
               'collective': lambda: dist.all_reduce(torch.zeros(3))}[operation]
    found = on_ranks(2, on_virtual, one_returns_early, between)
    matches('rank 2 has ended; rank 3 has ended|rank 2 has ended.*these wait for it: 0',
            found[0])
    assert found[1] is None


# ------------------------------------------------------------------------------ noise

NOISE = ('recvValue failed', 'sendBytes failed', 'Traceback', 'terminate called')


def process(rank, port, folder, gone, how):
    """Rank 0 holds the store. It ends first, while rank 1 still looks for signals in it."""
    os.dup2(os.open(f'{folder}/{rank}', os.O_CREAT | os.O_WRONLY), 2)
    os.environ.update(GLOO_SOCKET_IFNAME='lo')
    dist.init_process_group('gloo', init_method=f'tcp://127.0.0.1:{port}', rank=rank, world_size=2)
    settle('start', 0, max)
    stop = CommonStop(lambda: how == 'signal' and rank == 1, interval=0.001)
    settle('both look', 0, max)
    if how == 'signal':
        while not stop.end_event():
            pass
        stop.leave()
    if rank == 0:
        if how == 'error':
            sys.last_value = KeyError('planted')  # as the interpreter does
        stop.close()
        return
    os.close(gone[1])
    os.read(gone[0], 1)  # returns when rank 0 has ended
    if how != 'signal':
        stop._thread.join()
        assert 'rank 0 has ended' in stop._error
    stop.close()


@pytest.mark.parametrize('how', ['normal', 'signal', 'error'])
def test_the_process_with_the_store_ends_without_noise(how, tmp_path):
    port, gone = free_port(), os.pipe()
    children = [Child(process, rank, port, tmp_path, gone, how) for rank in range(2)]
    for one in gone:
        os.close(one)
    for child in children:
        child.result()
    for rank in range(2):
        text = (tmp_path / str(rank)).read_text()
        assert not [word for word in NOISE if word in text], text


# ------------------------------------------------------------------------------ connections


def test_somebody_without_the_token_is_sent_away():
    heard = []
    hub = Hub(lambda *first: heard.append(first), lambda *more: heard.append(more), heard.append)
    for said in (b'{"token": "guessed"}\n', b'GET / HTTP/1.1\r\n\r\n', b'[1]\n', b'"\xff"\n'):
        with socket.create_connection(('127.0.0.1', hub.port)) as other:
            other.sendall(said)
            assert other.recv(1) == b''
    hub.close()
    assert heard == []


def test_an_address_is_found_whatever_is_known():
    assert '127.0.0.1' in own_addresses(('127.0.0.1', 29500))
    for towards in (None, ('no-such-host.invalid', 29500)):
        assert own_addresses(towards) == [socket.gethostname()]


def test_who_cannot_reach_rank_0_goes_on_without(caplog):
    store = dist.HashStore()
    there, here = (presence.Presence([[0], [1]], number, lambda: store) for number in (0, 1))
    there._hub.close()
    here.connect()
    assert 'no connection to rank 0' in caplog.text and not here.known(0)
    here.close(presence.Ending.of(None))
    there.close(presence.Ending.of(None))
