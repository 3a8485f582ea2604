"""The subject of an audit: a config, its types and their files, read without a run.

The files show which environment variables user code reads, and which state it leaves in its
process, while a training runs. Self-checks find the rest: they repeat samples and steps from the
first ones on. They see no environment variable, and of hooks, optimizers and batch samplers a
witness alone sees anything.
"""
from __future__ import annotations

import ast
import builtins
import contextlib
import copy
import importlib
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, NamedTuple

from mmengine.config import Config

from ..checkpoint.kept_attributes import names_class
from ..config import RandomnessConfig, imports_of, randomness_of
from ..distributed.scheduler import LAUNCHED
from ..errors import RandomnessError
from ..facts.collect import NOT_REPEATED, RECORDED_VARIABLES
from ..objects.walks import named_dicts, root_registries
from ..runs.config_edits import import_mmrepro
from ..util.libraries import belongs_to_user, is_stock
from ..util.text import class_name
from .findings import TWO_LINES
from .sources import Hit, SourceFile, assignments, reaches

TRAIN_KEYS = ('model', 'train_dataloader', 'train_cfg', 'optim_wrapper', 'custom_hooks',
              'default_hooks', 'param_scheduler')


class Part(NamedTuple):
    """A dict of the config that names a type."""
    key: str  # where it is in the config, as in train_dataloader.dataset.pipeline[2]
    name: str  # the type's bare name
    node: Mapping[str, Any]


@dataclass(frozen=True)
class Subject:
    """A config and the machine it would run on."""
    cfg: Config  # complete
    device: str = 'cpu'  # or 'cuda'
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    lazy: bool = False  # a pure-Python config, whose custom_imports MMEngine does not run
    failed_import: str = ''  # message of the import of custom_imports that did not work

    @cached_property
    def imports(self) -> list[str]:
        """Modules in ``custom_imports``."""
        return imports_of(self.cfg)

    @cached_property
    def attached(self) -> bool:
        """Whether mmrepro's runner would run this config."""
        if class_name(self.cfg.get('runner_type') or '') == 'ReproRunner':
            return True
        if self.lazy:
            return False
        return any(name.partition('.')[0] == 'mmrepro' for name in self.imports) or any(
            source.imports('mmrepro') for source in self.sources)

    @cached_property
    def _parsed(self) -> tuple[RandomnessConfig, str]:
        try:
            return randomness_of(self.cfg), ''
        except RandomnessError as error:
            return RandomnessConfig(), str(error)

    @property
    def randomness(self) -> RandomnessConfig:
        """The config's randomness; defaults where it is not valid."""
        return self._parsed[0]

    @property
    def randomness_error(self) -> str:
        return self._parsed[1]

    @property
    def keyed(self) -> bool:
        """Samples have streams of their own, and MMDetection's parts are replaced."""
        return self.attached and not self.randomness.uses_stock_streams

    @property
    def is_deterministic(self) -> bool:
        """Determinism is in force as mmrepro sets it."""
        return self.attached and self.randomness.deterministic is True

    def with_two_lines(self) -> Subject:
        """Return the same config with mmrepro's two lines."""
        return self._attaching(self.lazy, randomness=copy.deepcopy(TWO_LINES['randomness']),
                               runner_type='mmrepro.ReproRunner')

    def under_our_train(self) -> Subject:
        """Return the same config as `mmrepro train` would start it."""
        return self._attaching(lazy=False)

    def _attaching(self, lazy: bool, **settings: Any) -> Subject:
        cfg = copy.deepcopy(self.cfg)
        cfg.update(settings)
        import_mmrepro(cfg)
        subject = replace(self, cfg=cfg, lazy=lazy)
        known = ('sources', 'hits')
        subject.__dict__.update({name: self.__dict__[name] for name in known
                                 if name in self.__dict__})
        return subject

    @property
    def world_size(self) -> int:
        """Number of ranks if the launcher has said it already, else 1."""
        text = self.env.get('WORLD_SIZE', '')
        return int(text) if text.isdecimal() else 1

    @cached_property
    def parts(self) -> list[Part]:
        """Every dict with a ``type``, in the order of the file."""
        # Config hides its dict, and lazy configs give classes: both come out as plain dicts here
        return [Part(key, class_name(node['type']), node)
                for key, node in named_dicts(self.cfg._cfg_dict) if node.get('type') is not None]

    def parts_in(self, *keys: str) -> list[Part]:
        """Return the parts under one of the top-level keys."""
        return [part for part in self.parts if part.key.partition('.')[0].partition('[')[0] in keys]

    @cached_property
    def scope(self) -> str:
        """The default scope, with its registries imported."""
        scope = self.cfg.get('default_scope') or 'mmengine'
        if scope not in ('mmengine', 'mmrepro'):
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(f'{scope}.registry')
        return scope

    def class_of(self, part: Part) -> type | None:
        """Return the class that a part would be built from; None if no registry knows it."""
        kind = part.node['type']
        if not isinstance(kind, str):
            return kind if isinstance(kind, type) else None
        key = kind, part.node.get('_scope_', self.scope)
        if key not in self._classes:  # a type that no registry has takes long
            self._classes[key] = _look_up(*key)
        return self._classes[key]

    @cached_property
    def _classes(self) -> dict[tuple[str, str], type | None]:
        return {}

    @cached_property
    def sources(self) -> tuple[SourceFile, ...]:
        """The user's files: ``custom_imports``, and classes that the config names."""
        paths: set[str] = set()
        for name in self.imports:
            if not is_stock(name):
                paths.update(_files_of(name))
        for cls in filter(None, map(self.class_of, self.parts)):
            for base in cls.__mro__:
                path = getattr(sys.modules.get(base.__module__), '__file__', None)
                if path and belongs_to_user(base.__module__) and not is_stock(base.__module__):
                    paths.add(path)
        return tuple(SourceFile.read(path) for path in sorted(paths) if path.endswith('.py'))

    @cached_property
    def hits(self) -> tuple[tuple[SourceFile, Hit], ...]:
        """The lines of the user's files that rules are about, each with its file."""
        patterns = tuple((source, hit) for source in self.sources for hit in source.hits)
        return patterns + hits_of(self.sources)


