"""The table of consequences where two environments differ, for resumes, manifests and replays.

A name is that of a fact (:mod:`mmrepro.facts.collect`) or of a field of a manifest, flattened.
"""
from __future__ import annotations

import fnmatch
import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple

from ..errors import ResumeError
from .hook_settings import counts_from_the_end, is_watching, without_watchers

CHANGES, MAY, HARMLESS = SEVERITIES = ('changes bits', 'may change bits', 'harmless')
# what a row of the table is about, beside settings
START = 'start'  # when, where and how the process was started: a repetition differs in it by design
WEIGHTS = 'weights'  # the weights that the training begins from: they may follow from other rows
ATTACHED = 'mmrepro'  # a fact of comparisons: whether mmrepro ran the training

MAX_ROWS = 40  # of a table; the rest is counted
ABSENT = '(not set)'
# of MMEngine's `randomness`, which a stock run need not set
DEFAULTS = {'randomness.diff_rank_seed': False, 'randomness.deterministic': False}
_WIDTHS = (48, 30, 30, 80)  # of the columns, in characters


class FactDifference(NamedTuple):
    """A fact or field that differs. ``severity`` is one of :data:`SEVERITIES`."""
    name: str
    then: Any
    now: Any
    severity: str
    consequence: str
    about: str = ''  # START, WEIGHTS or ''


class FactRule(NamedTuple):
    """The consequence of a difference in values whose names match ``pattern``."""
    pattern: str  # as in fnmatch
    severity: str  # one of SEVERITIES
    consequence: str  # for the table
    only: str = ''  # key of CONDITIONS: harmless unless it holds
    about: str = ''  # START, WEIGHTS or ''


def _reacts_to_metrics(facts: Mapping[str, Any]) -> bool:
    return any(isinstance(value, str) and (
        value.endswith('EarlyStoppingHook') or 'ReduceOnPlateau' in value)
        for value in facts.values())


def _averages_at_validation(facts: Mapping[str, Any]) -> bool:
    """Whether training goes on with statistics that ranks average before each validation."""
    if facts.get('world_size', 1) == 1:
        return False
    hooks = {str(value).rsplit('.', 1)[-1] for name, value in facts.items()
             if name.startswith(('config.custom_hooks', 'config.default_hooks'))
             and name.endswith('type')}
    # SyncBuffersHook averages at the end of every epoch, where a loop has epochs
    by_epoch = facts.get('config.train_cfg.by_epoch') is True or str(
        facts.get('config.train_cfg.type')).endswith('EpochBasedTrainLoop')
    return 'SyncNormHook' in hooks or ('SyncBuffersHook' in hooks and not by_epoch)


def _no_digest_of(*names: str) -> Callable[[Mapping[str, Any]], bool]:
    """Return a condition: all that a run says of its data is their path."""
    # before its data are loaded, and in a manifest, a run has no facts on them; logs have no scheme
    return lambda facts: ('train_samples' in facts or 'scheme' not in facts) and any(
        name not in facts for name in names)


def _without_mmrepro(facts: Mapping[str, Any]) -> bool:
    """Whether the facts are of a run of stock MMEngine."""
    return facts.get(ATTACHED) is False


_BY_CONTENT = 'the data are compared by what they hold'


class Condition(NamedTuple):
    """When a fact matters, and why it does not otherwise."""
    holds: Callable[[Mapping[str, Any]], bool]
    otherwise: str


CONDITIONS = {
    'end': Condition(
        lambda facts: counts_from_the_end(facts) or _reacts_to_metrics(facts)
        or _averages_at_validation(facts), 'nothing counts from the end of the training'),
    'no annotations': Condition(_no_digest_of('train_annotations'), _BY_CONTENT),
    'no images': Condition(_no_digest_of('train_images'), _BY_CONTENT),
    'no data': Condition(_no_digest_of('train_annotations', 'train_images'), _BY_CONTENT),
    'no AVX2': Condition(
        lambda facts: 'avx2' not in str(facts.get('hardware.cpu_features')).split(),
        'batches are the same on CPUs with AVX2; the kernels of training are compared by the CPU'),
    'own kernels': Condition(lambda facts: facts.get('randomness.numerics.cpu') != 'portable',
                             "randomness.numerics.cpu='portable' has the bits of every CPU"),
    'own level': Condition(lambda facts: facts.get('randomness.numerics.cpu') is None,
                           'randomness.numerics.cpu pins the instruction sets'),
    'cuda': Condition(lambda facts: facts.get('hardware.gpu') is not None, 'no GPU is used'),
    'ranks': Condition(lambda facts: facts.get('world_size', 1) > 1, 'there is one rank'),
    # with more than two ranks: a + b is b + a. Virtual ranks exchange bytes, and add them up in an
    # order of their own
    'nccl': Condition(lambda facts: facts.get('hardware.gpu') is not None and facts.get(
        'world_size', 1) > 2 and facts.get('randomness.virtual_ranks.ranks') is None,
                      'NCCL decides about no order of a sum'),
    'worker streams': Condition(
        lambda facts: _without_mmrepro(facts)
        or facts.get('randomness.worker_seed', 'sample') != 'sample',
        'each sample has a stream of its own'),
    'stock': Condition(_without_mmrepro, 'no order comes from hashes'),
    'metrics': Condition(_reacts_to_metrics, 'training does not react to metrics'),
    'validation': Condition(
        lambda facts: _without_mmrepro(facts) or _reacts_to_metrics(facts)
        or _averages_at_validation(facts), 'training does not react to validation'),
}

