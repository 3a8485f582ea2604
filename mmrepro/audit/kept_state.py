"""Find state in plain attributes, which no checkpoint holds and no worker shares."""
from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from typing import Any, Callable, NamedTuple

from .value_flow import assignments

# methods of lists, dicts, deques and sets that change them
_MUTATORS = {'append', 'appendleft', 'extend', 'insert', 'pop', 'popleft', 'popitem', 'update',
             'clear', 'remove', 'add', 'setdefault'}


class StatefulClass(NamedTuple):
    """A kind of class, and the methods of it that run again and again."""
    rule: str
    bases: tuple[str, ...]  # endings of base class names, or of the registry in the decorator
    methods: tuple[str, ...]  # beginnings of method names


STATEFUL: tuple[StatefulClass, ...] = (
    StatefulClass(
        'worker-state', ('Transform', 'TRANSFORMS', 'PIPELINES', 'Dataset', 'DATASETS'),
        ('transform', '__call__', '__getitem__', 'get_data_info', 'prepare_data', 'get_indexes')),
    StatefulClass(
        'model-state', ('Module', 'Model', 'Head', 'Detector', 'Backbone', 'Neck', 'Loss',
                        'MODELS', 'Assigner', 'Sampler', 'TASK_UTILS'),
        ('forward', 'loss', 'assign', 'sample', '_sample', 'extract_feat', 'get_targets')),
    StatefulClass('hook-state', ('Hook', 'HOOKS'), ('before_', 'after_')),
)


def kind_of(cls: ast.ClassDef) -> StatefulClass | None:
    """Return the first kind that a class is of, by its bases and decorators."""
    nodes = [*map(_container, cls.bases),
             *(node for decorator in cls.decorator_list for node in ast.walk(decorator))]
    names = [node.attr if isinstance(node, ast.Attribute) else node.id for node in nodes
             if isinstance(node, (ast.Attribute, ast.Name))]
    return next((kind for kind in STATEFUL
                 if any(name.endswith(kind.bases) for name in names)), None)


def states(cls: ast.ClassDef, shared: Collection[str],
           full_name: Callable[[ast.AST], str]) -> Iterator[tuple[str, Any, str]]:
    """Yield ``(rule, node, what)`` for each attribute or module variable that a step changes.

    Args:
        shared: names of the module's variables.
        full_name: the dotted name of a node.
    """
    kind = kind_of(cls)
    if kind is None:
        return
    # names that are registered as buffers or parameters: checkpoints hold them
    saved = {f'self.{ast.literal_eval(call.args[0])}' for call in ast.walk(cls)
             if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
             and call.func.attr in ('register_buffer', 'register_parameter') and call.args
             and isinstance(call.args[0], ast.Constant)}
    for method in cls.body:
        if not isinstance(method, ast.FunctionDef) or not method.name.startswith(kind.methods):
            continue
        local, said = _local_names(method), set(saved)
        for node in ast.walk(method):
            for name in map(full_name, _changed(node, full_name)):
                attribute = name.startswith('self.') and name.count('.') == 1
                if name not in said and (attribute or name in shared and name not in local):
                    said.add(name)
                    of_module = '' if attribute else ' of the module'
                    yield kind.rule, node, f'{method.name} changes {name}{of_module}'


def _changed(node: ast.AST, full_name: Callable[[ast.AST], str]) -> Iterator[ast.AST]:
    """Yield what a node changes in place, or computes from its previous value."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) \
            and node.func.attr in _MUTATORS:
        yield _container(node.func.value)
    for target, value in assignments(node):
        container = _container(target)
        if isinstance(node, ast.AugAssign) or isinstance(target, ast.Subscript) \
                or full_name(container) in map(full_name, ast.walk(value)):
            yield container


def _container(node: ast.AST) -> ast.AST:
    """Return ``self.cache`` of ``self.cache[0][1]``."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node


def _local_names(method: ast.FunctionDef) -> set[str]:
    """Return the local names of a method: arguments, and names bound without `global`."""
    arguments = (*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs)
    nodes = list(ast.walk(method))
    bound = {node.id for node in nodes
             if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return {argument.arg for argument in arguments} | bound - {
        name for node in nodes if isinstance(node, ast.Global) for name in node.names}
