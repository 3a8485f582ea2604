"""Find what code of the user reads from its process, or leaves there, while a training runs.

The self-checks of a training take samples, orders and steps again with what datasets, samplers,
models and the modules of the user had before. They see no variable of the environment, and repeat
no hook, no optimizer and no batch sampler.
"""
from __future__ import annotations

import ast
import builtins
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from ..checkpoint.adapters import names_class
from ..distributed.scheduler import LAUNCHED
from ..facts.collect import NOT_REPEATED, RECORDED_VARIABLES
from ..util.libraries import belongs_to_user
from .sources import Hit, SourceFile, assignments, reaches

_ENVIRONMENT = ('os.environ', 'os.environb', 'os.getenv', 'os.getenvb')
# methods that construct, register, show or test; all others run again and again
_ONCE = re.compile(r'(?!__(?:call|getitem|iter|next)__)(?:__|_?init|_?build|_?register|_?load|'
                   r'full_init|state_dict|show|draw|(?:before|after)_test)')
# methods that put back what a checkpoint has kept
_RESTORES = ('after_load_checkpoint', 'load_state_dict', '_load_from_state_dict',
             'set_extra_state', '__setstate__')
# methods that a resumed run calls as well
_AT_START_AND_END = ('before_run', 'before_train', 'after_train', 'after_run')
# methods of lists, dicts, deques and sets that change them
_MUTATORS = {'append', 'appendleft', 'extend', 'insert', 'pop', 'popleft', 'popitem', 'update',
             'clear', 'remove', 'add', 'setdefault'}
_IN_STATE_DICTS = ('self.state', 'self.param_groups')  # of optimizers


class Running(NamedTuple):
    """A function that a training may call in any step."""
    source: SourceFile
    cls: ast.ClassDef | None
    function: ast.FunctionDef


def hits_of(sources: Sequence[SourceFile]) -> tuple[tuple[SourceFile, Hit], ...]:
    """Return reads of the environment, and changes of what no checkpoint holds."""
    running = running_code(sources)
    functions = {code.function for code in running}
    found = [*((source, hit) for source in sources for hit in _reads(source, functions)),
             *((code.source, hit) for code in running
               if code.function.name not in _AT_START_AND_END for hit in _changes(code))]
    return tuple((source, hit) for source, hit in found
                 if not source.ignored(hit.line, hit.rule))


def running_code(sources: Sequence[SourceFile]) -> list[Running]:
    """Return methods and registered functions, and functions of all files that they name."""
    running: list[Running] = []
    named: defaultdict[str, list[Running]] = defaultdict(list)
    for source in sources:
        for node in ast.walk(source.tree):
            owner = source.parents.get(node)
            cls = owner if isinstance(owner, ast.ClassDef) else None
            if not isinstance(node, ast.FunctionDef) or cls is None and isinstance(
                    source.function_of(source.parents[node]), ast.FunctionDef):
                continue  # functions inside functions belong to these
            code = Running(source, cls, node)
            registered = any('register' in ast.unparse(mark) for mark in node.decorator_list)
            if registered or cls and not _ONCE.match(node.name):
                running.append(code)
            elif not node.name.startswith('__'):
                named[node.name].append(code)
    for code in running:  # which grows
        for node in ast.walk(code.function):
            if isinstance(node, (ast.Name, ast.Attribute)):
                running += named.pop(code.source.full_name(node).rpartition('.')[2], ())
    return running


