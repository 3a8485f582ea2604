"""The part of ``docs/explanation/what-changes.md`` with each variable, flag and attribute."""
from __future__ import annotations

from collections import defaultdict

from mmrepro.determinism.tables import ENV, FLAGS
from mmrepro.ops.aten.kernel_table import TABLE
from mmrepro.patches.replacements import PATCHES

__all__ = ['lines']


def _spans(names: list[str]) -> str:
    return ', '.join(f'`{name}`' for name in dict.fromkeys(names))


def lines() -> str:
    """Return the sections of the page."""
    targets = defaultdict(list)
    for patch in PATCHES:
        module, _, attribute = patch.target.partition(':')
        targets[module].append(attribute)
    kernels = [row for row in TABLE if row.target and not row.overrides_python]
    return '\n'.join([
        '## Variables and flags', '',
        f'Variables: {_spans([row.name for row in ENV if row.default is not None])}.', '',
        f'Flags: {_spans([flag.name for flag in FLAGS if not flag.name.startswith("mmrepro")])}.',
        '', '## Replaced attributes', '',
        '`set` is not an attribute of these modules; they get one, in front of the builtin.', '',
        *(f'- `{module}`: {_spans(names)}' for module, names in sorted(targets.items())),
        f'- torch: {_spans([row.operator for row in TABLE if row.overrides_python])}',
        '- kernels on a CPU: '
        f'{_spans([f"aten::{row.operator}" for row in kernels if "cpu" in row.devices])}',
        '- kernels on CUDA: '
        f'{_spans([f"aten::{row.operator}" for row in kernels if "cuda" in row.devices])}',
        '', 'With `numerics=dict(cpu=\'portable\')`, also the '
        '[kernels that MKL computes](portable.md).',
    ])
