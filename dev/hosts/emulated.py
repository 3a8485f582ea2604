"""Hosts, emulated by the variables that take instruction sets from libraries."""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mmrepro.determinism.cpu_level import level_variables, numpy_features
from mmrepro.runs.surroundings import LESS_THAN_AVX2

__all__ = ['HOSTS', 'CONTROLS', 'Host', 'hosts']


class Host(NamedTuple):
    """Variables of a process, and whether its batches are promised to be the same."""
    variables: dict[str, str]
    promised: bool = True


# OpenCV's names; one that this CPU lacks is of no consequence
_CV_AVX2 = 'AVX2,FMA3,AVX512-SKX'
HOSTS = {
    'this CPU': Host({}),
    'torch, MKL and oneDNN without AVX2': Host(LESS_THAN_AVX2),
    'two threads per operator': Host({'OMP_NUM_THREADS': '2', 'MKL_NUM_THREADS': '2'}),
    'OpenCV without AVX2': Host({'OPENCV_CPU_DISABLE': _CV_AVX2}, False),
    "Intel's part of OpenCV (IPP) without AVX2": Host({'OPENCV_IPP': 'sse42'}, False),
    'OpenCV without IPP': Host({'OPENCV_IPP': 'disabled'}, False),
    'OpenBLAS without AVX2': Host({'OPENBLAS_CORETYPE': 'Nehalem'}, False),
}
# hosts that have to differ, or the comparison of the others shows nothing
CONTROLS = ('no library with AVX2', 'OpenCV without IPP')


def hosts() -> dict[str, Host]:
    """Return :data:`HOSTS` and the hosts whose variables depend on NumPy on this machine."""
    none = {'NPY_DISABLE_CPU_FEATURES': ' '.join(_above_baseline(numpy_features()))}
    without = {**LESS_THAN_AVX2, **none, **HOSTS['OpenCV without AVX2'].variables,
               **HOSTS['OpenBLAS without AVX2'].variables, 'OPENCV_IPP': 'sse42'}
    return {**HOSTS,
            'all libraries at AVX2': Host(level_variables('avx2')),
            'NumPy without AVX2': Host(none, False),
            'no library with AVX2': Host(without, False)}


def _above_baseline(features: Sequence[str]) -> Sequence[str]:
    """Return the features above SSE4; NumPy before 2.4 names AVX2 and FMA3 separately."""
    return [name for name in features if name.startswith(('AVX', 'FMA', 'X86_V3', 'X86_V4'))]
