"""One copy of the weights, the optimizer's state and averages for all virtual ranks of a process.

The ranks train the same weights: after every step they hold the same bits. So the lowest rank of a
process, the owner, steps for all. The parameters of the other ranks, the followers, use its memory,
and their optimizers refer to its state. Everything else belongs to each rank: gradients, buffers,
schedules.

- A step of the owner needs no waiting: all ranks have met to average the gradients that it uses.
  Followers step when the owner has, so their next forward pass has its weights.
- Hooks that change weights or averages do so when all ranks of the process have come to them, see
  :mod:`.weight_hooks`.

Any other code that writes would do so once per rank. Checksums of weights and averages, and
versions of the optimizer's tensors, find it and end the run: before every step, before a validation
or test, when a checkpoint is saved, and at the end of the training.
"""
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Callable

import torch
import torch.distributed as dist
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from torch import Tensor, nn

from ..distributed.scheduler import Scheduler, current
from ..distributed.unwrap import unwrap
from ..errors import RandomnessError, VirtualRanksError
from ..objects.digests import as_bytes, exact_digest
from . import heap, weight_hooks
from .sharded import shard_weights
from .world import Collect

SEPARATE = "randomness.virtual_ranks.memory='separate'"
_NOT_BY_ELEMENT = ('LBFGS', )  # optimizers whose step evaluates the model
KINDS = ('parameter', 'average')  # of tensors that are shared and have checksums
KEY = 'shared weights'  # of meetings of the ranks of a process


def share_weights(runner: Any) -> None:
    """Let the virtual ranks of this process share weights in a training that is about to begin.

    Every rank calls this function when its weights are loaded and its hooks are ready.

    Raises:
        RandomnessError: ``virtual_ranks.memory='shared'`` is not possible, says why; or the runner
            has trained before.
    """
    scheduler = current()
    if scheduler is not None and runner.repro.virtual_ranks.memory == 'sharded':
        shard_weights(runner)
        return
    if scheduler is None or len(scheduler.ranks) == 1:
        return
    if runner.model.sharing is not None:  # a second train(): hooks would be adapted twice
        raise RandomnessError('runner.train() was called before, and the virtual ranks of this '
                              f'process share weights since. Build a new runner, or set {SEPARATE}')
    index, start = scheduler.ranks.index(scheduler.me), _Start(runner)
    shared: Shared = scheduler.meet(
        KEY, len(scheduler.ranks), 'the start of a training whose ranks share weights', index,
        lambda: start, lambda: Collect(functools.partial(Shared, scheduler)))
    if index == 0:
        runner.logger.info(
            f'the virtual ranks of a process have weights of their own: {shared.problem}'
            if shared.problem else f'the {len(scheduler.ranks)} virtual ranks of this process '
            'share weights and the state of the optimizer')
    if shared.problem:
        return
    member = Member(shared, index, start, runner.optim_wrapper)
    for hook in runner.hooks:
        weight_hooks.adapter_of(hook).adapt(hook, member, index == 0)
    runner.model.sharing = member


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
        problem = weight_hooks.problem(runner.hooks)
    if problem and memory == 'shared':
        raise RandomnessError(f"randomness.virtual_ranks.memory='shared', and {problem}; allowed "
                              "are None and 'separate'")
    return problem


def check_shared_weights(runner: Any) -> None:
    """Check weights that virtual ranks share, if they do, where somebody is about to use them.

    Raises:
        VirtualRanksError: something other than steps and adapted hooks has changed them.
    """
    member = getattr(runner.model, 'sharing', None)
    if member is not None:
        member.check()


class _Start:
    """The state of a rank's runner that is shared, at the start of a training."""

    def __init__(self, runner: Any) -> None:
        self.problem = _problem(runner)
        # an optimizer that cannot be shared has another kind of wrapper
        self.optimizer: Any = getattr(runner.optim_wrapper, 'optimizer', None)
        self.tensors: dict[str, dict[str, Tensor]] = dict(
            parameter=dict(unwrap(runner.model).named_parameters()),
            average=weight_hooks.averages(runner.hooks))
        self.hooks: list[Any] = runner.hooks

    def parameter_groups(self) -> list[list[nn.Parameter]]:
        return [group['params'] for group in self.optimizer.param_groups]

    def shared(self) -> list[Tensor]:
        """Return the tensors that the ranks share: by kind, then those of the optimizer."""
        kinds = [tensors.values() for tensors in self.tensors.values()]
        return [tensor for part in (*kinds, *self.parameter_groups()) for tensor in part]

    def settings(self) -> list[dict[str, Any]]:
        """Return learning rates and so on, group by group."""
        # MMEngine's groups are dicts that look at every value they return
        return [dict(dict.items(group), params=None) for group in self.optimizer.param_groups]

    @functools.cached_property
    def state_digest(self) -> str:
        """A digest of the optimizer's state before the training."""
        return exact_digest(self.optimizer.state_dict()['state'])

    def difference(self, other: _Start) -> str:
        """Return how the starts of two ranks differ; '' if they do not."""
        for kind, mine in self.tensors.items():
            theirs = other.tensors[kind]
            if list(mine) != list(theirs):
                return f'the ranks have different {kind}s'
            for name, value in mine.items():
                if not torch.equal(as_bytes(value), as_bytes(theirs[name])):
                    return f'the {kind} {name} is not the same on all ranks'
        return '' if self.state_digest == other.state_digest else \
            'the optimizers differ between the ranks'


