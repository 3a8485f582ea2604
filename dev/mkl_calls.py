"""Which operators of torch call MKL on a CPU.

    python -m dev.mkl_calls                 with torch's own kernels
    python -m dev.mkl_calls --portable      with those of cpu='portable': none may be left

torch links MKL into libtorch_cpu, and calls it through symbols that a preloaded library can define
as well. So a small library, built here with a C compiler, counts the calls of every entry point and
passes them on. The samples are those that torch keeps for the tests of its operators.
"""
from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import re
import subprocess
import sys
import types
import unittest
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = 'MMREPRO_MKL_COUNTER'  # variable with the path of the library
# BLAS and LAPACK by their Fortran names, vector functions, batched products, transforms, sparse
# products. Truncation of vectors is exact.
_ENTRY_POINT = re.compile(r'([sdcz][a-z0-9]+_|vm[sd](?!Trunc)[A-Z]\w*|cblas_\w+|DftiCompute\w*|'
                          r'mkl_sparse_[sdcz]_[a-z]+)$')
_SOURCE = '''
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
long counts[COUNT];
void *own[COUNT];
static const char *names[] = {NAMES};
void find(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    for (int i = 0; i < COUNT; i++) own[i] = dlsym(library, names[i]);
}
const char *counted(void) {
    static char text[1 << 16];
    char *end = text;
    *end = 0;
    for (int i = 0; i < COUNT; i++)
        if (counts[i]) end += sprintf(end, "%s %ld\\n", names[i], counts[i]);
    memset(counts, 0, sizeof counts);
    return text;
}
'''


def torch_library() -> str:
    """Return the path of the library that has MKL."""
    import importlib.util
    spec = importlib.util.find_spec('torch')
    assert spec is not None and spec.origin is not None
    return str(Path(spec.origin).parent / 'lib' / 'libtorch_cpu.so')


def entry_points(library: str) -> list[str]:
    """Return the functions of MKL that a library defines, and calls through its symbol table."""
    def lines(*command: str) -> list[str]:
        return subprocess.run([*command, library], capture_output=True, text=True,
                              check=True).stdout.splitlines()
    called = {line.split()[4].partition('@')[0] for line in lines('readelf', '-rW')
              if 'JUMP_SLO' in line or 'GLOB_DAT' in line}
    defined = {line.split()[-1] for line in lines('nm', '-D', '--defined-only')}
    return sorted(filter(_ENTRY_POINT.match, called & defined))


def build(folder: str | Path) -> str:
    """Build the library that counts; returns its path."""
    names = entry_points(torch_library())
    stem = Path(folder, 'mkl_counter')
    stem.with_suffix('.c').write_text(_SOURCE.replace('COUNT', str(len(names))).replace(
        'NAMES', ', '.join(f'"{name}"' for name in names)))
    stem.with_suffix('.s').write_text('.text\n' + ''.join(
        f'.globl {name}\n.type {name},@function\n{name}:\n  lock incq counts+{8 * index}(%rip)\n'
        f'  jmp *own+{8 * index}(%rip)\n' for index, name in enumerate(names))
        + '.section .note.GNU-stack,"",@progbits\n')
    library = str(stem.with_suffix('.so'))
    subprocess.run(['gcc', '-shared', '-fPIC', '-O1', '-Wl,-Bsymbolic', '-o', library,
                    str(stem.with_suffix('.c')), str(stem.with_suffix('.s')), '-ldl'], check=True)
    return library


def environment(library: str, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of a process that counts."""
    return {**env, 'LD_PRELOAD': library, LIBRARY: library}


class Counter:
    """The calls in this process, which was started with :func:`environment`."""

    def __init__(self) -> None:
        import torch  # noqa: F401  its library has to be there
        self._library = ctypes.CDLL(os.environ[LIBRARY])
        self._library.counted.restype = ctypes.c_char_p
        self._library.find(torch_library().encode())

    def take(self) -> dict[str, int]:
        """Return the number of calls by function since the last time."""
        lines = self._library.counted().decode().splitlines()
        return {name: int(count) for name, count in (line.split() for line in lines)}


def samples(only: str = '', at_most: int = 12) -> Iterator[tuple[str, Any]]:
    """Yield names of operators, and functions that run them forward and backward."""
    import torch
    from torch.utils._pytree import tree_leaves

    from mmrepro.errors import DeterminismError

    # torch's tests import a package for another purpose
    sys.modules.setdefault('expecttest', types.ModuleType('expecttest'))
    sys.modules['expecttest'].__dict__.setdefault('TestCase', unittest.TestCase)
    from torch.testing._internal.common_methods_invocations import op_db

    def run(operator: Any, sample: Any) -> None:
        result = operator(sample.input, *sample.args, **sample.kwargs)
        steep = [leaf for leaf in tree_leaves(result)
                 if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if steep:
            sum((leaf.abs() if leaf.is_complex() else leaf.float()).sum()
                for leaf in steep).backward()

    for operator in op_db:
        if not re.search(only, operator.name) or operator.name.startswith('jiterator'):
            continue
        for dtype in (torch.float32, torch.float64, torch.complex64, torch.bfloat16, torch.float16,
                      torch.int64):
            if dtype in operator.supported_dtypes('cpu'):
                steep = dtype in operator.supported_backward_dtypes('cpu')
                try:
                    made = list(itertools.islice(operator.sample_inputs(
                        'cpu', dtype, requires_grad=steep), at_most))
                except DeterminismError:  # by decompositions, say
                    continue
                for sample in made:
                    yield operator.name, lambda sample=sample, operator=operator: run(
                        operator, sample)


def sweep(only: str = '', at_most: int = 12) -> dict[str, dict[str, set[str]]]:
    """Run the samples; return {'calls': {operator: functions of MKL}, 'refused': {...: texts}}.

    Calls are those of operators of ``aten``, refusals those of what a user calls.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from mmrepro.errors import DeterminismError
    counter = Counter()
    found: dict[str, dict[str, set[str]]] = dict(calls=defaultdict(set), refused=defaultdict(set))

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None
                               ) -> Any:
            counter.take()
            try:
                return func(*args, **(kwargs or {}))
            finally:
                for name in counter.take():
                    found['calls'][str(func)].add(name)

    torch.set_num_threads(1)
    for name, run in samples(only, at_most):
        try:
            with Watch(), warnings.catch_warnings():
                warnings.simplefilter('ignore')
                run()
        except DeterminismError as error:
            found['refused'][name].add(str(error).partition(' is refused')[0])
        except RuntimeError:  # a few samples are not for every type of numbers
            continue
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--portable', action='store_true')
    parser.add_argument('--only', default='', help='a pattern of names')
    args = parser.parse_args()
    if LIBRARY not in os.environ:
        import tempfile
        with tempfile.TemporaryDirectory() as folder:
            return subprocess.run([sys.executable, '-m', 'dev.mkl_calls', *sys.argv[1:]],
                                  env=environment(build(folder))).returncode
    if args.portable:
        import torch

        from mmrepro.ops import portable
        torch.backends.cuda.enable_flash_sdp(False)
        portable.install()
    found = sweep(args.only)
    for kind, rows in found.items():
        for name in sorted(rows):
            print(f'{kind} {name}: {", ".join(sorted(rows[name])[:4])}')
    return int(args.portable and bool(found['calls']))


if __name__ == '__main__':
    sys.exit(main())
