"""Synthetic inputs of detectors: small images with boxes, masks and stuff."""
from __future__ import annotations

from typing import Any

import numpy as np

# left, top, right, bottom as shares of the image: small, tall, wide, large, overlapping
BOXES = ((.05, .10, .25, .28), (.55, .05, .75, .60), (.10, .62, .60, .90), (.30, .15, .95, .95))
UNKNOWN = 255  # label of pixels without a stuff class


def _picture(size: int, index: int) -> Any:
    """Return smooth waves and a block per box, different in every image; uint8 (3, size, size)."""
    import torch
    y, x = np.mgrid[:size, :size] / size
    waves = [np.sin((3 + channel + index) * x + (5 + channel) * y) for channel in range(3)]
    picture = 110 + 60 * np.stack(waves)
    for number, (left, top, right, bottom) in enumerate(BOXES):
        rows = slice(int(top * size), int(bottom * size))
        columns = slice(int(left * size), int(right * size))
        picture[(number + index) % 3, rows, columns] += 50
    return torch.from_numpy(picture.clip(0, 255).astype(np.uint8))


def _instances(size: int, index: int, classes: int) -> Any:
    """Return boxes, labels and elliptical masks of one image; odd images have one box fewer."""
    import torch
    from mmdet.structures.bbox import HorizontalBoxes
    from mmdet.structures.mask import BitmapMasks
    from mmengine.structures import InstanceData
    boxes = np.array(BOXES[index % 2:], np.float32) * size
    y, x = np.mgrid[:size, :size] + .5
    masks = [((x - (a + c) / 2) / (c - a)) ** 2 + ((y - (b + d) / 2) / (d - b)) ** 2 < .25
             for a, b, c, d in boxes]
    return InstanceData(
        bboxes=HorizontalBoxes(torch.from_numpy(boxes)),
        labels=torch.arange(len(boxes)) % classes,
        masks=BitmapMasks(np.stack(masks).astype(np.uint8), size, size),
        instances_ids=torch.arange(len(boxes)) + 100)


def _sample(size: int, index: int, classes: int, text: Any) -> Any:
    import torch
    from mmdet.structures import DetDataSample
    from mmdet.structures.bbox import HorizontalBoxes
    from mmengine.structures import InstanceData, PixelData
    sample = DetDataSample(metainfo=dict(
        img_id=index, img_shape=(size, size), ori_shape=(size, size), pad_shape=(size, size),
        batch_input_shape=(size, size), img_path='none.png', scale_factor=(1., 1.), flip=False,
        flip_direction=None, border=[0, size, 0, size],
        homography_matrix=np.eye(3, dtype=np.float32),
        **(dict(text=text, custom_entities=True, tokens_positive=-1) if text else {})))
    sample.gt_instances = instances = _instances(size, index, classes)
    sample.ignored_instances = InstanceData(
        bboxes=HorizontalBoxes(torch.zeros(0, 4)), labels=torch.zeros(0, dtype=torch.long),
        masks=instances.masks[:0])
    stuff = np.full((1, size, size), UNKNOWN, np.uint8)
    stuff[:, size // 2:] = 1
    sample.gt_sem_seg = PixelData(sem_seg=torch.from_numpy(stuff))
    return sample


def images(size: int = 64, classes: int = 1, number: int = 2, text: Any = None) -> dict:
    """Return a batch as from a data loader: ``inputs`` and ``data_samples``.

    ``size`` is height and width in pixels; ``text`` has class names joined by ' . ', for detectors
    with text input.
    """
    return dict(inputs=[_picture(size, index) for index in range(number)],
                data_samples=[_sample(size, index, classes, text) for index in range(number)])
