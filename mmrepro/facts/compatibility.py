"""How this run differs from the one that wrote a checkpoint, and what follows from it."""
from __future__ import annotations

import fnmatch
import textwrap
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Sequence

__all__ = ['CHANGES', 'HARMLESS', 'RULES', 'Difference', 'ResumeError', 'differences', 'table']

CHANGES, HARMLESS = 'changes bits', 'harmless'

MAX_ROWS = 40  # of a table; the rest is counted
_ABSENT = '(not set)'
_WIDTHS = (48, 30, 30, 80)  # of the columns, in characters


class ResumeError(RuntimeError):
    """The run that resumes differs from the one that wrote the checkpoint."""


class Difference(NamedTuple):
    """One fact that differs. ``severity`` is CHANGES or HARMLESS."""
    name: str
    then: Any
    now: Any
    severity: str
    consequence: str


class Rule(NamedTuple):
    """What follows when a fact whose name matches ``pattern`` differs.

    Attributes:
        pattern: as in ``fnmatch``.
        severity: CHANGES or HARMLESS.
        consequence: for the table.
        only: the condition under which it matters (a key of CONDITIONS); harmless otherwise.
    """
    pattern: str
    severity: str
    consequence: str
    only: str = ''


def _reacts_to_metrics(facts: Mapping[str, Any]) -> bool:
    return any(isinstance(value, str) and (
        value.endswith('EarlyStoppingHook') or 'ReduceOnPlateau' in value)
        for value in facts.values())


def _averages_at_validation(facts: Mapping[str, Any]) -> bool:
    """Running statistics of the ranks are averaged before each validation, and train on so."""
    if facts.get('world_size', 1) == 1:
        return False
    hooks = {str(value).rsplit('.', 1)[-1] for name, value in facts.items()
             if name.startswith(('config.custom_hooks', 'config.default_hooks'))
             and name.endswith('type')}
    # SyncBuffersHook averages at the end of every epoch, where a loop has epochs
    by_epoch = facts.get('config.train_cfg.by_epoch') is True or str(
        facts.get('config.train_cfg.type')).endswith('EpochBasedTrainLoop')
    return 'SyncNormHook' in hooks or ('SyncBuffersHook' in hooks and not by_epoch)


CONDITIONS = {
    'cuda': lambda facts: facts.get('hardware.gpu') is not None,
    'ranks': lambda facts: facts.get('world_size', 1) > 1,
    'worker streams': lambda facts: facts.get('randomness.worker_seed', 'sample') != 'sample',
    'metrics': _reacts_to_metrics,
    'validation': lambda facts: _reacts_to_metrics(facts) or _averages_at_validation(facts),
}

# The first row that matches counts.
RULES = (
    Rule('randomness.seed', CHANGES, 'different order of data, different random numbers'),
    Rule('randomness.resume_strict', HARMLESS, ''),
    Rule('randomness.operators', HARMLESS, 'the provider of operators is compared by itself'),
    Rule('randomness.*', CHANGES, 'different random numbers or kernels'),
    Rule('scheme', CHANGES, 'random numbers are derived in another way'),
    Rule('world_size', CHANGES, 'different batches per rank, gradients added in a different order'),
    Rule('train_samples', CHANGES, 'the training data are not the same'),
    Rule('operators', CHANGES, 'different kernels for the operators of mmcv'),
    Rule('version.mmrepro', HARMLESS, 'the scheme of the random numbers is compared by itself'),
    Rule('version.python', HARMLESS, 'nothing random depends on the interpreter'),
    Rule('version.cudnn', CHANGES, 'different kernels', 'cuda'),
    Rule('version.cuda', CHANGES, 'different kernels'),
    Rule('version.driver', HARMLESS, 'kernels come with CUDA and cuDNN'),
    Rule('version.pycocotools', HARMLESS, 'metrics only'),
    Rule('version.*', CHANGES, 'a different implementation'),
    Rule('hardware.*', CHANGES, 'different kernels: sums in a different order'),
    Rule('torch.num_threads', CHANGES, 'sums are split differently'),
    Rule('torch.num_interop_threads', HARMLESS, 'no operator is split by it'),
    Rule('cv2.num_threads', HARMLESS, 'OpenCV splits images, not sums'),
    Rule('torch.backends.cu*', CHANGES, 'different kernels', 'cuda'),
    Rule('torch._inductor.*', HARMLESS, 'compiled models are compiled again'),
    Rule('torch.utils.deterministic.fill_uninitialized_memory', HARMLESS,
         'only code that reads memory before it writes it can tell'),
    Rule('torch.*', CHANGES, 'different kernels'),
    Rule('env.PYTHONHASHSEED', HARMLESS, 'no order comes from hashes'),
    Rule('env.O*_NUM_THREADS', HARMLESS, 'the number of threads is compared by itself'),
    Rule('env.MKL_NUM_THREADS', HARMLESS, 'the number of threads is compared by itself'),
    Rule('env.CUDA_LAUNCH_BLOCKING', HARMLESS, 'speed only'),
    Rule('env.PYTORCH_CUDA_ALLOC_CONF', HARMLESS, 'addresses only'),
    Rule('env.CU*', CHANGES, 'different kernels', 'cuda'),
    Rule('env.NVIDIA_*', CHANGES, 'different kernels', 'cuda'),
    Rule('env.NCCL_*', CHANGES, 'a different order of the sums over ranks', 'ranks'),
    Rule('env.*', CHANGES, 'different kernels'),
    Rule('config.train_dataloader.num_workers', CHANGES, 'streams belong to workers',
         'worker streams'),
    Rule('config.train_dataloader.persistent_workers', CHANGES, 'streams belong to workers',
         'worker streams'),
    *(Rule(f'config.train_dataloader.{name}', HARMLESS, 'speed only') for name in (
        'prefetch_factor', 'pin_memory', 'timeout', 'multiprocessing_context')),
    Rule('config.train_cfg.max_*', CHANGES,
         'the run ends elsewhere; schedules and hooks that count from the end move'),
    *(Rule(f'config.{name}*', CHANGES, 'training reacts to metrics, or to averages of BatchNorm '
           'over ranks', 'validation')
      for name in ('train_cfg.val_', 'train_cfg.dynamic_intervals', 'val_cfg')),
    *(Rule(f'config.val_{name}*', CHANGES, 'training reacts to metrics', 'metrics')
      for name in ('dataloader', 'evaluator')),
    *(Rule(f'config.default_hooks.{name}*', HARMLESS, 'what is written, not what is computed')
      for name in ('checkpoint', 'logger', 'timer', 'visualization')),
    Rule('config.env_cfg.mp_cfg*', HARMLESS, 'how workers start'),
    Rule('config.env_cfg.dist_cfg*', CHANGES, 'the sums over ranks', 'ranks'),
    *(Rule(f'config.{name}*', CHANGES, 'different training') for name in (
        'model', 'train_dataloader', 'train_cfg', 'optim_wrapper', 'param_scheduler',
        'auto_scale_lr', 'custom_hooks', 'default_hooks', 'data_preprocessor', 'env_cfg',
        'default_scope', 'sync_bn', 'find_unused_parameters', 'broadcast_buffers',
        'detect_anomalous_params', 'compile', 'activation_checkpointing',
        'efficient_conv_bn_eval', 'runner_type')),
    Rule('*', HARMLESS, 'the training does not read it'),
)