class Shared:
    """The state that the ranks of one process share in one training."""

    def __init__(self, scheduler: Scheduler, starts: Sequence[_Start]) -> None:
        self.scheduler, self.owner = scheduler, starts[0]
        # why the ranks do not share; ''
        self.problem = next(filter(None, (start.problem for start in starts)), '') or next(
            filter(None, map(self.owner.difference, starts[1:])), '')
        self.steps = 0  # of the owner's optimizer
        self.changes_made = 0  # changes by hooks that the owner has finished
        self.settings: list[dict[str, Any]] = []  # of the owner's optimizer at its last step
        self.sums: dict[str, Tensor] = {}  # checksums by kind of tensor
        self._checksums_of = {kind: [*map(_Checksum, tensors.values())]
                              for kind, tensors in self.owner.tensors.items()}
        # of the optimizer: a parameter, the entries of its state, and their values and versions
        self.state: list[tuple[str, dict[str, Any], dict[str, tuple[Any, int]]]] = []
        if not self.problem:
            for start in starts[1:]:
                self.lend(start)
            heap.trim()  # the heap would keep the copies of the ranks, in pieces
            self.remember()

    def lend(self, start: _Start) -> None:
        """Let another rank use the owner's tensors, and refer to the state of its optimizer."""
        for kind, tensors in start.tensors.items():
            for name, tensor in tensors.items():
                tensor.data = self.owner.tensors[kind][name].data
        self.lend_state(start)

    def lend_state(self, start: _Start) -> None:
        state = self.owner.optimizer.state
        for mine, theirs in zip(start.parameter_groups(), self.owner.parameter_groups()):
            for parameter, owners in zip(mine, theirs):
                if owners in state:
                    start.optimizer.state[parameter] = state[owners]

    def remember(self, kinds: Sequence[str] = KINDS) -> None:
        """Take the checksums of the shared tensors, and the versions of the optimizer's state."""
        self.sums = {**self.sums, **{kind: self._checksums(kind) for kind in kinds}}
        state = self.owner.optimizer.state
        self.state = [(name, state[parameter], _versions(state[parameter]))
                      for name, parameter in self.owner.tensors['parameter'].items()
                      if parameter in state]

    def check(self, kinds: Sequence[str] = KINDS) -> None:
        """Raise VirtualRanksError if anything is not what it was; name a parameter."""
        for kind in kinds:
            changed = (self._checksums(kind) != self.sums[kind]).tolist()
            if any(changed):
                name = list(self.owner.tensors[kind])[changed.index(True)]
                self._refuse_change(f'the {kind} {name}')
        for name, entries, before in self.state:
            now = _versions(entries)
            if now.keys() != before.keys() or any(
                    value is not before[key][0] or version != before[key][1]
                    for key, (value, version) in now.items()):
                self._refuse_change(f'the state of {name} in the optimizer')

    def _refuse_change(self, what: str) -> None:
        self.refuse(f'between step {self.steps} of the optimizer and the next one, something '
                    f'else has changed {what}. The virtual ranks of a process share weights, so it '
                    'did so once per rank')

    def refuse(self, problem: str) -> None:
        """Raise VirtualRanksError with hooks that may be the cause, and the way out."""
        hooks = weight_hooks.of_users(self.owner.hooks)
        raise VirtualRanksError(
            f'{problem}. Hooks of this run that are not of MMEngine, MMDetection or mmrepro: '
            f'{", ".join(hooks) or "none"}. Give every rank its own weights: randomness.'
            f"virtual_ranks=dict(ranks={self.scheduler.world_size}, memory='separate')")

    def _checksums(self, kind: str) -> Tensor:
        sums = [checksum.take() for checksum in self._checksums_of[kind]]
        return torch.stack(sums) if sums else torch.empty(0)


