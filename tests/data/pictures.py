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


class SizedPictures(BaseDataset):
    """Pictures of two shapes and three classes, which are never loaded."""
    METAINFO = dict(classes=('a', 'b', 'c'))

    def __init__(self, size, pipeline=None):
        self.size = size
        super().__init__(serialize_data=False)  # packing entries collects garbage, which takes long
        self.pipeline = pipeline

    def load_data_list(self):
        return [dict(img_id=i, width=3 if i * 7 % 5 < 2 else 1, height=2,
                     cats=[i % 3, i // 3 % 3]) for i in range(self.size)]

    def get_cat_ids(self, idx):
        return self.get_data_info(idx)['cats']


def pretend_rank(monkeypatch, rank, world):
    """Let samplers that are built from now on be those of a rank."""
    for module in ('mmengine.dataset.sampler', 'mmengine.dist',
                   'mmdet.datasets.samplers.class_aware_sampler',
                   'mmdet.datasets.samplers.multi_source_sampler',
                   'mmdet.datasets.samplers.multi_data_sampler',
                   'mmdet.datasets.samplers.custom_sample_size_sampler',
                   'mmdet.datasets.samplers.track_img_sampler'):
        monkeypatch.setattr(f'{module}.get_dist_info', lambda: (rank, world))
