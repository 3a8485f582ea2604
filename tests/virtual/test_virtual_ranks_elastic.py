"""Tools under torchrun: a node is lost, the run goes on without it, the bits and metrics stay."""
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from harness import ROOT, environment, python
from machines import ADDRESSES, machines_or_skip
from preempted_runs import settings
from ranks import free_port

from mmrepro.errors import FingerprintError
from mmrepro.fingerprint.divergence import first_divergence
from mmrepro.fingerprint.reader import read_run

RANKS = 4
LOST_AFTER = 12  # iterations
WAIT = 300  # seconds for all that follows


def dump(cfg, tmp_path):
    cfg.custom_imports = dict(imports=['mmrepro', 'preempted_runs'], allow_failed_imports=False)
    path = str(tmp_path / 'config.py')
    cfg.dump(path)
    return path


def config(tmp_path, hooks=(), **changes):
    cfg = settings(tmp_path, **{
        'train_cfg.max_epochs': 40, 'train_cfg.val_interval': 20,
        'train_dataloader.dataset.size': 64, 'randomness.deterministic': True,
        'default_hooks.checkpoint': dict(type='CheckpointHook', by_epoch=False, interval=5),
        **changes})
    cfg.custom_hooks += hooks
    return dump(cfg, tmp_path)


def training(config, work_dir):
    return [str(ROOT / 'tools' / 'train.py'), config, '--virtual-ranks', str(RANKS), '--work-dir',
            str(work_dir), '--fingerprint', '--resume']


def agent(port, number, nodes, command, log, restarts=3, cwd=None, machines=None):
    """Start a node: an agent of torchrun with one process. Node 0 has the meeting point.

    ``machines``: each node is one of these; None: all are groups of processes on the loopback.
    """
    # otherwise processes that start again find the addresses of those before them
    env = {**environment(), 'TORCH_DISABLE_SHARE_RDZV_TCP_STORE': '1'}
    first, mine = ('127.0.0.1', ) * 2 if machines is None else (ADDRESSES[0], ADDRESSES[number])
    words = [sys.executable, '-m', 'torch.distributed.run', f'--nnodes=1:{nodes}',
             '--nproc_per_node=1', f'--max-restarts={restarts}', '--rdzv_backend=c10d',
             f'--rdzv_endpoint={first}:{port}',
             f'--rdzv_conf=is_host={int(number == 0)},last_call_timeout=5,keep_alive_interval=1',
             f'--local_addr={mine}', *command, '--launcher', 'pytorch']
    if machines is not None:
        words = machines.command(number, *words, cwd=cwd or os.getcwd())
    with open(log, 'ab') as output:
        return subprocess.Popen(words, env=env, stdout=output, stderr=subprocess.STDOUT,
                                start_new_session=True, cwd=cwd)


def descendants(pid):
    found = subprocess.run(['ps', '-o', 'pid=', '--ppid', str(pid)], capture_output=True, text=True)
    children = [int(word) for word in found.stdout.split()]
    return children + [one for child in children for one in descendants(child)]


def iterations_done(work_dir):
    path = work_dir / 'mmrepro' / 'fingerprints.rank0.jsonl'
    return path.read_bytes().count(b'"kind":"step"') if path.exists() else 0


def kill_with_children(node):
    # torchrun starts its processes in sessions of their own
    for pid in [node.pid, *descendants(node.pid)] if node.poll() is None else []:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.nightly
