"""Elementwise functions without MKL: float64 inside, rounded once.

Every function takes torch's own kernel of the operator, which is MKL's for float32 and float64 and
torch's for other numbers, and a tensor of any shape. float32 results are rounded from float64 ones,
which may be some units of their last place off; square roots are correctly rounded.
"""
from __future__ import annotations

import functools
import math
from typing import Any, Callable

import numpy
import torch
from torch import Tensor

_BLOCK = 1 << 15  # numbers at once, so that intermediate results stay in a cache
# log(2) in two parts; a product of the first one with an exponent is exact. The parts of pi / 2 and
# the polynomials of sine and cosine are those of fdlibm (netlib.org/fdlibm, k_sin.c and k_cos.c).
_LN2 = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_HALF_PI = (1.57079632673412561417e+00, 6.07710050630396597660e-11, 2.02226624871116645580e-21,
            8.47842766036889956997e-32)
_SIN = (-1.66666666666666324348e-01, 8.33333333332248946124e-03, -1.98412698298579493134e-04,
        2.75573137070700676789e-06, -2.50507602534068634195e-08, 1.58969099521155010221e-10)
_COS = (4.16666666666666019037e-02, -1.38888888888741095749e-03, 2.48015872894767294178e-05,
        -2.75573143513906633035e-07, 2.08757232129817482790e-09, -1.13596475577881948265e-11)
_LOG2_E, _LOG10_E, _LOG10_2 = math.log2(math.e), math.log10(math.e), math.log10(2)

Stock = Callable[..., Tensor]  # torch's own kernel
_HERE = (torch.float32, torch.float64)  # numbers of which MKL would compute the function


def _floating(x: Tensor) -> Tensor:
    """Return numbers that have the function: those of integers are floating-point numbers."""
    return x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())


def _elementwise(function: Callable[[Tensor], Tensor]) -> Callable[[Stock, Tensor], Tensor]:
    """Return the kernel that applies a function of float64 numbers to a tensor."""
    @functools.wraps(function)
    def kernel(stock: Stock, x: Tensor) -> Tensor:
        x = _floating(x)
        if x.dtype not in _HERE:
            return stock(x)
        result = torch.empty_like(x)
        flat = result.reshape(-1) if result.is_contiguous() else x.new_empty(x.numel())
        numbers = x.reshape(-1)
        for start in range(0, len(flat), _BLOCK):
            block = slice(start, start + _BLOCK)
            flat[block].copy_(function(numbers[block].double()))
        return result if result.is_contiguous() else result.copy_(flat.view(x.shape))

    return kernel


def sqrt(stock: Stock, x: Tensor) -> Tensor:
    """Return the square root, correctly rounded by the instruction of the CPU, as IEEE 754 asks."""
    x = _floating(x.detach()).resolve_neg()
    if x.dtype not in _HERE:
        return stock(x)
    result = torch.empty_like(x)
    with numpy.errstate(invalid='ignore'):  # of negative numbers: NaN, as in torch
        numpy.sqrt(x.numpy(), out=result.numpy())
    return result


def power(stock: Stock, x: Tensor, exponent: Any) -> Tensor:
    """Return ``x ** exponent``; torch takes MKL's square root if the exponent is one half."""
    return sqrt(stock, x) if exponent == 0.5 and not x.is_complex() else stock(x, exponent)


@_elementwise
def exp(x: Tensor) -> Tensor:
    """Return e to the power of ``x``."""
    x = x.clamp(-746, 710)  # beyond, the result is 0 or infinite
    n = (x * _LOG2_E).floor()
    return (((x - n * _LN2[0]) - n * _LN2[1]).expm1() + 1) * n.exp2()


