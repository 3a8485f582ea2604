"""One copy of the weights, the optimizer's state and averages for all virtual ranks of a process.

The ranks train the same weights: after every step they hold the same bits. So the lowest rank of a
process, the owner, steps for all. The parameters of the other ranks, the followers, use its memory,
and their optimizers refer to its state. Everything else belongs to each rank: gradients, buffers,
schedules.

- A step of the owner needs no waiting: all ranks have met to average the gradients that it uses.
  Followers step when the owner has, so their next forward pass has its weights.
- Hooks that change weights or averages do so when all ranks of the process have come to them, see
  :mod:`.weight_hooks`.

Any other writer would write several times. Tables decide which hooks and optimizers may take part,
and checksums tell whether any other code has changed the weights since the last step.
"""
from __future__ import annotations

import functools
import logging
from typing import Any, Callable

import torch
import torch.distributed as dist
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from torch import Tensor, nn

from ...digests import exact_digest
from ...errors import CollectiveMismatch, RandomnessError, VirtualRanksError
from ..unwrap import unwrap
from . import weight_hooks
from .exchange import as_bytes
from .scheduler import Scheduler, current

_logger = logging.getLogger('mmrepro')

SEPARATE = "randomness.virtual_ranks.memory='separate'"
_NOT_BY_ELEMENT = ('LBFGS', )  # optimizers whose step evaluates the model


def share_weights(runner: Any) -> None:
    """Let the virtual ranks of this process share weights in a training that is about to begin.

    Every rank calls this function when its weights are loaded and its hooks are ready.

    Raises:
        RandomnessError: ``virtual_ranks.memory='shared'`` is not possible, says why; or the runner
            has trained before.
    """
    scheduler = current()
    if scheduler is None or len(scheduler.ranks) == 1:
        return
    if runner.model.sharing is not None:  # a second train(): hooks would be adapted twice
        raise RandomnessError('runner.train() was called before, and the virtual ranks of this '
                              f'process share weights since. Build a new runner, or set {SEPARATE}')
    me = scheduler.me
    shared: Shared = scheduler.shared.setdefault(me.trainings, Shared(scheduler))
    index = scheduler.ranks.index(me)
    shared.starts[index] = _Start(runner), _problem(runner)
    scheduler.wait(lambda: len(shared.starts) == len(scheduler.ranks),
                   'the start of a training whose ranks share weights')
    scheduler.shared.pop(me.trainings, None)
    me.trainings += 1
    if shared.problem:
        _logger.info('the virtual ranks of a process have weights of their own: %s', shared.problem)
        return
    member = Member(shared, index, runner.optim_wrapper)
    for hook in runner.hooks:
        weight_hooks.adapt(hook, member, owner=index == 0)
    runner.model.sharing = member
    if index == 0:
        _logger.info('the %d virtual ranks of this process share weights and the state of the '
                     'optimizer', len(scheduler.ranks))


def _problem(runner: Any) -> str:
    """Return why the ranks cannot share weights; '' if they can."""
    memory = runner.repro.virtual_ranks.memory
    if memory == 'separate':
        return SEPARATE
    wrapper = runner.optim_wrapper
    optimizer = getattr(wrapper, 'optimizer', None)
    if type(wrapper) not in (OptimWrapper, AmpOptimWrapper):
        problem = f'the optimizer wrapper {type(wrapper).__name__} may step in a way of its own'
    elif not type(optimizer).__module__.startswith('torch.optim') or \
            type(optimizer).__name__ in _NOT_BY_ELEMENT:
        problem = f'the optimizer {type(optimizer).__name__} may step in a way of its own'
    else:
        problem = weight_hooks.problem(runner.hooks, vouched=memory == 'shared')
    if problem and memory == 'shared':
        raise RandomnessError(f"randomness.virtual_ranks.memory='shared', and {problem}; allowed "
                              "are None and 'separate'")
    return problem


