"""Imports point downwards, and the page on the architecture explains every entry of the root."""
import subprocess
from pathlib import Path

import mmrepro
from dev import layers


def test_imports_point_downwards():
    assert layers.wrong_imports() == []


def test_no_module_imports_itself_through_others():
    assert layers.circles() == []


def test_every_room_has_a_layer():
    rooms = {room for row, _ in layers.LAYERS for room in row}
    assert {layers.room_of(module) for module in layers.modules()} == rooms
    assert len(rooms) <= 30 and len(layers.LAYERS) <= 12


def test_public_names():
    assert sorted(mmrepro.__all__) == [
        'FingerprintHook', 'MMReproError', 'Preempted', 'RandomnessConfig', 'Report', 'ReproRunner',
        'ReproRunnerMixin', '__version__', 'activate', 'deactivate', 'init_random_seed',
        'is_active', 'isolate_rng', 'keep_attributes', 'on_virtual_ranks', 'set_random_seed']
    assert all(hasattr(mmrepro, name) for name in mmrepro.__all__)


def test_every_entry_of_the_root_is_explained():
    root = Path(__file__).resolve().parents[1]
    files = subprocess.run(['git', 'ls-files'], cwd=root, check=True, capture_output=True,
                           text=True).stdout.split('\n')
    entries = {f'{name.partition("/")[0]}/' if '/' in name else name for name in files if name}
    page = (root / 'docs/explanation/architecture.md').read_text(encoding='utf-8')
    assert [name for name in sorted(entries - {'mmrepro/'}) if f'`{name}`' not in page] == []
