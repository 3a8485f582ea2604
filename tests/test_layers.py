"""Imports point downwards: a room knows only the rooms below it."""
import mmrepro
from dev import layers


def test_imports_point_downwards():
    assert layers.wrong_imports() == []


def test_no_module_imports_itself_through_others():
    assert layers.circles() == []


def test_every_room_has_a_layer():
    rooms = {room for row, _ in layers.LAYERS for room in row}
    assert {layers.room_of(module) for module in layers.modules()} == rooms


def test_public_names():
    assert sorted(mmrepro.__all__) == [
        'FingerprintHook', 'MMReproError', 'Preempted', 'RandomnessConfig', 'Report', 'ReproRunner',
        'ReproRunnerMixin', '__version__', 'activate', 'deactivate', 'init_random_seed',
        'is_active', 'isolate_rng', 'keep_attributes', 'on_virtual_ranks', 'set_random_seed']
    assert all(hasattr(mmrepro, name) for name in mmrepro.__all__)
