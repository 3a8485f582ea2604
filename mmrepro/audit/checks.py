"""Checks of settings, data and environment. The rules and the short checks are in ``rules.py``."""
from __future__ import annotations

import inspect
from typing import Any, Callable

from ..checkpoint.kept_attributes import KEPT
from ..config import LEGACY_KEYS
from ..data.loader import without_positions
from ..data.sampling_orders import STOCK_FAULTS
from ..determinism.tables import CUDA_ENV, ENV, PolicySettings
from ..facts.known_hooks import AVERAGES_AT_EPOCH_END, AVERAGES_AT_VALIDATION, plays
from ..patches import CAUSES
from ..runs.config_files import TOP_LEVEL
from ..util.text import nearest, shorten
from .findings import CHANGES, HINT, MAY, Found, Hits
from .subject import TRAIN_KEYS, Part, Subject

# keys whose absence changes the run, whatever else the config says
DECISIVE = ('randomness', 'custom_imports', 'env_cfg', 'resume', 'load_from')
# similarity: two letters changed in eight; below it, names of variables in MMDetection's own
# configs (conv_cfg) come near to keys
SIMILAR = 0.82
LOADERS = ('train_dataloader', 'val_dataloader', 'test_dataloader')
# variables that a process has to start with
START_ENV = {row.name: row.default for row in ENV if row.at_start and row.default is not None}
# solved by the streams of samples and steps, and so in no table of replacements
_BY_STREAMS: dict[str, tuple[str, str]] = {
    'ScoreHLRSampler': (
        'C15', "positives from the accelerator's generator, negatives from the CPU's"),
    **dict.fromkeys(('YOLOXModeSwitchHook', 'PipelineSwitchHook'), (
        'B14', 'restarts the workers at the switch, and again at a resume')),
}


def not_run(s: Subject) -> bool:
    """Whether a pure-Python config names mmrepro in ``custom_imports``, without effect."""
    return s.lazy and not s.attached and 'mmrepro' in s.imports


def has_cuda() -> bool:
    import torch
    return torch.cuda.is_available()


def misspelt(s: Subject) -> Hits:
    """Find keys of a config that nothing reads, similar to a key that is read."""
    for key in s.cfg:
        near = [] if key in TOP_LEVEL else nearest(key, TOP_LEVEL, cutoff=SIMILAR)
        # val_evaluator_small and preprocessor are variables of the config's own
        if near and not (key.startswith(f'{near[0]}_') or near[0].endswith(f'_{key}')):
            yield Found(key, f'{shorten(s.cfg[key])}; did you mean {near[0]}?',
                        CHANGES if near[0] in DECISIVE else None)


def legacy_keys(s: Subject) -> Hits:
    for old in LEGACY_KEYS:
        if s.cfg.get(old) is not None:
            yield Found(old, repr(s.cfg[old]))


def mixed_precision(s: Subject) -> Hits:
    for part in s.parts_in('optim_wrapper'):
        if part.name in ('AmpOptimWrapper', 'ApexOptimWrapper'):
            yield Found(f'{part.key}.type', part.name)


def compiled(s: Subject) -> Hits:
    given = s.cfg.get('compile')
    mode = given.get('mode') if isinstance(given, dict) else None
    if isinstance(mode, str) and mode.startswith('max-autotune'):
        yield Found('compile.mode', repr(mode), None if s.is_deterministic else CHANGES)
    elif given:
        yield Found('compile', shorten(given), HINT)


def accumulation(s: Subject) -> Hits:
    for part in s.parts_in('optim_wrapper'):
        count = part.node.get('accumulative_counts', 1)
        if isinstance(count, int) and count > 1 and not s.keyed:
            yield Found(f'{part.key}.accumulative_counts', str(count))


def _argument(part: Part, cls: type, name: str) -> Any:
    """Return an argument of a class: from the config, or the default of its constructors."""
    constructors = [vars(base)['__init__'] for base in cls.__mro__ if '__init__' in vars(base)]
    defaults = (inspect.signature(constructor).parameters.get(name)
                for constructor in constructors)
    found = next((parameter.default for parameter in defaults if parameter is not None), None)
    return part.node.get(name, None if found is inspect.Parameter.empty else found)


def _line_of(cls: type, code: tuple[str, ...]) -> str:
    """Return file and line of the first of ``code`` in a class or its bases; '' if none has it."""
    for base in cls.__mro__[:-1]:
        if base.__module__.partition('.')[0] in ('torch', 'mmengine'):
            continue
        try:
            lines, start = inspect.getsourcelines(base)
        except (OSError, TypeError):  # typed into an interpreter
            continue
        for number, line in enumerate(lines, start):
            if any(word in line for word in code):
                return f'{base.__module__.replace(".", "/")}.py:{number}'
    return ''


