"""Imports point downwards: a room knows only the rooms below it."""
from dev import layers


def test_imports_point_downwards():
    assert layers.wrong_imports() == []


def test_no_module_imports_itself_through_others():
    assert layers.circles() == []


def test_every_room_has_a_layer():
    rooms = {room for row, _ in layers.LAYERS for room in row}
    assert {layers.room_of(module) for module in layers.modules()} == rooms
