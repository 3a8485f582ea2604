"""Read the user's Python files without running them: calls that make runs differ.

A call of a clock counts if its result reaches a value that training uses: names are followed
through the assignments of the calling function. A time that is only logged, or whose variable is
named after a time, does not count.
"""
from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Callable, NamedTuple

from ..fingerprint.generator_states import CLOCK, ENTROPY, PROCESS_ID
from ..util.text import shorten
from .findings import CHANGES, MAY

# calls by whether they have an argument, such as a seed; None counts as none
SEEDED, UNSEEDED = (True, ), (False, )
ANY = SEEDED + UNSEEDED
# rule; which calls; text on the call; full dotted names (import aliases resolved), as in `fnmatch`
CALLS: tuple[tuple[str, tuple[bool, ...], str, tuple[str, ...]], ...] = (
    # generators that the operating system seeds
    ('foreign-generator', UNSEEDED, 'seeded by the system', (
        'numpy.random.default_rng', 'numpy.random.RandomState', 'numpy.random.PCG64',
        'numpy.random.Philox', 'numpy.random.SeedSequence', 'numpy.random.seed', 'random.Random',
        'random.seed')),
    ('foreign-generator', ANY, 'seeded by the system', (
        'torch.seed', 'torch.cuda.seed', 'torch.cuda.seed_all')),
    ('foreign-generator', ANY, 'random numbers of the system', (
        'random.SystemRandom', *ENTROPY, 'secrets.*')),
    # generators kept by user code: their state lives in an object, and objects live in workers
    ('kept-generator', SEEDED, 'a generator of its own', (
        'numpy.random.default_rng', 'numpy.random.RandomState', 'random.Random')),
    ('kept-generator', ANY, 'a generator of its own', ('torch.Generator', )),
    # seeding of the generators that everything else draws from
    ('reseeding', SEEDED, 'moves the global generator', ('numpy.random.seed', 'random.seed')),
    ('reseeding', ANY, 'moves the global generator', (
        'torch.manual_seed', 'torch.random.manual_seed', 'torch.cuda.manual_seed',
        'torch.cuda.manual_seed_all')),
    ('clock', ANY, 'different in every run', (
        'uuid.uuid1', 'uuid.uuid4', 'threading.get_ident', *CLOCK, *PROCESS_ID)),
    # threads and processes: the operating system decides their order
    ('own-threads', ANY, 'in the order of completion', (
        'concurrent.futures.as_completed', 'asyncio.as_completed', '*.imap_unordered')),
    ('own-threads', ANY, 'runs concurrently', (
        'threading.Thread', 'threading.Timer', '_thread.start_new_thread', 'queue.Queue',
        'queue.SimpleQueue', 'queue.LifoQueue', 'queue.PriorityQueue', 'multiprocessing.Queue',
        'concurrent.futures.ThreadPoolExecutor', 'multiprocessing.pool.ThreadPool',
        'multiprocessing.dummy.Pool')),
    ('uninitialized', ANY, 'holds uninitialized memory', (
        'torch.empty', 'torch.empty_like', 'numpy.empty', 'numpy.empty_like', '*.new_empty')),
    ('unsorted-listing', ANY, 'in the order of the file system', (
        'os.listdir', 'os.scandir', 'os.walk', 'glob.iglob', '*.glob', '*.iterdir', '*.rglob',
        'mmengine.scandir', 'mmengine.utils.scandir', '*.list_dir_or_file')),
    ('hash-order', ANY, 'depends on PYTHONHASHSEED for strings, else on addresses', ('hash', )),
    ('address', ANY, 'an address in memory', ('id', )),
)


# names of values that are only shown or measured
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


_IGNORE = re.compile(r'#\s*mmrepro:\s*ignore(?:\[([\w, -]+)\])?')
# functions of a set whose result does not depend on its order
_ORDERLESS = {'len', 'sorted', 'set', 'frozenset', 'any', 'all', 'min', 'max', 'isinstance', 'bool'}
# functions of a set whose result depends on its order
_ORDERED = {'list', 'tuple', 'enumerate', 'iter', 'zip', 'map', 'next', 'reversed',
            'numpy.array', 'numpy.asarray', 'torch.tensor', 'random.choice', 'random.sample',
            'numpy.random.choice', 'numpy.random.permutation'}
# endings of the bases and registries of classes whose code belongs to no sample and no step
_UNREPEATED = ('Hook', 'HOOKS', 'Optimizer', 'OPTIMIZERS', 'BatchSampler')


class Hit(NamedTuple):
    """A line of user code that a rule is about."""
    rule: str
    line: int
    what: str
    severity: str | None = None  # replaces the rule's


