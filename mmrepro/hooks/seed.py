"""Put the generators of the main process at the start of their stream, at every event of a run."""
from __future__ import annotations

from typing import Any

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from .. import seeds
from ..config import RandomnessConfig
from ..data import placement_of, use_stream
from ..data.sample_check import left_out


class _Seeds(Hook):
    """What both hooks need: the streams of one run."""

    def __init__(self, config: RandomnessConfig, rank: int) -> None:
        self._config, self._root = config, config.root
        self._ranks = (rank,) if config.diff_rank_seed else ()

    def _seed(self, stream: str, *key: seeds.Key) -> None:
        seeds.seed_all(self._root, stream, *key, *self._ranks)


def _tell_epoch(runner: Any) -> None:
    """MMEngine leaves this to DistSamplerSeedHook, which a config may have removed."""
    loader = runner.train_dataloader
    if placement_of(loader) is not None and runner.train_loop.max_epochs > 1:
        loader.batch_sampler.sampler.set_epoch(runner.epoch)


@HOOKS.register_module()
class HookSeedHook(_Seeds):
    """Runs before all other hooks: what hooks draw depends on the iteration only."""
    priority = 0

    def __init__(self, config: RandomnessConfig, rank: int) -> None:
        super().__init__(config, rank)
        self.before_validation: tuple | None = None  # state of the sequence
        self._resumed: tuple | None = None

    @property
    def sequence(self) -> tuple | None:
        """With ``step_seed=False``, where training is in the generators' one long sequence."""
        if self._config.step_seed or self._config.legacy:
            return None
        if self._resumed is not None:
            # no iteration was made yet: a validation that comes first is not in the sequence
            return self._resumed
        return self.before_validation or seeds.capture_rng()

    @sequence.setter
    def sequence(self, state: tuple | None) -> None:
        # it counts from the first iteration on: until then loaders are built, hooks may draw
        self._resumed = state

    def before_train(self, runner: Any) -> None:
        runner.resuming.check_streams(runner)

    def before_train_epoch(self, runner: Any) -> None:
        _tell_epoch(runner)
        if self._config.step_seed:
            # a run that resumes within the epoch comes here as well, and hooks keep what they draw
            self._seed('hook', 'epoch', runner.epoch)

    def after_train_epoch(self, runner: Any) -> None:
        if self._config.step_seed:
            self._seed('hook', 'end of epoch', runner.epoch)

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if self._config.step_seed:
            self._seed('hook', runner.iter)
        elif self._resumed is not None:
            seeds.restore_rng(self._resumed)
            self._resumed = None

    def before_val(self, runner: Any) -> None:
        if not self._config.step_seed and not self._config.legacy:
            # training continues its own sequence, as if there had been no validation
            self.before_validation = seeds.capture_rng()

    def before_val_epoch(self, runner: Any) -> None:
        if not self._config.legacy:
            use_stream(runner.val_dataloader, 'val')
            self._seed('val', runner.iter)

    def before_test_epoch(self, runner: Any) -> None:
        if not self._config.legacy:
            use_stream(runner.test_dataloader, 'test')
            self._seed('test')


# What comes after the hooks of an event: the step, or code of a loop between two steps.
# event -> (only with step_seed, stream and key)
_AFTER = {
    'before_run': (False, lambda runner, batch: ('init', 'weights')),
    'before_train_epoch': (True, lambda runner, batch: ('hook', 'loop', runner.iter)),
    'before_train_iter': (True, lambda runner, batch: ('step', runner.iter)),
    'after_train_iter': (True, lambda runner, batch: ('hook', 'loop', runner.iter + 1)),
    'after_train_epoch': (True, lambda runner, batch: ('hook', 'loop', runner.iter)),
    'after_val': (True, lambda runner, batch: ('hook', 'loop', runner.iter)),
    'before_val_iter': (False, lambda runner, batch: ('val', runner.iter, batch)),
    'before_test_iter': (False, lambda runner, batch: ('test', batch)),
}
_BEFORE_IMAGES = ('before_val_iter', 'before_test_iter')


@HOOKS.register_module()
class SeedHook(_Seeds):
    """Runs after all other hooks; what follows them starts at the start of its stream."""
    priority = 100

    def __init__(self, config: RandomnessConfig, rank: int, of_hooks: HookSeedHook) -> None:
        super().__init__(config, rank)
        self._of_hooks = of_hooks

    def before_run(self, runner: Any) -> None:
        loops = (runner._train_loop, runner._val_loop, runner._test_loop)
        for name in left_out(self._config, [
                runner._train_dataloader, runner._val_dataloader, runner._test_dataloader,
                *(getattr(loop, 'dataloader', None) for loop in loops)]):
            runner.logger.info(f'samples of {name} are not checked: '
                               'randomness.nonrepeatable_datasets')

    def before_train_epoch(self, runner: Any) -> None:
        _tell_epoch(runner)  # again: a hook may have given the loop another loader

    def follow(self, event: str, runner: Any, batch_idx: int | None = None) -> None:
        """Start the stream of what comes after the hooks of ``event``.

        The runner calls it, as hooks of the lowest priority may be registered later than this one.
        """
        if event == 'after_val' and self._of_hooks.before_validation is not None:
            seeds.restore_rng(self._of_hooks.before_validation)
            self._of_hooks.before_validation = None
        steps_only, key = _AFTER.get(event, (True, None))
        if self._config.independent_predictions and event in _BEFORE_IMAGES:
            # the same for all: no number of an image is the same wherever it is tested
            seeds.seed_all(self._root, 'test', 'image')
            return
        if key is not None and (
                self._config.step_seed if steps_only else not self._config.legacy):
            self._seed(*key(runner, batch_idx))

    def before_save_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        runner.saving.complete(runner, checkpoint)
