"""A batch augmentation whose sizes come from a generator with a seed of its own."""
import os
import random

from mmdet.models.data_preprocessors import BatchSyncRandomResize
from mmdet.registry import MODELS


@MODELS.register_module()
class OwnRandomResize(BatchSyncRandomResize):
    generator = random.Random(os.environ.get('TASK_ID', '0'))

    def _get_random_size(self, aspect_ratio, device):
        side = 32 * self.generator.randint(5, 7)
        return side, side
