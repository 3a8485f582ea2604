"""A loss with a weight from the operating system's random numbers."""
import os

from mmdet.models.losses import L1Loss
from mmdet.registry import MODELS


@MODELS.register_module()
class JitterLoss(L1Loss):
    def forward(self, *args, **kwargs):
        jitter = int.from_bytes(os.urandom(4), 'little') / 2 ** 32
        return super().forward(*args, **kwargs) * (1 + 1e-3 * jitter)
