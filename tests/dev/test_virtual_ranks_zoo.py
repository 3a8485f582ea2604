"""Every family of the zoo on virtual ranks: see dev/virtual_ranks_zoo.py."""
import json
from pathlib import Path

import pytest

from dev import virtual_ranks_zoo as zoo
from dev.zoo.families import FAMILIES, Member
from dev.zoo.run_facts import FILE, facts_of
from dev.zoo.training import training

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


def test_one_config_of_every_family():
    assert [member.family for member in zoo.chosen()] == NAMES
    assert zoo.chosen(['libra_rcnn'])[0].config == 'libra_rcnn/libra-faster-rcnn_r50_fpn_1x_coco.py'
    with pytest.raises(ValueError, match="the zoo has no 'no_such'; allowed: atss, "):
        zoo.chosen(['no_such'])


def test_all_settings_are_the_defaults(tmp_path):
    cfg = training(Member('atss/atss_r50_fpn_1x_coco.py'), str(tmp_path), 3, 'quarter')
    assert cfg.randomness == dict(seed=42, deterministic=True)
    sizes = [node['scale'] for node in cfg.train_dataloader.dataset.pipeline if 'scale' in node]
    assert sizes == [(107, 64)]
    assert cfg.model.backbone.base_channels == 16 and cfg.model.neck.in_channels == [
        64, 128, 256, 512] and cfg.model.bbox_head.num_classes == 6


@pytest.mark.parametrize('kinds, processes, memory', [
    (['shared', 'shared', 'separate'], [1, 1, 2], 'shared'),
    (['separate'] * 3, [1, 1, 1], 'separate'), (['sharded'] * 3, [1, 2, 3], 'sharded'),
    (['shared', 'shared', 'separate'], [1, 1, 1], 'mixed')])
def test_memory_of_a_run(kinds, processes, memory, tmp_path):
    for rank, (one, process) in enumerate(zip(kinds, processes)):
        (tmp_path / FILE.format(rank)).write_text(json.dumps(dict(
            process=process, memory=one, finite=True, repeated=dict(steps=3, samples=2),
            check_steps=1000, check_samples=1000)))
    assert facts_of(tmp_path) == dict(memory=memory, finite=True, checks=[(1000, 1000)], steps=9,
                                      samples=6)
