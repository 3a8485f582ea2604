"""A node without the newest checkpoint is named, and leaves where nodes come and go."""
import os
import signal
import subprocess

import pytest

from mmrepro.distributed import elastic
from mmrepro.distributed.elastic import Start, check_starts
from mmrepro.errors import AgreementError

HERE = Start('node0', 6, 'run/preempted.pth')
RANKS = [HERE, HERE, Start('node1', 0, ''), Start('node1', 0, ''), Start('node2', 4, 'run/a.pth')]
TEXT = ('rank 2, 3 on node1 has no checkpoint of iteration 6; rank 4 on node2 has no checkpoint of '
        'iteration 6 (its newest is of iteration 4); share the work directory: all nodes have to '
        'see one run. Rank 0 on node0 resumes from run/preempted.pth')


@pytest.fixture
def begin(monkeypatch):
    """A function that lets rank ``number`` of ``ranks`` begin."""
    def as_rank(number, ranks):
        monkeypatch.setattr(elastic, 'agree', lambda topic, value, decide: decide(ranks))
        monkeypatch.setattr(elastic, 'get_rank', lambda: number)
        monkeypatch.setattr(elastic.platform, 'node', lambda: ranks[number].node)
        check_starts('run', *ranks[number][1:])
    return as_rank


@pytest.fixture
def torchrun(monkeypatch):
    """A function that returns a process whose command is that of torchrun, as the parent."""
    started = []

    def start(*words):
        monkeypatch.setenv('TORCHELASTIC_RUN_ID', 'a run')
        started.append(subprocess.Popen(['sh', '-c', 'echo; read nothing', *words],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        started[-1].stdout.readline()
        monkeypatch.setattr(os, 'getppid', lambda: started[-1].pid)
        return started[-1]

    yield start
    for one in started:
        ended(one)


def ended(process):
    process.stdin.close()
    process.stdout.close()
    return process.wait()


def test_ranks_that_resume_from_one_iteration_begin(begin):
    begin(0, [HERE, HERE])
    begin(1, [Start('node0', 0, ''), Start('node1', 0, '')])
    begin(0, [HERE, HERE._replace(node='node1', path='/mnt/run/preempted.pth')])


@pytest.mark.parametrize('number, leaves', enumerate((False, False, True, False, True)))
def test_the_first_rank_of_a_node_that_lacks_the_checkpoint_lets_it_leave(
        number, leaves, begin, torchrun, caplog):
    agent = torchrun('torchrun', '--nnodes=1:3')
    with pytest.raises(AgreementError) as error:
        begin(number, RANKS)
    assert str(error.value) == TEXT
    # before the process is ended by its torchrun
    said = f'{TEXT}\nThis node leaves: its torchrun (process {agent.pid})'
    assert (said in caplog.text) == leaves
    assert (ended(agent) == -signal.SIGTERM) == leaves


@pytest.mark.parametrize('words', [
    ('torchrun', '--nnodes=2'), ('torchrun', '--nnodes=2:2'), ('torchrun', ),
    ('make', '--nnodes=1:3')])
def test_where_nodes_do_not_change_none_leaves(words, begin, torchrun):
    agent = torchrun(*words)
    with pytest.raises(AgreementError):
        begin(2, RANKS)
    assert ended(agent) != -signal.SIGTERM


@pytest.mark.parametrize('words, variables', [
    (('python', '-m', 'torch.distributed.run', '--nnodes', '1:2'), {}),
    (('/usr/bin/torchrun', ), dict(PET_NNODES='1:2'))])
def test_other_spellings_of_torchrun(words, variables, torchrun, monkeypatch):
    agent = torchrun(*words)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert elastic._torchrun(os.environ) == agent.pid
    assert elastic._torchrun({}) is None
