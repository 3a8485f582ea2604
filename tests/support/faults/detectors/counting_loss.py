"""A loss that counts its calls in an attribute and warms up by them."""
from mmdet.models.losses import CrossEntropyLoss
from mmdet.registry import MODELS


@MODELS.register_module()
class WarmLoss(CrossEntropyLoss):
    calls = 0

    def forward(self, *args, **kwargs):
        self.calls += 1
        return super().forward(*args, **kwargs) * min(1.0, self.calls / 10)
