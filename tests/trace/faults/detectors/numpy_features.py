"""An FPN whose features go through NumPy and are scaled by a sum over blocks of any size."""
import time

import torch
from mmdet.models import FPN
from mmdet.registry import MODELS


def scale_of(values):
    block = 500 + time.perf_counter_ns() % 1000
    parts = [values[i:i + block].sum() for i in range(0, values.size, block)]
    return sum(parts) / values.size


@MODELS.register_module()
class ScaledFPN(FPN):
    def forward(self, inputs):
        first, *others = super().forward(inputs)
        values = first.detach().numpy()
        offset = torch.from_numpy(values * 0 + scale_of(values.reshape(-1)))
        return (first - offset, *others)
