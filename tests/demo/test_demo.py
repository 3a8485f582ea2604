"""The demonstration: its dataset, its digests, its verdict; without MMDetection."""
import copy
import hashlib
import json
import os
import re
import sys
from pathlib import Path

import cv2
import pytest
from command import exit_code
from harness import ROOT, python
from mmengine.config import Config

from mmrepro.cli import demo
from mmrepro.demo import dataset
from mmrepro.demo.classifier import CutOut, PhotoDataset
from mmrepro.demo.dataset import CLASSES, reads_coco, shipped
from mmrepro.fingerprint.reader import RankLog
from mmrepro.objects.digests import state_digest
from mmrepro.runs.config_edits import only_fingerprints
from mmrepro.verbs.demo import compare, lack_of_gpus, on_processes, prepare, runs_of

# of annotations alone: decoders of JPEG may differ in the last bit of a pixel
ANNOTATIONS = {
    'train2017': '96e28e8d994d5cf1659add1dd14e4ed3bec7f290f98b1cb95c1c45a780ab621c',
    'val2017': '113098faf6a522d43f8893bb1bcced557d98ca3a6133d4391a8d7817f5f899f2',
}


@pytest.mark.parametrize('split', dataset.SPLITS)
def test_annotations_are_pinned_and_images_have_the_size_that_is_written_down(data_root, split):
    content = Path(dataset.annotation_file(data_root, split)).read_bytes()
    assert hashlib.sha256(content).hexdigest() == ANNOTATIONS[split]
    for record in json.loads(content)['images']:
        image = cv2.imread(os.path.join(data_root, split, record['file_name']))
        assert image.shape == (record['height'], record['width'], 3)


def test_the_same_seed_gives_the_same_data_and_another_seed_another(tmp_path):
    digests = [dataset.write_dataset(str(tmp_path / name), seed, 3, 2)
               for name, seed in (('a', 1), ('b', 1), ('c', 2))]
    assert digests[0] == digests[1] != digests[2]


def test_a_smaller_data_set_is_written_over_a_larger_one(tmp_path):
    dataset.write_dataset(str(tmp_path), 0, 3, 1)
    dataset.write_dataset(str(tmp_path), 0, 2, 1)
    assert sorted(os.listdir(tmp_path / 'train2017')) == ['000000000001.png', '000000000002.png']


def test_mmdetection_loads_it_and_perfect_boxes_score_one(data_root):
    from mmdet.datasets import CocoDataset
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    loaded = CocoDataset(
        data_root=data_root, ann_file='annotations/instances_val2017.json',
        data_prefix=dict(img='val2017/'), metainfo=dict(classes=dataset.CLASSES), pipeline=[])
    assert len(loaded) == 8
    assert {i['bbox_label'] for info in loaded for i in info['instances']} == set(range(6))

    truth = COCO(dataset.annotation_file(data_root, 'val2017'))
    found = [dict(image_id=a['image_id'], category_id=a['category_id'], bbox=a['bbox'], score=1.0)
             for a in truth.anns.values()]
    evaluation = COCOeval(truth, truth.loadRes(found), 'bbox')
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    assert evaluation.stats[0] == 1.0


@pytest.mark.parametrize('arguments, message', [
    (['--images', '0'], '--images 0: must be 1 or more'),
    (['--config', 'no/such.py'], '--config no/such.py: no such file'),
    (['--processes', '1,2'], '--processes 1,2: needs --virtual-ranks'),
    (['--virtual-ranks', '1'], '--virtual-ranks 1: must be 2 or more'),
    (['--virtual-ranks', '3', '--processes', '1,4'],
     '--processes 1,4: must be numbers from 1 to 3'),
    (['--virtual-ranks', '3', '--processes', '2'], '--processes 2: give two numbers or more'),
    (['--data-only', '--data', 'OUT', '--train', '-3'], '--train -3: must be 1 to '),
    (['--data-only', '--data', 'OUT', '--val', '0'], '--val 0: must be 1 to '),
    (['--data-only', '--data', 'OUT', '--seed', '-1'], '--seed -1: must be 0 to 4294967295'),
])
def test_wrong_arguments_are_named(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert exit_code('demo', *arguments) == 2 and message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_one_line(capsys, tmp_path):
    (tmp_path / 'file').touch()
    for more in ([], ['--data-only']):
        assert exit_code('demo', '--data', tmp_path / 'file' / 'data', *more) == 2
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 1 and said[0].endswith('data cannot be written: Not a directory')


def test_an_image_that_opencv_does_not_write_is_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(cv2, 'imwrite', lambda *args: False)  # as of a full disk: no error
    assert exit_code('demo', '--data', tmp_path / 'data', '--data-only') == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].endswith('000000000001.png cannot be written')


