"""Measured changes of another version of a library, by the parts of a config.

``measured.json`` is made by ``python -m dev.versions``. For each package it holds the versions
that were measured, oldest first, and for each part (a transform, say) and each of its outputs the
digests at these versions: ``3*a1 1*- 2*b2`` is one digest at the first three versions, and none at
the fourth. Inputs were fixed; the CPU was an x86-64 with AVX2 and without AVX-512.
"""
from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..util.text import listed

# packages that a training meets in the transforms of its pipelines only, and the parts of models
# that call them nevertheless. NumPy is in too many places to be among them
IN_TRANSFORMS = {
    'cv2': ('SOLOHead', 'DecoupledSOLOHead', 'DecoupledSOLOLightHead', 'SOLOV2Head'),
    'PIL': (),
}
# where a config names transforms: hooks can exchange a pipeline
_PIPELINES = ('config.train_dataloader.', 'config.custom_hooks')
_OTHERS = ('config.model.', 'config.val_evaluator')  # assigners, heads and evaluators
# ends of the names of what stands beside transforms
_NO_TRANSFORMS = ('Dataset', 'Sampler', 'Hook', 'collate')
# defaults of settings that not all rows of a part cover
_DEFAULTS = {'interpolation': 'bilinear', 'backend': 'cv2', 'imdecode_backend': 'cv2',
             'color_type': 'color', 'random_pop': True, 'covariance_type': 'diag',
             'eval_mode': '11points'}
_ANY = '*'  # covered value of a setting: all
HOLE = '-'  # no digest

# outputs that not every pipeline has; transforms after which images are float32
_UINT8, _FLOAT32 = 'uint8 image', 'float32 image'
_BITMAPS, _POLYGONS, _LABEL_MAP = 'bitmap masks', 'polygon masks', 'label map'
_OPTIONAL = {_UINT8, _FLOAT32, _BITMAPS, _POLYGONS, _LABEL_MAP}
_TO_FLOAT32 = ('PhotoMetricDistortion', 'Normalize')


class Effect(NamedTuple):
    """The changes of a package between two versions, by the parts of a config.

    ``changed`` are parts, with those of their outputs that differ. Of ``equal`` parts, all outputs
    that the config has were measured as equal. ``unknown`` parts were not measured at this pair of
    versions, or with other settings.
    """
    changed: tuple[str, ...]
    equal: tuple[str, ...]
    unknown: tuple[str, ...]

    @property
    def all_equal(self) -> bool:
        """Whether all parts were measured, and none differs."""
        return not self.changed and not self.unknown

    def text(self) -> str:
        """Return the measurement in one line."""
        said = ('other results from', self.changed), ('the same from', self.equal), (
            'not measured:', self.unknown)
        return '; '.join(f'{words} {listed(names, 8)}' for words, names in said if names)


class _Part(NamedTuple):
    """A part of a config: its type, and the texts and truth values among its settings."""
    type: str
    settings: Mapping[str, Sequence[Any]]


def effect(package: str, then: Any, now: Any, *runs: Mapping[str, Any]) -> Effect | None:
    """Return the changes between two versions of ``package`` in the configs of runs.

    Args:
        package: its name among the facts, without ``version.``.
        then, now: the versions.
        runs: facts of both runs.

    Returns:
        None where the table has not both versions or no part of the configs, or where a run
        computes with other instructions than those of the table.
    """
    table = _table()['packages'].get(package)
    if table is None or not all(map(_has_instructions, runs)):
        return None
    positions = [_positions(table['versions'], str(version)) for version in (then, now)]
    if not all(positions):
        return None
    changed: dict[str, set[str]] = {}
    equal, unknown = set(), set()
    for run in runs:
        outputs = _outputs(run)
        for part in _transforms(run):
            rows = _rows(table, part)
            different = _different(rows, outputs, *positions)
            if different is None:
                unknown.add(part.type)
            elif different:
                changed.setdefault(part.type, set()).update(different)
            else:
                equal.add(part.type)
        for part in _parts(run, _OTHERS):
            known = {key for name, row in table['parts'].items() if _type(name) == part.type
                     for key in row['covers']}
            # heads have settings that have nothing to do with the call of a library
            rows = _rows(table, part._replace(settings={
                key: values for key, values in part.settings.items() if key in known}))
            different = _different(rows, outputs, *positions)
            if different:
                changed.setdefault(part.type, set()).update(different)
            elif rows and different is not None:
                equal.add(part.type)
            elif part.type in {*map(_type, table['parts']), *IN_TRANSFORMS.get(package, ())}:
                unknown.add(part.type)
    if not changed and not equal:
        return None
    return Effect(tuple(f'{name} ({listed(sorted(changed[name]), 6)})' for name in sorted(changed)),
                  tuple(sorted(equal - unknown - changed.keys())), tuple(sorted(unknown)))


