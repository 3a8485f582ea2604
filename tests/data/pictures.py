"""A dataset of small images, for transforms that mix samples."""
import random

import numpy as np
import torch
from mmdet.structures.bbox import HorizontalBoxes
from mmengine.dataset import BaseDataset

SIZE = 16  # images and pixels


class Pictures(BaseDataset):
    """Images of one grey value each, one box each, drawn noise and a transform that may refuse."""
    loads = 0

    def load_data_list(self):
        return [dict(number=i) for i in range(SIZE)]


def draw(results):
    """Loads an image: its own grey, and noise from every generator a transform may use."""
    Pictures.loads += 1
    noise = random.randrange(8) + np.random.randint(8) + int(torch.randint(8, ()))
    results['img'] = np.full((SIZE, SIZE, 3), 10 * results['number'], np.uint8) + np.uint8(noise)
    results['gt_bboxes'] = HorizontalBoxes(torch.tensor([[2., 2., 12., 12.]]))
    results['gt_bboxes_labels'] = np.array([results['number']])
    results['gt_ignore_flags'] = np.array([False])
    return results


def bits(item):
    return item['img'].tobytes() + item['gt_bboxes'].tensor.numpy().tobytes()
