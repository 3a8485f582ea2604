"""The demonstration for MMEngine alone."""
import json

from harness import python

from mmrepro.cli import demo
from mmrepro.demo.classifier import CutOut, PhotoDataset
from mmrepro.demo.photos import CLASSES
from mmrepro.demo.shipped_configs import reads_coco, shipped

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
from mmrepro.demo.two_runs import RUNS, prepare
from mmrepro.runs.startup import build_runner

cfg = prepare(sys.argv[1], RUNS[2:][int(sys.argv[2])], 'nowhere', 8, 1)
cfg.work_dir, cfg.custom_hooks = sys.argv[3], []
runner = build_runner(cfg)
runner.train()
from mmrepro.digests import state_digest
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


def test_it_trains_without_mmdetection_and_mmcv(tmp_path):
    config = shipped('configs/demo/classifier_demo.py')
    outcomes = []
    for run in (0, 1):
        said = python('-c', ALONE + TRAIN, config, run, tmp_path / str(run), PYTHONHASHSEED='0')
        outcomes.append(json.loads(said.splitlines()[-1]))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1] == []
