"""The table of replacements and how its rows are put in force and taken out."""
import importlib
import sys
from pathlib import Path

import pytest
import torch
from harness import python
from stock_mmdet import stock  # noqa: F401  a fixture

from dev.causes_report import NOTES, entries
from mmrepro import patches
from mmrepro.data.fetch import WorkerInit
from mmrepro.data.samplers import Placement
from mmrepro.patches import Patch, StockCause

pytestmark = pytest.mark.usefixtures('stock')
PAGE = Path(__file__).resolve().parents[2] / 'docs' / 'explanation' / 'causes.md'
MAX_CELL = 100  # characters of a table cell
ADE = 'mmdet.datasets.ade20k:ADE20KSegDataset.load_data_list'


@pytest.fixture(scope='module', autouse=True)
def everything_imported():
    for patch in patches.PATCHES:
        if patch.module.startswith(('mmdet', 'mmengine')):
            importlib.import_module(patch.module)


@pytest.fixture
def table(monkeypatch):
    return lambda *rows: monkeypatch.setattr(patches, 'PATCHES', rows)


def row(target):
    cause = StockCause('C7', 'a reason', False, '', ())
    return Patch(target, 'mmrepro.patches.methods:sorted_by_path', cause)


def names_of(rows):
    return [patch.target for patch in rows]


def entry(patch):
    """Return what the holder of a target has under its name: the object itself, or 'nothing'."""
    if patch.module not in sys.modules:
        return None
    owner, name = patches._locate(patch, sys.modules[patch.module])
    return vars(owner).get(name, 'nothing') if owner is not None else None


def test_every_row_is_well_formed():
    assert len(set(names_of(patches.PATCHES))) == len(patches.PATCHES)
    for patch in patches.PATCHES:
        module, _, function = patch.replacement.partition(':')
        assert callable(getattr(importlib.import_module(module), function))


def test_the_page_of_causes_shows_the_table_and_every_cell_fits_a_line():
    for cause in patches.CAUSES:
        assert 0 < len(cause.why) <= MAX_CELL and '|' not in cause.why, cause
    for note in NOTES.values():
        assert all(0 < len(cell) <= MAX_CELL and '|' not in cell for cell in note[:3]), note
    assert len(NOTES) == len(patches.CAUSES) and entries() in PAGE.read_text(encoding='utf-8')


def test_every_row_applies_to_the_installed_mmdetection(recwarn):
    in_force = names_of(patches.apply())
    absent = [name for name in names_of(patches.PATCHES) if name not in in_force]
    # a foreign package is looked up only where MMDetection could import it
    assert not [name for name in absent if name.startswith(('mmdet', 'mmengine'))]
    assert not [w for w in recwarn if 'is not covered' in str(w.message)]


def test_applying_twice_changes_nothing_more_and_revert_restores_the_very_objects():
    before = [entry(patch) for patch in patches.PATCHES]
    patches.apply()
    once = [entry(patch) for patch in patches.PATCHES]
    assert any(one is not b for one, b in zip(once, before))
    assert patches.apply() == patches.applied()
    assert all(entry(p) is one for p, one in zip(patches.PATCHES, once))
    patches.revert()
    assert all(entry(p) is b for p, b in zip(patches.PATCHES, before))
    assert patches.applied() == ()


def test_legacy_leaves_the_data_streams_alone_whatever_an_earlier_run_put_in():
    legacy = patches.apply(legacy=True)
    everything = patches.apply()
    assert legacy and not any(patch.cause.affects_data for patch in legacy)
    assert patches.apply(legacy=True) == legacy == patches.applied()
    assert patches.apply() == everything


def own_module(tmp_path, monkeypatch, name, text):
    (tmp_path / f'{name}.py').write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, 'dont_write_bytecode', True)
    return name


LOADER = 'class Loader:\n    def load_data_list(self):\n        return []\n'


def test_a_row_waits_for_the_import_of_its_module(table, tmp_path, monkeypatch):
    name = own_module(tmp_path, monkeypatch, 'a_library_of_test_patches', LOADER)
    table(row(f'{name}:Loader.load_data_list'))
    assert patches.apply() == () and name not in sys.modules
    for _ in range(2):  # the second time as after a reload in a notebook
        kind = importlib.import_module(name).Loader
        assert hasattr(kind.load_data_list, '__wrapped__') and len(patches.applied()) == 1
        del sys.modules[name]
    patches.revert()
    assert not hasattr(importlib.import_module(name).Loader.load_data_list, '__wrapped__')


