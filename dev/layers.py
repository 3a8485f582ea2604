"""The layers: which room of the package, and which folder beside it, may import which.

    python -m dev.layers        # how many rooms, layers, modules and public names there are

A room may import the rooms of its own row and of the rows below it, never of a row above. The test
of the layers and the page on the architecture are made from these tables.
"""
from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ['BESIDE', 'LAYERS', 'Import', 'circles', 'counts', 'imports', 'modules', 'room_of',
           'table', 'wrong_imports']

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = 'mmrepro'
SUPPORT = 'tests/support'

# Folders beside the package, the top row first: each may import the package and what is below it.
BESIDE: tuple[tuple[str, str], ...] = (
    ('benchmarks', 'measure figures of the docs'),
    ('tests', 'the tree of the package again'),
    ('dev', 'what only developers run'),
    (SUPPORT, 'trainings and processes that tests, `dev/` and `benchmarks/` share'),
)

# The top row first: rooms of a row, and what the row is for.
LAYERS: tuple[tuple[tuple[str, ...], str], ...] = (
    (('__init__', '__main__', 'cli'), 'the public names; one file per verb parses and prints'),
    (('verbs', ), 'a module for each verb: functions that return a report'),
    (('audit', 'localise'), 'rules for configs; the first difference of two runs, and its cause'),
    (('report', ), 'the model of a report, its renderers, the comparison of two runs'),
    (('demo', 'runs'), 'the demonstration dataset; starts, watches and shortens one training'),
    (('activation', 'dropin', 'run'),
     'where mmrepro attaches; the Runner, the moments of a run, its hooks'),
    (('selfcheck', ), 'samples and steps twice, the model around a validation, the witness'),
    (('checkpoint', 'facts', 'fingerprint'),
     'what a run leaves behind, and what it is: settings, versions, hardware, code, data'),
    (('data', 'patches', 'virtual'),
     'data loading by position; parts of MMDetection that are replaced; virtual ranks'),
    (('config', 'determinism', 'distributed'),
     'the `randomness` dict; flags and variables; process groups and agreement of ranks'),
    (('objects', 'ops', 'seeds'), 'walks and digests of objects; operators; random streams'),
    (('errors', 'util', 'version'), 'exceptions and exit codes; helpers that know no training'),
)
# Rooms of one row that may know each other, in this direction only: (importer, imported).
ALLOWED_SIDEWAYS: dict[tuple[str, str], str] = {
    ('__main__', 'cli'): 'is the command',
    ('activation', 'run'): 'builds the Runner',
    ('checkpoint', 'facts'): 'a checkpoint holds the facts of its run',
    ('demo', 'runs'): 'a shipped config is found as the config of any training is',
    ('distributed', 'determinism'): 'ranks compare the flags',
    ('fingerprint', 'facts'): 'the manifest is the facts of a run',
    ('patches', 'data'): 'caches of transforms follow the position of the sample',
    ('util', 'errors'): 'a damaged file is an error that is raised',
}


class Import(NamedTuple):
    """One import statement: module ``importer`` takes ``name`` from module ``imported``."""
    importer: str
    line: int
    imported: str
    name: str


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Return {module: file} of the package: dotted names without that of the package."""
    return {name: path for name, path in _files(root).items() if not _is_beside(name)}


def _files(root: Path) -> dict[str, Path]:
    """Return {module: file} of the package and of the folders beside it."""
    found = {}
    for folder in (PACKAGE, 'benchmarks', 'dev', 'tests'):
        for path in sorted((root / folder).rglob('*.py')):
            parts = path.relative_to(root).with_suffix('').parts
            if folder == PACKAGE:
                parts = parts[1:]
                if parts[0] in ('.mim', 'configs'):
                    continue
            if parts[-1] == '__init__' and len(parts) > 1:
                parts = parts[:-1]
            found['.'.join(parts)] = path
    return found


def _is_beside(module: str) -> bool:
    return module.partition('.')[0] in ('benchmarks', 'dev', 'tests')


def room_of(module: str) -> str:
    if module.startswith('tests.support'):
        return SUPPORT
    return module.partition('.')[0]


def imports(root: Path = ROOT) -> Iterator[Import]:
    """Yield all imports between modules that are known, nested imports included."""
    known = _files(root)
    for importer, path in known.items():
        for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    module = _resolved(alias.name, importer, known)
                    if module is not None:
                        yield Import(importer, node.lineno, module or '__init__', '')
            elif isinstance(node, ast.ImportFrom):
                base = _base(node, importer, path, known)
                if base is None:
                    continue
                for alias in node.names:
                    inner = f'{base}.{alias.name}' if base else alias.name
                    if inner in known:
                        yield Import(importer, node.lineno, inner, '')
                    else:
                        yield Import(importer, node.lineno, base or '__init__', alias.name)


def _base(node: ast.ImportFrom, importer: str, path: Path, known: dict[str, Path]) -> str | None:
    """Return the module that a statement imports from, '' for the package; None: another's."""
    if not node.level:
        return _resolved(node.module or '', importer, known)
    here = [] if importer == '__init__' else importer.split('.')
    if path.name != '__init__.py':
        here = here[:-1]
    base = here[:len(here) - node.level + 1]
    return '.'.join([*base, *(node.module.split('.') if node.module else [])])