@dataclass(frozen=True)
class SourceFile:
    """A file and its syntax tree."""
    path: str
    text: str
    tree: ast.Module
    error: str = ''  # why there is no tree

    @classmethod
    def read(cls, path: str) -> SourceFile:
        try:
            with tokenize.open(path) as file:
                text = file.read()
            return cls(path, text, ast.parse(text, path))
        except (OSError, SyntaxError, ValueError) as error:  # bytes that are no text, or NUL
            return cls(path, '', ast.Module([], []), f'{type(error).__name__}: {error}')

    def imports(self, package: str) -> bool:
        """Whether the file imports ``package``, or from it."""
        return any(full.partition('.')[0] == package for full in self.aliases.values())

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Names in the file -> full dotted names of what they were imported from."""
        names: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for item in node.names:
                    package = item.name.partition('.')[0]
                    names.update({item.asname: item.name} if item.asname else {package: package})
            elif isinstance(node, ast.ImportFrom):
                module = '.' * node.level + (node.module or '')
                for item in node.names:
                    names[item.asname or item.name] = f'{module}.{item.name}'
        return names

    def full_name(self, node: ast.AST) -> str:
        """Return ``numpy.random.seed`` for ``np.random.seed``; ``?`` for other expressions."""
        tail: list[str] = []
        while isinstance(node, ast.Attribute):
            tail.append(node.attr)
            node = node.value
        head = self.aliases.get(node.id, node.id) if isinstance(node, ast.Name) else '?'
        return '.'.join([head, *reversed(tail)])

    def ignored(self, line: int, rule: str) -> bool:
        """Whether the line says ``# mmrepro: ignore`` or ``# mmrepro: ignore[rule]``."""
        lines = self.text.splitlines()
        match = _IGNORE.search(lines[line - 1]) if 0 < line <= len(lines) else None
        return match is not None and (
            match[1] is None or rule in re.split(r'[,\s]+', match[1]))

    @property
    def excused(self) -> list[int]:
        """Lines that say ``# mmrepro: ignore``."""
        return [number for number, line in enumerate(self.text.splitlines(), 1)
                if _IGNORE.search(line)]

    @cached_property
    def hits(self) -> tuple[Hit, ...]:
        """Hits of all patterns, in the order of lines."""
        hits = {*self._calls(), *self._sets()}
        if self.error:
            hits.add(Hit('unreadable', 1, self.error))
        return tuple(sorted((hit for hit in hits if not self.ignored(hit.line, hit.rule)),
                            key=lambda hit: (hit.line, hit.rule, hit.what)))

    def code(self, node: ast.AST) -> str:
        """Return the source of a node, in one short line."""
        return shorten(' '.join((ast.get_source_segment(self.text, node) or '').split()))

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def ancestors(self, node: ast.AST) -> list[ast.AST]:
        """Return the nodes that a node is in, the innermost first."""
        above: list[ast.AST] = []
        while node in self.parents:
            node = self.parents[node]
            above.append(node)
        return above

    def function_of(self, node: ast.AST) -> ast.AST:
        """Return the function that a node is in or is, or the module."""
        return next((above for above in (node, *self.ancestors(node))
                     if isinstance(above, (ast.FunctionDef, ast.Lambda))), self.tree)

    def is_repeated(self, cls: ast.ClassDef) -> bool:
        """Whether samples or steps run this code: not hooks, optimizers or batch samplers.

        Self-checks repeat samples and steps from the first ones on; a witness comes later, if at
        all.
        """
        named = [*cls.bases, *(node for mark in cls.decorator_list for node in ast.walk(mark))]
        return not any(name.endswith(_UNREPEATED) or name.startswith('torch.optim.')
                       for name in map(self.full_name, named))

    def _calls(self) -> Iterator[Hit]:
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Call):
                continue
            name = self.full_name(node.func)
            seeded = not all(isinstance(value, ast.Constant) and value.value is None
                             for value in arguments(node))
            for rule, wanted, what, patterns in CALLS:
                if seeded not in wanted or self._harmless(rule, node) or not any(
                        fnmatchcase(name, pattern) for pattern in patterns):
                    continue
                goes = self._goes(node) if rule in ('clock', 'address') else ''
                if goes or rule != 'address':
                    yield Hit(rule, node.lineno, f'{self.code(node)}: {what}'
                              + (f', and it reaches {goes}' if goes else ''),
                              self._severity(node, goes) if rule == 'clock' else None)
            if any(word.arg == 'key' and self.full_name(word.value) == 'id'
                   for word in node.keywords):
                yield Hit('address', node.lineno, f'{self.code(node)}: in the order of addresses')

    def _goes(self, node: ast.Call) -> str:
        """Return where the result of a call goes, if that is a value of a function."""
        parent, function = self.parents[node], self.function_of(node)
        if self.full_name(node.func) == 'id' and (
                isinstance(parent, ast.BinOp) or isinstance(parent, ast.Compare) and isinstance(
                    parent.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE))):
            return self.code(parent)
        return '' if function is self.tree else reaches(node, function, self.full_name)

    def _severity(self, clock: ast.Call, goes: str) -> str | None:
        line = self.text.splitlines()[clock.lineno - 1].lower()
        if goes or 'seed' in line:
            return CHANGES
        return MAY if 'uuid' in line else None

    def _harmless(self, rule: str, node: ast.Call) -> bool:
        parent = self.parents.get(node)
        if rule == 'unsorted-listing':
            return self._sorted(node)
        if rule == 'uninitialized':
            # `torch.empty(3).normal_()` and `nn.Parameter(torch.empty(3))` are filled afterwards
            return isinstance(parent, ast.Attribute) or (
                isinstance(parent, ast.Call) and 'Parameter' in self.full_name(parent.func))
        if rule == 'kept-generator':  # found by repeated samples and steps
            owner = next((above for above in self.ancestors(node)
                          if isinstance(above, ast.ClassDef)), self.tree)
            classes = [cls for cls in ast.walk(owner) if isinstance(cls, ast.ClassDef)]
            return bool(classes) and all(map(self.is_repeated, classes))
        if rule == 'address':  # looked up only
            return isinstance(parent, (ast.Set, ast.SetComp, ast.DictComp, ast.Subscript)) or (
                isinstance(parent, ast.Dict) and node in parent.keys)
        # a class that says how it hashes
        return rule == 'hash-order' and getattr(self.function_of(node), 'name', '') == '__hash__'

    def _sorted(self, node: ast.AST) -> bool:
        """Whether the value goes through ``sorted`` or ``.sort()``, or its order has no effect."""
        above: ast.AST | None = node
        while above is not None and not isinstance(above, ast.stmt):
            if isinstance(above, (ast.Compare, ast.SetComp)) or (
                    isinstance(above, ast.Call) and self.full_name(above.func) in _ORDERLESS):
                return True
            above = self.parents.get(above)
        names = {target.id for target, _ in assignments(above or node)
                 if isinstance(target, ast.Name)}
        for call in ast.walk(self.function_of(node)):
            if not isinstance(call, ast.Call):
                continue
            owner, _, name = self.full_name(call.func).rpartition('.')
            if name == 'sort' and owner in names or name in ('sorted', 'natsorted') \
                    and names.intersection(map(self.full_name, call.args)):
                return True
        return False

    def _sets(self) -> Iterator[Hit]:
        for scope in ast.walk(self.tree):
            if not isinstance(scope, (ast.FunctionDef, ast.Module)):
                continue
            nodes = list(nodes_of(scope))
            names = {target.id for node in nodes for target, value in assignments(node)
                     if isinstance(target, ast.Name) and self._is_set(value, set())}
            for node in nodes:
                parent = self.parents.get(node)
                if isinstance(parent, ast.Call) and self.full_name(parent.func) in _ORDERLESS:
                    continue
                for used in self._order_seen(node):
                    if self._is_set(used, names):
                        yield Hit('set-order', used.lineno,
                                  f'{self.code(used)}: iterated over; sets of strings or objects '
                                  'have another order in every process')

    def _is_set(self, node: ast.AST, names: set[str]) -> bool:
        if isinstance(node, (ast.Set, ast.SetComp)):
            # constants that are numbers hash to themselves
            return not (isinstance(node, ast.Set) and all(
                isinstance(item, ast.Constant) and isinstance(item.value, (int, float))
                for item in node.elts))
        if isinstance(node, ast.BinOp) and isinstance(
                node.op, (ast.Sub, ast.BitOr, ast.BitAnd, ast.BitXor)):
            return self._is_set(node.left, names) or self._is_set(node.right, names)
        if isinstance(node, ast.Call):
            return self.full_name(node.func) in ('set', 'frozenset') and not (
                node.args and isinstance(node.args[0], ast.Call)
                and self.full_name(node.args[0].func) == 'range')
        return isinstance(node, ast.Name) and node.id in names

    def _order_seen(self, node: ast.AST) -> list[ast.expr]:
        """Return the expressions that a node iterates over."""
        if isinstance(node, ast.For):
            return [node.iter]
        if isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.DictComp)):
            return [generator.iter for generator in node.generators]
        if isinstance(node, ast.Call):
            name = self.full_name(node.func)
            if name in _ORDERED or name.endswith('.join'):
                return list(node.args)
            if isinstance(node.func, ast.Attribute) and node.func.attr == 'pop' and not node.args:
                return [node.func.value]
        if isinstance(node, ast.Starred):
            return [node.value]
        return []
