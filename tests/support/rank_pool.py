"""Real ranks for tests: forked processes, which need not import torch again, and stay warm.

    pool.run(function, world, *args)   calls function(rank, world, *args) on ranks 0 ... world - 1

Every call makes a process group of its own over gloo. The store lives in the test's process, so no
port has to be guessed and no rank takes the store along when it ends.
"""
import atexit
import functools
import multiprocessing
import os
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

LIMIT = timedelta(seconds=120)


def _serve(pipe, inherited):
    for other in inherited:  # with them open, the end of the test's process would go unnoticed
        other.close()
    # loopback: without it gloo looks up the host's name, which may take seconds
    os.environ.update(OMP_NUM_THREADS='1', MKL_NUM_THREADS='1', GLOO_SOCKET_IFNAME='lo')
    torch.set_num_threads(1)
    store = dist.TCPStore('127.0.0.1', pipe.recv(), is_master=False, timeout=LIMIT)
    while True:
        try:
            number, function, rank, world, group, args = pipe.recv()
        except EOFError:  # the test's process has ended
            return
        try:
            if group:
                dist.init_process_group('gloo', store=dist.PrefixStore(str(number), store),
                                        rank=rank, world_size=world, timeout=LIMIT)
                # a function may end at once, and its connections while others still connect
                store.set(f'{number}/{rank}', '')
                store.wait([f'{number}/{other}' for other in range(world)])
            pipe.send((True, function(rank, world, *args)))
        except Exception as error:
            error.__traceback__ = None
            pipe.send((False, (error, traceback.format_exc())))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


class Pool:
    """Up to ``size`` ranks. ``group=False``: the function makes the process group, if any."""

    def __init__(self, size):
        context = multiprocessing.get_context('fork')
        self.calls = 0
        self.pipes, self.processes = [], []
        for _ in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, [*self.pipes, here]), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)
        # when all are forked: its thread locks libc's resolver, and a fork would keep the lock
        self.store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
        for pipe in self.pipes:
            pipe.send(self.store.port)

    def outcomes(self, function, world, *args, group=True):
        """Return per rank (True, result) or (False, (exception, traceback))."""
        self.calls += 1
        for rank, pipe in enumerate(self.pipes[:world]):
            pipe.send((self.calls, function, rank, world, group, args))
        results = []
        for rank, pipe in enumerate(self.pipes[:world]):
            assert pipe.poll(2 * LIMIT.total_seconds()), f'rank {rank} hangs'
            results.append(pipe.recv())
        return results

    def run(self, function, world, *args, group=True):
        """Return the results in order of rank, or raise what the first rank has raised."""
        outcomes = self.outcomes(function, world, *args, group=group)
        for rank, (fine, result) in enumerate(outcomes):
            assert fine, f'rank {rank}: {result[1]}'
        return [result for _, result in outcomes]

    def close(self):
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join()


@functools.cache
def shared_pool():
    """Return the one pool of a test module, of four ranks."""
    pool = Pool(4)
    atexit.register(pool.close)
    return pool


def end_shared_pool():
    """End the pool, whose ranks have what this process had imported when they were forked."""
    if shared_pool.cache_info().currsize:
        pool = shared_pool()
        shared_pool.cache_clear()
        atexit.unregister(pool.close)
        pool.close()
