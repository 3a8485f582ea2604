"""A lateral convolution of the FPN that adds noise from a generator of its own."""
import torch
from mmcv.cnn import ConvModule
from mmdet.models import FPN
from mmdet.registry import MODELS


class NoisyConv(ConvModule):
    def forward(self, x):
        out = super().forward(x)
        return out + 1e-4 * torch.randn(out.shape, generator=self.noise)


@MODELS.register_module()
class NoisyFPN(FPN):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.lateral_convs[1].__class__ = NoisyConv
        self.lateral_convs[1].noise = torch.Generator()
        self.lateral_convs[1].noise.seed()