def _look_up(kind: str, scope: str) -> type | None:
    """Return the class that is registered under this name in MMEngine, or None."""
    for table in root_registries().values():
        for name in (kind, ) if '.' in kind else (f'{scope}.{kind}', kind):
            # errors: a scope whose package is not installed
            with contextlib.suppress(ImportError, AttributeError, KeyError, AssertionError):
                cls = table.get(name)
                if isinstance(cls, type):
                    return cls
    return None


def _files_of(name: str) -> list[str]:
    """Return the files of a module and its imported submodules, or of a module on the path."""
    if name in sys.modules:
        files = [getattr(module, '__file__', None) for key, module in sys.modules.items()
                 if key == name or key.startswith(f'{name}.')]
        if any(files):
            return list(filter(None, files))
    relative = name.replace('.', os.sep)
    candidates = (os.path.join(folder, tail) for folder in (os.getcwd(), *sys.path)
                  for tail in (f'{relative}.py', os.path.join(relative, '__init__.py')))
    return [path for path in candidates if os.path.isfile(path)][:1]


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
    for code in running:  # the list grows in this loop
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
    """Yield variables of modules and classes that change, and such attributes of hooks."""
    source, cls, function = code
    body = cls.body if cls else []
    methods = [node for node in body if isinstance(node, ast.FunctionDef)]
    lost = cls is not None and not names_class(cls.name) and not source.is_repeated(cls)
    # values that a method puts back are not lost
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
    """Yield the values that a function changes, with their paths, and whether in place."""
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
    """Whether a variable belongs to the module, or an attribute to a module or class."""
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
    """Return arguments and variables of a function, without those that outlive a call."""
    nodes, given = list(ast.walk(function)), function.args
    defaults = zip(reversed([*given.posonlyargs, *given.args]), reversed(given.defaults))
    lasting = {argument.arg for argument, value in defaults
               if isinstance(value, (ast.Dict, ast.List, ast.Set))}
    bound = {node.id for node in nodes
             if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound.difference_update(*(node.names for node in nodes if isinstance(node, ast.Global)))
    return bound | {node.arg for node in nodes if isinstance(node, ast.arg)} - lasting
