"""One level of CPU instructions for all libraries: the same kernels on every CPU that has it."""
from __future__ import annotations

import re
from typing import List, Mapping, Optional

import torch

__all__ = ['CPU_LEVELS', 'cpu_conflicts', 'cpu_instructions']

# cpu='...' -> the variables that a process has to start with
CPU_LEVELS = {
    'avx2': {
        'ATEN_CPU_CAPABILITY': 'avx2',  # torch's own kernels
        'MKL_CBWR': 'AVX2,STRICT',  # matrix products, also independent of the number of threads
        'ONEDNN_MAX_CPU_ISA': 'AVX2',  # convolutions
    },
}
# what torch calls them
_NAMES = {'avx2': 'AVX2'}


def cpu_conflicts(level: Optional[str], env: Mapping[str, str]) -> List[str]:
    """Why this process does not keep to ``level``, a key of :data:`CPU_LEVELS` or None."""
    if level is None:
        return []
    needed = CPU_LEVELS[level]
    found = [f'{name}={env[name]!r} is set in the environment, with cpu={level!r}. Unset {name}, '
             f'or set {value}.' for name, value in needed.items() if env.get(name, value) != value]
    missing = [f'{name}={value}' for name, value in needed.items() if name not in env]
    if missing:
        found.append(f'cpu={level!r} needs {" ".join(missing)}, which count only when Python '
                     'starts with them. Export them, or use `mmrepro train`, which sets them.')
    elif not found and cpu_instructions() != _NAMES[level]:
        found.append(f'cpu={level!r}, but torch uses {cpu_instructions()}: this CPU has no '
                     f'{_NAMES[level]}, or ATEN_CPU_CAPABILITY was set after torch had started.')
    return found


def cpu_instructions() -> str:
    """The level of instructions that torch's own kernels use: 'AVX2', 'AVX512', 'DEFAULT' ..."""
    if hasattr(torch.backends, 'cpu'):
        return torch.backends.cpu.get_cpu_capability()
    # torch 2.0 says it in a report only
    found = re.search('CPU capability usage: (.+)', torch.__config__.show())
    return found[1] if found else 'unknown'
