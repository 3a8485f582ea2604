"""One copy of the weights, the optimizer's state and averages for all virtual ranks of a process.

The ranks train the same weights: after every step they hold the same bits. So the lowest rank of a
process, the owner, steps for all. The parameters of the others have its memory, and their
optimizers refer to its state. Gradients, buffers, schedules and everything else stay the ranks'
own.

- A step of the owner needs no waiting: all ranks have met to average the gradients that it uses.
  The others step when the owner has, so their next forward pass has its weights.
- Hooks that change weights or averages do so when all ranks of the process have come to them, see
  :mod:`.weight_hooks`.

Anything else that writes to weights would write several times. Which hooks and optimizers may take
part is decided by tables; and checksums of the weights tell whether something else has changed them
since the last step.
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
from ...errors import CollectiveMismatch, RandomnessError
from ..unwrap import unwrap
from . import weight_hooks
from .buckets import as_bytes
from .scheduler import Scheduler, current

_logger = logging.getLogger('mmrepro')

SEPARATE = "randomness.virtual_ranks.memory='separate'"
_NOT_BY_ELEMENT = ('LBFGS', )  # their step evaluates the model


def share_weights(runner: Any) -> None:
    """Let the virtual ranks of this process share weights in a training that is about to begin.

    Every rank calls it, when its weights are loaded and its hooks are ready.

    Raises:
        RandomnessError: ``virtual_ranks.memory='shared'`` although that is not possible, says why;
            or the runner has trained before.
    """
    scheduler = current()
    if scheduler is None or len(scheduler.ranks) == 1:
        return
    if runner.model.sharing is not None:  # hooks begin anew, and would be adapted twice
        raise RandomnessError('runner.train() was called before, and the virtual ranks of this '
                              f'process share weights since. Build a new runner, or set {SEPARATE}')
    number = scheduler.me.trainings
    scheduler.me.trainings += 1
    shared: Shared = scheduler.shared.setdefault(number, Shared(scheduler))
    me = scheduler.ranks.index(scheduler.me)
    shared.come[me] = _Parts(runner), _problem(runner)
    scheduler.wait(lambda: len(shared.come) == len(scheduler.ranks),
                   'the start of a training whose ranks share weights')
    scheduler.shared.pop(number, None)
    if shared.problem:
        _logger.info('the virtual ranks of a process have weights of their own: %s', shared.problem)
        return
    member = _Member(shared, me, shared.come[me][0], runner.optim_wrapper)
    for hook in runner.hooks:
        weight_hooks.adapt(hook, member, owner=me == 0)
    runner.model.sharing = member
    if me == 0:
        _logger.info('the %d virtual ranks of this process share weights and the state of the '
                     'optimizer', len(scheduler.ranks))


def _problem(runner: Any) -> str:
    """Why the ranks cannot share; '' if they can."""
    memory = runner.repro.virtual_ranks.memory
    if memory == 'separate':
        return SEPARATE
    wrapper = runner.optim_wrapper
    optimizer = getattr(wrapper, 'optimizer', None)
    problem = ''
    if type(wrapper) not in (OptimWrapper, AmpOptimWrapper):
        problem = f'the optimizer wrapper {type(wrapper).__name__} may step in a way of its own'
    elif not type(optimizer).__module__.startswith('torch.optim') or \
            type(optimizer).__name__ in _NOT_BY_ELEMENT:
        problem = f'the optimizer {type(optimizer).__name__} may step in a way of its own'
    problem = problem or weight_hooks.problem(runner.hooks, vouched=memory == 'shared')
    if problem and memory == 'shared':
        raise RandomnessError(f"randomness.virtual_ranks.memory='shared', and {problem}; allowed "
                              "are None and 'separate'")
    return problem


class _Parts:
    """What is shared of one rank's runner."""

    def __init__(self, runner: Any) -> None:
        self.optimizer = runner.optim_wrapper.optimizer \
            if isinstance(runner.optim_wrapper, OptimWrapper) else None
        self.parameters: dict[str, nn.Parameter] = dict(unwrap(runner.model).named_parameters())
        self.averages: dict[str, Tensor] = weight_hooks.averages(runner.hooks)

    def in_groups(self) -> list[list[nn.Parameter]]:
        return [group['params'] for group in self.optimizer.param_groups]

    def settings(self) -> list[dict[str, Any]]:
        """Learning rates and so on, group by group."""
        return [{key: value for key, value in group.items() if key != 'params'}
                for group in self.optimizer.param_groups]

    @functools.cached_property
    def first_state(self) -> str:
        """A digest of what the optimizer has gathered before this training."""
        return exact_digest(self.optimizer.state_dict()['state'])

    def difference(self, other: _Parts) -> str:
        """In what the start of another rank's training is not this one's; ''."""
        if other is self:
            return ''
        for kind, own, others in (('parameter', self.parameters, other.parameters),
                                  ('average', self.averages, other.averages)):
            if list(own) != list(others):
                return f'the ranks have different {kind}s'
            for name in own:
                if not _same_bytes(own[name], others[name]):
                    return f'the {kind} {name} is not the same on all ranks'
        return '' if self.first_state == other.first_state else \
            'the optimizers differ between the ranks'


