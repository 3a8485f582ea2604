"""The layers of the package: which room may import which.

A room may import the rooms of its own row and of the rows below it, never of a row above. The test
of the layers and the page on the architecture are made from this table.
"""
from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ['LAYERS', 'Import', 'circles', 'imports', 'modules', 'room_of', 'table', 'wrong_imports']

PACKAGE = Path(__file__).resolve().parents[1] / 'mmrepro'

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
    """One import statement: module ``importer`` takes ``names`` from module ``imported``."""
    importer: str
    line: int
    imported: str
    name: str


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Return {module: file}; modules are dotted, without the name of the package."""
    found = {}
    for path in sorted(package.rglob('*.py')):
        parts = path.relative_to(package).with_suffix('').parts
        if parts[0] in ('.mim', 'configs'):
            continue
        found['.'.join(parts[:-1] if parts[-1] == '__init__' and len(parts) > 1 else parts)] = path
    return found


def room_of(module: str) -> str:
    return module.partition('.')[0]


def imports(package: Path = PACKAGE) -> Iterator[Import]:
    """Yield all imports between modules of the package, nested imports included."""
    known = modules(package)
    for importer, path in known.items():
        here = importer.split('.')
        if path.name != '__init__.py':
            here = here[:-1]
        elif here == ['__init__']:
            here = []
        for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.partition('.')[0] == package.name:
                        yield Import(importer, node.lineno, alias.name.partition('.')[2], '')
            elif isinstance(node, ast.ImportFrom):
                if node.level:
                    base = here[:len(here) - node.level + 1]
                    base = [*base, *(node.module.split('.') if node.module else [])]
                elif (node.module or '').partition('.')[0] == package.name:
                    base = node.module.split('.')[1:]
                else:
                    continue
                for alias in node.names:
                    inner = '.'.join([*base, alias.name])
                    if inner in known:
                        yield Import(importer, node.lineno, inner, '')
                    else:
                        yield Import(importer, node.lineno, '.'.join(base) or '__init__',
                                     alias.name)


def wrong_imports(package: Path = PACKAGE) -> list[str]:
    """Return upward and sideways imports, and imports of private names of other rooms."""
    rank = {room: number for number, (rooms, _) in enumerate(LAYERS) for room in rooms}
    found = []
    for one in imports(package):
        importer, imported = room_of(one.importer), room_of(one.imported)
        where = f'{one.importer} line {one.line}: '
        if importer == imported:
            continue
        if importer not in rank or imported not in rank:
            found.append(f'{where}{importer} or {imported} is in no row of LAYERS')
        elif rank[imported] < rank[importer]:
            found.append(f'{where}imports {one.imported}, which lies above it')
        elif rank[imported] == rank[importer] and (importer, imported) not in ALLOWED_SIDEWAYS:
            found.append(f'{where}imports {one.imported}, a neighbor')
        private = [part for part in (*one.imported.split('.'), one.name)
                   if part.startswith('_') and not part.startswith('__')]
        if private:
            found.append(f'{where}imports the private name {private[0]} of {imported}')
    return found


def circles(package: Path = PACKAGE) -> list[tuple[str, ...]]:
    """Return groups of modules that import each other, directly or through others."""
    graph: dict[str, set[str]] = {name: set() for name in modules(package)}
    for one in imports(package):
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


def table() -> str:
    """Return the layers as a Markdown table, the top row first."""
    rows = [f'| {_cell(rooms)} | {why} |' for rooms, why in LAYERS]
    return '\n'.join(['| rooms | what for |', '|---|---|', *rows])


def _cell(rooms: tuple[str, ...], width: int = 6) -> str:
    """Return the names of rooms, at most ``width`` per line."""
    names = [f'`{room}`' for room in rooms]
    lines = [', '.join(names[start:start + width]) for start in range(0, len(names), width)]
    return ',<br>'.join(lines)