class Member:
    """One rank in :class:`Shared`: the owner has index 0."""

    def __init__(self, shared: Shared, index: int, mine: _Start, wrapper: OptimWrapper) -> None:
        self._shared, self._index, self._mine = shared, index, mine
        self._steps = self._changes = 0
        # Nothing changes gradients but clipping and scaling, so they may be views of a common sum.
        # The owner's step shall not depend on where in memory buckets have put them.
        group: Any = dist.group.WORLD
        self.views = type(wrapper) is OptimWrapper and not wrapper.clip_grad_kwargs and (
            index > 0 or group.alone)
        optimizer = self._mine.optimizer
        # MMEngine's schedulers look for the attributes of the method that they have wrapped
        optimizer.step = functools.wraps(optimizer.step)(
            functools.partial(self._follow if index else self._step, optimizer.step))

    def check(self) -> None:
        """Raise VirtualRanksError if what is shared has been changed, or is no longer shared."""
        self._check_memory()
        self._shared.check()

    def _check_memory(self) -> None:
        mine, owners = self._mine.shared(), self._shared.owner.shared()
        for left, right in zip(map(Tensor.data_ptr, mine), map(Tensor.data_ptr, owners)):
            if left != right:
                self._refuse_memory()

    def _refuse_memory(self) -> None:
        names = [f'{kind} {name}' for kind, tensors in self._mine.tensors.items()
                 for name in tensors]
        names += [f'parameter of the optimizer, of {parameter.shape}'
                  for group in self._mine.parameter_groups() for parameter in group]
        pairs = zip(names, self._mine.shared(), self._shared.owner.shared())
        name = next(name for name, left, right in pairs if left.data_ptr() != right.data_ptr())
        self._shared.refuse(f'the {name} does not have the memory that the virtual ranks of this '
                            'process share')

    def writes_on_every_rank(self, function: Callable[[], Any]) -> None:
        """Call ``function``, in which all ranks meet, and then write the same values each."""
        shared = self._shared
        shared.check()
        before = shared.sums
        function()
        if shared.sums is before:  # the first rank that comes out
            shared.remember()

    def changes(self, where: str, function: Callable[[], Any],
                kinds: Sequence[str] = KINDS) -> Any:
        """Call ``function``, which changes tensors of ``kinds``, when all ranks have come here.

        The owner's call is the first. Calls of followers must not change shared tensors.
        """
        shared, scheduler = self._shared, self._shared.scheduler
        scheduler.meet(KEY, len(scheduler.ranks), where, self._index, lambda: None,
                       lambda: Collect(len))
        self._changes += 1
        if self._index:
            scheduler.wait(lambda: shared.changes_made >= self._changes, where)
            return function()
        shared.check(kinds)
        result = function()
        shared.remember(kinds)
        shared.changes_made += 1
        return result

    # ---------------------------------------------------------------------------- steps

    def _step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replace ``optimizer.step`` of the owner: step for all ranks."""
        self._shared.check(['parameter'])
        self._shared.settings = self._mine.settings()
        result = step(*args, **kwargs)
        self._shared.steps += 1
        self._shared.remember(['parameter'])
        return result

    def _follow(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replace ``optimizer.step`` of a follower: wait for the owner's, and change no weight."""
        shared = self._shared
        # ranks come out of a collective in any order
        self._steps += 1
        shared.scheduler.wait(lambda: shared.steps >= self._steps,
                              f'step {self._steps} of the optimizer on shared weights')
        self._check_memory()
        if self._mine.settings() != shared.settings:
            shared.refuse('the parameter groups of the optimizer (learning rate, ...) are not the '
                          'same on all virtual ranks, which share weights')
        result = self._step_without_parameters(step, *args, **kwargs)
        shared.lend_state(self._mine)
        return result

    def _step_without_parameters(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call torch's step while the optimizer has no parameter groups.

        torch's step calls the user's hooks of steps and counts, as on any rank, and changes
        nothing.
        The groups are away between the last hook before the step and the first hook after it.
        """
        optimizer = self._mine.optimizer
        groups = optimizer.param_groups
        away = optimizer.register_step_pre_hook(lambda *_: setattr(optimizer, 'param_groups', []))
        back = optimizer.register_step_post_hook(
            lambda *_: setattr(optimizer, 'param_groups', groups))
        optimizer._optimizer_step_post_hooks.move_to_end(back.id, last=False)
        try:
            with away, back:
                return step(*args, **kwargs)
        finally:
            optimizer.param_groups = groups


class _Checksum:
    """The sum of the bytes of a tensor, eight at a time: a single change shows."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._place: tuple[int, int] | None = None  # of the memory in the next two, if it is that
        self._words = self._rest = tensor

    def take(self) -> Tensor:
        """Return it, a number."""
        place = self._tensor.data_ptr(), self._tensor.numel()
        if place != self._place:
            flat = as_bytes(self._tensor)
            end, aligned = len(flat) // 8 * 8, flat.storage_offset() % 8 == 0
            words = flat[:end] if aligned else flat[:end].clone()
            self._words, self._rest = words.view(torch.int64), flat[end:]
            self._place = place if aligned and flat.data_ptr() == place[0] else None
        total = self._words.sum()
        return total + self._rest.sum() if len(self._rest) else total


def _versions(entries: dict[str, Any]) -> dict[str, tuple[Any, int]]:
    """Return the values, and how often each was written to: without a pass over the memory."""
    return {key: (value, getattr(value, '_version', 0)) for key, value in entries.items()}
