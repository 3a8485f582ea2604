"""Functions in forked children."""
import multiprocessing
import os
import signal

import pytest

from dev.children import ChildFailed, finished, run_all


def test_results_come_as_children_end_and_are_returned_in_the_order_of_the_jobs():
    first, second = multiprocessing.get_context('fork').Event(), os.getpid
    jobs = {'waits': (first.wait, (), {}), 'ends': (second, (), {})}
    found = finished(jobs, 2)
    name, process = next(found)
    assert name == 'ends' and process != os.getpid()
    first.set()
    assert [*found] == [('waits', True)]
    assert [*run_all(jobs, 2)] == ['waits', 'ends']


def test_a_group_of_which_none_ends_is_an_error_that_names_it():
    with pytest.raises(TimeoutError, match='of any of one, two'):
        next(finished({'one': (signal.pause, (), {}), 'two': (signal.pause, (), {})}, 2, 0.1))


def test_a_child_that_raises_brings_its_traceback():
    with pytest.raises(ChildFailed, match='invalid literal'):
        run_all({'one': (int, ('a', ), {})})
