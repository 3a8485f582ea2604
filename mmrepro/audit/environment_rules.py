"""Checks of environment variables, packages and the model. The rules are in ``rules.py``."""
from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Callable

from ..checkpoint.adapters import ADAPTERS
from ..determinism.tables import CUDA_ENV, ENV, PolicySettings
from ..patches import PATCHES
from .findings import CHANGES, MAY, Found, Hits, when
from .sources import Hit, SourceFile
from .subject import Subject


def contradicting_variables(s: Subject) -> Hits:
    """Variables that the policy would refuse, or warn of."""
    mode = s.randomness.deterministic
    if not mode:
        return
    settings = PolicySettings(mode, s.randomness.numerics.float32_precision)
    for row in ENV:
        value = s.env.get(row.name)
        unread = s.device == 'cpu' and row.name in CUDA_ENV and not s.attached
        if value is not None and not unread and not row.accepts(value, settings):
            yield Found(row.name, f'{value!r}; accepted: {" | ".join(row.accepted(settings))}')


# variables that a process has to start with
START_ENV = {row.name: row.default for row in ENV if row.at_start and row.default is not None}


def missing_variables(s: Subject) -> Hits:
    """Variables that mmrepro would set if it were attached."""
    if s.attached or s.device == 'cpu':
        return
    for name in START_ENV:
        if name not in s.env:
            yield Found(name, 'not set')


def _has_cuda() -> bool:
    import torch
    return torch.cuda.is_available()


hash_seed = when(
    lambda s: not s.attached and s.env.get('PYTHONHASHSEED', 'random') == 'random',
    'PYTHONHASHSEED', 'not set')
threads = when(
    lambda s: s.device == 'cpu' and s.randomness.numerics.num_threads is None
    and 'OMP_NUM_THREADS' not in s.env,
    'OMP_NUM_THREADS', 'not set: as many threads as this machine has cores')
no_such_device = when(lambda s: s.device != 'cpu' and not _has_cuda(), '--device cuda',
                      'no CUDA device here: judged by the tables alone')
not_built = when(lambda s: s.model_error, 'model', lambda s: s.model_error)


def rank_statistics(s: Subject) -> Hits:
    """BatchNorm that each rank keeps for itself; only once the launcher says how many."""
    if s.world_size < 2 or s.model is None or s.keyed or s.cfg.get('sync_bn'):
        return
    from torch.nn import SyncBatchNorm
    from torch.nn.modules.batchnorm import _BatchNorm
    hooks = {part.name for part in s.parts_in('custom_hooks', 'default_hooks')}
    if hooks & {'SyncBuffersHook', 'SyncNormHook'}:
        return
    for path, module in s.model.named_modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm) \
                and module.weight is not None and module.weight.requires_grad:
            yield Found(f'model.{path}', f'{type(module).__name__} with its own statistics on '
                        f'each of {s.world_size} ranks')
            return


def albumentations_alone(s: Subject) -> Hits:
    """A transform of albumentations outside of a ``Compose``: nothing seeds it."""
    if importlib.util.find_spec('albumentations') is None:
        return
    for part in s.training:
        cls = s.class_of(part)
        if cls is not None and cls.__module__.startswith('albumentations.') \
                and '.transforms[' not in part.key:
            yield Found(part.key, part.name)


def _hits(s: Subject, *rules: str) -> Iterator[tuple[SourceFile, Hit]]:
    return ((source, hit) for source in s.sources for hit in source.hits if hit.rule in rules)


def source_hits(rule: str) -> Callable[[Subject], Hits]:
    """A check that reports what the user's own files hold about ``rule``."""

    def check(s: Subject) -> Hits:
        for source, hit in _hits(s, rule):
            if not (s.keyed and (hit.keyed or _is_replaced(source.path, hit.what))):
                yield Found(f'{source.path}:{hit.line}', hit.what)

    return check


def _is_replaced(path: str, what: str) -> bool:
    """Whether a hit, `Class.method ...`, is in a method that mmrepro replaces."""
    return any(what.split()[0] == patch.target.partition(':')[2]
               and path.endswith(patch.module.replace('.', os.sep) + '.py') for patch in PATCHES)


def seeds_from_clock(s: Subject) -> Hits:
    """Clocks and process ids; those that reach a seed or a value are more severe."""
    for source, hit in _hits(s, 'clock'):
        line = source.text.splitlines()[hit.line - 1]
        severity = (CHANGES if hit.reaches or 'seed' in line.lower() else
                    MAY if 'uuid' in line else None)
        yield Found(f'{source.path}:{hit.line}', hit.what, severity)


def kept_state(s: Subject) -> Hits:
    """Attributes of modules and hooks that change, unless an adapter keeps them."""
    for source, hit in _hits(s, 'model-state', 'hook-state'):
        if hit.what.partition('.')[0] not in ADAPTERS:
            yield Found(f'{source.path}:{hit.line}', hit.what)


def unreadable(s: Subject) -> Hits:
    for source in s.sources:
        if source.error:
            yield Found(source.path, source.error)
