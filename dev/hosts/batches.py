"""Print digests of the first batches of stock pipelines, as JSON, with what computed them.

    python dev/hosts/batches.py ROOT [NAME ...]

ROOT is what dev.hosts has written, NAME a pipeline; without one, all of them.
"""
from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from itertools import islice
from typing import Any

BATCHES, BATCH_SIZE = 2, 4

# name -> config of MMDetection; together they call what MMDetection's pipelines take from OpenCV
# and NumPy
PIPELINES = {
    'Faster R-CNN': 'faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py',
    'Mask R-CNN, large-scale jitter': 'common/lsj-100e_coco-instance.py',
    'Mask R-CNN, copy-paste': 'common/ssj_scp_270k_coco-instance.py',
    'DETR': 'detr/detr_r50_8xb2-150e_coco.py',
    'SSD': 'ssd/ssd300_coco.py',
    'CenterNet': 'centernet/centernet_r18_8xb16-crop512-140e_coco.py',  # images in float32
    'YOLOX': 'yolox/yolox_tiny_8xb8-300e_coco.py',
    'RTMDet': 'rtmdet/rtmdet_tiny_8xb32-300e_coco.py',
    'RTMDet-Ins': 'rtmdet/rtmdet-ins_tiny_8xb32-300e_coco.py',
    'Soft Teacher': '',  # the demonstration's: the stock one reads lists that COCO does not have
}
# where albumentations is installed
ALBU = {'Albu': 'albu_example/mask-rcnn_r50_fpn_albu-1x_coco.py'}
VERSIONS = ('torch', 'numpy', 'cv2', 'mmcv', 'mmengine', 'mmdet', 'pycocotools')


def digests(root: str, only: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the digests of the first batches by name of the pipeline."""
    import mmdet
    from mmengine.config import Config

    from mmrepro.demo.dataset import demo_config, use_data
    stock = os.path.join(os.path.dirname(mmdet.__file__), '.mim', 'configs')
    albu = ALBU if importlib.util.find_spec('albumentations') else {}
    found = {}
    for name, path in {**PIPELINES, **albu}.items():
        if only and name not in only:
            continue
        if path:
            cfg = Config.fromfile(os.path.join(stock, path))
            use_data(cfg, root)
        else:
            cfg = demo_config('soft-teacher_faster-rcnn_r50', root)
        found[name] = _first_batches(cfg)
    return found


def _first_batches(cfg: Any) -> list[str]:
    from mmengine.registry import DefaultScope
    from mmengine.runner import Runner

    from mmrepro.config import RandomnessConfig
    from mmrepro.data import adopt_loader
    from mmrepro.demo.dataset import CLASSES
    from mmrepro.objects.digests import state_digest
    from mmrepro.runs.config_edits import innermost, shrink
    cfg.setdefault('model', {})  # some files hold pipelines only
    shrink(cfg)
    settings = cfg.train_dataloader
    settings.update(num_workers=0, persistent_workers=False, batch_size=BATCH_SIZE)
    for dataset in innermost(settings.dataset):
        dataset.metainfo = dict(classes=CLASSES)
    if 'batch_size' in settings.sampler:
        settings.sampler.batch_size = BATCH_SIZE
    with DefaultScope.overwrite_default_scope('mmdet'):
        loader = adopt_loader(Runner.build_dataloader(settings), RandomnessConfig(seed=0),
                              'sample', rank=0)
        return [state_digest(batch) for batch in islice(loader, BATCHES)]


def main() -> None:
    root, *only = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
    import mmrepro  # noqa: F401  patches attach to MMDetection
    from mmrepro.determinism.cpu_level import cpu_instructions
    from mmrepro.facts.collect import cpu_features, cpu_name
    from mmrepro.seeds import SCHEME
    found = digests(root, only)
    versions = {name: sys.modules[name].__version__.partition('+')[0] for name in VERSIONS
                if hasattr(sys.modules.get(name), '__version__')}
    print(json.dumps(dict(cpu=cpu_name(), features=cpu_features(), instructions=cpu_instructions(),
                          versions=dict(versions, scheme=SCHEME), digests=found)))


if __name__ == '__main__':
    main()