class _Start:
    """What a rank's runner has at the start of a training, as far as it is shared."""

    def __init__(self, runner: Any) -> None:
        # an optimizer that cannot be shared has another kind of wrapper
        self.optimizer: Any = getattr(runner.optim_wrapper, 'optimizer', None)
        self.parameters: dict[str, Tensor] = dict(unwrap(runner.model).named_parameters())
        self.averages: dict[str, Tensor] = weight_hooks.averages(runner.hooks)

    def parameter_groups(self) -> list[list[nn.Parameter]]:
        return [group['params'] for group in self.optimizer.param_groups]

    def settings(self) -> list[dict[str, Any]]:
        """Return learning rates and so on, group by group."""
        return [{key: value for key, value in group.items() if key != 'params'}
                for group in self.optimizer.param_groups]

    @functools.cached_property
    def state_digest(self) -> str:
        """A digest of the optimizer's state before the training."""
        return exact_digest(self.optimizer.state_dict()['state'])

    def difference(self, other: _Start) -> str:
        """Return how the starts of two ranks differ; '' if they do not."""
        if other is self:
            return ''
        for kind, mine, theirs in (('parameter', self.parameters, other.parameters),
                                   ('average', self.averages, other.averages)):
            if list(mine) != list(theirs):
                return f'the ranks have different {kind}s'
            for name in mine:
                if not _same_bytes(mine[name], theirs[name]):
                    return f'the {kind} {name} is not the same on all ranks'
        return '' if self.state_digest == other.state_digest else \
            'the optimizers differ between the ranks'


