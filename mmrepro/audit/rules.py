"""The rules, one row each, and the audit: read a config, run the rules, report what they find.

A new rule is a check and a row here, and a config in the tests.
"""
from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import os
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from mmengine.config import Config

from ..activation import REFUSED_RUNNERS
from ..distributed.ordered_sums import ORDER_MATTERS_FROM
from ..errors import DIFFERENT, DONE, ConfigError
from ..report.report import Report, Table
from ..runs.config_files import find_config, read_config
from ..util.text import class_name, listed, page
from . import checks
from .checks import START_ENV, source_hits
from .findings import CHANGES, HINT, MAY, SEVERITIES, TWO_LINES, AuditFinding, AuditRule, when
from .subject import Subject

_AUDIT = page('how-to/audit.md')
_CAUSES = page('reference/causes.md')
_LIMITS = page('reference/limits.md')
_QUICKSTART = page('tutorials/quickstart.md')
_STREAMS = page('explanation/streams.md')
_RUNNER = {'runner_type': 'mmrepro.ReproRunner'}
_DETERMINISTIC = {'randomness.deterministic': True}

RULES: tuple[AuditRule, ...] = (
    AuditRule('not-attached', CHANGES, when(
        lambda s: not (s.attached or checks.not_run(s)), 'custom_imports',
        lambda s: f'imports={s.imports!r} has no mmrepro'),
        why="under MMDetection's own tools/train.py, MMEngine's seeding leaves most causes in "
            "place: seeds of workers, resume, validation, kernels (mmrepro train attaches itself)",
        link=f'{_CAUSES} A1-A8', settings=TWO_LINES),
    AuditRule('lazy-import', CHANGES, when(
        checks.not_run, 'custom_imports',
        'a pure-Python config: MMEngine does not run its custom_imports'),
        why='mmrepro is named but never imported, so the run is a stock one',
        fix='or inherit from mmrepro.configs._base_.reproducible', link=_QUICKSTART,
        settings=_RUNNER),
    AuditRule('import-may-fail', HINT, when(
        # MMEngine's default is True
        lambda s: any(name.partition('.')[0] == 'mmrepro' for name in s.imports)
        and s.cfg.custom_imports.get('allow_failed_imports', True),
        'custom_imports.allow_failed_imports', lambda s: str(
            s.cfg.custom_imports.get('allow_failed_imports', 'missing, which means True'))),
        why='where mmrepro is not installed the run goes on without it, with a warning only',
        link=_QUICKSTART, settings={'custom_imports.allow_failed_imports': False}),
    AuditRule('import-failed', MAY, when(
        lambda s: s.failed_import, 'custom_imports', lambda s: s.failed_import),
        why='what the module registers could not be looked at',
        fix='install it, or put its folder on PYTHONPATH, and audit again', link=_AUDIT),
    AuditRule('other-runner', CHANGES, when(
        lambda s: class_name(s.cfg.get('runner_type') or '') in REFUSED_RUNNERS, 'runner_type',
        lambda s: class_name(s.cfg.runner_type)),
        why='its strategies shard states and reduce in orders that mmrepro does not control; '
            'refused',
        link=f'{_LIMITS} FlexibleRunner', settings=_RUNNER),
    AuditRule('invalid-randomness', CHANGES, when(
        lambda s: s.randomness_error, 'randomness', lambda s: s.randomness_error,
        lambda s: CHANGES if s.attached or 'randomness' not in s.cfg else MAY),
        why='the run is refused at its start', fix='correct the key', link=_STREAMS),
    AuditRule('no-seed', CHANGES, when(
        lambda s: s.randomness.seed is None and not s.randomness_error, 'randomness.seed',
        lambda s: 'None' if 'seed' in (s.cfg.get('randomness') or {}) else 'missing'),
        why='every start draws another seed (it is written into log, config and checkpoint)',
        link=f'{_CAUSES} A7', settings={'randomness.seed': 42}),
    AuditRule('misspelt-key', MAY, checks.misspelt,
        why='nothing reads this key: the run goes on with what the base or a default says',
        fix='correct the name; if it is a variable of your own, rename it or --ignore misspelt-'
            'key',
        link=_AUDIT),
    AuditRule('legacy-keys', HINT, checks.legacy_keys,
        why='a key of MMDetection 2.x; stock MMEngine ignores it',
        fix='move it into randomness = dict(...)', link=_QUICKSTART),
    # kernels
    AuditRule('not-deterministic', CHANGES, when(
        lambda s: not s.randomness.deterministic and not s.randomness_error,
        'randomness.deterministic', 'False',
        # on one thread, CPU kernels add in one order
        lambda s: CHANGES if s.device != 'cpu' else MAY),
        why='kernels may add in any order; losses agree to rounding at first, then drift apart',
        link=f'{_CAUSES} A1', settings=_DETERMINISTIC),
    AuditRule('only-warns', MAY, when(
        lambda s: s.randomness.deterministic == 'warn', 'randomness.deterministic', "'warn'"),
        why='an operator without a deterministic form runs anyway, and attention keeps backward '
            'kernels that add in any order',
        link=f'{_LIMITS} warn', settings=_DETERMINISTIC),
    AuditRule('cudnn-benchmark', CHANGES, when(
        lambda s: (s.cfg.get('env_cfg') or {}).get('cudnn_benchmark') and not s.is_deterministic,
        'env_cfg.cudnn_benchmark', 'True', lambda s: CHANGES if s.device != 'cpu' else HINT),
        why='cuDNN times its kernels and takes the fastest, which differs from run to run (with '
            'deterministic=True the setting is not followed)',
        link=f'{_CAUSES} A1', settings={'env_cfg.cudnn_benchmark': False}),
    AuditRule('precision', HINT, when(
        lambda s: s.device != 'cpu' and not s.attached, 'randomness.numerics.float32_precision',
        'not set: convolutions use TF32 where the GPU has it, and float32 where not'),
        why='repeats on one GPU model, but nothing records the precision of a run or notices that'
            ' it changed',
        fix='mmrepro does both', link=f'{_CAUSES} A1', settings=TWO_LINES),
    AuditRule('mixed-precision', HINT, checks.mixed_precision,
        why='repeats on one machine; 16 bits make every other difference visible sooner, and with'
            ' a dynamic scale a skipped step follows from the first overflow',
        fix='only while you look for a difference', link=page('how-to/my-runs-differ.md'),
        settings={'optim_wrapper.type': 'OptimWrapper'}),
    AuditRule('compile', MAY, checks.compiled,
        why='inductor may choose kernels by timing them; mmrepro sets '
            'TORCHINDUCTOR_DETERMINISTIC, which not every release honours',
        fix="or no mode='max-autotune'", link=f'{_LIMITS} other versions',
        settings={'compile': False}),
    # ranks
    AuditRule('gradient-order', CHANGES, when(
        lambda s: s.world_size >= ORDER_MATTERS_FROM and not s.is_deterministic, 'WORLD_SIZE',
        lambda s: f'{s.world_size} ranks'),
        why='a sum of three or more ranks depends on how DDP lays out its buckets, which changes '
            'after the first step, after a resume, and with find_unused_parameters in every batch',
        fix='gradients are then summed in the order of ranks', link=f'{_CAUSES} B9',
        settings=TWO_LINES),
    AuditRule('rank-statistics', MAY, checks.rank_statistics,
        why="every rank has statistics of its own part of the data and validates with them; the "
            "checkpoint has rank 0's, and a resume gives them to all",
        fix="mmrepro validates with their mean and saves it; norm_cfg=dict(type='SyncBN') makes "
            "them equal in training",
        link=f'{_CAUSES} A10', settings=TWO_LINES),
    AuditRule('accumulation', HINT, checks.accumulation,
        why='a run that is killed in the middle of a cycle loses the sums',
        fix='or checkpoints at multiples of accumulative_counts', link=f'{_CAUSES} B3',
        settings=TWO_LINES),
    AuditRule('accumulated-batch', HINT, checks.accumulated_batch,
        why='accumulated batches are not a large batch: their mean of losses divides each by the '
            'positives of its own batch, and BatchNorm sees one batch at a time',
        fix='virtual_ranks=N computes on one device what N devices compute',
        link=page('tutorials/virtual-ranks.md')),
    AuditRule('ranks-differ', MAY, checks.ranks_differ,
        why='ranks can get different numbers of batches, as in MMDetection',
        fix='AspectRatioBatchSampler over one dataset', link=f'{_CAUSES} C11'),
    # data
    AuditRule('known-part', CHANGES, checks.known_parts,
        why='mmrepro replaces or seeds this part; here it is stock',
        fix="with worker_seed='mmengine' it stays stock", link=_CAUSES, settings=TWO_LINES),
    AuditRule('stock-workers', MAY, checks.stock_workers,
        why='MMEngine seeds workers by their number', link=f'{_CAUSES} A3', settings=TWO_LINES),
    AuditRule('stock-validation', HINT, when(
        lambda s: not s.keyed and s.cfg.get('val_dataloader') and s.cfg.get('train_dataloader'),
        'train_cfg.val_interval', lambda s: '{}: each validation moves the generators of training'
        .format((s.cfg.get('train_cfg') or {}).get('val_interval', 1))),
        why='validating at different times changes the run', link=f'{_CAUSES} A5',
        settings=TWO_LINES),
    AuditRule('stock-resume', CHANGES, when(
        lambda s: s.cfg.get('resume') and not s.keyed, 'resume', 'True'),
        why="MMEngine saves no generators: a resumed run draws the first epoch's numbers again",
        link=f'{_CAUSES} A2', settings=TWO_LINES),
    AuditRule('streams', HINT, when(
        lambda s: s.attached and s.randomness.worker_seed != 'sample', 'randomness.worker_seed',
        lambda s: repr(s.randomness.worker_seed),
        lambda s: MAY if s.randomness.uses_stock_streams else HINT),
        why='samples then depend on the number of workers, or steps on what ran before',
        link=f'{_STREAMS} other modes', settings={'randomness.worker_seed': 'sample'}),
    AuditRule('resume-not-strict', HINT, when(
        lambda s: s.attached and not s.randomness.resume_strict, 'randomness.resume_strict',
        'False'),
        why='a resume with different settings or versions only warns',
        link=page('how-to/resume.md'), settings={'randomness.resume_strict': True}),
    AuditRule('iterable', CHANGES, checks.without_position,
        why='samples without a position cannot be seeded one by one: refused',
        fix="or a map-style dataset in batches: MMEngine's own streams do not resume exactly",
        link=f'{_LIMITS} iterable', settings={'randomness.worker_seed': 'mmengine'}),
    # environment
    AuditRule('variable', CHANGES, checks.contradicting_variables,
        why='contradicts the determinism that the config asks for; refused at the start of a run '
            'with deterministic=True',
        fix='unset it, or set an accepted value', link=f'{_CAUSES} A1'),
    AuditRule('variable-missing', MAY, checks.missing_variables,
        why='cuBLAS sizes its workspace itself and picks kernels that share it between streams',
        fix='or let mmrepro set it', link=f'{_CAUSES} A1', env=START_ENV),
    AuditRule('hash-seed', HINT, when(
        lambda s: not s.attached and s.env.get('PYTHONHASHSEED', 'random') == 'random',
        'PYTHONHASHSEED', 'not set'),
        why='sets of strings have another order in every process',
        fix='or let mmrepro keep their order', link=f'{_CAUSES} C1', env={'PYTHONHASHSEED': '0'}),
    AuditRule('threads', HINT, when(
        lambda s: s.device == 'cpu' and s.randomness.flags['num_threads'] is None
        and 'OMP_NUM_THREADS' not in s.env,
        'OMP_NUM_THREADS', 'not set: as many threads as this machine has cores'),
        why='repeats here; a machine with another number of cores splits sums differently',
        fix='or any other fixed number, or OMP_NUM_THREADS', link=f'{_LIMITS} other machines',
        settings={'randomness.numerics.num_threads': 1}),
    AuditRule('no-device', HINT, when(
        lambda s: s.device != 'cpu' and not checks.has_cuda(), '--device cuda',
        'no CUDA device here: judged by the tables alone'),
        why='no GPU was queried', fix='audit again on the machine that trains', link=_AUDIT),
    # the user's own files: transforms, datasets, modules, hooks, samplers
    AuditRule('foreign-generator', CHANGES, source_hits('foreign-generator'),
        why='no seed reaches it',
        fix="draw from numpy.random, random or torch's functions: each sample and step has its "
            "own stream there",
        link=f'{_CAUSES} C16'),
    AuditRule('kept-generator', MAY, source_hits('kept-generator'),
        why='no checkpoint holds its state: only a witness would notice, which a short run has not',
        fix='draw from the global generators, which belong to the sample or step; or build it in '
            'each call from a seed drawn there',
        link=f'{_CAUSES} C16'),
    AuditRule('reseeding', MAY, source_hits('reseeding'),
        why='everything that draws afterwards draws the same numbers again',
        fix='remove it; or put the old state back (getstate, setstate)', link=f'{_CAUSES} C5'),
    AuditRule('clock', HINT, source_hits('clock'),
        why='different in every run; harmless in names and logs',
        fix='keep it out of data, seeds and losses', link=f'{_CAUSES} harmless'),
    AuditRule('set-order', MAY, source_hits('set-order'),
        why='sets of integers are safe, others are not', fix='sorted(...), or dict.fromkeys(...)',
        link=f'{_CAUSES} C1'),
    AuditRule('hash-order', MAY, source_hits('hash-order'),
        why='hashes of strings differ from process to process', fix='hashlib, or zlib.crc32',
        link=f'{_CAUSES} C1'),
    AuditRule('address', MAY, source_hits('address'),
        why='addresses differ from process to process', fix='number the objects',
        link=f'{_CAUSES} C2'),
    AuditRule('unsorted-listing', MAY, source_hits('unsorted-listing'),
        why='the order differs between machines and copies of the folder', fix='sorted(...)',
        link=f'{_CAUSES} C7'),
    AuditRule('own-threads', MAY, source_hits('own-threads'),
        why='the operating system decides which thread comes first, and a generator that one of '
            'them draws from moves under the others',
        fix='take results in the order in which the work was given out (map of an executor does),'
            ' and draw random numbers outside of threads',
        link=f'{_CAUSES} C20'),
    AuditRule('uninitialized', HINT, source_hits('uninitialized'),
        why='fine if it is filled before it is read',
        fix='zeros; to find a read: torch.utils.deterministic.fill_uninitialized_memory = True in '
            'the method before_train of a hook',
        link=f'{_CAUSES} harmless'),
    AuditRule('environment', MAY, source_hits('environment'),
        why='another shell, or the machine of a resume, may have another value',
        fix='make it an argument in the config', link=f'{_CAUSES} C25'),
    AuditRule('kept-state', MAY, source_hits('kept-state'),
        why='a checkpoint does not hold it, so a resumed run starts over; only a witness would '
            'notice, which a short run has not',
        fix='compute it from the iteration or the epoch; in a hook, '
            'mmrepro.keep_attributes(Class, "attribute")',
        link=f'{_CAUSES} B11 B16'),
    AuditRule('unreadable', MAY, source_hits('unreadable'),
        why='nothing in it was checked', fix='correct the file', link=_AUDIT),
)


