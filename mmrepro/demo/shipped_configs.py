"""Find the shipped configs and tools, and point a config at a dataset."""
from __future__ import annotations

import os

from mmengine.config import Config

from ..objects.nested import dicts
from ..runs.config_files import shipped
from .dataset import annotation_file


def demo_config(model: str, data_root: str | None = None) -> Config:
    """Read the config ``configs/demo/<model>_demo.py``, on the dataset in ``data_root``.

    >>> demo_config('faster-rcnn_r50_fpn').randomness.seed
    42
    """
    cfg = Config.fromfile(shipped(f'configs/demo/{model}_demo.py'))
    if data_root is not None:
        use_data(cfg, data_root)
    return cfg


def reads_coco(config: str) -> bool:
    """Whether a config reads a dataset in the format of COCO."""
    cfg = Config.fromfile(config, import_custom_modules=False)
    return 'ann_file' in str(cfg.get('train_dataloader'))


def use_data(cfg: Config, root: str) -> None:
    """Let all datasets and metrics of ``cfg`` read the COCO-format data in ``root``."""
    for node in dicts([cfg[key] for key in cfg
                       if key.endswith(('_dataloader', '_evaluator')) and cfg[key]]):
        if 'data_root' in node:
            node['data_root'] = root
        if os.path.basename(str(node.get('ann_file', ''))) and 'data_root' not in node:
            split = 'train2017' if 'train2017' in node['ann_file'] else 'val2017'
            node['ann_file'] = annotation_file(root, split)