def test_without_the_photographs_it_says_what_to_install(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'skimage', None)
    assert exit_code('demo', '--data-only', '--data', tmp_path / 'out') == 2
    said = capsys.readouterr().err
    assert 'pip install scikit-image pycocotools' in said
    assert len(said.splitlines()) == 1 and not os.path.exists(tmp_path / 'out')


def fingerprints(*weights, ranks=1, loss=1.5):
    """Return the fingerprints of a run whose weights have these digests after each iteration."""
    steps = {i: dict(weights=one * 16, parameters=one * 16, total=len(weights),
                     losses=dict(loss=float(loss).hex())) for i, one in enumerate(weights)}
    return {rank: RankLog('', [], dict(steps), [], True, []) for rank in range(ranks)}


def compared(first, second):
    report = compare(dict(A=first, B=second))
    return str(report).rstrip(), report.exit_code == 0


@pytest.mark.parametrize('first, second, verdict', [
    ('abc', 'axy', 'DIFFERENT from iteration 2 on'), ('ab', 'ab', ''), ('a', '', 'DIFFERENT'),
    ('ab', 'a', 'DIFFERENT')])
def test_the_verdict_names_the_first_differing_iteration(first, second, verdict):
    table, same = compared(fingerprints(*first), fingerprints(*second))
    assert same is not bool(verdict) and (verdict or 'after each of 2 iterations') in table
    assert compared({}, {})[1] is False, 'no iteration is no agreement'


def test_each_number_of_processes_has_a_column_and_every_rank_counts():
    names = list(on_processes(4, (1, 2, 3)))
    assert names == ['1 process', '2 processes', '3 processes']
    runs = {name: fingerprints('a', 'b', ranks=2) for name in names}
    table = str(compare(runs))
    assert 'SAME BITS' in table and table.count(state_digest(['b' * 16] * 2)[:16]) == 1
    assert [table.count(f'loss {name}') for name in names] == [1, 1, 1]
    steps = runs['3 processes'][1].steps
    steps[1] = dict(steps[1], losses=dict(loss=2.625.hex()))
    report = compare(runs)
    assert report.exit_code == 1 and report.verdict == ('DIFFERENT from iteration 2 on')


def test_all_runs_use_the_cpu_where_there_are_fewer_gpus_than_processes(monkeypatch):
    monkeypatch.setattr('torch.cuda.is_available', lambda: True)
    monkeypatch.setattr('torch.cuda.device_count', lambda: 1)
    lack = lack_of_gpus(on_processes(4, (1, 2)))
    assert lack == '2 processes need 2 GPUs, and there is 1'
    assert not lack_of_gpus(on_processes(4, (1, )))


@pytest.mark.parametrize('stock, verdict', [('axy', 'diverge at iteration 2'), ('abc', 'agree as')])
def test_runs_without_mmrepro_are_shown_and_decide_nothing(stock, verdict):
    logs = {'stock 1': 'abc', 'stock 2': stock, 'A': 'xyz', 'B': 'xyz'}
    report = compare({name: fingerprints(*run) for name, run in logs.items()})
    assert report.exit_code == 0 and verdict in report.notes[0]
    assert report.images['losses'].startswith(b'\x89PNG')
    assert [row[-2:] for row in report.tables[0].rows][2] == ('z' * 16, 'yes')


def changed(cfg, run):
    """Return the config of a run."""
    copied = copy.deepcopy(cfg)
    run.change(copied, 2)
    return copied


def test_the_runs_differ_in_what_must_not_matter_only(data_root):
    cfg = prepare(Config.fromfile(dataset.shipped(demo.DEFAULT_CONFIG)), data_root, 10, 2)
    only_fingerprints(cfg, 'step')
    stock, _, first, second = (changed(cfg, run) for run in runs_of(cfg, 10).values())
    assert first.train_dataloader.num_workers == 0 and second.train_dataloader.num_workers == 2
    second.train_dataloader.update(num_workers=0, persistent_workers=False)
    second.default_hooks.checkpoint = first.default_hooks.checkpoint
    assert first.to_dict() == second.to_dict()
    stock.update(runner_type=first.runner_type, randomness=first.randomness)
    assert first.to_dict() == stock.to_dict()


@pytest.mark.parametrize('iterations, worker_seed, killed', [
    (6, 'sample', True), (3, 'sample', False), (6, 'mmengine', False)])
