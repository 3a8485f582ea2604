"""A box head that remembers the scores of its last prediction and sharpens by them."""
from mmdet.models import Shared2FCBBoxHead
from mmdet.registry import MODELS


@MODELS.register_module()
class SharpHead(Shared2FCBBoxHead):
    temperature = 1.0

    def forward(self, x):
        scores, boxes = super().forward(x)
        if not self.training:
            self.temperature = 1.0 + float(scores.max())
        return scores / self.temperature, boxes
