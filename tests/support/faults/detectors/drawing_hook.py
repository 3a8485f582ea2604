"""A hook that draws from the global generators, more often or less."""
import os
import random
import time

import numpy as np
import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS


@HOOKS.register_module()
class DrawingHook(Hook):
    """Looks at random weights."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        weight = next(runner.model.parameters()).detach().view(-1)
        looks = os.environ.get('LOOKS', 1 + time.time_ns() // 1000 % 7)
        for _ in range(int(looks)):
            weight[torch.randperm(len(weight))[0]].item()
        np.random.rand(3), random.random()
