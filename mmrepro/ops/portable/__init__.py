"""Operators whose bits do not depend on the CPU, for ``numerics=dict(cpu='portable')``.

On x86-64, torch computes with three kinds of kernels: its own and SLEEF's, which run the same IEEE
instructions on every CPU once they are held at AVX2; those of oneDNN, held at AVX2 as well; and
those of MKL, which has other kernels for each maker. This package keeps MKL out. ``table`` lists
every operator of torch that calls MKL: it goes to oneDNN (``products``, ``convolutions``), to a
form in float64 (``functions``), or is refused by name. ``known_answers`` has digests of results
that a CPU must reproduce before it may train.
"""
from .dispatch import install, installed, uninstall
