"""Imports point downwards, and the page on the architecture explains every entry of the root."""
import subprocess
from pathlib import Path

import pytest

import mmrepro
from dev import layers


def test_imports_point_downwards():
    assert layers.wrong_imports() == []


def test_no_module_imports_itself_through_others():
    assert layers.circles() == []


@pytest.mark.parametrize(('module', 'line', 'seen'), [
    ('mmrepro/seeds.py', 'from .run import runner', 'imports run.runner, which lies above it'),
    ('mmrepro/seeds.py', 'from dev import layers', 'imports dev.layers, which lies above it'),
    ('mmrepro/run/runner.py', 'from ..seeds import _root', 'imports the private name _root'),
    ('tests/support/harness.py', 'from dev import layers', 'imports dev.layers, which lies above'),
    ('tests/support/harness.py', 'import conftest', 'imports tests.conftest, which lies above it'),
    ('dev/layers.py', 'import conftest', 'imports tests.conftest, which lies above it'),
    ('dev/layers.py', 'import harness', None),
    ('tests/conftest.py', 'from dev.layers import table', None)])
def test_an_upward_import_is_seen(module, line, seen, tmp_path):
    for name in ('mmrepro/seeds.py', 'mmrepro/run/runner.py', 'dev/layers.py', 'tests/conftest.py',
                 'tests/support/harness.py'):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(line if name == module else '')
    found = layers.wrong_imports(tmp_path)
    assert len(found) == (seen is not None) and all(seen in one for one in found), found


def test_a_circle_is_seen(tmp_path):
    folder = tmp_path / 'tests' / 'support'
    folder.mkdir(parents=True)
    (folder / 'ranks.py').write_text('import harness')
    (folder / 'harness.py').write_text('from ranks import joined')
    assert layers.circles(tmp_path) == [('tests.support.harness', 'tests.support.ranks')]


def test_every_room_has_a_layer():
    rooms = {room for row, _ in layers.LAYERS for room in row}
    assert {layers.room_of(module) for module in layers.modules()} == rooms
    counts = layers.counts()
    assert counts['rooms'] <= 28 and counts['layers'] <= 12 and counts['modules'] <= 215


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