# patterns, then the other fields of FactRule; the first pattern that matches counts
_ROWS: tuple[tuple[str, ...], ...] = (
    (ATTACHED, CHANGES, 'other random numbers and kernels: bits cannot agree'),
    ('randomness.seed', CHANGES, 'different order of data, different random numbers'),
    ('randomness.resume_strict', HARMLESS, ''),
    ('randomness.self_checks.*', HARMLESS, 'checks change no bit'),
    ('randomness.independent_predictions', CHANGES, 'training reacts to metrics', 'metrics'),
    ('randomness.virtual_ranks.memory', HARMLESS, 'the ranks of a process compute the same'),
    ('randomness.virtual_ranks.ranks', CHANGES,
     'gradients are added up in another order over the ranks'),
    ('randomness.operators', HARMLESS, 'the provider of operators is compared by itself'),
    ('randomness.numerics.float32_precision', HARMLESS,
     'the flags that it sets are compared by themselves'),
    ('randomness.streams.*', CHANGES, 'different random numbers in this stream'),
    ('randomness.*', CHANGES, 'different random numbers or kernels'),
    ('scheme', CHANGES, 'random numbers are derived in another way'),
    ('processes', HARMLESS, 'bits belong to the ranks'),
    ('world_size', CHANGES, 'different batches per rank, gradients added in a different order'),
    ('train_samples train_annotations train_images train_entries', CHANGES,
     'the training data are not the same'),
    ('operators operators.*', CHANGES, 'different kernels for the operators of mmcv'),
    ('version.mmrepro', HARMLESS, 'the scheme of the random numbers is compared by itself'),
    ('version.python', HARMLESS, 'nothing random depends on the interpreter'),
    ('version.cudnn', CHANGES, 'different kernels', 'cuda'),
    ('version.nccl env.NCCL_* ranks_per_machine', CHANGES,
     'a different order of the sums over ranks', 'nccl'),
    ('version.cuda', CHANGES, 'different kernels'),
    ('version.driver', HARMLESS, 'kernels come with CUDA and cuDNN'),
    ('version.pycocotools', HARMLESS, 'metrics only'),
    ('version.*', CHANGES, 'a different implementation'),
    ('hardware.cpu_features', CHANGES, 'batches are the same on x86-64 CPUs with AVX2 only',
     'no AVX2'),
    ('hardware.cpu hardware.cpu_instructions', CHANGES,
     'different kernels: sums in a different order', 'own kernels'),
    ('hardware.*', CHANGES, 'different kernels: sums in a different order'),
    ('library.libc', CHANGES, 'other roundings: NumPy, OpenCV and torch call its functions'),
    ('torch.num_threads', CHANGES, 'sums are split differently'),
    ('torch.num_interop_threads', HARMLESS, 'no operator is split by it'),
    ('cv2.num_threads', HARMLESS, 'OpenCV splits images, not sums'),
    ('torch.backends.cu*', CHANGES, 'different kernels', 'cuda'),
    ('torch._inductor.* torch._dynamo.*', CHANGES, 'compiled models have different kernels'),
    ('torch.utils.deterministic.fill_uninitialized_memory', HARMLESS,
     'only code that reads memory before it writes it can tell'),
    ('torch.*', CHANGES, 'different kernels'),
    ('env.PYTHONHASHSEED', CHANGES, 'sets of strings have another order', 'stock'),
    ('env.O*_NUM_THREADS env.MKL_NUM_THREADS', HARMLESS,
     'the number of threads is compared by itself'),
    ('env.CUDA_LAUNCH_BLOCKING', HARMLESS, 'speed only'),
    ('env.PYTORCH_CUDA_ALLOC_CONF', HARMLESS, 'addresses only'),
    ('env.CU* env.NVIDIA_*', CHANGES, 'different kernels', 'cuda'),
    ('env.OPENCV_* env.NPY_* env.OPENBLAS_CORETYPE', CHANGES, 'different pixels in batches',
     'own level'),
    ('env.*', CHANGES, 'different kernels'),
    ('config.train_dataloader.num_workers config.train_dataloader.persistent_workers', CHANGES,
     'streams belong to workers', 'worker streams'),
    ('config.train_dataloader.prefetch_factor config.train_dataloader.pin_memory '
     'config.train_dataloader.timeout config.train_dataloader.multiprocessing_context', HARMLESS,
     'speed only'),
    ('config.train_dataloader*.ann_file', CHANGES, 'different or moved annotation file',
     'no annotations'),
    ('config.train_dataloader*.data_prefix.img*', CHANGES, 'different or moved images',
     'no images'),
    ('config.train_dataloader*.data_root', CHANGES, 'different or moved data', 'no data'),
    ('config.train_cfg.max_*', CHANGES,
     'the run ends elsewhere; schedules and hooks that count from the end move', 'end'),
    ('config.train_cfg.val_* config.train_cfg.dynamic_intervals* config.val_cfg*', CHANGES,
     'validation moves the generators of a stock run; training reacts to metrics, or to averages '
     'of BatchNorm over ranks', 'validation'),
    ('evaluation.*', CHANGES, 'training reacts to metrics', 'metrics'),
    ('config.val_dataloader* config.val_evaluator*', CHANGES, 'training reacts to metrics',
     'metrics'),
    ('config.default_hooks.checkpoint*', HARMLESS, 'what is written, not what is computed', '',
     START),
    ('config.default_hooks.logger* config.default_hooks.timer* '
     'config.default_hooks.visualization*', HARMLESS, 'what is written, not what is computed'),
    ('config.env_cfg.mp_cfg*', HARMLESS, 'how workers start'),
    ('config.env_cfg.cudnn_benchmark', HARMLESS, 'the flag is compared by itself'),
    ('config.env_cfg.dist_cfg*', CHANGES, 'the sums over ranks', 'ranks'),
    ('config.model* config.train_dataloader* config.train_cfg* config.optim_wrapper* '
     'config.param_scheduler* config.auto_scale_lr* config.custom_hooks* config.default_hooks* '
     'config.data_preprocessor* config.env_cfg* config.default_scope* config.sync_bn* '
     'config.find_unused_parameters* config.broadcast_buffers* config.detect_anomalous_params* '
     'config.compile* config.activation_checkpointing* config.efficient_conv_bn_eval* '
     'config.runner_type*', CHANGES, 'different training'),
    # fields of a manifest that are no facts
    ('initial_weights weights.*.sha256', CHANGES, 'the training starts from other weights', '',
     WEIGHTS),
    ('weights.*', MAY, 'the training may start from other weights', '', WEIGHTS),
    ('resumed_from*', MAY, 'the run begins in the middle'),
    ('data.samples data.annotations.*.sha256', CHANGES, 'the training data are not the same'),
    ('data.annotations.*', MAY, 'another annotation file'),
    ('data.images.*', CHANGES, 'other images, or in another order'),
    ('data.*', MAY, 'the training data may not be the same'),
    ('machine.torch_git machine.torch_config', MAY, 'another build of torch'),
    ('machine.gpus*', MAY, 'other kernels'),
    ('machine.torch_parallel', HARMLESS, 'the number of threads is compared by itself'),
    ('machine.*', HARMLESS, 'nothing reads it'),
    ('code.*.commit', MAY, 'another version of the code'),
    ('code.*.diff_sha256', MAY, 'the code was changed'),
    ('code.*', HARMLESS, 'what changed is compared by its digest'),
    ('environment.PYTHONHASHSEED', HARMLESS, 'no order comes from hashes'),
    ('environment.*_NUM_THREADS', HARMLESS, 'the number of threads is compared by itself'),
    ('environment.MMREPRO_*', HARMLESS, 'how the process was started', '', START),
    ('environment.CUDA_VISIBLE_DEVICES', HARMLESS, 'which GPU, not what kind'),
    ('environment.*WORLD_SIZE environment.SLURM_NTASKS', HARMLESS,
     'ranks and processes are compared by themselves'),
    # torchrun sets it
    ('environment.TORCH_NCCL_ASYNC_ERROR_HANDLING', HARMLESS, 'when a lost rank is noticed'),
    ('environment.*_DIR', HARMLESS, 'where files lie'),
    ('environment.TZ', HARMLESS, 'no training reads the time'),
    ('environment.LC_* environment.LANG', HARMLESS, 'no training reads the language'),
    ('environment.*', MAY, 'libraries may choose other kernels'),
    ('variables.*', MAY, 'code outside of libraries reads it'),
    ('packages.torch*', MAY, 'another implementation'),
    ('packages.nvidia-*', MAY, 'other kernels'),
    ('packages.*', HARMLESS, 'packages that compute are compared by what is imported'),
    ('created command* cwd work_dir', HARMLESS, 'says when and how, not what', '', START),
    ('*', HARMLESS, 'the training does not read it'),
)
RULES = tuple(FactRule(pattern, *row) for patterns, *row in _ROWS for pattern in patterns.split())

