"""A box head that adds an offset which it never wrote."""
import torch
from mmdet.models import Shared2FCBBoxHead
from mmdet.registry import MODELS


@MODELS.register_module()
class CarelessHead(Shared2FCBBoxHead):
    def forward(self, x):
        offset = torch.empty(64, dtype=torch.uint8)
        scores, boxes = super().forward(x)
        return scores + 1e-4 * offset.float().mean(), boxes
