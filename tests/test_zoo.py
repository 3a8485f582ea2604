"""The walk through MMDetection's zoo: complete, honest about failures, and every family works."""
from __future__ import annotations

import json
import os

import pytest

from mmrepro.zoo import FAMILIES, Member, families, step, walk

NOT_DETECTORS = {
    '_base_',  # parts that the others inherit
    'common',  # parts as well
    'dsdl',    # the same detectors on data sets described in another language
}


@pytest.fixture(scope='module')
def warm():
    walk.warm()


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


def test_a_detector_trains_and_infers_with_the_same_bits(warm):
    row = walk.visit(Member('faster_rcnn/faster-rcnn_r18_fpn_8xb8-amp-lsj-200e_coco.py'))
    assert row['outcome'] == 'ok', row
    assert row['operators'] == ['nms', 'roi_align_backward', 'roi_align_forward']


def test_what_needs_a_package_names_it(warm, monkeypatch):
    package = families.Package('mmrepro-no-such-package', 'mmrepro_no_such_package', 'this test')
    monkeypatch.setitem(families.PACKAGES, package.name, package)
    monkeypatch.setattr(step, 'take', lambda member: 1 / 0)
    row = walk.visit(Member('any.py', packages=(package.name,)))
    assert (row['outcome'], row['packages']) == ('needs', [package.name])


def test_a_needed_package_that_is_not_needed_is_a_failure(warm, monkeypatch):
    package = families.Package('mmrepro-no-such-package', 'mmrepro_no_such_package', 'this test')
    monkeypatch.setitem(families.PACKAGES, package.name, package)
    monkeypatch.setattr(step, 'take', lambda member: dict(equal=True))
    row = walk.visit(Member('any.py', packages=(package.name,)))
    assert (row['outcome'], row['error']) == ('failed', f'works without {package.name}')


@pytest.mark.parametrize('take, error', [
    (lambda member: 1 / 0, 'ZeroDivisionError: division by zero'),
    (lambda member: os._exit(3), 'the process died with exit code 3'),
    (lambda member: [None for _ in iter(int, 1)], 'no result within 0.2 s'),
])
def test_a_failure_says_what_happened(warm, monkeypatch, take, error):
    monkeypatch.setattr(step, 'take', take)
    row = walk.visit(Member('any.py'), limit=.2 if 'within' in error else 60)
    assert (row['outcome'], row['error']) == ('failed', error)


def test_different_bits_are_not_ok(warm, monkeypatch):
    monkeypatch.setattr(step, 'take', lambda member: dict(equal=False, different=['weights']))
    assert walk.visit(Member('any.py'))['outcome'] == 'differs'


def test_members_are_found_by_folder_config_and_pattern():
    dcn = [m.config for m in FAMILIES if m.family == 'dcn']
    assert [m.config for m in walk.members(['dcn'])] == dcn
    assert [m.config for m in walk.members(['htc/htc_r50*', 'htc_r50_fpn_1x_coco'])] == [
        'htc/htc_r50_fpn_1x_coco.py']
    assert walk.members() == list(FAMILIES)
    with pytest.raises(ValueError, match="'no-such' matches no config"):
        walk.members(['no-such'])


def test_the_tool_writes_rows_and_tells_failure_by_its_exit_code(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(walk, 'visit', lambda member, limit: dict(
        config=member.config, outcome='failed' if 'mask' in member.config else 'ok', trace='deep'))
    out = tmp_path / 'zoo.json'
    assert walk.main(['carafe', '--out', str(out)]) == 1
    assert walk.main(['atss']) == 0
    rows = json.loads(out.read_text())['rows']
    assert [row['outcome'] for row in rows] == ['ok', 'failed']
    assert 'deep' not in out.read_text()
    assert 'carafe/mask-rcnn_r50_fpn-carafe_1x_coco.py' in capsys.readouterr().out


@pytest.mark.nightly
def test_every_family_of_the_zoo():
    rows = walk.walk(FAMILIES)
    bad = [row for row in rows if row['outcome'] in ('failed', 'differs')]
    assert [(row['config'], row.get('error')) for row in bad] == []
