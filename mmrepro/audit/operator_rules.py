"""Operators of mmcv that a model reaches, and that are missing or add in any order.

A module of ``mmcv.ops`` stands for the compiled operators of its file, and the source of every
other class is searched for calls. Operators of torch need no rule: with determinism, torch refuses
those that it has no form of, and repeated steps show the others.
"""
from __future__ import annotations

import ast
import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import re
from collections.abc import Iterator
from typing import Any

from ..ops.operator_table import TABLE
from .findings import Found
from .sources import SourceFile
from .subject import Subject

_read = functools.cache(SourceFile.read)


def mmcv_operators(subject: Subject) -> Iterator[Found]:
    """Find operators of mmcv that the model reaches and that are missing or add with atomics."""
    if subject.model is None:
        return
    compiled = _has_extension()
    needed: dict[str, str] = {}  # file of mmcv.ops -> a module that needs it
    called: set[str] = set()  # names of classes and functions of these files
    for cls, path in _classes_of(subject.model).items():
        for file, name in _used_by(cls):
            needed.setdefault(file, path)
            called.add(_plain(name))
    for source, path in sorted(needed.items()):
        rows = [row for row in TABLE.values() if row.source == source]
        lacking = [row.name for row in rows if not row.target]
        if len(lacking) < len(rows):  # the file has operators of several functions
            lacking = [name for name in lacking if _plain(name) in called]
        atomics = [row.name for row in rows if row.compiled == 'atomics']
        if lacking and not compiled:
            yield Found(path, f'mmcv.ops.{source[:-3]} ({", ".join(lacking)}) has no form in '
                        'PyTorch, and this mmcv has none compiled: it raises when it is called')
        elif atomics and compiled and subject.device != 'cpu' and not subject.strict:
            yield Found(path, f'mmcv.ops.{source[:-3]} ({", ".join(atomics)}) adds floats in the '
                        'order in which threads arrive')
        elif [name for name in lacking if name in atomics] and subject.device != 'cpu':
            yield Found(path, f'mmcv.ops.{source[:-3]} ({", ".join(lacking)}) has no form in '
                        'PyTorch; the compiled one adds floats in the order of threads')


def _has_extension() -> bool:
    """Whether mmcv came with compiled operators; those of mmrepro do not count."""
    package = importlib.util.find_spec('mmcv')
    return package is not None and importlib.machinery.PathFinder.find_spec(
        'mmcv._ext', package.submodule_search_locations) is not None


def _plain(name: str) -> str:
    """Return what the name of a class or function shares with those of its operators.

    >>> _plain('CARAFENaive') == _plain('carafe_naive_forward')
    True
    """
    return re.sub('_(forward|backward)$', '', name).replace('_', '').lower()


def _used_by(cls: type) -> set[tuple[str, str]]:
    """Return files of ``mmcv.ops`` with what a class uses of them: itself, or what it calls."""
    if cls.__module__.startswith('mmcv.ops.'):
        return {(cls.__module__.rpartition('.')[2] + '.py', cls.__name__)}
    source, tree = _source_of(cls)
    if not source.imports('mmcv'):
        return set()
    names = {source.full_name(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    owners = [getattr(importlib.import_module('mmcv.ops'), name.split('.')[2], None)
              for name in names if name.startswith('mmcv.ops.')]
    return {(f'{(getattr(owner, "__module__", "") or "").rpartition(".")[2]}.py',
             getattr(owner, '__name__', '')) for owner in owners}


def _classes_of(model: Any) -> dict[type, str]:
    """Return the classes of all modules and their bases, each with the first module that has it."""
    classes: dict[type, str] = {}
    for path, module in model.named_modules():
        for cls in type(module).__mro__:
            if cls.__module__.partition('.')[0] not in ('torch', 'builtins', 'abc', 'mmengine'):
                classes.setdefault(cls, f'model.{path}'.rstrip('.'))
    return classes


def _source_of(cls: type) -> tuple[SourceFile, ast.Module | ast.ClassDef]:
    """Return the file of a class and its syntax tree, empty for a class that is made in C."""
    try:
        source = _read(inspect.getsourcefile(cls) or '')
    except TypeError:
        source = _read('')
    trees = (node for node in ast.walk(source.tree)
             if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
    return source, next(trees, ast.Module([], []))
