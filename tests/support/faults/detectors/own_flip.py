"""A flip that draws from a generator that its first call makes, of the number of the task."""
import os

import numpy as np
from mmdet.datasets.transforms import RandomFlip
from mmdet.registry import TRANSFORMS


@TRANSFORMS.register_module()
class OwnFlip(RandomFlip):
    rng = None

    def transform(self, results):
        if self.rng is None:
            self.rng = np.random.default_rng(int(os.environ.get('TASK_ID', 0)))
        self.prob = 1.0 if self.rng.random() < 0.5 else 0.0
        return super().transform(results)
