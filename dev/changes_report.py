"""The part of ``docs/explanation/what-changes.md`` with each variable, flag and attribute."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from mmrepro.determinism.cpu_level import CPU_LEVELS, NUMPY_FEATURES
from mmrepro.determinism.tables import ENV, FLAGS, EnvRow, Flag
from mmrepro.ops.aten.kernel_table import TABLE
from mmrepro.patches.replacements import PATCHES

__all__ = ['lines']


def _spans(names: list[str]) -> str:
    return ', '.join(f'`{name}`' for name in dict.fromkeys(names))


def _settings(rows: Sequence[EnvRow | Flag]) -> list[str]:
    """Return two lists: rows whose effect a file of the repository shows, and the others."""
    return ['The effect of these is shown by the file that is named:', '',
            *(f'- `{row.name}` (`{row.verified}`): {row.why}' for row in rows if row.verified), '',
            'Of these it was read in documentation and sources; most matter on a GPU, and no GPU '
            'has run mmrepro yet:', '',
            *(f'- `{row.name}`: {row.why}' for row in rows if not row.verified)]


def lines() -> str:
    """Return the sections of the page."""
    targets = defaultdict(list)
    for patch in PATCHES:
        module, _, attribute = patch.target.partition(':')
        targets[module].append(attribute)
    kernels = [row for row in TABLE if row.target and not row.overrides_python]
    return '\n'.join([
        '## Variables and flags', '',
        *_settings([row for row in ENV if row.default is not None]
                   + [flag for flag in FLAGS if not flag.name.startswith('mmrepro')]), '',
        'Set by the restart only: '
        f'{_spans([row.name for row in ENV if row.at_start and row.default is None])}; with '
        f'`numerics.cpu`, {_spans([*CPU_LEVELS["avx2"], NUMPY_FEATURES])}.', '',
        '## Replaced attributes', '',
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
