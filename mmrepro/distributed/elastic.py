"""Nodes that come and go: what all nodes need, and how a node leaves without ending the others.

``torchrun --nnodes=1:4`` starts the processes of all nodes again when a node has come or has gone.
A torchrun whose own processes fail starts them again, too, and those of all other nodes with them,
until its restarts are used up; then it closes the job for all. If it gets SIGTERM, it leaves, and
the others go on.
"""
from __future__ import annotations

import logging
import os
import platform
import re
import signal
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mmengine.dist import get_rank

from ..errors import AgreementError
from ..util.text import listed
from .agreement import agree

_logger = logging.getLogger('mmrepro')
_RANGE = re.compile(r'--nnodes[= ](\d+):(\d+)')


class Start(NamedTuple):
    """The checkpoint from which a rank begins."""
    node: str
    iteration: int  # of the checkpoint that it resumes; 0: it has none
    path: str  # of the checkpoint; ''


def check_starts(folder: str, iteration: int, path: str) -> None:
    """Refuse to begin if ranks would resume from different iterations. A collective operation.

    A node that lacks the newest checkpoint leaves, where nodes come and go.

    Args:
        folder: The work directory.
        iteration: Of the checkpoint that this rank resumes; 0: it has none.
        path: Of that checkpoint.

    Raises:
        AgreementError: on every rank, with the same message: ranks, nodes, iteration, folder.
    """
    mine = Start(platform.node(), iteration, path)
    ranks = agree('the checkpoint to resume', mine, list)
    text = _lacking(folder, ranks)
    if not text:
        return
    if iteration < max(start.iteration for start in ranks) and get_rank() == ranks.index(mine):
        _leave(text)
    raise AgreementError(text)


def _lacking(folder: str, ranks: Sequence[Start]) -> str:
    """Return which ranks lack the newest checkpoint; '' if all have it."""
    newest = max(ranks, key=lambda start: start.iteration)
    lines = []
    for node, iteration in dict.fromkeys(
            (start.node, start.iteration) for start in ranks
            if start.iteration < newest.iteration):
        numbers = [str(rank) for rank, start in enumerate(ranks)
                   if (start.node, start.iteration) == (node, iteration)]
        has = f' (its newest is of iteration {iteration})' if iteration else ''
        lines.append(f'rank {listed(numbers)} on {node} has no checkpoint of iteration '
                     f'{newest.iteration}{has}')
    if not lines:
        return ''
    return (f'{"; ".join(lines)}; share the work directory: all nodes have to see one {folder}. '
            f'Rank {ranks.index(newest)} on {newest.node} resumes from {newest.path}')


def _leave(reason: str) -> None:
    """Let the torchrun of this process leave; where nodes do not change, nothing happens."""
    agent = _torchrun(os.environ)
    if agent is None:
        return
    # torchrun ends this process, perhaps before it has raised an error
    _logger.error('%s\nThis node leaves: its torchrun (process %d) gets SIGTERM, so that it does '
                  'not start again, and the restarts of the other nodes last', reason, agent)
    os.kill(agent, signal.SIGTERM)


def _torchrun(env: Mapping[str, str]) -> int | None:
    """Return the process of the torchrun that started this one; None if nodes do not change."""
    if 'TORCHELASTIC_RUN_ID' not in env:
        return None
    parent = os.getppid()
    try:
        with open(f'/proc/{parent}/cmdline', 'rb') as file:
            command = file.read().decode(errors='replace').replace('\0', ' ')
    except OSError:  # not Linux
        return None
    nodes = _RANGE.search(command) or _RANGE.search(f'--nnodes={env.get("PET_NNODES", "")}')
    by_torchrun = 'torchrun' in command or 'torch.distributed' in command
    return parent if by_torchrun and nodes is not None and nodes[1] != nodes[2] else None