# of facts that exist only once a module is imported
_UNKNOWN = ('unavailable', 'mmcv is not in use')


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> List[Difference]:
    """Facts that differ, those that change bits first; see :func:`mmrepro.facts.collect`."""
    found = []
    for name in sorted({*then, *now}):
        before, after = then.get(name, _ABSENT), now.get(name, _ABSENT)
        same = before == after and isinstance(before, bool) == isinstance(after, bool)
        if same or before in _UNKNOWN or after in _UNKNOWN or _not_asked(name, before, after):
            continue
        rule = next(rule for rule in RULES if fnmatch.fnmatchcase(name, rule.pattern))
        matters = not rule.only or CONDITIONS[rule.only](then) or CONDITIONS[rule.only](now)
        severity = rule.severity if matters else HARMLESS
        found.append(Difference(name, before, after, severity, rule.consequence))
    return sorted(found, key=lambda one: (one.severity != CHANGES, one.name))


def _not_asked(name: str, before: Any, after: Any) -> bool:
    """A package that only one of the processes had imported when it looked."""
    return name.startswith(('version.', 'train_samples')) and _ABSENT in (before, after)


def table(rows: Sequence[Difference]) -> str:
    """Name, then, now, consequence; long values are shortened."""
    shown = [('', 'then', 'now', 'consequence'), *(
        (row.name, _text(row.then), _text(row.now), row.consequence) for row in rows[:MAX_ROWS])]
    widths = [min(width, max(len(line[column]) for line in shown))
              for column, width in enumerate(_WIDTHS)]
    lines = ['  '.join(_cut(cell, width).ljust(width) for cell, width in zip(line, widths)).rstrip()
             for line in shown]
    if len(rows) > MAX_ROWS:
        lines.append(f'and {len(rows) - MAX_ROWS} more')
    return textwrap.indent('\n'.join(lines), '  ')


def one_line(rows: Iterable[Difference]) -> str:
    """Harmless differences, for the log."""
    parts = [f'{row.name} {_cut(_text(row.then), 24)} -> {_cut(_text(row.now), 24)}'
             for row in rows]
    return '; '.join([*parts[:8], *([f'and {len(parts) - 8} more'] if len(parts) > 8 else [])])


def check(path: str, then: Dict[str, Any], now: Dict[str, Any], strict: bool) -> List[str]:
    """Lines for the log about what differs from the run that wrote ``path``.

    Raises:
        ResumeError: ``strict``, and something that changes bits differs; holds the table.
    """
    found = differences(then, now)
    serious = [row for row in found if row.severity == CHANGES]
    harmless = [row for row in found if row.severity == HARMLESS]
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
        lines.append(f'different from the resumed run, without effect on its bits: '
                     f'{one_line(harmless)}')
    return lines


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value == _ABSENT else repr(value)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f'{text[:width // 2 - 3]}...{text[-(width // 2):]}'
