"""A transform that remembers how many samples it has seen; every worker has one of its own."""
from mmcv.transforms import BaseTransform
from mmdet.registry import TRANSFORMS


@TRANSFORMS.register_module()
class Curriculum(BaseTransform):
    seen = 0

    def transform(self, results):
        self.seen += 1
        results['img'] = (results['img'] * min(1.0, 0.5 + self.seen / 100)).astype('uint8')
        return results
