"""Whether what a call returns reaches a value that training uses, within the function that calls.

Names are followed through assignments of one function. A time that is logged, or kept under a name
that says so, reaches nothing.
"""
from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Callable

# names for what is only shown or measured
MEASURED = re.compile(r'time|start|begin|end$|tic|toc|last|clock|stamp|date|now|elapsed|'
                      r'duration|eta|log|name|path|file|dir|folder|prefix|suffix|pid$')
# functions whose result is computed from what they are given
COMPUTES = ('numpy.', 'torch.', 'random.', 'math.')


def reaches(call: ast.Call, function: ast.AST, full_name: Callable[[ast.AST], str]) -> str:
    """Return where the result of ``call`` goes in ``function``: ``"results['img']"``, or ''.

    Args:
        full_name: the dotted name of a node, with aliases resolved.
    """
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return ''
    names: set[str] = set()  # variables that hold the result

    def holds(value: ast.AST | None) -> bool:
        return value is not None and any(
            node is call or isinstance(node, ast.Name) and node.id in names
            for node in ast.walk(value))

    assigned = [pair for node in ast.walk(function) for pair in assignments(node)]
    for _ in assigned:  # in a loop, a later assignment may reach an earlier one
        names |= {target.id for target, value in assigned
                  if isinstance(target, ast.Name) and holds(value)}

    def sinks() -> Iterator[str]:
        for node in ast.walk(function):
            for target, value in assignments(node):
                if isinstance(target, (ast.Subscript, ast.Attribute)) and holds(value) \
                        and not MEASURED.search(_last_name(target)):
                    yield ast.unparse(target)
            if isinstance(node, ast.Return) and holds(node.value) \
                    and not MEASURED.search(function.name):
                yield f'what {function.name} returns'
            elif isinstance(node, ast.Call) and node is not call \
                    and full_name(node.func).startswith(COMPUTES) \
                    and any(map(holds, arguments(node))):
                yield full_name(node.func)

    return next(sinks(), '')


def assignments(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Return the targets of an assignment, each with the value."""
    if isinstance(node, ast.AugAssign):
        return [(node.target, node.value)]
    return [(target, node.value) for target in node.targets] if isinstance(node, ast.Assign) else []


def arguments(call: ast.Call) -> list[ast.expr]:
    """Return the values that a call passes."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _last_name(target: ast.Subscript | ast.Attribute) -> str:
    """Return ``loss`` of ``self.loss`` and of ``results['loss']``."""
    if isinstance(target, ast.Attribute):
        return target.attr.lower()
    key = target.slice
    return (str(key.value) if isinstance(key, ast.Constant) else ast.unparse(key)).lower()
