"""A level of CPU instructions for all libraries: the same kernels on all CPUs that have it."""
from __future__ import annotations

import importlib
import re
from collections.abc import Mapping

import numpy

_AVX2 = {
    'ATEN_CPU_CAPABILITY': 'avx2',  # torch's own kernels
    # matrix products, exp, log and square roots. MKL reads it on Intel CPUs only: on others it is
    # AUTO,STRICT, which stays below AVX-512 too, with kernels of its own
    'MKL_CBWR': 'AVX2,STRICT',
    'ONEDNN_MAX_CPU_ISA': 'AVX2',  # convolutions
    'OPENCV_CPU_DISABLE': 'AVX512-SKX',  # OpenCV's own kernels
    'OPENCV_IPP': 'avx2',  # Intel's: bicubic resizing; OpenCV 4.13 ignores it on Intel CPUs
    'OPENBLAS_CORETYPE': 'Haswell',  # NumPy's matrix products; those of Zen are the same
}
# cpu='...' -> the variables that a process has to start with
CPU_LEVELS = {'avx2': _AVX2, 'portable': _AVX2}
NUMPY_FEATURES = 'NPY_DISABLE_CPU_FEATURES'  # those that NumPy is not to use


def level_variables(level: str | None, env: Mapping[str, str] = {}) -> dict[str, str]:
    """Return the variables that a process has to start with on this machine.

    NumPy accepts only names of features that the CPU has, so its list differs between machines.

    Args:
        level: a key of :data:`CPU_LEVELS`; None: no variables.
        env: environment of this process; features that NumPy has disabled already stay disabled.
    """
    if level is None:
        return {}
    above = _numpy_above_avx2()
    if not above:
        return dict(CPU_LEVELS[level])
    listed = re.findall(r'[^\s,]+', env.get(NUMPY_FEATURES, ''))
    return {**CPU_LEVELS[level], NUMPY_FEATURES: ' '.join(dict.fromkeys([*listed, *above]))}


def _numpy_above_avx2() -> list[str]:
    return [name for name in numpy_features() if name.startswith('AVX512') or name == 'X86_V4']


def numpy_features() -> list[str]:
    """Return the instruction sets beyond its baseline whose kernels NumPy uses here."""
    package = 'numpy._core' if hasattr(numpy, '_core') else 'numpy.core'  # before NumPy 2
    core = importlib.import_module(f'{package}._multiarray_umath')
    return [name for name in core.__cpu_dispatch__ if core.__cpu_features__.get(name)]


def cpu_conflicts(level: str | None, env: Mapping[str, str]) -> list[str]:
    """Return why this process exceeds ``level``, a key of :data:`CPU_LEVELS` or None."""
    if level is None:
        return []
    needed = level_variables(level, env)
    problems = [f'{name}={env[name]!r} is set in the environment, with cpu={level!r}. Unset '
                f'{name}, or set {value!r}.'
                for name, value in needed.items() if env.get(name, value) != value]
    missing = [f'{name}={value!r}' for name, value in needed.items() if name not in env]
    if missing:
        problems.append(f'cpu={level!r} needs {" ".join(missing)}, which count only when Python '
                        'starts with them. Export them, or use `mmrepro train`, which sets them.')
    elif not problems and cpu_instructions() != 'AVX2':
        problems.append(f'cpu={level!r}, but torch uses {cpu_instructions()}: this CPU has no '
                        'AVX2, or ATEN_CPU_CAPABILITY was set after torch had started.')
    elif not problems and _numpy_above_avx2():
        problems.append(f'cpu={level!r}, but NumPy uses {" ".join(_numpy_above_avx2())}: '
                        f'{NUMPY_FEATURES} was set after NumPy had started.')
    return problems


def cpu_instructions() -> str:
    """Return the instruction set of torch's own kernels: 'AVX2', 'AVX512', 'DEFAULT' ..."""
    import torch
    if hasattr(torch.backends, 'cpu'):
        return torch.backends.cpu.get_cpu_capability()
    # torch 2.0 says it in a report only
    match = re.search('CPU capability usage: (.+)', torch.__config__.show())
    return match[1] if match else 'unknown'
