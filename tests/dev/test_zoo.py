"""The sweep over MMDetection's zoo is complete, reports failures, and every family works."""
import json
import os

import pytest
from mmengine.config import Config

from dev.zoo import FAMILIES, Member, families, step, sweep

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


def test_every_member_is_a_config_and_listed_once():
    root = step.config_root()
    assert [m.config for m in FAMILIES if not os.path.isfile(os.path.join(root, m.config))] == []
    assert len({member.config for member in FAMILIES}) == len(FAMILIES)
    for member in FAMILIES:
        assert set(member.packages) <= set(families.PACKAGES)


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


def test_the_tool_writes_rows_and_tells_failure_by_its_exit_code(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sweep, 'visit', lambda member, *_: dict(
        config=member.config, outcome='failed' if 'mask' in member.config else 'ok', trace='deep'))
    out = tmp_path / 'zoo.json'
    assert sweep.main(['carafe', '--out', str(out)]) == 1
    assert sweep.main(['atss']) == 0
    rows = json.loads(out.read_text())['rows']
    assert [row['outcome'] for row in rows] == ['ok', 'failed']
    assert 'deep' not in out.read_text()
    assert 'carafe/mask-rcnn_r50_fpn-carafe_1x_coco.py' in capsys.readouterr().out


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