# how else a config that does not attach mmrepro could be trained: key in the data, words, subject
ATTACHED = {
    'with_mmrepro_train': ('under mmrepro train, which attaches itself', Subject.under_our_train),
    'with_two_lines': ('with the two lines of mmrepro', Subject.with_two_lines),
}
STYLES = dict(zip(SEVERITIES, ('bad', 'warn', '')))
VERDICTS = dict(zip(SEVERITIES, (
    'NOT REPRODUCIBLE', 'CAUSES FOUND THAT MAY CHANGE BITS', 'NO CAUSE FOUND')))
NOT_LOOKED_AT = ("not looked at: compiled extensions, code outside of custom_imports and of the "
                 "config's classes, values that pass through several functions, the data")


def audit(config: str, *, device: str | None = None, ignore: Collection[str] = (),
          options: Mapping[str, Any] | None = None, strict: bool = False) -> Report:
    """Look for what would make two runs of a config differ. Nothing is trained.

    The config, the types that it names, the user's own source files and the environment are read.

    Args:
        config: path of a config, or ``package::path`` inside an installed package.
        device: where the config would train, ``'cpu'`` or ``'cuda'``; None: CUDA if there is any.
        ignore: names of rules to leave out.
        options: dotted key -> value, changes of the config.
        strict: let what may change bits count as what does.

    Returns:
        A report whose exit code is 1 if anything changes bits.

    Raises:
        ConfigError: the config cannot be read, an option does not fit it, or a rule is unknown.
    """
    import torch
    # modules may print when they are imported
    with contextlib.redirect_stdout(sys.stderr):
        subject = load(config, device or ('cuda' if torch.cuda.is_available() else 'cpu'),
                       options=options)
        findings = findings_of(subject, ignore)
        attached = {} if subject.attached else {
            name: findings_of(attach(subject), ignore)
            for name, (_, attach) in ATTACHED.items()}
    worst = findings[0].severity if findings else HINT
    verdict = VERDICTS[worst]
    if worst == CHANGES and not subject.attached:
        verdict += " under MMDetection's own tools/train.py"
    lines = [f'{verdict}: {summary(findings)} ({config}, {subject.device}, '
             f'torch {torch.__version__})']
    for name, remaining in attached.items():
        rules = ', '.join(dict.fromkeys(finding.rule for finding in remaining))
        lines.append(f'{ATTACHED[name][0]}: {summary(remaining)}{f" ({rules})" if rules else ""}')
    if worst != CHANGES:
        lines += [NOT_LOOKED_AT, f'what only a run shows: mmrepro verify {shlex.quote(config)}']
    excused = [f'{source.path}:{line}' for source in subject.sources for line in source.excused]
    left_out = [*([f'--ignore {" ".join(ignore)}'] if ignore else []),
                *([f'"# mmrepro: ignore" at {listed(excused, 9)}'] if excused else [])]
    differs = worst in SEVERITIES[:2 if strict else 1]
    return Report(
        '', '\n'.join(lines), DIFFERENT if differs else DONE, list(_blocks(findings)),
        [f'left out: {" and ".join(left_out)}'] if left_out else [],
        data=dict(config=config, device=subject.device, attached=subject.attached,
                  **{name: attached.get(name) for name in ATTACHED},
                  findings=findings))