def accumulated_batch(s: Subject) -> Hits:
    """Find parts that depend on the batch size, where accumulated batches replace a large batch."""
    counts = [part.node.get('accumulative_counts', 1) for part in s.parts_in('optim_wrapper')]
    if not any(isinstance(count, int) and count > 1 for count in counts):
        return
    named = set()
    for part in s.parts_in('model'):
        cls = s.class_of(part)
        if cls is None or cls in named or not hasattr(cls, 'forward'):
            continue
        named.add(cls)
        norm = _argument(part, cls, 'norm_cfg')
        kind = str(norm.get('type')) if isinstance(norm, dict) else ''
        if kind.endswith('BN') and not _argument(part, cls, 'norm_eval'):
            yield Found(part.key, f'{part.name}: statistics of {kind} are those of a batch')
        line = _line_of(cls, ('reduce_mean(', 'avg_factor = '))
        if line:
            yield Found(part.key, f'{part.name}: divides its loss by a count of the batch ({line})')


def rank_statistics(s: Subject) -> Hits:
    """Find BatchNorm with statistics of each rank; only once the launcher says how many."""
    averages = any(plays(part.name, AVERAGES_AT_VALIDATION, AVERAGES_AT_EPOCH_END)
                   for part in s.parts_in('custom_hooks', 'default_hooks'))
    if s.world_size < 2 or s.keyed or s.cfg.get('sync_bn') or averages:
        return
    for part in s.parts_in('model'):
        if part.key.endswith('norm_cfg') and part.name == 'BN' \
                and part.node.get('requires_grad', True):
            yield Found(part.key, f'BN with its own statistics on each of {s.world_size} ranks')
            return


# ------------------------------------------------------------------------------------------- data

def known_parts(s: Subject) -> Hits:
    """Find types that break reproducibility and that mmrepro neither replaces nor seeds."""
    if s.keyed:
        return
    # type in a config, id in causes.md, why, 'key=value' that has to be in the dict
    faults = [
        *((name, *fault, '') for name, fault in (*_BY_STREAMS.items(), *STOCK_FAULTS.items())),
        *((name, cause.id, cause.why, cause.condition) for cause in CAUSES for name in cause.types),
        *((name, 'B11', f'lost at a resume: {row.why}', '')
          for name, row in KEPT.items())]
    for part in s.parts_in(*TRAIN_KEYS):
        for name, cause, why, condition in faults:
            key, _, value = condition.partition('=')
            if name != part.name:
                continue
            cls = s.class_of(part)
            if not key or value == str(_argument(part, cls, key) if cls else part.node.get(key)):
                yield Found(part.key, f'{part.name}: {why} ({cause})')


def stock_workers(s: Subject) -> Hits:
    loader = s.cfg.get('train_dataloader') or {}
    workers = loader.get('num_workers', 0) if isinstance(loader, dict) and not s.keyed else 0
    if workers:
        yield Found('train_dataloader.num_workers',
                    f'{workers}: the augmentation of a sample depends on this number')
    if workers and not loader.get('persistent_workers'):
        yield Found('train_dataloader.persistent_workers',
                    'False: every epoch draws the same random numbers', MAY)


def without_position(s: Subject) -> Hits:
    """Find loaders that mmrepro's runner refuses."""
    if not s.keyed:
        return
    for key in LOADERS:
        loader = s.cfg.get(key)
        if isinstance(loader, dict) and loader.get('batch_size', 1) is None \
                and not loader.get('batch_sampler'):
            yield Found(f'{key}.batch_size', without_positions(object, batched=False))
    for part in s.parts_in(*LOADERS):
        cls = s.class_of(part)
        refusal = without_positions(cls) if cls is not None else ''
        if refusal:
            yield Found(part.key, refusal)


def ranks_differ(s: Subject) -> Hits:
    for part in s.parts_in('train_dataloader'):
        if part.name == 'MultiDataAspectRatioBatchSampler' and s.world_size > 1:
            yield Found(part.key, f'{part.name}, {s.world_size} ranks')


# ------------------------------------------------------------------------------------ environment

def contradicting_variables(s: Subject) -> Hits:
    """Find variables that the policy would refuse, or warn of."""
    mode = s.randomness.deterministic
    settings = PolicySettings(mode, s.randomness.numerics.float32_precision)
    for row in ENV if mode else ():
        value = s.env.get(row.name)
        unread = s.device == 'cpu' and row.name in CUDA_ENV and not s.attached
        if value is not None and not unread and not row.accepts(value, settings):
            yield Found(row.name, f'{value!r}; accepted: {" | ".join(row.accepted(settings))}')


def missing_variables(s: Subject) -> Hits:
    """Find variables that mmrepro would set if it were attached."""
    for name in START_ENV:
        if not s.attached and s.device != 'cpu' and name not in s.env:
            yield Found(name, 'not set')


# ---------------------------------------------------------------------------------- user's files

def source_hits(rule: str) -> Callable[[Subject], Hits]:
    """Return a check that reports the lines of the user's files that ``rule`` is about."""

    def check(s: Subject) -> Hits:
        for source, hit in s.hits:
            if hit.rule == rule:
                yield Found(f'{source.path}:{hit.line}', hit.what, hit.severity)

    return check
