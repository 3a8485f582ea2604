"""One object owns a save: the state of a rank is collected once."""
from counted import Counted
from harness import Child
from small_runs import finish, small_run


def collected(cfg):
    counted = Counted()
    finish(cfg)
    return counted.calls['state']


def test_a_save_collects_the_state_once(tmp_path):
    assert Child(collected, small_run(tmp_path)).result() == 8  # one checkpoint per iteration