def load(path: str, device: str = 'cpu', env: Mapping[str, str] | None = None,
         options: Mapping[str, Any] | None = None) -> Subject:
    """Read a config; the modules in its ``custom_imports`` are imported, nothing is run.

    Raises:
        ConfigError: the file is missing or is not a config, or an option does not fit it.
    """
    path = find_config(path)
    cfg = read_config(path, options, imports=False)
    lazy = Config._is_lazy_import(path)
    subject = Subject(cfg, device, os.environ if env is None else env, lazy)
    failed = []
    for name in subject.imports:
        try:
            importlib.import_module(name)
        except Exception as error:  # user code may raise anything
            failed.append(f'{name}: {type(error).__name__}: {error}'.splitlines()[0])
    return dataclasses.replace(subject, failed_import='; '.join(failed))


def findings_of(subject: Subject, ignore: Collection[str] = ()) -> list[AuditFinding]:
    """Return all findings, those that change bits first.

    Raises:
        ConfigError: ``ignore`` names a rule that does not exist.
    """
    unknown = set(ignore) - {rule.name for rule in RULES}
    if unknown:
        raise ConfigError(f'--ignore {" ".join(sorted(unknown))}: no such rule; rules: '
                          f'{", ".join(rule.name for rule in RULES)}')
    findings: dict[tuple[str, str, str], AuditFinding] = {}
    for rule in RULES:
        if rule.name in ignore:
            continue
        for where, what, severity in rule.check(subject):
            findings.setdefault((rule.name, where, what), AuditFinding(
                rule.name, severity or rule.severity, where, what, rule.why, rule.advice,
                rule.link))
    return sorted(findings.values(), key=lambda finding: SEVERITIES.index(finding.severity))


def summary(findings: Sequence[AuditFinding]) -> str:
    """Count the findings: ``'2 that change bits, 1 that may, 0 hints'``."""
    counts = [sum(finding.severity == severity for finding in findings)
              for severity in SEVERITIES]
    return (f'{counts[0]} that change{"s" if counts[0] == 1 else ""} bits, {counts[1]} that may, '
            f'{counts[2]} hint{"" if counts[2] == 1 else "s"}')


def _blocks(findings: Sequence[AuditFinding]) -> Iterator[Table]:
    """Yield a table for each rule."""
    for (severity, rule), block in itertools.groupby(
            findings, key=lambda finding: (finding.severity, finding.rule)):
        rows = list(block)
        yield Table(
            (), [*(('at', f'{row.where}  {row.what}') for row in rows),
                 ('fix', rows[0].fix), ('read', rows[0].link)],
            f'{severity}  {rule}: {rows[0].why}',
            [*([STYLES[severity]] * len(rows)), 'fix', 'soft'])
