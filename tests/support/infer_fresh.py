"""A fresh process: predictions of a detector for images, in three ways; prints their digests.

Arguments: a config, a file with weights, and the images in the order in which to take them.
"""
import contextlib
import json
import os
import sys

import torch

import mmrepro
from mmrepro.objects.digests import state_digest


def digest_of(sample):
    found = sample.pred_instances
    return state_digest({name: found[name] for name in ('bboxes', 'scores', 'labels')}), len(found)


def by_inferencer(cfg, weights, images):
    from mmdet.apis import DetInferencer
    inferencer = DetInferencer(cfg, weights, device='cpu', show_progress=False)
    found = inferencer(images, return_datasamples=True, no_save_vis=True)['predictions']
    return list(map(digest_of, found))


def by_function(cfg, weights, images):
    from mmdet.apis import inference_detector, init_detector
    model = init_detector(cfg, weights, device='cpu', palette='coco')
    return list(map(digest_of, inference_detector(model, images)))


def with_augmentation(cfg, weights, images):
    """Run what ``mmrepro test --tta`` and ``tools/test.py --tta`` run for an image."""
    from mmcv.transforms import Compose
    from mmengine.dataset import pseudo_collate
    from mmengine.registry import MODELS
    from mmengine.runner import load_checkpoint

    from mmrepro.runs.config_edits import augment_test
    augment_test(cfg)
    model = MODELS.build(cfg.model).eval()
    load_checkpoint(model.module, weights, map_location='cpu')
    pipeline = Compose([step for step in cfg.tta_pipeline if step.type != 'LoadAnnotations'])
    with torch.no_grad():
        return [digest_of(model.test_step(pseudo_collate([pipeline(dict(
            img_path=image, img_id=0))]))[0]) for image in images]


WAYS = (by_inferencer, by_function, with_augmentation)


def main(path, weights, *images):
    from mmengine.config import Config
    from mmengine.registry import init_default_scope
    init_default_scope('mmdet')
    found = {}
    for way in WAYS:
        mmrepro.set_random_seed(0, deterministic=True)
        digests = way(Config.fromfile(path), weights, list(images))
        found[way.__name__] = dict(zip(map(os.path.basename, images), digests))
    return found


if __name__ == '__main__':
    with contextlib.redirect_stdout(sys.stderr):  # progress bars
        result = main(*sys.argv[1:])
    print(json.dumps(result))