@pytest.mark.parametrize('nodes', [2, 4])
def test_a_run_that_loses_a_node_goes_on_with_the_others_and_keeps_its_bits(tmp_path, nodes):
    path = config(tmp_path)
    python(*training(path, tmp_path / 'whole'))
    command, port = training(path, tmp_path / 'elastic'), free_port()
    agents = [agent(port, number, nodes, command, tmp_path / f'node{number}.txt')
              for number in range(nodes)]
    try:
        end = time.monotonic() + WAIT
        while iterations_done(tmp_path / 'elastic') < LOST_AFTER:
            assert time.monotonic() < end and agents[0].poll() is None, 'see node0.txt'
            time.sleep(0.01)
        kill_with_children(agents[-1])
        for number, one in enumerate(agents[:-1]):
            assert one.wait(WAIT) == 0, (tmp_path / f'node{number}.txt').read_text()[-3000:]
    finally:
        for one in agents:
            kill_with_children(one)
    whole, elastic = (read_run(str(tmp_path / name)) for name in ('whole', 'elastic'))
    # agents that come late to a start let it start again
    processes = [one['processes'] for one in elastic.manifests]
    assert processes[0] == nodes and processes[-1] == nodes - 1, processes
    assert elastic.manifests[-1]['iteration'] > 0, 'it began again'
    assert sorted(elastic.ranks) == list(range(RANKS)) and elastic.ranks[0].ended
    for rank in range(RANKS):
        assert list(elastic.ranks[rank].steps) == list(range(160)) == list(whole.ranks[rank].steps)
    assert first_divergence(whole.ranks, elastic.ranks) is None


ALONE = 12  # iterations that a node does by itself before others come


@pytest.fixture(params=['loopback', 'namespaces'])
def nodes(request, tmp_path, tmp_path_factory):
    """A function that starts a node; what it has started is gone after the test."""
    started, port, machines = [], free_port(), None
    if request.param == 'namespaces':
        machines = machines_or_skip(tmp_path_factory, tmp_path / 'machines')

    def start(number, command, **options):
        log = tmp_path / f'node{number}.txt'
        started.append(agent(port, number, 2, command, log, machines=machines, **options))
        return started[-1]

    yield start
    for one in started:
        kill_with_children(one)
    if machines is not None:
        machines.close()


def wait_for(happened, healthy, log):
    end = time.monotonic() + WAIT
    while not happened():
        assert time.monotonic() < end and healthy.poll() is None, log.read_text()[-3000:]
        time.sleep(0.1)


def starts(folder):
    """Return the numbers of processes of all starts of a run until now."""
    try:
        return [one['processes'] for one in read_run(str(folder)).manifests]
    except FingerprintError:  # nothing yet, or half of a line
        return []


@pytest.mark.nightly
def test_a_node_joins_leaves_and_comes_back_and_the_bits_stay(tmp_path, nodes):
    longer = {'train_cfg.max_epochs': 60, 'randomness.self_checks': dict(witness=False)}
    python(*training(config(tmp_path, **longer), tmp_path / 'whole'))
    path = config(tmp_path, [dict(type='HeldAlone', after=ALONE)], **longer)
    folder, log = tmp_path / 'elastic', tmp_path / 'node0.txt'
    command = training(path, folder)
    healthy = nodes(0, command)
    for times in (1, 2):
        wait_for(lambda times=times: iterations_done(folder) >= ALONE * times and starts(
            folder)[-1:] == [1], healthy, log)
        other = nodes(1, command)
        wait_for(lambda: starts(folder)[-1:] == [2], healthy, log)
        if times == 1:
            before = iterations_done(folder)
            wait_for(lambda before=before: iterations_done(folder) >= before + 4, healthy, log)
            other.send_signal(signal.SIGTERM)
            other.wait(WAIT)
    for one in (healthy, other):
        assert one.wait(WAIT) == 0, log.read_text()[-3000:]
    whole, elastic = (read_run(str(tmp_path / name)) for name in ('whole', 'elastic'))
    changes = [count for count, before in zip(starts(folder), [0, *starts(folder)])
               if count != before]
    assert changes == [1, 2, 1, 2], changes
    assert sorted(elastic.ranks) == list(range(RANKS)) and elastic.ranks[0].ended
    for rank in range(RANKS):
        assert list(elastic.ranks[rank].steps) == list(range(240)) == list(whole.ranks[rank].steps)
    assert first_divergence(whole.ranks, elastic.ranks) is None