class Shared:
    """What the ranks of one process share in one training."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        # by member: what it has at the start, and why it cannot share
        self.come: dict[int, tuple[_Parts, str]] = {}
        members = range(len(scheduler.ranks))
        self.steps = dict.fromkeys(members, 0)  # of the optimizer
        self.changing = dict.fromkeys(members, (0, ''))  # changes that it has come to, where
        self.changed = 0  # changes that the owner has finished
        self.settings: list[dict[str, Any]] = []  # of the owner's optimizer at its last step
        self._sums: Tensor | None = None  # checksums of the parameters; None: not known

    @property
    def parts(self) -> _Parts:
        """The owner's."""
        return self.come[0][0]

    @functools.cached_property
    def problem(self) -> str:
        """Why the ranks do not share; ''. Asked when all have come and none has gone on."""
        own = (problem for _, problem in self.come.values() if problem)
        return next(own, '') or next(filter(None, (
            self.parts.difference(parts) for parts, _ in self.come.values())), '')

    def remember(self) -> None:
        """The weights are what they should be now."""
        self._sums = self._checksums()

    def forget(self) -> None:
        """Something changes weights that may do so."""
        self._sums = None

    def begin(self) -> None:
        """The owner begins a forward pass."""
        if self._sums is None:
            self.remember()

    def check(self) -> None:
        """Raises RuntimeError if the weights are not what they were; names a parameter."""
        if self._sums is None:
            return
        changed = (self._checksums() != self._sums).tolist()
        if any(changed):
            name = list(self.parts.parameters)[changed.index(True)]
            raise RuntimeError(
                f'between step {self.steps[0]} of the optimizer and the next one, something else '
                f'has changed {name}. The virtual ranks of a process share weights, so it did so '
                f'once per rank. Give every rank its own: {SEPARATE}')

    def _checksums(self) -> Tensor:
        return torch.stack([_checksum(one) for one in self.parts.parameters.values()])


class _Member:
    """One rank in :class:`Shared`: the owner has index 0."""

    def __init__(self, shared: Shared, index: int, parts: _Parts, wrapper: OptimWrapper) -> None:
        self._shared, self._index, self._parts = shared, index, parts
        # Nothing changes gradients but clipping and scaling, so they may be views of a common sum.
        # The owner's step shall not depend on where in memory buckets have put them.
        self.views = type(wrapper) is OptimWrapper and not wrapper.clip_grad_kwargs and (
            index > 0 or dist.group.WORLD.alone)
        if index:
            for name, one in parts.parameters.items():
                one.data = shared.parts.parameters[name].data
            for name, average in parts.averages.items():
                average.data = shared.parts.averages[name].data
            self._take_state()
        step = parts.optimizer.step
        # MMEngine's schedulers look for the attributes of the method that they have wrapped
        parts.optimizer.step = functools.wraps(step)(
            functools.partial(self._follow if index else self._step, step))

    def before_forward(self) -> None:
        """A forward pass begins: from here on, nothing but a step or a change writes to weights."""
        if self._index == 0:
            self._shared.begin()

    def forget(self) -> None:
        """This rank writes to weights what every rank writes."""
        self._shared.forget()

    def changes(self, where: str, function: Callable[[], Any], weights: bool = True) -> Any:
        """Call ``function``, which changes weights or averages, when all ranks have come here.

        The owner's is the first. The others' must leave alone what is shared.

        Args:
            weights: Also weights.
        """
        shared, me = self._shared, self._index
        number = shared.changing[me][0] + 1
        shared.changing[me] = number, where
        if me:
            shared.scheduler.wait(lambda: shared.changed >= number, where)
            return function()
        shared.scheduler.wait(lambda: min(shared.changing.values())[0] >= number, where)
        places = sorted({place for _, place in shared.changing.values()})
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
        """The owner's."""
        self._shared.check()
        self._shared.settings = self._parts.settings()
        result = step(*args, **kwargs)
        self._shared.steps[0] += 1
        self._shared.remember()
        return result

    def _follow(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Another rank's: hooks and counters as ever, but nothing to step."""
        shared, owner = self._shared, self._shared.parts
        # ranks come out of a collective in any order
        number = shared.steps[self._index]
        shared.scheduler.wait(lambda: shared.steps[0] > number,
                              f'step {number + 1} of the optimizer on shared weights')
        for name, one in self._parts.parameters.items():
            if one.data_ptr() != owner.parameters[name].data_ptr():
                raise RuntimeError(
                    f'the parameter {name} no longer has the memory that the virtual ranks of this '
                    f'process share. Give every rank its own weights: {SEPARATE}')
        if self._parts.settings() != shared.settings:
            raise RuntimeError(
                'the parameter groups of the optimizer (learning rate, ...) are not the same on '
                f'all virtual ranks. Give every rank its own weights: {SEPARATE}')
        groups = self._parts.optimizer.param_groups
        before = self._parts.in_groups()

        def leave_out(*_: Any) -> None:
            for group in groups:
                group['params'] = []

        # behind the hooks of others, which may look at the parameters
        handle = self._parts.optimizer.register_step_pre_hook(leave_out)
        try:
            result = step(*args, **kwargs)
        finally:
            handle.remove()
            for group, parameters in zip(groups, before):
                group['params'] = parameters
        self._take_state()
        shared.steps[self._index] += 1
        return result

    def _take_state(self) -> None:
        """Refer to the owner's state of the optimizer."""
        owner, state = self._shared.parts, self._parts.optimizer.state
        for own, others in zip(self._parts.in_groups(), owner.in_groups()):
            for one, other in zip(own, others):
                if other in owner.optimizer.state:
                    state[one] = owner.optimizer.state[other]


def _checksum(tensor: Tensor) -> Tensor:
    """The sum of the bytes, eight at a time: a single change shows."""
    flat = as_bytes(tensor.detach())
    end = len(flat) // 8 * 8
    words = flat[:end] if flat.storage_offset() % 8 == 0 else flat[:end].clone()
    return words.view(torch.int64).sum() + flat[end:].sum()


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    return torch.equal(as_bytes(one.detach()), as_bytes(other.detach()))
