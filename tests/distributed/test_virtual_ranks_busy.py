"""Real processes on a busy machine: a hundred trainings, one digest."""
from __future__ import annotations

import multiprocessing

import pytest
import schedules
from harness import digest
from virtual_runs import run

TRAININGS, BUSY = 100, 2


def spin(stop):
    while not stop.is_set():
        pass


@pytest.mark.nightly
@pytest.mark.filterwarnings('ignore')
def test_a_hundred_trainings_on_two_processes_end_with_the_same_bits(tmp_path):
    context = multiprocessing.get_context('fork')
    stop = context.Event()
    others = [context.Process(target=spin, args=(stop, ), daemon=True) for _ in range(BUSY)]
    for other in others:
        other.start()
    try:
        cfg = schedules.config(str(tmp_path))
        found = [digest(run(cfg, schedules.RANKS, 2, tmp_path / str(number)))
                 for number in range(TRAININGS)]
    finally:
        stop.set()
        for other in others:
            other.join()
    assert found == found[:1] * TRAININGS
