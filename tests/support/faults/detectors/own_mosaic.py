"""A Mosaic that takes its partners from a generator of its own."""
import random

from mmdet.datasets.transforms import Mosaic
from mmdet.registry import TRANSFORMS

partners = random.Random()


@TRANSFORMS.register_module()
class OwnMosaic(Mosaic):
    def get_indexes(self, dataset):
        return [partners.randint(0, len(dataset) - 1) for _ in range(3)]
