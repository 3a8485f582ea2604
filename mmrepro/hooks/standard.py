"""The hooks that every reproducible runner has."""
from __future__ import annotations

from collections.abc import Sequence

from mmengine.hooks import Hook

from ..config import RandomnessConfig
from .operator_guard import OperatorGuardHook
from .preempt import PreemptHook
from .resume import ResumeHook
from .seed import HookSeedHook, SeedHook
from .self_check import SelfCheckHook


def hooks_of(config: RandomnessConfig, rank: int, present: Sequence[Hook]) -> list[Hook]:
    """What a runner registers beside the hooks of its config, which are ``present``."""
    of_hooks = HookSeedHook(config, rank)
    ours: list[Hook] = [of_hooks, SeedHook(config, rank, of_hooks)]
    if not config.legacy:
        ours.append(ResumeHook())
    kinds = [PreemptHook]
    if config.deterministic:
        kinds.insert(0, OperatorGuardHook)
    if config.deterministic is True:
        kinds.insert(1, SelfCheckHook)
    # one that the config has with settings of its own stands for ours
    return ours + [kind() for kind in kinds
                   if not any(isinstance(hook, kind) for hook in present)]
