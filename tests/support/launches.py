"""Stands for fresh processes: what was asked of them."""
from __future__ import annotations

import json
import os

from mmrepro.fingerprint.schema import FOLDER, fingerprint_name
from mmrepro.fingerprint.writer import Writer
from mmrepro.runs import launcher
from mmrepro.runs.child import Training


def training_of(launch):
    """Return the training that a launch of mmrepro.runs.child makes."""
    module, given = launch.command
    assert module == 'mmrepro.runs.child'
    return Training(**json.loads(given))


def folder_of(launch):
    return os.path.dirname(launch.log)


class EndedTraining:
    """Stands for a launched training that has ended; a subclass writes its files."""
    launches: list = []

    def __init__(self, launch):
        self.launches.append(launch)

    def poll(self):
        return True

    def kill(self):
        pass


def stand_in(monkeypatch, kind, **attributes):
    """Let a class like :class:`EndedTraining` stand for all launched trainings; return it."""
    made = type('Made', (kind, ), dict(launches=[], **attributes))
    monkeypatch.setattr(launcher, 'LaunchedTraining', made)
    monkeypatch.setattr(launcher, 'POLL', 0)
    return made


def write_steps(folder, steps, rank=0, ranks=1, first=0, end=False):
    """Write the fingerprints of a rank: the start, these fields of each step, perhaps the end."""
    writer = Writer(os.path.join(folder, FOLDER, fingerprint_name(rank)))
    writer.write(dict(kind='start', format=1, level='step', rank=rank, world_size=ranks,
                      iteration=first))
    for iteration, step in enumerate(steps, first):
        writer.write({**dict(kind='step', iteration=iteration, epoch=0), **step})
    if end:
        writer.write(dict(kind='end', iteration=first + len(steps)))
    writer.close()