@functools.cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(
        Path(__file__).with_suffix('.json').read_text(encoding='utf-8'))
    return table


def _has_instructions(facts: Mapping[str, Any]) -> bool:
    """Whether libraries compute with AVX2 and with nothing above it."""
    features = str(facts.get('hardware.cpu_features')).split()
    return 'avx2' in features and (
        'avx512f' not in features or facts.get('randomness.numerics.cpu') is not None)


def _positions(versions: Sequence[str], version: str) -> list[int]:
    """Return where a version stands: several times where OpenCV built one more than once."""
    return [number for number, built in enumerate(versions)
            if built == version or re.fullmatch(re.escape(version) + r'\.\d+', built)]


def _type(name: str) -> str:
    """Return the type of a part.

    >>> _type('Rotate(interpolation=nearest)')
    'Rotate'
    """
    return name.partition('(')[0]


def _rows(table: Mapping[str, Any], part: _Part) -> list[Mapping[str, Any]]:
    """Return the rows of a package that hold for a part with its settings."""
    return [row for name, row in table['parts'].items() if _covers(name, row, part)]


def _covers(name: str, row: Mapping[str, Any], part: _Part) -> bool:
    """Whether the digests of a row are those of a part with its settings."""
    if _type(name) != part.type:
        return False
    covers = row['covers']
    wanted: dict[str, Sequence[Any]] = {
        key: [value] for key, value in _DEFAULTS.items() if key in covers}
    wanted.update(part.settings)
    return all(_ANY in covers.get(key, ()) or value in covers.get(key, ())
               for key, values in wanted.items() for value in values)


def _different(rows: Sequence[Mapping[str, Any]], outputs: set[str], then: Sequence[int],
               now: Sequence[int]) -> set[str] | None:
    """Return the outputs that differ; None where nothing or not everything was measured."""
    found, complete = set(), bool(rows)
    for row in rows:
        for output, text in row['digests'].items():
            if output in _OPTIONAL and output not in outputs:
                continue
            digests = expanded(text)
            seen = {digests[number] for number in (*then, *now)}
            if HOLE in seen:
                complete = False
            elif len(seen) > 1:
                found.add(output)
    return found if found or complete else None


def expanded(text: str) -> list[str]:
    """Return the digest at each version.

    >>> expanded('2*a1 1*-')
    ['a1', 'a1', '-']
    """
    digests = []
    for run in text.split():
        count, _, digest = run.partition('*')
        digests += [digest] * int(count)
    return digests


# ------------------------------------------------------------------------------- configs


def _transforms(facts: Mapping[str, Any]) -> Iterator[_Part]:
    """Yield the transforms that a config names, those within other transforms as well."""
    for part in _parts(facts, _PIPELINES):
        if not part.type.endswith(_NO_TRANSFORMS):
            yield part


def _parts(facts: Mapping[str, Any], prefixes: tuple[str, ...]) -> Iterator[_Part]:
    """Yield the parts with a type in the settings whose names begin with one of ``prefixes``."""
    types = {name.rpartition('.')[0]: value.rpartition('.')[2] for name, value in facts.items()
             if name.startswith(prefixes) and name.endswith('.type') and isinstance(value, str)}
    settings: dict[str, dict[str, Sequence[Any]]] = {path: {} for path in types}
    for name, value in facts.items():
        path, _, key = name.rpartition('.')
        if path in types and key != 'type' and _words(value):
            settings[path][key] = _words(value)
    for path, type_ in types.items():
        yield _Part(type_, settings[path])


def _words(value: Any) -> list[Any]:
    """Return the texts and truth values in a setting; lists are texts among the facts.

    >>> _words(True), _words("['left', 'right']"), _words('[1333, 800]'), _words(3)
    ([True], ['left', 'right'], [], [])
    >>> _words("['[CLS]', '[SEP]']"), _words('[MASK] token')
    (['[CLS]', '[SEP]'], ['[MASK] token'])
    """
    if isinstance(value, str) and value.startswith('['):
        with suppress(ValueError, SyntaxError):  # a text, such as '[CLS]', or [0, inf]
            value = ast.literal_eval(value)
    items = value if isinstance(value, list) else [value]
    return [item for item in items if isinstance(item, (str, bool))]


def _outputs(facts: Mapping[str, Any]) -> set[str]:
    """Return which of the optional outputs a pipeline has: too many rather than too few."""
    found = {_UINT8}
    for part in _transforms(facts):
        has = {key for key, values in part.settings.items() if True in values}
        if 'to_float32' in has:
            found.discard(_UINT8)
        if 'to_float32' in has or part.type in _TO_FLOAT32:
            found.add(_FLOAT32)
        if 'with_mask' in has:
            found.add(_POLYGONS if False in part.settings.get('poly2mask', ()) else _BITMAPS)
        if 'with_seg' in has:
            found.add(_LABEL_MAP)
    return found