# facts that exist only once a module is imported, the data are loaded, or a variable is read
_LATE = ('version.', 'library.', 'train_', 'torch._dynamo', 'variables.')
_UNKNOWN = ('unavailable', 'mmcv is not in use')


def severity(name: str, facts: Mapping[str, Any]) -> str:
    """Return what would follow if the fact ``name`` changed: one of :data:`SEVERITIES`."""
    return _judged(_rule(name), facts)[0]


def _rule(name: str) -> FactRule:
    return next(rule for rule in RULES if fnmatch.fnmatchcase(name, rule.pattern))


def _judged(rule: FactRule, *runs: Mapping[str, Any]) -> tuple[str, str]:
    """Return severity and consequence of a value that differs between these runs."""
    if rule.only and not any(map(CONDITIONS[rule.only].holds, runs)):
        return HARMLESS, CONDITIONS[rule.only].otherwise
    return rule.severity, rule.consequence


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[FactDifference]:
    """Compare two environments.

    Args:
        then, now: values by name: facts, and fields of manifests.

    Returns:
        The differences, in the order of :data:`SEVERITIES`, by name within.
    """
    rows = []
    then, now = without_watchers(then), without_watchers(now)
    for name in {*then, *now}:
        before, after = (facts.get(name, DEFAULTS.get(name, ABSENT)) for facts in (then, now))
        same = before == after and isinstance(before, bool) == isinstance(after, bool)
        not_asked = name.startswith(_LATE) and ABSENT in (before, after)
        not_asked |= name.startswith('operators.') and (
            then.get('operators') in _UNKNOWN or now.get('operators') in _UNKNOWN)
        if same or before in _UNKNOWN or after in _UNKNOWN or not_asked:
            continue
        rule = _rule(name)
        if any(is_watching(name, facts) for facts in (then, now)):
            judged = HARMLESS, 'the hook changes nothing'
        else:
            judged = _judged(rule, then, now)
        rows.append(FactDifference(name, before, after, *judged, rule.about))
    return sorted(rows, key=lambda row: (SEVERITIES.index(row.severity), row.name))


