"""The start of a training: all weights follow from the seed, and no earlier call left a state."""
from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Callable, NamedTuple
from weakref import WeakValueDictionary

from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop
from torch import nn
from torch.utils.data import Dataset

from .. import determinism
from ..config import RandomnessConfig
from ..distributed.unwrap import unwrap
from ..errors import RandomnessError
from ..facts.compatibility import inexact
from ..util.text import listed

# arguments of a runner that a script may build by itself
BUILT_BY_SCRIPTS = ('model', 'train_dataloader', 'val_dataloader', 'test_dataloader')


class _SeededByScript(NamedTuple):
    """The seed that a script has set, and the objects that existed by then."""
    seed: int
    earlier: WeakValueDictionary[int, Any]  # modules and datasets by their ids


_by_script: _SeededByScript | None = None


def seeded_by_script(seed: int) -> None:
    """Note that a script has seeded this process: later objects follow from the seed."""
    global _by_script
    if _by_script is None or _by_script.seed != seed:
        _by_script = _SeededByScript(seed, WeakValueDictionary({
            id(built): built for built in gc.get_objects()
            if issubclass(type(built), (nn.Module, Dataset))}))


def _why_not_from(seed: int | None, built: Any) -> str:
    """Return why what a script has built does not follow from the seed of its runner, or ''."""
    if _by_script is None:
        return 'before this runner has set its seed'
    if _by_script.earlier.get(id(built)) is built:
        return f'before mmrepro.set_random_seed({_by_script.seed}) was called'
    if _by_script.seed != seed:
        return f'after mmrepro.set_random_seed({_by_script.seed}), and randomness.seed is {seed}'
    return ''


class TrainingStart:
    """Guards the start of each training of one runner.

    Args:
        settings: arguments of the runner.
    """

    def __init__(self, config: RandomnessConfig, settings: Mapping[str, Any], resumed: bool
                 ) -> None:
        self._config = config
        # argument -> why what was given does not follow from the seed
        self._not_from_seed: dict[str, str] = {}
        for name in BUILT_BY_SCRIPTS:
            built = settings.get(name)
            if built is None or isinstance(built, Mapping) or config.uses_stock_streams:
                continue
            if name != 'model':
                built = getattr(built, 'dataset', built)
            why = _why_not_from(config.seed, built)
            if why and not (name == 'model' and resumed):
                self._not_from_seed[name] = f'{type(built).__name__} was built {why}'
        self._loaded = False  # MMEngine has loaded what the config names, and no training began
        self._running = False  # the loop has begun and has not ended
        self._trained = False
        self._unwritten: list[str] = []  # parameters that nothing has initialized

    @property
    def condition(self) -> str:
        """The condition on which all promises depend, or ''."""
        if not self._not_from_seed:
            return ''
        return (f'if {listed([*self._not_from_seed])} of the script hold the same in every run '
                f'({"; ".join(dict.fromkeys(self._not_from_seed.values()))})')

    def _unseeded_model(self) -> str:
        """Return why the model does not follow from the seed, or ''."""
        if 'model' not in self._not_from_seed:
            return ''
        seed = 42 if self._config.seed is None else self._config.seed
        return (f'{self._not_from_seed["model"]}: its initial weights come from whatever the '
                f'generators gave then. They repeat when mmrepro.set_random_seed({seed}) is called '
                f'before it is built and the runner gets randomness=dict(seed={seed}), or when the '
                "model is given as a dict: model=dict(type=..., ...)")

    def build_model(self, stock: Callable[[Any], Any], model: Any, logger: Any) -> Any:
        """Let ``stock`` build the model; warn where the seed had no part in its initial weights."""
        problem = self._unseeded_model()
        if problem and self._config.deterministic is not True:
            logger.warning(problem)
        with determinism.filled_memory():
            return stock(model)

    def initialize(self, runner: Any, stock: Callable[[], None]) -> None:
        """Let ``stock`` initialize the weights, and remember the weights that it left out."""
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
            RandomnessError: a model was built before the seed, or parameters hold what was in
                memory before; names them. With ``deterministic='warn'`` it is a warning.
        """
        problem = self._unseeded_model()
        if problem and self._config.deterministic is True:
            raise RandomnessError(problem)
        if self._unwritten:  # a checkpoint may have been loaded since
            still = set(determinism.unwritten(unwrap(runner.model)))
            names = [name for name in self._unwritten if name in still]
            text = (f'{listed(names)} of {type(unwrap(runner.model)).__name__}: nothing has '
                    'initialized these weights (torch.empty, torch.Tensor(size)), they hold '
                    'the old content of the memory. Write them in __init__ or in init_weights')
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
        goes_on = self._config.uses_stock_streams or not self._running and (
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
        return bool(loop.stop_training or loop.iter >= loop.max_iters)
    if isinstance(loop, EpochBasedTrainLoop):
        return bool(loop.stop_training or loop.epoch >= loop.max_epochs)
    return True  # a loop of the user's own knows what it does
