"""Configs of MMDetection's model zoo, for small images and without downloads."""
from __future__ import annotations

import os
from typing import Any

from mmrepro.objects.walks import dicts
from mmrepro.runs.config_edits import random_weights
from mmrepro.runs.config_files import find_config

BATCH_SIZES = ('BatchFixedSizePad', 'BatchSyncRandomResize', 'BatchResize')

# Small images need fewer candidates. With the numbers for 1333 pixels the candidates mostly repeat
# the same few pixels, and the sweep takes hours.
FEWER = {
    'num': 24,            # sampled anchors and RoIs per image
    'nms_pre': 200,       # candidates per level before NMS
    'max_per_img': 16,    # proposals and detections
    'num_points': 256,    # sampled points of a mask
    'num_proposals': 16,  # learned boxes; QueryInst wants as many detections
    'num_queries': 30,    # learned queries; no more than there are pixels on all levels
}


def load(path: str, size: int = 64, small: bool = True) -> Any:
    """Return the config without downloads; ``small``: for images of ``size`` pixels."""
    from mmengine.config import Config
    cfg = Config.fromfile(find_config(f'mmdet::{path}'))
    random_weights(cfg.model)
    for node in dicts(cfg.model):
        if isinstance(node.get('teacher_config'), str):  # written from MMDetection's root
            node['teacher_config'] = load(
                os.path.relpath(node['teacher_config'], 'configs'), size, small)
        for key, most in FEWER.items() if small else ():
            if isinstance(node.get(key), int):
                node[key] = min(node[key], most)
        if small and node.get('type') in BATCH_SIZES:
            for key in ('size', 'random_size_range', 'scale'):
                if key in node:
                    node[key] = (size, size)
    return cfg