def _reads(source: SourceFile, running: set[ast.FunctionDef]) -> Iterator[Hit]:
    """Yield reads of variables that runs do not record: in a step, a value or a condition."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.expr) or source.full_name(node) not in _ENVIRONMENT:
            continue
        above = source.ancestors(node)
        # of os.environ.get(...), the call
        parent, statement = above[1:3] if isinstance(above[0], ast.Attribute) else above[:2]
        if isinstance(statement, ast.Expr) or isinstance(getattr(parent, 'ctx', None),
                                                         (ast.Store, ast.Del)):
            continue  # a write
        variable = next((child.value for child in ast.iter_child_nodes(parent)
                         if isinstance(child, ast.Constant)), '')
        if variable in (*LAUNCHED, *NOT_REPEATED) or any(
                fnmatchcase(str(variable), pattern) for pattern in RECORDED_VARIABLES):
            continue
        goes = reaches(node, source.function_of(node), source.full_name)
        decides = any(getattr(outer, 'test', None) is inner
                      for inner, outer in zip([node, *above], above))
        if goes or decides or running.intersection(above):
            yield Hit('environment', node.lineno, source.code(parent)
                      + (f': it reaches {goes}' if goes else ''))


def _changes(code: Running) -> Iterator[Hit]:
    """Yield variables of modules and classes that change, and attributes of hooks and the like."""
    source, cls, function = code
    body = cls.body if cls else []
    methods = [node for node in body if isinstance(node, ast.FunctionDef)]
    lost = cls is not None and not names_class(cls.name) and not source.is_repeated(cls)
    # what a method puts back is not lost
    said = {path for method in methods if method.name in _RESTORES
            for _, path, _ in _changed(method)}
    # containers of the class that no method replaces by the object's own
    shared = {f'self.{target.id}' for node in body for target, value in assignments(node)
              if isinstance(target, ast.Name) and not isinstance(value, (ast.Constant, ast.Tuple))
              } - {path for method in methods for _, path, in_place in _changed(method)
                   if not in_place}
    local = _local_names(function)
    if any(source.full_name(mark) == 'classmethod' for mark in function.decorator_list):
        local.difference_update(argument.arg for argument in function.args.args[:1])
    reads = [(_path(node, function), node.lineno) for node in ast.walk(function)
             if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)]
    for target, path, in_place in _changed(function):
        if path in said or path in _IN_STATE_DICTS:
            continue
        of_object = lost and re.fullmatch(r'self\.\w+', path) and (in_place or any(
            read == path and line <= target.lineno for read, line in reads))
        if of_object or in_place and path in shared or _is_shared(source, target, local):
            said.add(path)
            where = f'{cls.name}.{function.name}' if cls else function.name
            yield Hit('kept-state', target.lineno, f'{where} changes {path}')


def _changed(function: ast.FunctionDef) -> Iterator[tuple[ast.expr, str, bool]]:
    """Yield what a function changes, with its path, and whether that is in place."""
    for node in ast.walk(function):
        targets = [(target, isinstance(node, ast.AugAssign)) for target, _ in assignments(node)]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) \
                and node.func.attr in _MUTATORS:
            targets = [(node.func.value, True)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ('next', 'setattr'):
            targets = [(argument, True) for argument in node.args[:1]]
        for target, in_place in targets:
            while isinstance(target, ast.Subscript):  # self.cache of self.cache[0][1]
                target, in_place = target.value, True
            yield target, _path(target, function), in_place


def _path(node: ast.expr, function: ast.FunctionDef) -> str:
    """Return the source of a node, where the first argument of the function is ``self``."""
    first = function.args.args[0].arg if function.args.args else 'self'
    return re.sub(rf'^{first}\b', 'self', ast.unparse(node))


def _is_shared(source: SourceFile, target: ast.expr, local: set[str]) -> bool:
    """Whether a variable is the module's, or an attribute that of a module or class."""
    root = target
    while isinstance(root, (ast.Attribute, ast.Subscript)):
        if isinstance(root, ast.Attribute) and root.attr == '__class__':
            return True
        root = root.value
    if isinstance(root, ast.Call):
        return source.full_name(root.func) in ('type', 'globals')
    return isinstance(root, ast.Name) and root.id not in local \
        and not hasattr(builtins, root.id) and belongs_to_user(source.aliases.get(root.id, ''))


def _local_names(function: ast.FunctionDef) -> set[str]:
    """Return arguments and variables of a function, without what outlives a call of it."""
    nodes, given = list(ast.walk(function)), function.args
    defaults = zip(reversed([*given.posonlyargs, *given.args]), reversed(given.defaults))
    lasting = {argument.arg for argument, value in defaults
               if isinstance(value, (ast.Dict, ast.List, ast.Set))}
    bound = {node.id for node in nodes
             if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound.difference_update(*(node.names for node in nodes if isinstance(node, ast.Global)))
    return bound | {node.arg for node in nodes if isinstance(node, ast.arg)} - lasting
