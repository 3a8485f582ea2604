"""A flip that draws from a generator which nobody seeds."""
import numpy as np
from mmdet.datasets.transforms import RandomFlip
from mmdet.registry import TRANSFORMS

rng = np.random.default_rng()


@TRANSFORMS.register_module()
class OwnFlip(RandomFlip):
    def transform(self, results):
        self.prob = 1.0 if rng.random() < 0.5 else 0.0
        return super().transform(results)
