"""Whether a checkpoint fits the run that resumes it: complete, and of the same parts.

A run can continue from the content of a file if nothing is missing.

MMEngine loads what fits and warns of the rest, and hooks may have changed the model or the
optimizer since they were built. So a checkpoint holds a line for each part of the training
(weights, modules, optimizers, schedules), and a resume compares these lines with those of its own
parts.
"""
from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from mmengine.runner import BaseLoop
from mmengine.runner.checkpoint import get_state_dict
from torch import nn

from ..data import dataset_tree
from ..distributed.unwrap import (
    class_of,
    names_of_parameters,
    optim_wrappers,
    param_schedulers,
    unwrap,
)
from ..errors import CheckpointError, ConfigError
from ..facts.collect import read_settings, settings_of
from ..facts.compatibility import ABSENT, CHANGES, FactDifference, inexact, table
from ..objects.digests import local_part, state_digest
from ..seeds import MAX_SEED
from ..util.files import SCALAR, Rule, mismatch, or_none
from ..util.libraries import belongs_to_user
from ..util.text import listed

# parts that MMEngine's ``Runner.resume`` reads; a run without it is a different run
PARTS = {
    'message_hub': 'no message hub (the best score, the logged values)',
    'optimizer': 'no optimizer (its momenta, its learning rates)',
    'param_schedulers': 'no schedules (the course of the learning rate)',
}
_OF_RANK = {'attributes?': {str: {str: object}}, 'gradients?': {str: torch.Tensor},
            'buffers?': {str: torch.Tensor},
            'order?': {'states?': [{str: {str: object}}], 'draws?': {str: [int]}}}
# parts that mmrepro reads, see docs/reference/checkpoints.md
_SHAPE = {
    'meta': {
        'epoch': int, 'iter': int, 'mmrepro?': {
            'facts?': {'world_size?': int, str: SCALAR}, 'schedules?': bool},
        'place?': Rule(lambda value: mismatch(value, [int]) is None and len(value) == 2,
                       '[epoch, batches]'),
        'seed?': Rule(lambda value: value is None or mismatch(value, int) is None
                      and 0 <= value <= MAX_SEED, f'None, or an integer from 0 to {MAX_SEED}')},
    'state_dict?': {str: object},
    'message_hub?': {'runtime_info': {str: object}},
    'mmrepro?': {
        **_OF_RANK, 'ranks?': {int: _OF_RANK}, 'counts?': {str: int},
        'takes_buffers?': {str: bool}, 'parts?': {str: str}, 'moving?': [str],
        'left_out?': {str: str}, 'passes?': int,
        'metrics?': or_none(dict), 'validated?': or_none(int)}}


