"""A Mosaic that takes its partners from a generator that its first call makes."""
import random

from mmdet.datasets.transforms import Mosaic
from mmdet.registry import TRANSFORMS


@TRANSFORMS.register_module()
class OwnMosaic(Mosaic):
    partners = None

    def get_indexes(self, dataset):
        if self.partners is None:
            self.partners = random.Random()
        return [self.partners.randint(0, len(dataset) - 1) for _ in range(3)]
