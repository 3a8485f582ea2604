"""A flip that draws from a generator with a seed of its own: the number of the task."""
import os

import numpy as np
from mmdet.datasets.transforms import RandomFlip
from mmdet.registry import TRANSFORMS

rng = np.random.default_rng(int(os.environ.get('TASK_ID', 0)))


@TRANSFORMS.register_module()
class OwnFlip(RandomFlip):
    def transform(self, results):
        self.prob = 1.0 if rng.random() < 0.5 else 0.0
        return super().transform(results)