def stock_facts(meta: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings that stock MMEngine keeps as text of a config file."""
    text = meta.get('cfg')
    return settings_of(read_settings(text)) if isinstance(text, str) and text.strip() else {}


def has_schedules(meta: Mapping[str, Any]) -> bool:
    """Whether the run that wrote a checkpoint with this ``meta`` had ``param_scheduler``."""
    written_by = meta.get('mmrepro', {})
    if 'schedules' in written_by:
        return bool(written_by['schedules'])
    facts = written_by.get('facts') or stock_facts(meta)
    return any(name.startswith('config.param_scheduler') and value not in (None, '[]', '{}')
               for name, value in facts.items())


def damage(content: Any) -> str | None:
    """Return why a checkpoint's ``content`` cannot be used at all, or None."""
    meta = content.get('meta') if isinstance(content, Mapping) else None
    if not isinstance(meta, Mapping) or not {'epoch', 'iter'} <= {*meta}:
        return 'is no checkpoint of a run: it has no meta with epoch and iter'
    problem = mismatch(content, _SHAPE)
    try:
        if not problem and not meta.get('mmrepro'):
            stock_facts(meta)
    except ConfigError as error:
        problem = f'meta.cfg is {error}'
    return problem and f'is damaged: {problem}'


def lacks(content: Any) -> str | None:
    """Return why a run cannot continue from a checkpoint's ``content``, or None."""
    problem = damage(content)
    if problem is not None:
        return problem
    meta = content['meta']
    wanted = [part for part in PARTS if part != 'param_schedulers' or has_schedules(meta)]
    missing = [PARTS[part] for part in wanted if part not in content]
    return f'holds {" and ".join(missing)}' if missing else None


def left_out(model: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights and buffers that a ``state_dict`` has under none of their names.

    Hooks may reduce what is written to what is trained.
    """
    written = {name.removeprefix('module.') for name in state_dict}
    weights = {name: value for name, value in get_state_dict(model).items()
               if isinstance(value, torch.Tensor) and not nn.parameter.is_lazy(value)}
    memory = {local_part(value).data_ptr() for name, value in weights.items() if name in written}
    return {name: value for name, value in weights.items()
            if name not in written and local_part(value).data_ptr() not in memory}


def is_weights(content: Any) -> bool:
    """Whether a file holds weights and nothing else that a training writes."""
    if not isinstance(content, Mapping):
        return False
    return not {'message_hub', 'optimizer', 'mmrepro'} & {*content}


def judge(path: str, content: Any, strict: bool) -> list[str]:
    """Return lines for the log about a file that the user named to resume from.

    Raises:
        CheckpointError: no run has written it.
        ResumeError: ``strict``, and a run could not continue exactly.
    """
    problem = lacks(content)
    if problem is None:
        return []
    if damage(content) or 'message_hub' not in content:
        raise CheckpointError(f'{path} {problem}. Weights are loaded with load_from=..., '
                              'resume=False')
    return [inexact(f'{path} {problem}: it can be loaded, not resumed. ', strict,
                    'Begin a new run from these weights: load_from=..., resume=False; or name a '
                    'checkpoint that has all of it')]


# groups of parts: MMEngine restores the content of the first, hooks set up the second
RESTORED = ('weights.', 'optimizer.', 'schedule.')
SET_UP = ('module.', 'frozen.', 'hooks.', 'step.', 'pipeline')
HOOKS = ('_forward_hooks', '_forward_pre_hooks', '_backward_hooks', '_backward_pre_hooks')
LOOKS = 3  # at consecutive iterations: what changes twice in a row changes in each
LAZY = 'known after the first step'
NAMES = '.parameters'  # of an optimizer, group by group
NO_NAME = '(not of the model)'


def parts_of(runner: Any) -> dict[str, str]:
    """Return a line for each part of a training, by name.

    These are dtype and shape of ``'weights.NAME'``, ``'optimizer.class'``, the number of parameters
    in each of ``'optimizer.groups'``, their names in ``'optimizer.parameters'``, class of
    ``'schedule.NUMBER'``, class and settings of ``'module.NAME'``, ``'frozen.NAME'`` for parameters
    that are not trained, the number of the user's hooks in ``'hooks.NAME'``, accumulation and
    clipping in ``'step.NAME'``, the classes of ``'pipeline'``, and a digest of the source in
    ``'code.CLASS'`` for the user's classes of modules. ``'alias.NAME'`` has the other names of what
    has several.
    """
    model = unwrap(runner.model)
    weights = {name: value for name, value in get_state_dict(model).items()
               if isinstance(value, torch.Tensor)}
    modules = dict(model.named_modules(remove_duplicate=False))
    parts = {f'weights.{name}': _size(value) for name, value in weights.items()}
    parts.update(_aliases((name, local_part(value).data_ptr()) for name, value in weights.items()
                          if local_part(value).numel() and not nn.parameter.is_lazy(value)))
    parts.update(_aliases((name, id(module)) for name, module in modules.items()))
    names = names_of_parameters(model)
    for name, wrapper in optim_wrappers(runner.optim_wrapper).items():
        optimizer, path = wrapper.optimizer, f'optimizer.{name}'.rstrip('.')
        parts[f'{path}.class'] = _name(type(optimizer))
        parts[f'{path}.groups'] = ', '.join(
            str(len(group['params'])) for group in optimizer.param_groups)
        # a state dict has the momenta of parameters by their number
        parts[f'{path}{NAMES}'] = '; '.join(
            ' '.join(names.get(id(parameter), NO_NAME) for parameter in group['params'])
            for group in optimizer.param_groups)
        parts[f'step.{name}'.rstrip('.')] = (
            f'accumulates {wrapper._accumulative_counts}, clips {wrapper.clip_grad_kwargs}')
        parts.update((f'schedule.{name}{number}', _name(type(schedule)))
                     for number, schedule in enumerate(param_schedulers(runner).get(name, [])))
    parts.update((f'module.{name}', _settings(module)) for name, module in modules.items())
    parts.update((f'frozen.{name}', 'frozen') for name, parameter in model.named_parameters(
        remove_duplicate=False) if not parameter.requires_grad)
    for name, module in model.named_modules():
        hooks = [hook for kind in HOOKS for hook in getattr(module, kind).values()]
        count = sum(belongs_to_user(getattr(hook, '__module__', None) or type(hook).__module__)
                    for hook in hooks)
        if count:
            parts[f'hooks.{name}'] = str(count)
    classes: dict[Any, None] = dict.fromkeys(map(class_of, model.modules()))
    parts.update((f'code.{_name(cls)}', _source(cls)) for cls in classes
                 if belongs_to_user(cls.__module__))
    if isinstance(runner._train_loop, BaseLoop):  # runner.train_dataloader would build it
        pipelines = dataset_tree.pipelines(runner._train_loop.dataloader.dataset)
        parts['pipeline'] = ', '.join(_name(type(part)) for part in pipelines)
    return parts


def _aliases(things: Iterable[tuple[str, int]]) -> dict[str, str]:
    names: dict[int, list[str]] = defaultdict(list)
    for name, key in things:
        names[key].append(name)
    return {f'alias.{name}': ' '.join(other for other in several if other != name)
            for several in names.values() if len(several) > 1 for name in several}


def differing(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names of the parts that differ.

    A second name for a part that both have is no difference: DDQ's decoder gets one in a step.
    """
    return [name for name in {**then, **now} if then.get(name) != now.get(name)
            and not name.startswith('alias.') and not _is_alias(name, then, now)
            and not (name.endswith(NAMES) and _same_parameters(name, then, now))]


def _same_parameters(part: str, then: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Whether the groups of an optimizer have the same parameters in the same order."""
    if part not in then or part not in now:
        return True  # not known; another optimizer shows in its class and its groups
    return not any(a != b and b not in then.get(f'alias.{a}', '').split()
                   and a not in now.get(f'alias.{b}', '').split()
                   for a, b in _in_groups(then[part], now[part]))


def _in_groups(then: str, now: str) -> Iterator[tuple[str, str]]:
    """Yield the names of parameters, and ``';'`` between groups, side by side."""
    groups = [text.replace('; ', ' ; ').split() for text in (then, now)]
    yield from itertools.zip_longest(groups[0], groups[1], fillvalue=ABSENT)


def _shown(name: str, then: str, now: str) -> tuple[str, str]:
    """Format both values of a part for a message; of parameters, the first that differs."""
    if not name.endswith(NAMES):
        return then, now
    return next(((a, b) for a, b in _in_groups(then, now) if a != b), (then, now))


def _is_alias(name: str, then: Mapping[str, str], now: Mapping[str, str]) -> bool:
    group, _, path = name.partition('.')
    here, there = (then, now) if name in then else (now, then)
    others = here.get(f'alias.{path}', '').split()
    return name not in there and any(
        there.get(f'{group}.{other}') == here[name] for other in others)


def _size(value: torch.Tensor) -> str:
    if nn.parameter.is_lazy(value):
        return LAZY
    return f'{str(value.dtype).removeprefix("torch.")} {tuple(value.shape)}'


def _loaded_size(model: nn.Module, name: str, state_dict: Mapping[str, Any]) -> str | None:
    """Return the size that a weight or buffer has after loading; None if it cannot be loaded.

    Observers of quantization resize their buffers. A parameter is no other one then: the optimizer
    has it.
    """
    path, _, name = name.rpartition('.')
    prefix = f'{path}.' if path else ''
    part = OrderedDict((key[len(prefix):], value) for key, value in (
        (key.removeprefix('module.'), value) for key, value in state_dict.items())
        if key.startswith(prefix))
    try:
        module = copy.deepcopy(model.get_submodule(path))
        parameters = dict(module.named_parameters())
        module.load_state_dict(part, strict=False)
    except Exception:  # sizes that do not fit, and whatever the code of a module raises
        return None
    same = all(value is parameters.get(key) for key, value in module.named_parameters())
    return _size(module.state_dict()[name]) if same else None


def _name(cls: type) -> str:
    module = cls.__module__
    return ('' if module.startswith('torch.') else f'{module}.') + cls.__qualname__


def _settings(module: nn.Module) -> str:
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        return LAZY
    # classes of the user may count in their text
    cls = class_of(module)
    text = module.extra_repr() if cls.__module__.startswith('torch.nn.') else ''
    return f'{_name(cls)}({text})'


@functools.cache
def _source(cls: type) -> str:
    """Return a digest of the source of a class and of the user's classes that it inherits from."""
    sources = []
    for base in cls.__mro__:
        if belongs_to_user(base.__module__):
            with suppress(OSError, TypeError):  # typed into an interpreter, or made by exec()
                sources.append(inspect.getsource(base))
    return state_digest(sources)[:12]


class MovingParts:
    """Finds the parts that hooks set anew in each iteration, such as a dropout by progress.

    A checkpoint has their values in the iteration that it was written after, and the run that
    resumes those of the next, so that they differ where nothing is lost.

    Attributes:
        names: of the parts that were found.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._left = LOOKS
        self._seen: deque[Mapping[str, str]] = deque(maxlen=LOOKS)

    def look_again(self) -> None:
        """Look at the next iterations, too: hooks may begin late."""
        self._left = LOOKS

    def begin_iteration(self, runner: Any) -> None:
        """Compare the parts after the hooks that set them, with those of the last iterations."""
        if not self._left:
            self._seen.clear()
            return
        self._left -= 1
        self._seen.append(parts_of(runner))
        seen = [*self._seen]
        changes = [set(differing(then, now)) for then, now in zip(seen, seen[1:])]
        if len(changes) == LOOKS - 1:
            self.names.update(name for name in set.intersection(*changes)
                              if name.startswith(SET_UP))


class Compatibility:
    """Compares the parts of a training with ``parts``, those of the checkpoint at ``path``.

    ``moving``: the names of those that :class:`MovingParts` has found.
    """

    def __init__(self, path: str, parts: Mapping[str, str], moving: Sequence[str], strict: bool
                 ) -> None:
        self._path, self._parts, self._strict = path, parts, strict
        self._moving = frozenset(moving)
        self._at_the_start: Mapping[str, str] | None = None

    def check_restored(self, runner: Any, state_dict: Mapping[str, Any]) -> None:
        """Compare the parts that MMEngine is about to restore; ``state_dict``: the weights.

        Raises:
            ResumeError: something does not fit, with ``resume_strict``; otherwise it is a warning.
        """
        now = parts_of(runner)
        model = unwrap(runner.model)
        for name in differing(self._parts, now):
            if name.startswith('weights.') and {name} <= {*self._parts} & {*now}:
                size = _loaded_size(model, name.removeprefix('weights.'), state_dict)
                now[name] = size or now[name]
        self._compare(runner, now, RESTORED, ())
        edited = [name.removeprefix('code.') for name, code in now.items()
                  if name.startswith('code.') and self._parts.get(name, code) != code]
        if edited:
            runner.logger.warning(
                f'the code of {listed(edited)} has changed since {self._path} was written. If the '
                'training depends on it, the result is not that of the uninterrupted run')

    def training_begins(self, runner: Any) -> None:
        """Note the parts before the hooks of the first epoch."""
        self._at_the_start = parts_of(runner)

    def check_set_up(self, runner: Any) -> None:
        """Compare the parts that hooks set up, before the first step of the resumed training.

        A hook may change a part when its epoch begins, and the checkpoint may be of before or
        after that: a part fits if it does so at the start of the training, or now.

        Raises:
            ResumeError: as :meth:`check_restored`.
        """
        if self._at_the_start is not None:
            self._compare(runner, parts_of(runner), SET_UP, (self._at_the_start, ))
            self._at_the_start = None

    def _compare(self, runner: Any, now: Mapping[str, str], groups: tuple[str, ...],
                 before: tuple[Mapping[str, str], ...]) -> None:
        then = self._parts
        if 'optimizer' not in {name.partition('.')[0] for name in now}:
            groups = ('weights.', )  # for a validation: no optimizer has been built
        rows = [FactDifference(name, *_shown(name, then.get(name, ABSENT), now.get(name, ABSENT)),
                               CHANGES, 'a resume does not restore it')
                for name in differing(then, now) if name.startswith(groups)
                and LAZY not in (then.get(name), now.get(name))
                and all(then.get(name) != parts.get(name) for parts in before)]
        moving = [row.name for row in rows if row.name in self._moving]
        if moving:
            runner.logger.warning(
                f'{listed(moving)} changed in each iteration of the run that wrote {self._path}, '
                'and a resume does not restore that. What a hook computes from runner.iter is '
                'right; a counter of its own begins again, unless it is registered '
                '(mmrepro.keep_attributes)')
        rows = [row for row in rows if row.name not in moving]
        if not rows:
            return
        advice = ('What is added to a model while it trains has to be there before a checkpoint '
                  'is loaded: let a hook add layers and groups of parameters in before_run, and '
                  'give a buffer its size in the constructor, or in _load_from_state_dict')
        if groups == SET_UP:
            advice = ('A hook that sets this from an epoch on has to do so again when a run '
                      'resumes: let it ask for runner.epoch >= N, not == N, in before_train_epoch')
        if all(row.name.endswith(NAMES) for row in rows):
            advice = ('The momenta of a parameter would go to another one. Give the optimizer its '
                      'parameters in an order that is the same in every process, such as that of '
                      'named_parameters() or of sorted names, not that of a set')
        runner.logger.warning(inexact(
            f'{self._path} does not fit this run:\n{table(rows)}\n', self._strict, advice))
