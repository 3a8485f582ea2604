"""Measure versions: ``python -m dev.versions [PACKAGE ...] [--folder FOLDER]``.

Each environment is this Python with a folder of other packages in front. It is measured in a fresh
process, and its digests stay in the folder: a second call goes on where the first was stopped.
"""
from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mmrepro.facts.measured import HOLE, expanded

from . import inputs
from .packages import PACKAGES, Package

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / 'mmrepro' / 'facts' / 'measured.json'
FORMAT = 1
# packages that every environment shares, and whose versions the table names
SHARED = ('numpy', 'opencv-python', 'Pillow', 'scipy', 'pycocotools', 'shapely', 'torch',
          'mmengine', 'mmcv-lite', 'mmdet')


def installed(requirement: str, folder: Path) -> Path:
    """Return the folder with a package (a wheel, without its dependencies); fetch it if needed."""
    target = folder / 'overlays' / requirement.replace('==', '-')
    if not (target / 'complete').exists():
        shutil.rmtree(target, ignore_errors=True)
        subprocess.run([sys.executable, '-m', 'pip', 'install', '--quiet', '--no-deps',
                        '--only-binary', ':all:', '--target', str(target), requirement], check=True)
        (target / 'complete').touch()
    return target


def measure(name: str, package: Package, release: str, folder: Path) -> dict[str, Any]:
    """Return the digests of a version: part -> settings that are covered, and digests by output."""
    kept = folder / 'digests' / f'{name}-{release}.json'
    if kept.exists():
        return json.loads(kept.read_text())
    overlays = [str(installed(one, folder)) for one in
                (f'{package.distribution}=={release}', *package.beside)]
    env = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONHASHSEED': '0',
           'PYTHONPATH': os.pathsep.join((*overlays, str(ROOT)))}
    done = subprocess.run(
        [sys.executable, '-W', 'ignore', '-m', 'dev.versions.parts', str(folder / 'inputs.npz'),
         name], env=env, cwd=ROOT, capture_output=True, text=True)
    kept.parent.mkdir(exist_ok=True)
    kept.with_suffix('.txt').write_text(done.stderr)
    if done.returncode:
        print(f'{name} {release}: {done.stderr.strip().splitlines()[-1]}', file=sys.stderr)
        return {}
    kept.write_text(done.stdout)
    return json.loads(done.stdout)


def merged(measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return part -> covered settings and, for each output, the digests of all versions in a text.

    A number counts equal digests that follow each other; ``-`` is a hole.
    """
    parts: dict[str, Any] = {}
    for found in measured.values():
        for part, content in found.items():
            row = parts.setdefault(part, dict(covers={}, digests={}))
            row['covers'] = content['covers']
            for output in content['digests']:
                row['digests'].setdefault(output, '')
    for part, row in parts.items():
        for output in row['digests']:
            row['digests'][output] = runs([
                found.get(part, {}).get('digests', {}).get(output, '-')
                for found in measured.values()])
    return parts


def runs(digests: list[str]) -> str:
    """Return digests as text, equal ones that follow each other once.

    >>> runs(['a', 'a', '-', 'b'])
    '2*a 1*- 1*b'
    """
    counted: list[list[Any]] = []
    for one in digests:
        if one.startswith('!'):  # an error: nothing was measured
            one = '-'
        if counted and counted[-1][1] == one:
            counted[-1][0] += 1
        else:
            counted.append([1, one])
    return ' '.join(f'{count}*{one}' for count, one in counted)


def table() -> str:
    """Return a Markdown table: the versions at which the digests of parts change."""
    lines = ['| package | from version | part | outputs that differ from the version before |',
             '|---|---|---|---|']
    for row in json.loads(TABLE.read_text())['packages'].values():
        lines.append(f'| {row["distribution"]} | {row["versions"][0]} to {row["versions"][-1]} | '
                     f'{len(row["parts"])} in {len(row["versions"])} versions | |')
        lines += [f'| | {release} | {part} | {", ".join(outputs)} |'
                  for release, part, outputs in _changes(row)]
    return '\n'.join(lines)


def _changes(row: dict[str, Any]) -> list[tuple[str, str, list[str]]]:
    """Return version, part and outputs of all changes of a package, oldest first."""
    found: dict[tuple[int, str], list[str]] = {}
    for part, content in row['parts'].items():
        for output, text in content['digests'].items():
            digests = expanded(text)
            for number, (before, after) in enumerate(zip(digests, digests[1:]), 1):
                if before != after and HOLE not in (before, after):
                    found.setdefault((number, part), []).append(output)
    return [(row['versions'][number], part, sorted(found[number, part]))
            for number, part in sorted(found)]


def write(content: dict[str, Any]) -> None:
    """Write the table, one line per part."""
    lines = []
    for key, value in content.items():
        if key != 'packages':
            lines.append(f'{json.dumps(key)}: {json.dumps(value)}')
    packages = []
    for name, row in content['packages'].items():
        parts = ',\n'.join(f'   {json.dumps(part)}: {json.dumps(content)}'
                           for part, content in row['parts'].items())
        head = ', '.join(f'{json.dumps(key)}: {json.dumps(value)}' for key, value in row.items()
                         if key != 'parts')
        packages.append(f'  {json.dumps(name)}: {{{head}, "parts": {{\n{parts}}}}}')
    lines.append('"packages": {\n' + ',\n'.join(packages) + '}')
    TABLE.write_text('{' + ',\n '.join(lines) + '}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('packages', nargs='*', metavar='PACKAGE',
                        help=f'{", ".join(PACKAGES)}; default: all')
    parser.add_argument('--folder', type=Path, default=ROOT / 'work_dirs' / 'versions')
    args = parser.parse_args()
    unknown = [name for name in args.packages if name not in PACKAGES]
    if unknown:
        parser.error(f'{unknown[0]!r} is none of {", ".join(PACKAGES)}')
    digest = inputs.make(args.folder)
    content: dict[str, Any] = dict(format=FORMAT, inputs=digest, packages={})
    if TABLE.exists():
        content = json.loads(TABLE.read_text())
        if content['inputs'] != digest:
            parser.error(f'{args.folder}/inputs.npz is not what {TABLE} was measured with; '
                         'delete the table to begin again')
    content['python'] = platform.python_version()
    content['shared'] = {name: version(name) for name in SHARED}
    for name in args.packages or PACKAGES:
        package = PACKAGES[name]
        found = {}
        for release in package.versions:
            found[release] = measure(name, package, release, args.folder)
            print(f'{name} {release}: {len(found[release])} parts', flush=True)
        content['packages'][name] = dict(
            distribution=package.distribution, beside=list(package.beside),
            versions=[release for release in package.versions if found[release]],
            parts=merged({release: one for release, one in found.items() if one}))
        write(content)


if __name__ == '__main__':
    main()
