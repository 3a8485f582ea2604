"""Every family of MMDetection's zoo works, also on virtual ranks; sweeps report failures."""
import json
import os
from pathlib import Path

import pytest
from mmengine.config import Config

from dev import virtual_ranks_zoo as zoo
from dev.virtual_ranks_detectors import CONFIGS
from dev.zoo import FAMILIES, Member, step, sweep
from dev.zoo.training import training

NOT_DETECTORS = {
    '_base_',  # parts that the others inherit
    'common',  # parts as well
    'dsdl',    # the same detectors on datasets described in another language
}


@pytest.fixture(scope='module')
def warm():
    sweep.warm()


def test_every_folder_of_the_zoo_is_visited():
    root = step.config_root()
    folders = {name for name in os.listdir(root) if os.path.isdir(os.path.join(root, name))}
    assert folders - NOT_DETECTORS == {member.family for member in FAMILIES}


@pytest.mark.parametrize('take, outcome, error', [
    (lambda *_: 1 / 0, 'failed', 'ZeroDivisionError: division by zero'),
    (lambda *_: os._exit(3), 'failed', 'the process died with exit code 3'),
    (lambda *_: [None for _ in iter(int, 1)], 'failed', 'no result within 0.2 s'),
    (lambda *_: dict(equal=False, different=['weights']), 'differs', ''),
])
def test_a_failure_says_what_happened_and_different_bits_are_not_ok(warm, monkeypatch, take,
                                                                    outcome, error):
    monkeypatch.setattr(step, 'take', take)
    row = sweep.visit(Member('any.py'), limit=.2 if 'within' in error else 60)
    assert (row['outcome'], row.get('error') or '') == (outcome, error)


def _types(node):
    if isinstance(node, dict):
        if node.get('type') is not None:
            yield getattr(node['type'], '__name__', node['type'])
        node = node.values()
    if not isinstance(node, str) and hasattr(node, '__iter__'):
        for value in node:
            yield from _types(value)


@pytest.mark.nightly
def test_the_members_name_every_class_of_the_zoo(warm):
    root, found = step.config_root(), {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.relpath(os.path.join(folder, name), root)
            if name.endswith('.py') and path.partition(os.sep)[0] not in NOT_DETECTORS:
                try:
                    cfg = Config.fromfile(os.path.join(root, path), import_custom_modules=False)
                except (FileNotFoundError, ModuleNotFoundError):
                    continue  # MMDetection's own wrong paths; another package's base config
                found[path] = set(_types(cfg.get('model')))
    assert len(found) > 600
    covered = set().union(*(found.get(member.config, set()) for member in FAMILIES))
    assert {t: path for path, types in found.items() for t in types if t not in covered} == {}


@pytest.mark.nightly
def test_every_family_of_the_zoo():
    rows = sweep.sweep(FAMILIES)
    bad = [row for row in rows if row['outcome'] in ('failed', 'differs')]
    assert [(row['config'], row.get('error')) for row in bad] == []


RESULTS = Path(__file__).resolve().parents[2] / 'docs' / 'results'
REPORTS = {3: RESULTS / 'virtual_ranks_zoo.json', 1: RESULTS / 'zoo_trained.json'}  # by ranks
NAMES = list(dict.fromkeys(member.family for member in FAMILIES))


@pytest.mark.nightly
@pytest.mark.parametrize('ranks', REPORTS)
@pytest.mark.parametrize('name', NAMES)
def test_every_family(name, ranks, photographs, tmp_path):
    rows = list(zoo.family_rows(*zoo.chosen([name]), photographs, tmp_path, ranks))
    assert {row['difference'] for row in rows} == {''}
    assert len(rows) == (1 if 'cannot' in rows[0] else len(zoo.ROWS[ranks]))


@pytest.mark.parametrize('ranks', REPORTS)
def test_the_published_table_has_every_family_and_is_equal(ranks):
    rows = json.loads(REPORTS[ranks].read_text())['rows']
    found = {(row['family'], row['processes'], row['resumed_from']) for row in rows}
    alone = {row['family'] for row in rows if 'cannot' in row}
    assert found == {(name, *run) for name in NAMES
                     for run in ([(0, 0)] if name in alone else zoo.ROWS[ranks])}
    assert [row for row in rows if row['difference']] == []
    trained = [row for row in rows if 'cannot' not in row]
    assert all(row['steps'] and row['samples'] and row['memory'] != 'mixed' for row in trained)


def test_what_is_published_of_sharded_weights_is_equal():
    rows = json.loads((RESULTS / 'sharded_zoo.json').read_text())['rows']
    assert [row for row in rows if row['difference']] == []
    for family in {row['family'] for row in rows}:
        found = {(row['processes'], row['resumed_from']): row['memory']
                 for row in rows if row['family'] == family}
        assert found == {run: 'shared' if run == (1, 2) else 'sharded'
                         for run in zoo.ROWS[zoo.SHARDED]}
    rows = json.loads((RESULTS / 'sharded_matrix.json').read_text())['rows']
    assert {(row['config'], row['difference']) for row in rows} == {(name, '') for name in CONFIGS}


def test_all_settings_are_the_defaults(tmp_path):
    cfg = training(Member('atss/atss_r50_fpn_1x_coco.py'), str(tmp_path), 3, 'quarter')
    assert cfg.randomness == dict(seed=42, deterministic=True)
    sizes = [node['scale'] for node in cfg.train_dataloader.dataset.pipeline if 'scale' in node]
    assert sizes == [(107, 64)]
    assert cfg.model.backbone.base_channels == 16 and cfg.model.neck.in_channels == [
        64, 128, 256, 512] and cfg.model.bbox_head.num_classes == 6
