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
    """Where the result of ``call`` goes in ``function``: ``"results['img']"``, or ''.

    Args:
        full_name: the dotted name of a node, with aliases resolved.
    """
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return ''
    tainted: set[str] = set()
    while True:  # assignments in loops may come in any order
        found = {target.id for node in ast.walk(function) if isinstance(node, ast.Assign)
                 and _holds(node.value, call, tainted)
                 for target in node.targets if isinstance(target, ast.Name)}
        found |= {node.target.id for node in ast.walk(function) if isinstance(node, ast.AugAssign)
                  and isinstance(node.target, ast.Name) and _holds(node.value, call, tainted)}
        if found <= tainted:
            break
        tainted |= found
    return next(_sinks(call, function, tainted, full_name), '')


def _sinks(call: ast.Call, function: ast.FunctionDef | ast.AsyncFunctionDef, tainted: set[str],
           full_name: Callable[[ast.AST], str]) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, (ast.Assign, ast.AugAssign)) and _holds(node.value, call, tainted):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                text = ast.unparse(target)
                if isinstance(target, (ast.Subscript, ast.Attribute)) and not MEASURED.search(
                        _last_name(target)):
                    yield text
        elif isinstance(node, ast.Return) and node.value is not None \
                and _holds(node.value, call, tainted) and not MEASURED.search(function.name):
            yield f'what {function.name} returns'
        elif isinstance(node, ast.Call) and node is not call:
            name = full_name(node.func)
            given = [*node.args, *(word.value for word in node.keywords)]
            if name.startswith(COMPUTES) and any(_holds(value, call, tainted) for value in given):
                yield name


def _holds(node: ast.AST, call: ast.Call, tainted: set[str]) -> bool:
    """Whether the value of an expression is made of the call's result."""
    return any(inner is call or isinstance(inner, ast.Name) and inner.id in tainted
               for inner in ast.walk(node))


def _last_name(target: ast.AST) -> str:
    """``loss`` of ``self.loss`` and of ``results['loss']``."""
    if isinstance(target, ast.Attribute):
        return target.attr.lower()
    inner = target.slice if isinstance(target, ast.Subscript) else target
    if isinstance(inner, ast.Constant):
        return str(inner.value).lower()
    return ast.unparse(inner).lower()