def _resolved(name: str, importer: str, known: dict[str, Path]) -> str | None:
    """Return the module that a dotted name stands for; None for one of another package.

    Tests and benchmarks import those of their own folder, and of tests/support, by their bare name.
    """
    first, _, rest = name.partition('.')
    if first == PACKAGE:
        return rest
    if _is_beside(name):
        return name
    if _is_beside(importer):
        for folder in (importer.rpartition('.')[0], 'tests.support', 'tests', 'tests.host_cuda'):
            if f'{folder}.{name}' in known:
                return f'{folder}.{name}'
    return None


def wrong_imports(root: Path = ROOT) -> list[str]:
    """Return upward and sideways imports, and imports of private names of other rooms."""
    rows = [*((room, ) for room, _ in BESIDE), *(rooms for rooms, _ in LAYERS)]
    rank = {room: number for number, rooms in enumerate(rows) for room in rooms}
    found = []
    for one in imports(root):
        importer, imported = room_of(one.importer), room_of(one.imported)
        where = f'{one.importer} line {one.line}: '
        if importer == imported:
            continue
        if importer not in rank or imported not in rank:
            found.append(f'{where}{importer} or {imported} is in no row of LAYERS or BESIDE')
        elif rank[imported] < rank[importer]:
            found.append(f'{where}imports {one.imported}, which lies above it')
        elif rank[imported] == rank[importer] and (importer, imported) not in ALLOWED_SIDEWAYS:
            found.append(f'{where}imports {one.imported}, a neighbor')
        private = [part for part in (*one.imported.split('.'), one.name)
                   if part.startswith('_') and not part.startswith('__')]
        if private and not _is_beside(one.importer):
            found.append(f'{where}imports the private name {private[0]} of {imported}')
    return found


def circles(root: Path = ROOT) -> list[tuple[str, ...]]:
    """Return groups of modules that import each other, directly or through others."""
    graph: dict[str, set[str]] = {name: set() for name in _files(root)}
    for one in imports(root):
        if one.imported in graph and one.imported != one.importer:
            graph[one.importer].add(one.imported)
    reach = {name: _reachable(graph, name) for name in graph}
    return sorted({tuple(sorted(other for other in reach[name] if name in reach[other]))
                   for name in graph if name in reach[name]})


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += graph[name]
    return seen


def counts() -> dict[str, int]:
    """Return how many rooms, layers, modules and public names the package has."""
    import mmrepro
    return {'rooms': sum(len(rooms) for rooms, _ in LAYERS), 'layers': len(LAYERS),
            'modules': len(modules()), 'public names': len(mmrepro.__all__)}


def table() -> str:
    """Return the layers as a Markdown table, the top row first."""
    rows = [f'| {_cell(rooms)} | {why} |' for rooms, why in LAYERS]
    return '\n'.join(['| rooms | what for |', '|---|---|', *rows])


def _cell(rooms: tuple[str, ...], width: int = 6) -> str:
    """Return the names of rooms, at most ``width`` per line."""
    names = [f'`{room}`' for room in rooms]
    lines = [', '.join(names[start:start + width]) for start in range(0, len(names), width)]
    return ',<br>'.join(lines)


if __name__ == '__main__':
    print(*(f'{number:4d} {what}' for what, number in counts().items()), sep='\n')