class Shared:
    """What the ranks of one process share in one training."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        # by index of a rank in this process: its start, and why it cannot share
        self.starts: dict[int, tuple[_Start, str]] = {}
        indices = range(len(scheduler.ranks))
        self.steps = dict.fromkeys(indices, 0)  # of the optimizer
        self.arrivals = dict.fromkeys(indices, (0, ''))  # number and name of the latest change
        self.changed = 0  # changes that the owner has finished
        self.settings: list[dict[str, Any]] = []  # of the owner's optimizer at its last step
        self.sums: Tensor | None = None  # checksums of the weights; None: to be taken

    @property
    def owner(self) -> _Start:
        return self.starts[0][0]

    @functools.cached_property
    def problem(self) -> str:
        """Why the ranks do not share; ''. Read when all have come and none has gone on."""
        problems = (problem for _, problem in self.starts.values() if problem)
        return next(problems, '') or next(filter(None, (
            self.owner.difference(start) for start, _ in self.starts.values())), '')

    def remember(self) -> None:
        """Take the checksums of the weights as they are now."""
        self.sums = self._checksums()

    def check(self) -> None:
        """Raises RuntimeError if the weights are not what they were; names a parameter."""
        changed = [] if self.sums is None else (self._checksums() != self.sums).tolist()
        if any(changed):
            name = list(self.owner.parameters)[changed.index(True)]
            raise VirtualRanksError(
                f'between step {self.steps[0]} of the optimizer and the next one, something else '
                f'has changed {name}. The virtual ranks of a process share weights, so it did so '
                f'once per rank. Give every rank its own: {SEPARATE}')

    def _checksums(self) -> Tensor:
        return torch.stack([_checksum(value) for value in self.owner.parameters.values()])


class Member:
    """One rank in :class:`Shared`: the owner has index 0."""

    def __init__(self, shared: Shared, index: int, wrapper: OptimWrapper) -> None:
        self._shared, self._index = shared, index
        self._mine, _ = shared.starts[index]
        # Nothing changes gradients but clipping and scaling, so they may be views of a common sum.
        # The owner's step shall not depend on where in memory buckets have put them.
        group: Any = dist.group.WORLD
        self.views = type(wrapper) is OptimWrapper and not wrapper.clip_grad_kwargs and (
            index > 0 or group.alone)
        if index:
            for name, parameter in self._mine.parameters.items():
                parameter.data = shared.owner.parameters[name].data
            for name, average in self._mine.averages.items():
                average.data = shared.owner.averages[name].data
            self._refer_to_owners_state()
        optimizer = self._mine.optimizer
        # MMEngine's schedulers look for the attributes of the method that they have wrapped
        optimizer.step = functools.wraps(optimizer.step)(
            functools.partial(self._follow if index else self._step, optimizer.step))

    def before_forward(self) -> None:
        """From here on, nothing but a step or a change writes to weights."""
        if self._index == 0 and self._shared.sums is None:
            self._shared.remember()

    def forget(self) -> None:
        """Invalidate the checksums: all ranks are about to write identical values."""
        self._shared.sums = None

    def changes(self, where: str, function: Callable[[], Any], weights: bool = True) -> Any:
        """Call ``function``, which changes weights or averages, when all ranks have come here.

        The owner's is the first. Those of followers must leave alone what is shared.

        Args:
            weights: Whether weights change, not only averages.
        """
        shared, index = self._shared, self._index
        number = shared.arrivals[index][0] + 1
        shared.arrivals[index] = number, where
        if index:
            shared.scheduler.wait(lambda: shared.changed >= number, where)
            return function()
        shared.scheduler.wait(lambda: min(shared.arrivals.values())[0] >= number, where)
        places = sorted({place for _, place in shared.arrivals.values()})
        if len(places) > 1:
            raise CollectiveMismatch('virtual ranks that share weights have come to different '
                                     f'changes of them: {", and ".join(places)}')
        if weights:
            shared.check()
        result = function()
        if weights:
            shared.remember()
        shared.changed = number
        return result

    # ---------------------------------------------------------------------------- steps

    def _step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The owner's ``optimizer.step``."""
        self._shared.check()
        self._shared.settings = self._mine.settings()
        result = step(*args, **kwargs)
        self._shared.steps[0] += 1
        self._shared.remember()
        return result

    def _follow(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A follower's ``optimizer.step``: waits for the owner's, and changes no weight."""
        shared = self._shared
        # ranks come out of a collective in any order
        number = shared.steps[self._index]
        shared.scheduler.wait(lambda: shared.steps[0] > number,
                              f'step {number + 1} of the optimizer on shared weights')
        for name, parameter in self._mine.parameters.items():
            if parameter.data_ptr() != shared.owner.parameters[name].data_ptr():
                raise VirtualRanksError(
                    f'the parameter {name} no longer has the memory that the virtual ranks of this '
                    f'process share. Give every rank its own weights: {SEPARATE}')
        if self._mine.settings() != shared.settings:
            raise VirtualRanksError(
                'the parameter groups of the optimizer (learning rate, ...) are not the same on '
                f'all virtual ranks. Give every rank its own weights: {SEPARATE}')
        result = self._step_without_parameters(step, *args, **kwargs)
        self._refer_to_owners_state()
        shared.steps[self._index] += 1
        return result

    def _step_without_parameters(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call torch's step while the parameter groups are empty.

        It calls the user's hooks of steps and counts, as on any rank, and finds nothing to change.
        The groups are emptied by the last hook before the step, because others may look at them.
        """
        groups = self._mine.optimizer.param_groups
        parameters = self._mine.parameter_groups()

        def empty(*_: Any) -> None:
            for group in groups:
                group['params'] = []

        handle = self._mine.optimizer.register_step_pre_hook(empty)
        try:
            return step(*args, **kwargs)
        finally:
            handle.remove()
            for group, before in zip(groups, parameters):
                group['params'] = before

    def _refer_to_owners_state(self) -> None:
        """Let the optimizer refer to the state of the owner's, parameter by parameter."""
        owner, state = self._shared.owner, self._mine.optimizer.state
        for mine, theirs in zip(self._mine.parameter_groups(), owner.parameter_groups()):
            for parameter, owners in zip(mine, theirs):
                if owners in owner.optimizer.state:
                    state[parameter] = owner.optimizer.state[owners]


def _checksum(tensor: Tensor) -> Tensor:
    """Return the sum of the bytes, eight at a time: a single change shows."""
    flat = as_bytes(tensor.detach())
    end = len(flat) // 8 * 8
    words = flat[:end] if flat.storage_offset() % 8 == 0 else flat[:end].clone()
    return words.view(torch.int64).sum() + flat[end:].sum()


def _same_bytes(left: Tensor, right: Tensor) -> bool:
    return (left.shape, left.dtype, left.device) == (right.shape, right.dtype, right.device) \
        and torch.equal(as_bytes(left.detach()), as_bytes(right.detach()))
