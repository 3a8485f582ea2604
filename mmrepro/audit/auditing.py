"""Read a config, run the rules, and report their findings."""
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

from ..errors import DIFFERENT, DONE, ConfigError
from ..report.report import Report, Table
from ..runs.config_files import find_config, read_config
from ..util.text import listed
from .findings import CHANGES, HINT, SEVERITIES, AuditFinding
from .rules import RULES
from .subject import Subject

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
