"""Record the operators of torch that detectors reach: ``python -m dev.detector_operators``.

Members of the zoo train two steps and infer one image on a CPU, in deterministic mode, under a
dispatcher mode, which sees forward, backward and optimizer. ``tests/ops/aten/test_coverage.py``
compares the file with the table of operators.
"""
from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mmrepro import determinism, ops, patches

from .zoo.families import FAMILIES
from .zoo.step import load, one_rank, run_once

__all__ = ['CONFIGS', 'RESULT']

RESULT = Path(__file__).resolve().parents[1] / 'docs/results/detector_operators.json'
# Configs of the zoo (dev/zoo/families.py), chosen for the operators that they reach.
CONFIGS = (
    'faster_rcnn/faster-rcnn_r50_fpn_1x_coco', 'mask_rcnn/mask-rcnn_r50_fpn_1x_coco',
    'retinanet/retinanet_r18_fpn_1x_coco', 'fcos/fcos_r50-caffe_fpn_gn-head_1x_coco',
    'yolox/yolox_tiny_8xb8-300e_coco', 'rtmdet/rtmdet-ins_tiny_8xb32-300e_coco',
    'deformable_detr/deformable-detr_r50_16xb2-50e_coco', 'dino/dino-4scale_r50_8xb2-12e_coco',
    'detr/detr_r18_8xb2-500e_coco', 'mask2former/mask2former_r50_8xb2-lsj-50e_coco',
    'solov2/solov2-light_r18_fpn_ms-3x_coco', 'condinst/condinst_r50_fpn_ms-poly-90k_coco_instance',
    'reppoints/reppoints-moment_r50_fpn_1x_coco', 'htc/htc_r50_fpn_1x_coco',
    'point_rend/point-rend_r50-caffe_fpn_ms-1x_coco', 'libra_rcnn/libra-retinanet_r50_fpn_1x_coco',
    'detectors/cascade-rcnn_r50-sac_1x_coco', 'carafe/faster-rcnn_r50_fpn-carafe_1x_coco',
    'dynamic_rcnn/dynamic-rcnn_r50_fpn_1x_coco', 'pisa/retinanet-r50_fpn_pisa_1x_coco',
    'free_anchor/freeanchor_r50_fpn_1x_coco', 'swin/retinanet_swin-t-p4-w7_fpn_1x_coco',
    'pvt/retinanet_pvt-t_fpn_1x_coco', 'yolact/yolact_r50_1xb8-55e_coco',
    'centernet/centernet-update_r18_fpn_8xb8-amp-lsj-200e_coco',
    'cornernet/cornernet_hourglass104_8xb6-210e-mstest_coco', 'tood/tood_r50_fpn_1x_coco',
    'vfnet/vfnet_r50-mdconv-c3-c5_fpn_ms-2x_coco', 'atss/atss_r50_fpn_1x_coco',
    'gcnet/mask-rcnn_r50-syncbn-gcb-r4-c3-c5_fpn_1x_coco')


class _Names(TorchDispatchMode):
    """Collects the operators that run below autograd, as ``namespace.name.overload``."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.add(str(func))
        return func(*args, **kwargs or {})


def _reached(config: str) -> set[str]:
    """Return the operators that a member reaches. Exceptions of its training propagate."""
    member, = (one for one in FAMILIES if one.config == f'{config}.py')
    cfg = load(member.config, member.size)
    with determinism.deterministic(), one_rank(cfg), _Names() as names:
        run_once(member, cfg)
    return names.found


def main() -> None:
    from mmdet.utils import register_all_modules
    parser = argparse.ArgumentParser()
    parser.add_argument('--out', type=Path, default=RESULT)
    out = parser.parse_args().out
    register_all_modules(init_default_scope=True)
    torch.set_num_threads(1)
    patches.apply()
    users = defaultdict(list)
    with ops.using('torch'):
        for config in CONFIGS:
            print(config, flush=True)
            for name in _reached(config):
                users[name].append(config.partition('/')[0])
    # all of many users say no more than the first
    operators = {name: found if len(found) <= 3 else [*found[:3], f'and {len(found) - 3} more']
                 for name, found in sorted(users.items())}
    result = dict(command='python -m dev.detector_operators', torch=torch.__version__,
                  configs=CONFIGS, operators=operators)
    out.write_text(json.dumps(result, indent=1) + '\n')


if __name__ == '__main__':
    main()
