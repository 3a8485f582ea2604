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
                      r'duration|eta|log|name|path|file|dir|folder|prefix|suffix|pid$|'
                      r'__(repr|str|hash)__')
# functions whose result is computed from what they are given, and methods that write into a tensor
COMPUTES = re.compile(r'(numpy|torch|random|math)\.|.*[a-z]_$')


def reaches(call: ast.expr, function: ast.AST, full_name: Callable[[ast.AST], str]) -> str:
    """Return where the result of ``call`` goes in ``function``: ``"results['img']"``, or ''.

    ``function`` may be a module, whose variables are values. ``full_name`` resolves aliases.
    """
    of_module, name = isinstance(function, ast.Module), getattr(function, 'name', '')
    nodes = list(nodes_of(function) if of_module else ast.walk(function))
    names: set[str] = set()  # variables that hold the result

    def holds(value: ast.AST | None) -> bool:
        return value is not None and any(
            node is call or isinstance(node, ast.Name) and node.id in names
            for node in ast.walk(value))

    assigned = [pair for node in nodes for pair in assignments(node)]
    for _ in assigned:  # in a loop, a later assignment may reach an earlier one
        names |= {target.id for target, value in assigned
                  if isinstance(target, ast.Name) and holds(value)}

    def sinks() -> Iterator[str]:
        for node in nodes:
            for target, value in assignments(node):
                if (of_module or not isinstance(target, ast.Name)) and holds(value) \
                        and not MEASURED.search(_last_name(target)):
                    yield ast.unparse(target)
            if isinstance(node, ast.Return) and holds(node.value) and not MEASURED.search(name):
                yield f'what {name} returns'
            elif isinstance(node, ast.Call) and node is not call \
                    and COMPUTES.match(full_name(node.func)) \
                    and any(map(holds, arguments(node))):
                yield full_name(node.func)

    return next(sinks(), '')


def nodes_of(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function or module, without those of functions inside it."""
    stack = list(ast.iter_child_nodes(scope))
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, ast.FunctionDef):
            stack.extend(ast.iter_child_nodes(node))


def assignments(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Return the names, attributes and items that a statement assigns to, each with the value."""
    value = getattr(node, 'value', None)
    if value is None or not isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        return []
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [(target, value) for outer in targets for target in getattr(outer, 'elts', [outer])]


def arguments(call: ast.Call) -> list[ast.expr]:
    """Return the values that a call passes."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _last_name(target: ast.expr) -> str:
    """Return ``loss`` of ``self.loss`` and of ``results['loss']``."""
    key = target.slice if isinstance(target, ast.Subscript) else target
    return (str(key.value) if isinstance(key, ast.Constant) else
            ast.unparse(key).rpartition('.')[2]).lower()
