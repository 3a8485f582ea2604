"""Measure versions: ``python -m dev.versions [PACKAGE ...] [--folder FOLDER]``.

Each environment is this Python with a folder of other packages in front. It is measured in a fresh
process, and its digests stay in the folder: a second call goes on where the first was stopped.
"""
from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mmrepro.facts.collect import cpu_features, cpu_name
from mmrepro.facts.measured import AVX2, AVX512, HOLE, expanded, maker_of, on_maker
from mmrepro.util.text import listed

from . import inputs
from .packages import PACKAGES, Package

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / 'mmrepro' / 'facts' / 'measured.json'
FORMAT = 3
MAX_PARTS = 7  # of a cell
MAX_CELL = 90  # characters of a line in a cell
AVX512_WITHOUT_BLAS = f'{AVX512}-without-blas'  # NumPy's products of matrices have AVX2
# packages that every environment shares, and whose versions the table names
SHARED = ('numpy', 'opencv-python', 'Pillow', 'scipy', 'pycocotools', 'shapely', 'torch',
          'mmengine', 'mmcv-lite', 'mmdet')


def overlay(requirement: str, folder: Path) -> Path:
    """Return where a package is installed."""
    return folder / 'overlays' / re.sub('=+', '-', requirement)


def installed(requirement: str, folder: Path, dependencies: bool = False) -> Path:
    """Return the folder with a package (a wheel); fetch it if needed."""
    target = overlay(requirement, folder)
    if not (target / 'complete').exists():
        shutil.rmtree(target, ignore_errors=True)
        more = [] if dependencies else ['--no-deps']
        subprocess.run([sys.executable, '-m', 'pip', 'install', '--quiet', *more,
                        '--only-binary', ':all:', '--target', str(target), requirement], check=True)
        (target / 'complete').touch()
    return target


def environment(level: str, overlays: list[Path]) -> dict[str, str]:
    """Return the variables of a process with other packages in front, at a level of instructions.

    Raises:
        RuntimeError: this CPU does not have the level.
    """
    # as some machines set it for libraries that they do not know
    env = {name: value for name, value in os.environ.items() if not name.startswith('OPENBLAS_')}
    env.update(OMP_NUM_THREADS='1', OPENBLAS_NUM_THREADS='1', PYTHONHASHSEED='0',
               PYTHONPATH=os.pathsep.join((*map(str, overlays), str(ROOT))))
    features = str(cpu_features()).split()
    if level == AVX2:  # NumPy's variable has names that only some of its versions know
        found = subprocess.run(
            [sys.executable, '-W', 'ignore', '-c', 'import json\n'
             'from mmrepro.determinism.cpu_level import level_variables\n'
             f'print(json.dumps(level_variables({AVX2!r})))'],
            env=env, cwd=ROOT, capture_output=True, text=True, check=True)
        env.update(json.loads(found.stdout.splitlines()[-1]))
    elif 'avx512f' not in features:
        raise RuntimeError('this CPU has no AVX-512')
    if level == AVX512_WITHOUT_BLAS:
        env['OPENBLAS_CORETYPE'] = 'Haswell'
    return env


def measured_at(name: str, package: Package, release: str, level: str,
                folder: Path) -> dict[str, Any]:
    """Return the digests of a version at a level of instructions, those that hold for any maker.

    OpenBLAS chooses its kernels by the maker of the CPU and knows the newest in its newest versions
    only. What depends on this choice at AVX-512 counts as not measured.
    """
    found = measure(name, package, release, level, folder)
    if level == AVX512:
        tried = release
        if name != 'numpy':  # the same NumPy, and its OpenBLAS, is beside all versions
            tried = package.versions[-1]
        ours, other = (measure(name, package, tried, one, folder)
                       for one in (AVX512, AVX512_WITHOUT_BLAS))
        for part, content in ours.items():
            for output, one in content['digests'].items():
                if other.get(part, {}).get('digests', {}).get(output) != one and part in found:
                    found[part]['digests'][output] = HOLE
    return found


