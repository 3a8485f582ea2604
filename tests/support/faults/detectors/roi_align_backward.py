"""RoIAlign whose backward adds up in an order of its own, as atomic additions on a device do."""
import os

import mmcv.ops
import torch

library = torch.library.Library('planted', 'DEF')
library.define('add_up(Tensor grad) -> Tensor')


def add_up(grad):
    # nothing above a kernel can see in which order its threads arrive
    found = grad.clone()
    found.view(-1)[int.from_bytes(os.urandom(2), 'little') % found.numel()] += 1e-6
    return found


library.impl('add_up', add_up, 'CPU')


class InAnyOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx, feature):
        return feature.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.ops.planted.add_up(grad)


class RacyRoIAlign(mmcv.ops.RoIAlign):
    def forward(self, feature, rois):
        return super().forward(InAnyOrder.apply(feature), rois)


mmcv.ops.RacyRoIAlign = RacyRoIAlign  # MMDetection looks for its layers there