OTHER_SCOPE = """
import pathlib, sys
from mmengine.registry import TRANSFORMS
from mmengine.runner import Runner
from small_runs import config
from mmrepro import ops
deterministic = dict(seed=1, deterministic=True)
Runner.from_cfg(config(pathlib.Path(sys.argv[1]), randomness=deterministic))
print('mmdet' in sys.modules)
mosaic = TRANSFORMS.build(dict(type='mmdet.CachedMosaic'))
print(hasattr(type(mosaic).transform, '__wrapped__'), ops.provider())
"""


@pytest.mark.slow
def test_scope_and_imports_at_the_start_do_not_matter(tmp_path):
    """As configs of another library, which take single transforms from MMDetection."""
    said = python('-c', OTHER_SCOPE, tmp_path)
    assert said.split('\n')[-3:-1] == ['False', 'True auto']


def test_without_mmdetection_there_is_nothing_to_do(monkeypatch):
    for patch in patches.PATCHES:
        monkeypatch.setitem(sys.modules, patch.module, None)
    assert patches.apply() == ()


@pytest.mark.parametrize('target', [
    'mmdet.no_such_package.module:Class.method',
    'mmdet.datasets.ade20k:NoSuchClass.method',
    'no_such_package.module:Class.method',
])
def test_what_this_version_does_not_have_is_left_out(table, target):
    table(row(target), row(ADE))
    assert names_of(patches.apply()) == [ADE]


def test_a_renamed_method_is_reported(table):
    table(row('mmdet.datasets.ade20k:ADE20KSegDataset.load_everything'))
    with pytest.warns(RuntimeWarning, match=r'load_everything .* cause C7 is not covered'):
        assert patches.apply() == ()


def test_revert_respects_a_later_replacement(table, monkeypatch):
    from mmdet.datasets.ade20k import ADE20KSegDataset
    monkeypatch.setattr(ADE20KSegDataset, 'load_data_list', ADE20KSegDataset.load_data_list)
    table(row(ADE))
    patches.apply()
    ADE20KSegDataset.load_data_list = len
    with pytest.warns(RuntimeWarning, match='replaced again by other code'):
        patches.revert()
    assert ADE20KSegDataset.load_data_list is len


def test_an_inherited_method_is_inherited_again_after_revert(table):
    from mmdet.datasets import CocoDataset
    table(row('mmdet.datasets.coco:CocoDataset.full_init'))
    assert 'full_init' not in vars(CocoDataset)
    patches.apply()
    assert 'full_init' in vars(CocoDataset)
    patches.revert()
    assert 'full_init' not in vars(CocoDataset)


def test_a_shadowed_builtin_stays_inside_its_module():
    from mmdet.datasets.transforms import text_transformers, transforms

    from mmrepro.patches.ordered import OrderedSet
    patches.apply()
    assert text_transformers.set is OrderedSet
    assert not hasattr(transforms, 'set')
    patches.revert()
    assert not hasattr(text_transformers, 'set')


def test_names_and_docstrings_stay():
    from mmdet.datasets.ade20k import ADE20KSegDataset
    stock_method = ADE20KSegDataset.load_data_list
    patches.apply()
    method = ADE20KSegDataset.load_data_list
    assert method is not stock_method
    for name in ('__qualname__', '__doc__', '__module__'):
        assert getattr(method, name) == getattr(stock_method, name)
    assert method.__wrapped__ is stock_method


class SeesReplacement(torch.utils.data.Dataset):
    """Items tell whether the process that makes them has the replacement of a class's method."""

    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return hasattr(self.kind.load_data_list, '__wrapped__')


@pytest.mark.slow
def test_spawned_workers_get_the_replacements():
    from mmdet.datasets.ade20k import ADE20KSegDataset
    loader = torch.utils.data.DataLoader(
        SeesReplacement(ADE20KSegDataset), num_workers=1, multiprocessing_context='spawn',
        worker_init_fn=WorkerInit(Placement(0), 0, patches.apply))
    assert [bool(item) for item in loader] == [True]
