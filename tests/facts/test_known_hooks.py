"""The table of known hooks."""
import pytest

from mmrepro.facts import known_hooks
from mmrepro.facts.known_hooks import HOOKS, STATELESS, WATCHES, WRITES_WEIGHTS
from mmrepro.virtual.weight_hooks import ADAPTERS


@pytest.mark.parametrize('kind, watches', [
    ('CheckpointHook', True), ('mmengine.hooks.CheckpointHook', True),
    ('mmdet.DetVisualizationHook', True), ('EMAHook', False), ('MyHook', False), (None, False)])
def test_a_hook_is_known_by_its_class_or_its_type_in_a_config(kind, watches):
    assert known_hooks.plays(kind, WATCHES) == watches
    assert known_hooks.is_known(kind) == (watches or kind == 'EMAHook')
    assert not known_hooks.plays(kind, STATELESS)


def test_hooks_that_write_to_weights_are_those_that_virtual_ranks_adapt():
    assert {path.rpartition('.')[2] for path in ADAPTERS} == {
        name for name, roles in HOOKS.items() if WRITES_WEIGHTS in roles}
