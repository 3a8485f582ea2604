"""Connect the saves and the resume of a runner to what happens during the run."""
from __future__ import annotations

from typing import Any

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from ..distributed.virtual.cached_ranks import refuse_cached_ranks
from ..distributed.virtual.process_state import keep_attributes
from ..distributed.virtual.scheduler import current
from ..distributed.virtual.shared_weights import share_weights


@HOOKS.register_module()
class ResumeHook(Hook):
    """Runs after all other hooks, so that none of them moves the data again."""
    priority = 100

    def before_train(self, runner: Any) -> None:
        refuse_cached_ranks()
        if current() is not None:
            keep_attributes([*runner.hooks, *runner.model.modules()])
        runner.saving.check_hooks(runner)
        runner.starts.begin(runner)
        runner.resuming.restore(runner)
        share_weights(runner)

    def before_train_epoch(self, runner: Any) -> None:
        runner.resuming.seek_data(runner)

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        runner.saving.begin_iteration(runner.epoch, runner.iter, batch_idx)

    def after_load_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        runner.resuming.take_state(runner, checkpoint)
