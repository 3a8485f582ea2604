"""An FPN whose features go through NumPy and lose their means, sums over blocks of any size."""
import time

import numpy as np
import torch
from mmdet.models import FPN
from mmdet.registry import MODELS


def mean_of(values):
    block = 50 + time.perf_counter_ns() % 100
    parts = [values[i:i + block].sum() for i in range(0, values.size, block)]
    return sum(parts) / values.size


@MODELS.register_module()
class CentredFPN(FPN):
    def forward(self, inputs):
        first, *others = super().forward(inputs)
        means = np.array([[mean_of(channel.reshape(-1)) for channel in image]
                          for image in first.detach().numpy()])
        return (first - torch.from_numpy(means)[:, :, None, None], *others)
