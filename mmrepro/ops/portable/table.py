"""The table of torch's operators that call MKL on a CPU.

Measured with torch 2.13 (``python -m dev.mkl_calls``): the samples that torch keeps for the tests
of its operators run while every entry point of MKL counts its calls. What is not listed here made
none. ``trunc`` is not listed either: it is exact.
"""
from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ..operator_table import read_names

_DNN = 'oneDNN at AVX2; other types of numbers: a sum of products, element by element'
_CONV = 'oneDNN at AVX2, also where torch takes an unfolded product for small inputs'
_SLEEF = "SLEEF's {} in float64 and IEEE operations, rounded once"
_LIBM = "torch's own {} in float64 and the C library, rounded once"


class Routed(NamedTuple):
    """An operator with a kernel of this package."""
    operator: str  # name in ``aten``, with its overload
    target: str  # module:function of the kernel
    why: str  # why its bits cannot depend on the CPU
    out: str = ''  # name of the form that writes to ``out``; '' if there is none
    in_place: str = ''  # name of the form that changes its first argument; '' if there is none


def _forms(name: str, target: str, why: str, in_place: bool = True) -> Routed:
    return Routed(name, target, why, f'{name}.out', f'{name}_' if in_place else '')


def _function(name: str, why: str) -> Routed:
    return _forms(name, f'functions:{name}', why)


ROUTED: tuple[Routed, ...] = (
    *(_forms(name, f'products:{name}', _DNN, in_place='add' in name)
      for name in ('mm', 'addmm', 'mv', 'addmv', 'bmm', 'baddbmm', 'addbmm')),
    *(_forms(name, f'products:{name}', "torch's own products and sum", in_place=False)
      for name in ('dot', 'vdot')),
    _forms('_embedding_bag_per_sample_weights_backward', 'products:gradient_of_bag_weights',
           "torch's own products and sum", in_place=False),
    Routed('convolution', 'convolutions:forward', _CONV),
    Routed('convolution_backward', 'convolutions:backward', _CONV),
    _function('sqrt', "NumPy's, an instruction of the CPU: correctly rounded, as IEEE 754 asks"),
    Routed('pow.Tensor_Scalar', 'functions:power', 'as sqrt, if the exponent is one half',
           'pow.Tensor_Scalar_out', 'pow_.Scalar'),
    _function('exp', _SLEEF.format('expm1 and exp2')),
    _function('tanh', _SLEEF.format('expm1')),
    *(_function(name, _SLEEF.format('log1p')) for name in ('log', 'log2', 'log10')),
    *(_function(name, "fdlibm's polynomial in float64, IEEE operations only, rounded once")
      for name in ('sin', 'cos', 'tan')),
    *(_function(name, _SLEEF.format('atan2')) for name in ('atan', 'asin', 'acos')),
    *(_function(name, _LIBM.format('incomplete gamma function')) for name in ('erf', 'erfc')),
    _function('erfinv', _LIBM.format('quantile of the normal distribution')),
)

_KINDS = read_names(Path(__file__).with_name('refused.ini'))
# names of operators of sparse matrices in compressed form -> what they are of
REFUSED_SPARSE = dict.fromkeys(_KINDS['sparse matrices'], 'sparse matrices')
# name in ``aten`` -> why it is not replaced; with every overload
REFUSED = {name: kind for kind, names in _KINDS.items() if kind != 'sparse matrices'
           for name in names}
