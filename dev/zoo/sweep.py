"""Sweep over the zoo: every member in a child process, with a time limit and its peak memory."""
from __future__ import annotations

import argparse
import fnmatch
import gc
import json
import os
import resource
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import Callable

from children import Child, ChildFailed

from .families import FAMILIES, PACKAGES, Member

__all__ = ['OUTCOMES', 'main', 'members', 'sweep', 'visit']

# Outcomes of a row and their meanings.
OUTCOMES = {
    'ok': 'built, two training steps and an inference; twice with the same bits, unless --once',
    'differs': 'as ok, but the second run gave different bits',
    'needs': 'needs a package that is not installed here',
    'broken': 'raises an error of MMDetection itself, which mmrepro has no part in',
    'tracker': 'puts boxes of a detector into tracks; has no training step of its own',
    'failed': 'raised, or ran out of time',
}
LIMIT = 300  # seconds by the clock for one member; the slowest takes a fifth of a free core


def members(patterns: Iterable[str] = ()) -> list[Member]:
    """Return the members whose config or folder matches one of ``patterns``, or all members.

    Raises:
        ValueError: a pattern matches nothing.
    """
    patterns = list(patterns)
    chosen = []
    for pattern in patterns:
        found = [m for m in FAMILIES if pattern == m.family or fnmatch.fnmatch(m.config, pattern)
                 or os.path.basename(m.config) in (pattern, f'{pattern}.py')]
        if not found:
            raise ValueError(f'{pattern!r} matches no config of the sweep; allowed: a folder, a '
                             'config or a pattern such as "dcn*/*mask*"')
        chosen += found
    return list(dict.fromkeys(chosen)) if patterns else list(FAMILIES)


def _missing(member: Member) -> list[str]:
    import importlib.util
    return [name for name in member.packages
            if importlib.util.find_spec(PACKAGES[name].module) is None]