def _parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return log(m) and e with x = m * 2**e and m between the roots of 0.5 and 2."""
    mantissa, exponent = torch.frexp(x)
    low = mantissa < math.sqrt(0.5)
    mantissa = torch.where(low, mantissa * 2, mantissa)
    return (mantissa - 1).log1p(), (exponent - low.to(exponent.dtype)).double()


@_elementwise
def log(x: Tensor) -> Tensor:
    """Return the natural logarithm."""
    mantissa, exponent = _parts(x)
    return exponent * _LN2[0] + (mantissa + exponent * _LN2[1])


@_elementwise
def log2(x: Tensor) -> Tensor:
    """Return the logarithm to base 2; of a power of 2, exactly."""
    mantissa, exponent = _parts(x)
    return mantissa * _LOG2_E + exponent


@_elementwise
def log10(x: Tensor) -> Tensor:
    """Return the logarithm to base 10."""
    mantissa, exponent = _parts(x)
    return mantissa * _LOG10_E + exponent * _LOG10_2


@_elementwise
def tanh(x: Tensor) -> Tensor:
    """Return the hyperbolic tangent."""
    t = (x.abs() * -2).expm1()
    return (-t / (t + 2)).copysign(x)


def _polynomial(z: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    result = torch.full_like(z, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * z + coefficient
    return result


def _sine_and_cosine(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return both; the error is below 2**-50 up to 10**6, and |x| * 2**-53 beyond."""
    if bool((x.abs() > 1e9).any()):
        x = x.fmod(2 * math.pi)
    n = (x * (2 / math.pi)).round()
    r = x
    for part in _HALF_PI:
        r = r - n * part
    z = r * r
    sine = r + r * z * _polynomial(z, _SIN)
    cosine = 1 - (z * 0.5 - z * z * _polynomial(z, _COS))
    quadrant = n - (n * 0.25).floor() * 4
    odd = (quadrant == 1) | (quadrant == 3)
    sine, cosine = torch.where(odd, cosine, sine), torch.where(odd, sine, cosine)
    return (torch.where(quadrant >= 2, -sine, sine),
            torch.where((quadrant == 1) | (quadrant == 2), -cosine, cosine))


@_elementwise
def sin(x: Tensor) -> Tensor:
    """Return the sine."""
    return torch.where(x == 0, x, _sine_and_cosine(x)[0])


@_elementwise
def cos(x: Tensor) -> Tensor:
    """Return the cosine."""
    return _sine_and_cosine(x)[1]


@_elementwise
def tan(x: Tensor) -> Tensor:
    """Return the tangent."""
    sine, cosine = _sine_and_cosine(x)
    return torch.where(x == 0, x, sine / cosine)


@_elementwise
def atan(x: Tensor) -> Tensor:
    """Return the inverse tangent."""
    return torch.atan2(x, torch.ones_like(x))


@_elementwise
def asin(x: Tensor) -> Tensor:
    """Return the inverse sine."""
    return torch.atan2(x, sqrt(torch.sqrt, (1 - x) * (1 + x)))


@_elementwise
def acos(x: Tensor) -> Tensor:
    """Return the inverse cosine."""
    return torch.atan2(sqrt(torch.sqrt, (1 - x) * (1 + x)), x)


@_elementwise
def erf(x: Tensor) -> Tensor:
    """Return the error function."""
    half = torch.full_like(x, 0.5)
    return torch.where(x.abs() < 1e-8, x * (2 / math.sqrt(math.pi)),
                       torch.special.gammainc(half, x * x).copysign(x))


@_elementwise
def erfc(x: Tensor) -> Tensor:
    """Return one minus the error function."""
    half, square = torch.full_like(x, 0.5), x * x
    return torch.where(x < 0, 1 + torch.special.gammainc(half, square),
                       torch.special.gammaincc(half, square))


@_elementwise
def erfinv(x: Tensor) -> Tensor:
    """Return the inverse of the error function."""
    near = x * (math.sqrt(math.pi) / 2) * (1 + x * x * (math.pi / 12))
    return torch.where(x.abs() < 1e-4, near,
                       torch.special.ndtri((1 + x) / 2) * math.sqrt(0.5))
