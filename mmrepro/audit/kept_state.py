"""Find state in plain attributes, which no checkpoint holds and no worker shares."""
from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from typing import Any, Callable, NamedTuple

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


def states(cls: ast.ClassDef,
           shared: Collection[str] = ()) -> Iterator[tuple[str, Any, str]]:
    """Yield ``(rule, node, what)`` for each attribute or module variable that a step changes.

    Args:
        shared: names of the module's variables.
    """
    kind = _kind(cls)
    if kind is None:
        return
    # names that are registered as buffers or parameters: checkpoints hold them
    safe = {call.args[0].value for call in ast.walk(cls)
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
            and call.func.attr in ('register_buffer', 'register_parameter') and call.args
            and isinstance(call.args[0], ast.Constant)}
    for method in cls.body:
        if isinstance(method, ast.FunctionDef) and method.name.startswith(kind.methods):
            said = {'', *safe}
            own = _bound_in(method)
            for node in ast.walk(method):
                name = _changed(node, _self_attribute)
                if name not in said:
                    said.add(name)
                    yield kind.rule, node, f'{method.name} changes self.{name}'
                name = _changed(node, _variable)
                if name in shared and name not in own and f'global {name}' not in said:
                    said.add(f'global {name}')
                    yield kind.rule, node, f'{method.name} changes {name} of the module'


def _kind(cls: ast.ClassDef) -> StatefulClass | None:
    names = {_last(base) for base in cls.bases}
    names |= {_last(node) for deco in cls.decorator_list for node in ast.walk(deco)
              if isinstance(node, (ast.Attribute, ast.Name))}
    return next((kind for kind in STATEFUL
                 if any(name.endswith(kind.bases) for name in names)), None)


def of_data_loading(cls: ast.ClassDef) -> bool:
    """Whether objects of the class live in data loading workers."""
    kind = _kind(cls)
    return kind is not None and kind.rule == 'worker-state'


def _changed(node: ast.AST, named: Callable[[ast.AST], str]) -> str:
    """Return the name (by ``named``) of a value that the node changes in place, or ''."""
    if isinstance(node, ast.AugAssign):
        return named(node.target)
    if isinstance(node, ast.Assign):
        for target in node.targets:
            name = named(target)
            if name and (isinstance(target, ast.Subscript) or name in {
                    named(inner) for inner in ast.walk(node.value)}):
                return name
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) \
            and node.func.attr in _MUTATORS:
        return named(node.func.value)
    return ''


def _bound_in(method: ast.FunctionDef) -> set[str]:
    """Return the local names of a method: arguments, and names bound without `global`."""
    names = {argument.arg for argument in (
        *method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs)}
    shared: set[str] = set()
    for node in ast.walk(method):
        if isinstance(node, ast.Global):
            shared.update(node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names - shared


def _variable(node: ast.AST) -> str:
    if isinstance(node, ast.Subscript):
        return _variable(node.value)
    return node.id if isinstance(node, ast.Name) else ''


def _self_attribute(node: ast.AST) -> str:
    if isinstance(node, ast.Subscript):
        return _self_attribute(node.value)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) \
            and node.value.id == 'self':
        return node.attr
    return ''


def _last(node: ast.AST) -> str:
    if isinstance(node, ast.Subscript):
        return _last(node.value)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, 'id', '')
