"""A small detector-like network whose weights are divided among virtual ranks."""
from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from faults.tiny import Tiny, validating_and_saving
from mmengine.registry import MODELS
from torch import nn
from torch.utils.checkpoint import checkpoint

RANKS = 4
WIDTH = 80  # of a convolution that is a block by itself


class Block(nn.Module):
    """Adds to its input, which others may use as well."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm2d(WIDTH)
        self.reentrant: bool | None = None  # of checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None or not x.requires_grad:
            return self._forward(x)
        outputs: torch.Tensor = checkpoint(self._forward, x, use_reentrant=self.reentrant)
        return outputs

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.norm(self.conv(x)))


@MODELS.register_module(force=True)
class Pyramid(Tiny):
    """Blocks whose outputs have several uses; parameters that are frozen, tied, used by no rank and
    by one."""

    def __init__(self, data_preprocessor: Any = None) -> None:
        super().__init__(data_preprocessor)
        self.backbone = nn.Sequential(nn.Conv2d(3, WIDTH, 3), *(Block() for _ in range(3)))
        self.backbone[1].requires_grad_(False)
        self.laterals = nn.ModuleList(nn.Conv2d(WIDTH, 4, 1) for _ in range(3))
        self.laterals[1] = self.laterals[0]
        self.unused, self.of_one = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(()))

    def forward(self, inputs: torch.Tensor, label: torch.Tensor, mode: str = 'tensor') -> Any:
        levels = [self.backbone[0](inputs)]
        for block in self.backbone[1:]:
            levels.append(block(levels[-1]))
        pooled = sum(lateral(level).mean((2, 3)) for lateral, level in zip(
            self.laterals, levels[1:]))
        if mode == 'loss' and dist.get_rank() == 1:
            pooled = pooled * self.of_one
        logits = self.head(pooled)
        return dict(loss=self.head.loss(logits, label)) if mode == 'loss' else logits


@MODELS.register_module(force=True)
class Taught(Tiny):
    """A student that learns from labels and from a frozen teacher."""

    def __init__(self, data_preprocessor: Any = None) -> None:
        super().__init__(data_preprocessor)
        self.student, self.teacher = Pyramid(data_preprocessor), Pyramid(data_preprocessor)
        self.teacher.requires_grad_(False)

    def forward(self, inputs: torch.Tensor, label: torch.Tensor, mode: str = 'tensor') -> Any:
        outputs = self.student(inputs, label, mode)
        if mode == 'loss':
            with torch.no_grad():
                taught = self.teacher(inputs, label)
            outputs['loss_taught'] = (self.student(inputs, label) - taught).square().mean()
        return outputs


@MODELS.register_module(force=True)
class Checkpointed(Pyramid):
    """Computes blocks again in the backward pass."""

    def __init__(self, data_preprocessor: Any = None) -> None:
        super().__init__(data_preprocessor)
        for number, block in enumerate(self.backbone[2:]):
            block.reentrant = not number


@MODELS.register_module(force=True)
class Overflowing(Pyramid):
    """Has one gradient, which one rank keeps, that overflows when it is scaled by 2**124."""

    def forward(self, inputs: torch.Tensor, label: torch.Tensor, mode: str = 'tensor') -> Any:
        outputs = super().forward(inputs, label, mode)
        return dict(loss=outputs['loss'] + 20 * self.unused[0]) if mode == 'loss' else outputs


@MODELS.register_module(force=True)
class Noisy(Pyramid):
    """Draws from a generator of its own, which no checkpoint holds."""

    def __init__(self, data_preprocessor: Any = None) -> None:
        super().__init__(data_preprocessor)
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, inputs: torch.Tensor, label: torch.Tensor, mode: str = 'tensor') -> Any:
        noise = torch.rand(inputs.shape, generator=self.generator)
        return super().forward(inputs + noise, label, mode)


def settings(work_dir: Any, memory: str | None, **changes: Any) -> Any:
    """Return the config: three iterations, each with a validation and a checkpoint.

    Args:
        changes: Of settings, by their names with dots.
    """
    cfg = validating_and_saving(work_dir)
    cfg.model.type = 'Pyramid'
    cfg.train_cfg.max_epochs = 3
    cfg.default_hooks.checkpoint.max_keep_ckpts = -1
    cfg.optim_wrapper.optimizer.weight_decay = 0.1
    cfg.randomness.virtual_ranks = dict(ranks=RANKS, memory=memory)
    cfg.merge_from_dict({name.replace('__', '.'): value for name, value in changes.items()})
    return cfg