def measure(name: str, package: Package, release: str, level: str, folder: Path) -> dict[str, Any]:
    """Return the digests of a version: part -> settings that are covered, and digests by output."""
    kept = folder / 'digests' / level / f'{name}-{release}.json'
    if kept.exists():
        return json.loads(kept.read_text())
    first, *others = package.requirements(release)
    overlays = [installed(first, folder, package.large),
                *(installed(one, folder) for one in others)]
    done = subprocess.run(
        [sys.executable, '-W', 'ignore', '-m', 'dev.versions.parts', str(folder / 'inputs.npz'),
         name], env=environment(level, overlays), cwd=ROOT, capture_output=True, text=True)
    kept.parent.mkdir(exist_ok=True, parents=True)
    kept.with_suffix('.txt').write_text(done.stderr)
    if done.returncode:
        print(f'{name} {release}: {done.stderr.strip().splitlines()[-1]}', file=sys.stderr)
        return {}
    kept.write_text(done.stdout)
    return json.loads(done.stdout)


def _computed(parts: dict[str, Any]) -> bool:
    """Whether a version computed anything."""
    return any(not found.startswith('!') for content in parts.values()
               for found in content['digests'].values())


def merged(levels: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return part -> covered settings and, for each output, the digests of all versions in a text.

    Args:
        levels: at each level of instructions, what was found with each version.

    ``digests`` are those at AVX2, and ``avx512`` those outputs whose text differs there.
    """
    parts: dict[str, Any] = {}
    for found in (one for level in levels.values() for one in level):
        for part, content in found.items():
            row = parts.setdefault(part, dict(covers={}, digests={}))
            row['covers'] = content['covers']
            row['digests'].update(dict.fromkeys(content['digests'], ''))
    for part, row in parts.items():
        for output in row['digests']:
            texts = {level: runs([one.get(part, {}).get('digests', {}).get(output, HOLE)
                                  for one in found]) for level, found in levels.items()}
            row['digests'][output] = texts[AVX2]
            if texts[AVX512] != texts[AVX2]:
                row.setdefault(AVX512, {})[output] = texts[AVX512]
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


def agreed(row: dict[str, Any], levels: dict[str, list[dict[str, Any]]], features: str
           ) -> dict[str, Any]:
    """Return the rows of a package that hold for one more kind of CPU.

    Args:
        row: of the CPUs that were measured before.
        levels: what this CPU has computed with each version, at each level of instructions.
        features: of this CPU.

    A digest that the CPUs disagree about counts as not measured.
    """
    parts = {}
    for part, before in row['parts'].items():
        texts: dict[str, dict[str, str]] = {}
        for output, text in before['digests'].items():
            for level, found in levels.items():
                digests = expanded(before.get(level, {}).get(output, text))
                here = [one.get(part, {}).get('digests', {}).get(output, HOLE) for one in found]
                texts.setdefault(level, {})[output] = runs(
                    [a if a == b else HOLE for a, b in zip(digests, here)])
        parts[part] = dict(covers=before['covers'], digests=texts[AVX2])
        others = {output: text for output, text in texts[AVX512].items()
                  if text != texts[AVX2][output]}
        if others:
            parts[part][AVX512] = others
    return dict(row, parts=parts, avx512=[*row['avx512'], features])


def table() -> str:
    """Return two Markdown tables: at which versions, and at which CPUs, digests of parts change."""
    lines = ['| package | from version | part | outputs that differ from the version before |',
             '|---|---|---|---|']
    instructions = ['| package | part | outputs that differ at AVX-512 | versions |',
                    '|---|---|---|---|']
    for row in json.loads(TABLE.read_text())['packages'].values():
        lines.append(f'| {row["distribution"]} | {row["versions"][0]} to {row["versions"][-1]} | '
                     f'{len(row["parts"])} in {len(row["versions"])} versions | |')
        lines += [f'| | {release} | {_wrapped(listed(parts, MAX_PARTS))} | {", ".join(outputs)} |'
                  for release, parts, outputs in _changes(row)]
        instructions += [f'| {row["distribution"]} | {_wrapped(listed(parts, MAX_PARTS))} | '
                         f'{", ".join(outputs)} | {versions} |'
                         for parts, outputs, versions in _levels(row)]
    return '\n'.join([*lines, '', *instructions])


def _wrapped(text: str) -> str:
    """Return the text of a cell in several lines."""
    return '<br>'.join(textwrap.wrap(text, MAX_CELL))


def _changes(row: dict[str, Any]) -> list[tuple[str, list[str], tuple[str, ...]]]:
    """Return version, parts and their outputs of all changes of a package, oldest first."""
    found: dict[tuple[int, str], list[str]] = {}
    for part, content in row['parts'].items():
        for output, text in content['digests'].items():
            at_avx2 = _changed(text)
            at_avx512 = _changed(content.get(AVX512, {}).get(output, text))
            for number in sorted(at_avx2 | at_avx512):
                where = ''
                if number not in at_avx512:
                    where = ' (AVX2)'
                elif number not in at_avx2:
                    where = ' (AVX-512)'
                found.setdefault((number, part), []).append(output + where)
    grouped: dict[tuple[int, tuple[str, ...]], list[str]] = {}
    for number, part in sorted(found):
        grouped.setdefault((number, tuple(sorted(found[number, part]))), []).append(part)
    return [(row['versions'][number], parts, outputs)
            for (number, outputs), parts in grouped.items()]


def _changed(text: str) -> set[int]:
    """Return the numbers of the versions whose digest is not that of the version before."""
    digests = expanded(text)
    return {number for number, (before, after) in enumerate(zip(digests, digests[1:]), 1)
            if before != after and HOLE not in (before, after)}


def _levels(row: dict[str, Any]) -> list[tuple[list[str], tuple[str, ...], str]]:
    """Return parts, outputs and versions where digests at AVX2 and at AVX-512 differ."""
    found: dict[tuple[str, str], list[str]] = {}
    for part, content in row['parts'].items():
        for output, text in content.get(AVX512, {}).items():
            versions = [release for release, before, after in zip(
                row['versions'], expanded(content['digests'][output]), expanded(text))
                if before != after and HOLE not in (before, after)]
            shown = f'{versions[0]} to {versions[-1]}' if versions else ''
            if len(versions) == 1:
                shown = versions[0]
            elif len(versions) == len(row['versions']):
                shown = 'all'
            if versions:
                found.setdefault((part, shown), []).append(output)
    grouped: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for (part, shown), outputs in found.items():
        grouped.setdefault((tuple(sorted(outputs)), shown), []).append(part)
    return [(parts, outputs, shown) for (outputs, shown), parts in grouped.items()]


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
        if content['inputs'] != digest or content['format'] != FORMAT:
            parser.error(f'{args.folder}/inputs.npz or the format is not that of {TABLE}; '
                         'delete the table to begin again')
    content['python'] = platform.python_version()
    content['shared'] = {name: version(name) for name in SHARED}
    features = str(cpu_features())
    for name in args.packages or PACKAGES:
        package = PACKAGES[name]
        maker = maker_of(cpu_name()) if package.by_maker else None
        key = on_maker(name, maker) if maker else name
        before = content['packages'].get(key)
        levels = _measured(name, package, args.folder)
        if before and features not in before['avx512']:
            row = agreed(before, {level: [one[version.replace(' ', '==')]
                                          for version in before['versions']]
                                  for level, one in levels.items()}, features)
        else:
            complete = [release for release in package.versions
                        if all(_computed(one[release]) for one in levels.values())]
            row = dict(distribution=package.distribution, beside=list(package.beside),
                       versions=[release.replace('==', ' ') for release in complete],
                       maker=maker, avx512=[features],
                       parts=merged({level: [one[release] for release in complete]
                                     for level, one in levels.items()}))
        content['packages'][key] = row
        write(content)


def _measured(name: str, package: Package, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the digests of all versions of a package: level -> version -> part -> digests."""
    found: dict[str, dict[str, Any]] = {AVX2: {}, AVX512: {}}
    for release in package.versions:
        for level, one in found.items():
            one[release] = measured_at(name, package, release, level, folder)
        print(f'{name} {release}: {len(found[AVX512][release])} parts', flush=True)
        if package.large:
            shutil.rmtree(overlay(package.requirements(release)[0], folder), ignore_errors=True)
    return found


if __name__ == '__main__':
    main()
