"""Checks of the config's settings. Each yields what it found; the table is in ``rules.py``."""
from __future__ import annotations

import difflib

from ..activation import REFUSED_RUNNERS
from ..config import LEGACY_KEYS
from ..distributed.ordered_reduction import ORDER_MATTERS_FROM
from ..runs.config_files import TOP_LEVEL
from ..text import shorten
from .findings import CHANGES, HINT, MAY, Found, Hits, when
from .subject import Subject, class_name

# keys whose absence changes the run, whatever else the config says
DECISIVE = ('randomness', 'custom_imports', 'env_cfg', 'resume', 'load_from')
# of difflib: two letters changed in eight; below it, names of variables in MMDetection's own
# configs (conv_cfg) come near to keys
SIMILAR = 0.82


def _not_run(s: Subject) -> bool:
    """A pure-Python config whose ``custom_imports`` name mmrepro without effect."""
    return s.lazy and not s.attached and 'mmrepro' in s.imports


def _order_matters(s: Subject) -> bool:
    return s.world_size >= ORDER_MATTERS_FROM and not s.strict


not_attached = when(lambda s: not (s.attached or _not_run(s)), 'custom_imports',
                    lambda s: f'imports={list(s.imports)!r} has no mmrepro')
lazy_import = when(_not_run, 'custom_imports',
                   'a pure-Python config: MMEngine does not run its custom_imports')
import_failed = when(lambda s: s.failed_import, 'custom_imports', lambda s: s.failed_import)
only_warns = when(lambda s: s.randomness.deterministic == 'warn', 'randomness.deterministic',
                  "'warn'")
not_strict_resume = when(lambda s: s.attached and not s.randomness.resume_strict,
                         'randomness.resume_strict', 'False')
precision = when(
    lambda s: s.device != 'cpu' and not s.attached, 'randomness.numerics.float32_precision',
    'not set: convolutions use TF32 where the GPU has it, and float32 where not')
gradient_order = when(_order_matters, 'WORLD_SIZE', lambda s: f'{s.world_size} ranks')
stock_resume = when(lambda s: s.cfg.get('resume') and not s.keyed, 'resume', 'True')


def import_may_fail(s: Subject) -> Hits:
    imports = s.cfg.get('custom_imports') or {}
    # MMEngine's default is True
    if any(name.partition('.')[0] == 'mmrepro' for name in s.imports) \
            and imports.get('allow_failed_imports', True):
        yield Found('custom_imports.allow_failed_imports',
                    f'{imports.get("allow_failed_imports", "missing, which means True")}')


def no_seed(s: Subject) -> Hits:
    if s.randomness.seed is None and not s.randomness_error:
        given = s.cfg.get('randomness')
        yield Found('randomness.seed', 'missing' if not given or 'seed' not in given else 'None')


def invalid(s: Subject) -> Hits:
    if s.randomness_error:
        refused = s.attached or 'randomness' not in s.cfg
        yield Found('randomness', s.randomness_error, None if refused else MAY)


def not_deterministic(s: Subject) -> Hits:
    if not s.randomness.deterministic and not s.randomness_error:
        # on one thread, CPU kernels add in one order
        severity = CHANGES if s.device != 'cpu' else MAY
        yield Found('randomness.deterministic', 'False', severity)


def streams(s: Subject) -> Hits:
    randomness = s.randomness
    if s.attached and randomness.worker_seed != 'sample':
        yield Found('randomness.worker_seed', repr(randomness.worker_seed),
                    MAY if randomness.legacy else None)


def misspelt(s: Subject) -> Hits:
    """A key of a config that nothing reads, similar to one that is read."""
    for key in s.cfg:
        near = [] if key in TOP_LEVEL else difflib.get_close_matches(
            key, TOP_LEVEL, n=1, cutoff=SIMILAR)
        # val_evaluator_small and preprocessor are variables of the config's own
        if near and not (key.startswith(f'{near[0]}_') or near[0].endswith(f'_{key}')):
            yield Found(key, f'{shorten(s.cfg[key])}; did you mean {near[0]}?',
                        CHANGES if near[0] in DECISIVE else None)


def legacy_keys(s: Subject) -> Hits:
    for old in LEGACY_KEYS:
        if s.cfg.get(old) is not None:
            yield Found(old, repr(s.cfg[old]))


def cudnn_benchmark(s: Subject) -> Hits:
    if (s.cfg.get('env_cfg') or {}).get('cudnn_benchmark') and not s.strict:
        yield Found('env_cfg.cudnn_benchmark', 'True', CHANGES if s.device != 'cpu' else HINT)


def runner_type(s: Subject) -> Hits:
    kind = s.cfg.get('runner_type')
    if kind is not None and class_name(kind) in REFUSED_RUNNERS:
        yield Found('runner_type', class_name(kind))


def mixed_precision(s: Subject) -> Hits:
    for part in s.parts_in('optim_wrapper'):
        if part.name in ('AmpOptimWrapper', 'ApexOptimWrapper'):
            yield Found(f'{part.key}.type', part.name)


def compiled(s: Subject) -> Hits:
    given = s.cfg.get('compile')
    if not given:
        return
    mode = given.get('mode') if isinstance(given, dict) else None
    if isinstance(mode, str) and mode.startswith('max-autotune'):
        yield Found('compile.mode', repr(mode), None if s.strict else CHANGES)
    else:
        yield Found('compile', shorten(given), HINT)


def unused_parameters(s: Subject) -> Hits:
    wrapper = s.cfg.get('model_wrapper_cfg') or {}
    for key, given in (('find_unused_parameters', s.cfg.get('find_unused_parameters')),
                       ('model_wrapper_cfg.find_unused_parameters',
                        wrapper.get('find_unused_parameters'))):
        if given and _order_matters(s):
            yield Found(key, 'True')


def accumulation(s: Subject) -> Hits:
    if s.keyed:
        return
    for part in s.parts_in('optim_wrapper'):
        count = part.node.get('accumulative_counts', 1)
        if isinstance(count, int) and count > 1:
            yield Found(f'{part.key}.accumulative_counts', str(count))
