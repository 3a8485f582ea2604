"""Make a resumed run the uninterrupted one: data position, gradients, state in attributes."""
from __future__ import annotations

from typing import Any, Dict, Optional

from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop

from ..data import placement_of
from ..data.seek import seek, where
from ..state import adapters

__all__ = ['ResumeHook']


def _unwrap(model: Any) -> Any:
    return getattr(model, 'module', model)


@HOOKS.register_module()
class ResumeHook(Hook):
    """Runs after all other hooks, so that none of them moves the data again."""
    priority = 100

    def __init__(self) -> None:
        self._state: Optional[Dict[str, Any]] = None
        self._start: Optional[int] = None

    def before_save_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        checkpoint['mmrepro'] = dict(
            attributes=adapters.collect(_unwrap(runner.model), runner.hooks),
            gradients=self._gradients(runner))

    def after_load_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        if runner._resume:
            self._state = checkpoint.get('mmrepro')

    def before_train(self, runner: Any) -> None:
        if not runner._resume or runner.iter == 0:
            return
        self._start = runner.iter
        state = self._state or {}
        unknown = adapters.restore(_unwrap(runner.model), runner.hooks, state.get('attributes', {}))
        for place in unknown:
            runner.logger.warning(f'the checkpoint has state of {place}, which this run lacks')
        for name, parameter in _unwrap(runner.model).named_parameters():
            if name in state.get('gradients', {}):
                gradient = state['gradients'][name]
                parameter.grad = gradient.to(parameter.device, parameter.dtype)

    def before_train_epoch(self, runner: Any) -> None:
        loop, loader = runner.train_loop, runner.train_dataloader
        if self._start is None or placement_of(loader) is None:
            return
        if isinstance(loop, EpochBasedTrainLoop):
            seek(loader, runner.epoch, runner.iter - runner.epoch * len(loader))
            self._start = None
        elif isinstance(loop, IterBasedTrainLoop):
            # DistSamplerSeedHook has put the sampler back to its first pass
            seek(loader, *where(loader, self._start))
            self._start = None

    @staticmethod
    def _gradients(runner: Any) -> Dict[str, Any]:
        """What gradient accumulation has summed up so far in an unfinished cycle."""
        wrapper = runner.optim_wrapper
        wrappers = wrapper.values() if hasattr(wrapper, 'values') else [wrapper]
        if all(one._inner_count % one._accumulative_counts == 0 for one in wrappers):
            return {}
        return {name: parameter.grad.detach().cpu().clone()
                for name, parameter in _unwrap(runner.model).named_parameters()
                if parameter.grad is not None}