@pytest.mark.nightly
def test_a_node_without_the_checkpoint_leaves_and_the_restarts_of_the_other_last(tmp_path, nodes):
    path = config(tmp_path, [dict(type='HeldAlone', after=ALONE)], **{
        'randomness.self_checks': dict(witness=False)})
    command = training(path, 'run')  # the same text, on disks of their own
    disks = [tmp_path / f'disk{number}' for number in (0, 1)]
    for disk in disks:
        disk.mkdir()
    log = tmp_path / 'node0.txt'
    healthy = nodes(0, command, cwd=disks[0], restarts=1)
    wait_for(lambda: iterations_done(disks[0] / 'run') >= ALONE, healthy, log)
    other = nodes(1, command, cwd=disks[1])
    assert other.wait(WAIT) != 0
    (disks[0] / 'run' / 'go').touch()
    assert healthy.wait(WAIT) == 0, log.read_text()[-3000:]
    for number in (0, 1):
        assert re.search(r'has no checkpoint of iteration \d+; share the work directory',
                         (tmp_path / f'node{number}.txt').read_text())
    found = read_run(str(disks[0] / 'run'))
    assert set(starts(disks[0] / 'run')) == {1}  # nothing was trained with the other
    assert list(found.ranks[0].steps) == list(range(160)) and found.ranks[0].ended


# ranks of the training, which have BatchNorm statistics of their own: processes, and what to add
TRAININGS = {'two processes': (2, ()), 'two virtual ranks': (1, ('--virtual-ranks', '2'))}
TESTS = {'one process': (1, ()), 'two processes': (2, ()),
         'virtual ranks, one process': (1, ('--virtual-ranks', '2')),
         'virtual ranks, two processes': (2, ('--virtual-ranks', '2')),
         'three virtual ranks, two processes': (2, ('--virtual-ranks', '3'))}


def tool(name, processes, *arguments):
    start = ()
    if processes > 1:
        start = ('-m', 'torch.distributed.run', f'--nproc_per_node={processes}',
                 f'--master_port={free_port()}')
        arguments += ('--launcher', 'pytorch')
    python(*start, ROOT / 'tools' / name, *arguments)


def metric_of(folder):
    lines = [json.loads(line) for path in folder.glob('*/vis_data/scalars.json')
             for line in path.read_text().splitlines()]
    lines += [json.loads(path.read_text()) for path in folder.glob('*/*.json')]
    return [float(line['total']).hex() for line in lines if 'total' in line][-1]


@pytest.mark.nightly
@pytest.mark.parametrize('training', TRAININGS)
def test_the_metric_of_a_checkpoint(training, tmp_path):
    cfg = settings(tmp_path, **{
        'train_cfg.max_epochs': 2, 'train_cfg.val_interval': 2, 'randomness.deterministic': True,
        'val_dataloader.batch_size': 1, 'val_dataloader.dataset.size': 13,
        'val_dataloader.dataset.noise': 0., 'custom_hooks': [],
        'default_hooks.checkpoint': dict(type='CheckpointHook', interval=2)})
    cfg.test_dataloader, cfg.test_cfg, cfg.test_evaluator = (
        cfg.val_dataloader, dict(), cfg.val_evaluator)
    path = dump(cfg, tmp_path)
    processes, more = TRAININGS[training]
    tool('train.py', processes, path, '--work-dir', tmp_path / 'train', *more)
    checkpoint = tmp_path / 'train' / 'epoch_2.pth'
    own = torch.load(checkpoint, weights_only=False)['mmrepro']['ranks']
    statistics = [own[rank]['buffers']['model.layers.1.running_mean'] for rank in (0, 1)]
    assert not torch.equal(*statistics), 'the ranks share their statistics'
    found = {}
    for name, (processes, more) in TESTS.items():
        folder = tmp_path / name.replace(' ', '_')
        tool('test.py', processes, path, checkpoint, '--work-dir', folder, *more)
        found[name] = metric_of(folder)
    assert set(found.values()) == {metric_of(tmp_path / 'train')}, found