def test_a_run_is_killed_where_it_can_be_resumed(iterations, worker_seed, killed):
    cfg = Config(dict(randomness=dict(worker_seed=worker_seed)))
    runs = runs_of(cfg, iterations)
    assert [run.kill for run in runs.values()] == [False, False, False, killed]
    assert ('killed after iteration 3, resumed' in runs['B'].title) is killed
    assert list(runs_of(cfg, iterations, portable=True)) == ['A', 'B']


def demo_in(folder, *arguments):
    return demo.main(['--data', f'{folder}/data', '--work-dir', f'{folder}/work',
                      *map(str, arguments)])


@pytest.mark.smoke
def test_the_command_as_users_type_it(tmp_path, capfd):
    assert demo_in(tmp_path) == 0
    said = capfd.readouterr().out
    assert 'SAME BITS: loss, weights and optimizer state agree after each of 6' in said
    assert 'deterministic=True: the runs diverge at iteration 2' in said
    assert (tmp_path / 'work' / 'losses.png').stat().st_size > 10_000
    logs = {name: (tmp_path / 'work' / name / 'output.txt').read_text() for name in (
        'stock_1', 'A', 'B')}
    assert 'PYTHONHASHSEED=1, killed after iteration 3' in said
    assert 'iter_2.pth: epoch 0, iteration 2' in logs['B']
    # without mmrepro: MMEngine's own lines, none of ours behind the restart
    assert 'mmrepro train' in logs['A'] and 'mmrepro train' not in logs['stock_1']


@pytest.mark.nightly
def test_the_weights_are_those_of_the_readme_on_this_cpu(tmp_path, capfd):
    assert demo_in(tmp_path, '--portable') == 0
    row = next(line for line in capfd.readouterr().out.splitlines() if line.startswith(' 6 '))
    for readme in ('README.md', 'README_zh-CN.md'):
        text = (ROOT / readme).read_text(encoding='utf-8')
        digest = re.search(r'tools/demo.sh --portable`.*?`([0-9a-f]{16})`', text, re.S).group(1)
        assert digest in row.split(), readme


@pytest.mark.nightly
def test_mmengines_own_streams_depend_on_the_workers_and_the_verdict_says_so(tmp_path, capfd):
    config = tmp_path / 'stock_streams.py'
    config.write_text(f"_base_ = {dataset.shipped('configs/demo/yolox_s_demo.py')!r}\n"
                      "randomness = dict(worker_seed='mmengine')\n")
    # the first batch comes from worker 0, whose seed is that of the main process
    assert demo_in(tmp_path, '--config', config, '--images', 8, '--epochs', 1) == 1
    assert 'DIFFERENT from iteration 2 on' in capfd.readouterr().out


# hides packages that are installed here
ALONE = '''
import importlib.abc, sys

class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in ('mmdet', 'mmcv', 'pycocotools'):
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)

sys.meta_path.insert(0, Hidden())
'''
TRAIN = '''
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *args: (
    None if name in ('mmdet', 'mmcv', 'pycocotools') else found(name, *args))
import json, sys
from mmengine.config import Config
from mmrepro.runs.config_edits import only_fingerprints
from mmrepro.runs.startup import build_runner
from mmrepro.verbs.demo import prepare, runs_of

cfg = prepare(Config.fromfile(sys.argv[1]), 'nowhere', 8, 1)
only_fingerprints(cfg, 'step')
runs_of(cfg, 4)[sys.argv[2]].change(cfg, 2)
cfg.work_dir, cfg.custom_hooks = sys.argv[3], []
runner = build_runner(cfg)
runner.train()
from mmrepro.objects.digests import state_digest
print(json.dumps([state_digest(runner.model.state_dict()),
                  sorted({name.partition('.')[0] for name in sys.modules} & {'mmdet', 'mmcv'})]))
'''


def test_every_category_is_as_frequent_and_every_cut_has_its_size():
    dataset = PhotoDataset(length=12, pipeline=[CutOut(size=16)])
    samples = [dataset[i] for i in range(12)]
    assert sorted(one['label'] for one in samples) == sorted([*range(len(CLASSES))] * 2)
    assert {one['image'].shape for one in samples} == {(16, 16, 3)}
    assert len({one['image'].tobytes() for one in samples}) > len(CLASSES)


def test_its_data_are_not_written():
    assert reads_coco(shipped(demo.DEFAULT_CONFIG))
    assert not reads_coco(shipped(demo.WITHOUT_MMDET))


@pytest.mark.nightly
def test_it_trains_without_mmdetection_and_mmcv(tmp_path):
    config = shipped('configs/demo/classifier_demo.py')
    outcomes = []
    for run in 'AB':
        said = python('-c', ALONE + TRAIN, config, run, tmp_path / run, PYTHONHASHSEED='0')
        outcomes.append(json.loads(said.splitlines()[-1]))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1] == []
