"""Whatever runs first: equal bits, or one named error on all ranks, within a number of turns."""
import itertools
import json

import pytest
from harness import ROOT, Child
from schedule_faults import FAULTS
from schedules import KINDS, Plan, run_many

OF_A_KIND, SHARDED = 1, 1  # schedules
NIGHTLY, AT_ONCE = 20_000, 50
LIMIT = 1000  # seconds for a block of schedules, which takes one minute or two of an idle core


def test_every_schedule_ends_as_promised():
    numbers = [number for kind in KINDS for number in itertools.islice(
        (number for number in itertools.count() if Plan.of(number).kind == kind), OF_A_KIND)]
    found = Child(run_many, numbers).result(LIMIT)
    assert not found['wrong'], found['wrong'][0]
    assert found['kinds'] == dict.fromkeys(KINDS, OF_A_KIND)


def test_so_does_one_of_sharded_weights():
    found = Child(run_many, list(range(SHARDED)), memory='sharded').result(LIMIT)
    assert not found['wrong'], found['wrong'][0]


@pytest.mark.nightly
def test_so_do_more_of_sharded_weights():
    found = Child(run_many, list(range(SHARDED, 50)), memory='sharded').result(LIMIT)
    assert not found['wrong'], found['wrong'][0]


@pytest.mark.nightly
@pytest.mark.parametrize('first', range(0, NIGHTLY, 10 * AT_ONCE))
def test_so_do_many_more(first):
    for start in range(first, first + 10 * AT_ONCE, AT_ONCE):
        found = Child(run_many, list(range(start, start + AT_ONCE))).result(LIMIT)
        assert not found['wrong'], found['wrong'][0]


def test_the_published_schedules_are_those_of_the_nightly_run():
    found = json.loads((ROOT / 'docs' / 'results' / 'schedules.json').read_text())
    assert found['ranges'] == [[0, NIGHTLY]] and found['schedules'] == NIGHTLY
    assert sum(found['kinds'].values()) == NIGHTLY and found['wrong'] == []


@pytest.mark.parametrize('name', [
    name if at < 2 else pytest.param(name, marks=pytest.mark.nightly)
    for at, name in enumerate(FAULTS)])
def test_schedules_find_planted_faults(name):
    kinds = ('condition', ) if name == 'conditions that raise' else KINDS
    numbers = [number for number in range(100) if Plan.of(number).kind in kinds]
    assert Child(run_many, numbers, True, FAULTS[name]).result(LIMIT)['wrong']