def table(rows: Sequence[FactDifference]) -> str:
    """Format name, values and consequence of each row; long values are shortened."""
    shown = [('', 'then', 'now', 'consequence'), *(
        (row.name, *_from_difference(_text(row.then), _text(row.now)), row.consequence)
        for row in rows[:MAX_ROWS])]
    widths = [min(width, max(len(line[column]) for line in shown))
              for column, width in enumerate(_WIDTHS)]
    lines = ['  '.join(_cut(cell, width).ljust(width) for cell, width in zip(line, widths)).rstrip()
             for line in shown]
    if len(rows) > MAX_ROWS:
        lines.append(f'and {len(rows) - MAX_ROWS} more')
    return textwrap.indent('\n'.join(lines), '  ')


def check(path: str, then: dict[str, Any], now: dict[str, Any], strict: bool) -> list[str]:
    """Return lines for the log about what differs from the run that wrote ``path``.

    Raises:
        ResumeError: ``strict``, and a difference changes bits.
    """
    rows = differences(then, now)
    serious = [row for row in rows if row.severity == CHANGES]
    harmless = [f'{row.name} {_cut(_text(row.then), 24)} -> {_cut(_text(row.now), 24)}'
                for row in rows if row.severity == HARMLESS]
    lines = []
    if serious:
        text = f'This run differs from the one that wrote {path}:\n{table(serious)}\n'
        if strict:
            raise ResumeError(
                f'{text}The result would not be that of the uninterrupted run. Put the settings '
                'back; or accept a different result: randomness.resume_strict=False; or begin a '
                'new run from these weights: load_from=..., resume=False')
        lines.append(f'{text}The result is not that of the uninterrupted run.')
    if harmless:
        more = [f'and {len(harmless) - 8} more'] if len(harmless) > 8 else []
        lines.append('different from the resumed run, without effect on its bits: '
                     + '; '.join([*harmless[:8], *more]))
    return lines


def _text(value: Any) -> str:
    return ABSENT if value == ABSENT else repr(value)


def _from_difference(then: str, now: str) -> tuple[str, str]:
    """Cut long texts of two values to what follows shortly before they differ."""
    begin = len(os.path.commonprefix([then, now])) - 8
    if begin <= 0 or max(len(then), len(now)) <= _WIDTHS[1]:
        return then, now
    return f'...{then[begin:]}', f'...{now[begin:]}'


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f'{text[:width // 2 - 3]}...{text[-(width // 2):]}'
