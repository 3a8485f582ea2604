"""The start of a training: all weights follow from the seed, and no earlier call left a state."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable

from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop
from torch import nn

from .. import determinism
from ..config import RandomnessConfig
from ..distributed.unwrap import unwrap
from ..errors import RandomnessError
from ..facts.compatibility import inexact
from ..text import listed


class TrainingStart:
    """Guards the start of each training of one runner."""

    def __init__(self, config: RandomnessConfig) -> None:
        self._config = config
        self._loaded = False  # MMEngine has loaded what the config names, and no training began
        self._running = False  # the loop has begun and has not ended
        self._trained = False
        self._unwritten: list[str] = []  # parameters that nothing has initialized

    def build_model(self, stock: Callable[[Any], Any], model: Any, resumed: bool,
                    logger: Any) -> Any:
        """Let ``stock`` build the model; warn where the seed had no part in its initial weights."""
        if isinstance(model, nn.Module) and not self._config.legacy and not resumed:
            logger.warning(
                f'{type(model).__name__} was built before this runner has set its seed: its '
                'initial weights come from whatever the generators gave then. They repeat when '
                f'mmrepro.set_random_seed({self._config.seed}) is called right before it is '
                'built, or when the model is given as a dict')
        with determinism.filled_memory():
            return stock(model)

    def initialize(self, runner: Any, stock: Callable[[], None]) -> None:
        """Let ``stock`` initialize the weights, and remember which it left out."""
        with determinism.filled_memory():
            stock()
        if self._config.deterministic:
            self._unwritten = determinism.unwritten(unwrap(runner.model))

    def load(self, runner: Any, stock: Callable[[], None]) -> None:
        """Let ``stock`` load or resume, and remember whether it did."""
        before = runner._has_loaded
        stock()
        self._loaded = runner._has_loaded and not before

    def begin(self, runner: Any) -> None:
        """Note that the loop begins, with everything in place.

        Raises:
            RandomnessError: parameters hold what was in memory before; names them. With
                ``deterministic='warn'`` it is a warning.
        """
        if self._unwritten:  # a checkpoint may have been loaded since
            still = set(determinism.unwritten(unwrap(runner.model)))
            names = [name for name in self._unwritten if name in still]
            text = (f'{listed(names)} of {type(unwrap(runner.model)).__name__}: nothing has '
                    'initialized these weights (torch.empty, torch.Tensor(size)), they are what '
                    'was in memory before. Write them in __init__ or in init_weights')
            if names and self._config.deterministic is True:
                raise RandomnessError(text)
            if names:
                runner.logger.warning(text)
        self._running = True

    @contextmanager
    def training(self, runner: Any) -> Iterator[None]:
        """Call MMEngine's ``train`` in this block.

        Raises:
            ResumeError: an earlier training stopped within the loop, and a new one would not go on
                where it stood; with ``resume_strict=False`` it is a warning.
        """
        goes_on = self._config.legacy or not self._running and (
            not self._trained or _at_its_end(runner.train_loop))
        if not goes_on:
            runner.logger.warning(inexact(
                f'runner.train() was called before, and ended in epoch {runner.epoch}, iteration '
                f'{runner.iter}. The same runner cannot go on from there: the loop would begin '
                'with the first batch of the epoch again, and a step may be half done. ',
                self._config.resume_strict, 'Build a new runner with resume=True, which goes on '
                'from the newest checkpoint'))
        if self._loaded:
            # a validation came first. MMEngine initializes the weights now, and would keep those
            # instead of the loaded ones; averages of weights start again as well
            runner._has_loaded = self._loaded = False
        yield
        self._running, self._trained = False, True


def _at_its_end(loop: Any) -> bool:
    if isinstance(loop, IterBasedTrainLoop):
        return loop.stop_training or loop.iter >= loop.max_iters
    if isinstance(loop, EpochBasedTrainLoop):
        return loop.stop_training or loop.epoch >= loop.max_epochs
    return True  # a loop of the user's own knows what it does
