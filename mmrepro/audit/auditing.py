"""Run the rules, and report what they found."""
from __future__ import annotations

import dataclasses
import importlib
import itertools
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mmengine.config import Config

from ..errors import AuditError, ConfigError
from ..runs.config_files import find_config, read_config
from .findings import CHANGES, SEVERITIES, AuditFinding
from .rules import RULES
from .subject import Subject


def load(path: str, device: str = 'cpu', env: Mapping[str, str] | None = None,
         options: Mapping[str, Any] | None = None) -> Subject:
    """Read a config; the modules in its ``custom_imports`` are imported, nothing is run.

    Args:
        path: as for :func:`find_config`.
        device: ``'cpu'`` or ``'cuda'``.
        env: environment variables; the process's by default.
        options: changes, as ``--cfg-options`` gives them.

    Raises:
        AuditError: the file is missing or is not a config, or an option does not fit it.
    """
    import torch
    try:
        path = find_config(path)
        cfg = read_config(path, options, imports=False)
    except ConfigError as error:
        raise AuditError(str(error)) from error
    lazy = Config._is_lazy_import(path)
    version = tuple(int(part) for part in re.findall(r'\d+', torch.__version__)[:2])
    subject = Subject(cfg, device, os.environ if env is None else env, version, lazy)
    for name in subject.imports:
        try:
            importlib.import_module(name)
        except Exception as error:  # user code may raise anything
            failed = f'{name}: {type(error).__name__}: {error}'.splitlines()[0]
            return dataclasses.replace(subject, failed_import=failed)
    return subject


def audit(subject: Subject, ignore: Collection[str] = ()) -> list[AuditFinding]:
    """All findings, those that change bits first.

    Raises:
        AuditError: ``ignore`` names a rule that does not exist.
    """
    unknown = set(ignore) - {rule.name for rule in RULES}
    if unknown:
        raise AuditError(f'--ignore {" ".join(sorted(unknown))}: no such rule; rules: '
                         f'{", ".join(rule.name for rule in RULES)}')
    found: dict[tuple[str, str, str], AuditFinding] = {}
    for rule in RULES:
        if rule.name in ignore:
            continue
        for where, what, severity in rule.check(subject):
            found.setdefault((rule.name, where, what), AuditFinding(
                rule.name, severity or rule.severity, where, what, rule.why, rule.advice,
                rule.link))
    return sorted(found.values(), key=lambda finding: SEVERITIES.index(finding.severity))


def exit_code(findings: Sequence[AuditFinding]) -> int:
    """1 if anything changes bits, else 0."""
    return int(any(finding.severity == CHANGES for finding in findings))


def summary(findings: Sequence[AuditFinding]) -> str:
    """``'2 that change bits, 1 that may, 0 hints'``."""
    counts = [sum(finding.severity == severity for finding in findings)
              for severity in SEVERITIES]
    return (f'{counts[0]} that change{"s" if counts[0] == 1 else ""} bits, {counts[1]} that may, '
            f'{counts[2]} hint{"" if counts[2] == 1 else "s"}')


def report(findings: Sequence[AuditFinding], console: Any) -> None:
    """Print the findings to a ``rich.console.Console``, one block per rule."""
    from rich.text import Text
    colours = dict(zip(SEVERITIES, ('bold red', 'yellow', 'cyan')))
    blocks = itertools.groupby(findings, key=lambda finding: (finding.severity, finding.rule))
    for index, ((severity, rule), block) in enumerate(blocks):
        first, *more = block
        if index:
            console.print()
        console.print(Text.assemble((f'{severity}  ', colours[severity]), (rule, 'bold'),
                                    f': {first.why}'))
        for finding in (first, *more):
            console.print(Text.assemble('    at    ', (finding.where, 'bold'),
                                        f'  {finding.what}'))
        console.print(Text.assemble('    fix   ', (first.fix, 'green')))
        console.print(Text(f'    read  {first.link}', 'dim'))