def _cause(error: BaseException) -> str:
    """Return the innermost line of code of the error, without the path of this machine."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ''
    frame = frames[-1]
    _, _, name = frame.filename.rpartition('site-packages' + os.sep)
    return f'{name or os.path.basename(frame.filename)}:{frame.lineno} {frame.line}'


def _attempt(member: Member, once: bool, device: str) -> dict:
    from .step import take
    missing = _missing(member)
    if not member.data and not missing:
        return dict(outcome='tracker')
    try:
        result = take(member, once, device)
    except Exception as error:
        if missing:
            return dict(outcome='needs', packages=missing)
        if member.broken and member.broken in str(error):
            return dict(outcome='broken', error=member.broken, cause=_cause(error))
        return dict(outcome='failed', error=f'{type(error).__name__}: {error}'[:400],
                    cause=_cause(error), trace=traceback.format_exc())
    if missing or member.broken:
        what = f'works without {", ".join(missing)}' if missing else f'no longer: {member.broken}'
        return dict(outcome='failed', error=what, cause='its row')
    return dict(outcome='differs' if result['equal'] is False else 'ok', **result)


def _measured(member: Member, once: bool, device: str) -> dict:
    sys.stdout = sys.stderr = open(os.devnull, 'w')
    before = resource.getrusage(resource.RUSAGE_SELF)
    result = _attempt(member, once, device)
    after = resource.getrusage(resource.RUSAGE_SELF)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return dict(result, seconds=round(seconds, 1),
                peak_mib=(after.ru_maxrss - before.ru_maxrss) // 1024)


def visit(member: Member, limit: float = LIMIT, once: bool = False, device: str = 'cpu') -> dict:
    """Run one member in a child process.

    Returns:
        The row: config, family, annotations, 'with' (versions, for one that needs a package),
        outcome (see OUTCOMES), seconds (of one core), peak_mib (of memory on top of what the
        imports take), and what ``step.take`` returns, or error and cause.
    """
    facts = dict(config=member.config, family=member.family, annotations=member.annotations)
    if member.packages and not _missing(member):
        facts['with'] = versions(('torch', *member.packages))
    gc.collect()
    try:
        return dict(facts, **Child(_measured, member, once, device).result(limit))
    except (ChildFailed, TimeoutError) as error:
        return dict(facts, outcome='failed', error=str(error), cause='')


def warm() -> None:
    """Import what every child needs, once."""
    import mmcv.ops  # noqa: F401
    import torch
    from mmdet.utils import register_all_modules

    from . import step  # noqa: F401
    torch.set_num_threads(1)
    register_all_modules(init_default_scope=True)


def sweep(chosen: Sequence[Member], limit: float = LIMIT, once: bool = False,
          on_row: Callable[[dict], None] = lambda row: None, device: str = 'cpu') -> list[dict]:
    """Run members one after the other; ``tell`` is called with each row."""
    warm()
    rows = []
    for member in chosen:
        rows.append(visit(member, limit, once, device))
        on_row(rows[-1])
    return rows


def _print(row: dict) -> None:
    what = row.get('error') or ', '.join(row.get('packages', ()))
    print(f'{row["outcome"]:8} {row.get("seconds", 0):6.1f} s {row.get("peak_mib", 0):6} MiB  '
          f'{row["config"]}  {what}', flush=True)


def _known(path: str) -> dict[str, dict]:
    """Return the rows of an earlier sweep by config; none without a file."""
    if not os.path.exists(path):
        return {}
    with open(path) as file:
        return {row['config']: row for row in json.load(file)['rows']}


def _write(path: str, rows: dict[str, dict]) -> None:
    """Write one line per row in the order of the families, so that a diff shows changed configs."""
    ordered = [rows[member.config] for member in FAMILIES if member.config in rows]
    lines = ',\n'.join(json.dumps(row) for row in ordered)
    with open(f'{path}.part', 'w') as file:
        file.write(f'{{"versions": {json.dumps(versions())},\n"rows": [\n{lines}\n]}}\n')
    os.replace(f'{path}.part', path)


def main(argv: Sequence[str] | None = None) -> int:
    """Sweep, print and write JSON; return 1 if a row failed or differed."""
    parser = argparse.ArgumentParser(
        prog='zoo.py', description='Build, train and infer every family of the MMDetection zoo.')
    parser.add_argument('patterns', nargs='*', help='folders or configs; all without any')
    parser.add_argument('--out', help='write the rows to this JSON file; others in it stay')
    parser.add_argument('--missing', action='store_true',
                        help='only what --out does not hold yet, or as failed, or from --once')
    parser.add_argument('--once', action='store_true',
                        help='run each config once, without a comparison of bits: half the time')
    parser.add_argument('--device', default='cpu', help='where the models train')
    parser.add_argument('--limit', type=float, default=LIMIT,
                        help='seconds for one config')
    parser.add_argument('--list', action='store_true', help='print the configs and stop')
    parser.add_argument('--trace', action='store_true', help='print the trace of every failure')
    args = parser.parse_args(argv)
    chosen = members(args.patterns)
    if args.list:
        print('\n'.join(member.config for member in chosen))
        return 0

    rows = _known(args.out) if args.out else {}

    def on_row(row: dict) -> None:
        trace = row.pop('trace', '')
        _print(row)
        if args.trace and trace:
            print(trace)
        rows[row['config']] = row
        if args.out:  # after every row: a sweep takes hours and may be interrupted
            _write(args.out, rows)

    if args.missing:
        done = {config for config, row in rows.items() if row['outcome'] != 'failed'
                and (args.once or row.get('equal', True) is not None)}
        chosen = [member for member in chosen if member.config not in done]
    rows_now = sweep(chosen, args.limit, args.once, on_row, args.device)
    return int(any(row['outcome'] in ('failed', 'differs') for row in rows_now))


def versions(names: Sequence[str] = ('python', 'torch', 'numpy', 'mmengine', 'mmcv', 'mmcv-lite',
                                    'mmdet')) -> dict[str, str]:
    """Return the versions of the installed packages that the sweep depends on."""
    import platform
    from importlib.metadata import PackageNotFoundError, version
    found = dict(python=platform.python_version()) if 'python' in names else {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
