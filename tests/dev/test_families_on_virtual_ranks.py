"""Detectors whose passes change attributes, buffers and memory, with all checks: the same bits.

Every family of the zoo: dev/virtual_ranks_zoo.py.
"""
import gc

import pytest

from dev import virtual_ranks_zoo as zoo
from dev.zoo.training import training

# one process, two, and one that goes on with the checkpoint of two
RUNS = ((1, 0), (2, 0), (1, 2))


# family: the width, and what is changed
FAMILIES = {
    'faster_rcnn': ('quarter', None),
    'ssd': ('full', None),  # SSDLite
    'tood': ('quarter', None),
    'yolox': ('full', lambda cfg: cfg.update(sync_bn='torch')),
}


@pytest.fixture(scope='module', autouse=True)
def imported_once():
    """Before the processes are forked."""
    import mmdet.datasets
    import mmdet.models  # noqa: F401
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.nightly  # a minute each; tests/virtual has models of every kind
@pytest.mark.parametrize('family', FAMILIES)
def test_the_number_of_processes_does_not_matter(family, photographs, tmp_path):
    width, change = FAMILIES[family]
    (member, ) = zoo.chosen([family])
    cfg = training(member, photographs, zoo.RANKS, width)
    if change:
        change(cfg)
    rows = list(zoo.compared(cfg, tmp_path, {}, RUNS))
    assert [row['difference'] for row in rows] == [''] * len(RUNS)
    assert {row['memory'] for row in rows} == {'shared'}
    assert all(row['finite'] and row['samples'] for row in rows)
    # of iterations 1, 2 and 4, by every rank; the resumed run has the last of them
    assert [row['steps'] for row in rows] == [3 * zoo.RANKS, 3 * zoo.RANKS, zoo.RANKS]
