"""Build a runner. Imports nothing heavy: a process may have to start again first."""
from __future__ import annotations

from typing import Any

from mmengine.config import Config

__all__ = ['build_runner']


def build_runner(cfg: Config) -> Any:
    """The runner that ``cfg`` asks for, as MMDetection's own script builds it."""
    from mmdet.utils import setup_cache_size_limit_of_dynamo
    from mmengine.registry import RUNNERS
    from mmengine.runner import Runner

    # as MMDetection's own script does: the default makes torch.compile give up on detectors
    setup_cache_size_limit_of_dynamo()
    return RUNNERS.build(cfg) if 'runner_type' in cfg else Runner.from_cfg(cfg)
