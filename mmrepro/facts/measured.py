"""Measured changes of another version of a library, by the parts of a config.

``measured.json`` is made by ``python -m dev.versions``. For each package it holds the versions
that were measured, oldest first, and for each part (a transform, say) and each of its outputs the
digests at these versions: ``3*a1 1*- 2*b2`` is one digest at the first three versions, and none at
the fourth. ``digests`` hold for x86-64 CPUs whose libraries stay at AVX2, ``avx512`` has those
texts that are others at AVX-512 on the CPUs whose features a package lists. A package whose kernels
depend on the maker of the CPU has rows for each, as ``torch on Intel``. Inputs were fixed.
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
# packages that stock transforms and models call in few places, and those places
CALLED_BY = {
    'albumentations': ('Albu', ),
    'scikit-learn': ('PAAHead', 'LADHead'),
    'scipy': ('HungarianAssigner', 'TopkHungarianAssigner', 'CrowdHumanMetric'),
    'timm': ('TIMMBackbone', ),
    'lvis': ('LVISMetric', ),
    'cityscapesscripts': ('CityScapesMetric', ),
}
# packages, and stock transforms that compute nothing with them
NOT_CALLED_BY = {'torch': ('LoadImageFromFile', 'LoadAnnotations')}
ALBU = 'Albu'  # the transforms that it builds are albumentations', and `Albu.Resize` among the rows
# variables that move a library to other instructions
_VARIABLES = ('ATEN_CPU_CAPABILITY', 'OPENCV_CPU_DISABLE', 'OPENCV_IPP', 'NPY_DISABLE_CPU_FEATURES',
              'NPY_ENABLE_CPU_FEATURES')
# where a config names transforms: hooks can exchange a pipeline
_PIPELINES = ('config.train_dataloader.', 'config.custom_hooks')
# detectors, assigners, heads, evaluators and optimizers
_OTHERS = ('config.model.', 'config.val_evaluator', 'config.optim_wrapper.')
# what torch computes in every config, measured or not
_COMPUTED = ('config.model', 'config.optim_wrapper.optimizer')
# ends of the names of what stands beside transforms
_NO_TRANSFORMS = ('Dataset', 'Sampler', 'Hook', 'collate')
# defaults of settings that not all rows of a part cover
_DEFAULTS = {'interpolation': 'bilinear', 'backend': 'cv2', 'imdecode_backend': 'cv2',
             'color_type': 'color', 'random_pop': True, 'covariance_type': 'diag',
             'eval_mode': '11points', 'pretrained': False, 'features_only': False}
# settings whose numbers choose among methods
_CHOICES = ('interpolation', 'border_mode')
_ANY = '*'  # covered value of a setting: all
_ARGUMENTS = 'arguments'  # among covered settings: the names of all arguments
_ANY_NUMBER = {'p'}  # arguments that all rows cover
HOLE = '-'  # no digest
AVX2, AVX512 = 'avx2', 'avx512'  # levels of instructions

# outputs that not every pipeline has; transforms after which images are float32
_UINT8, _FLOAT32 = 'uint8 image', 'float32 image'
_BITMAPS, _POLYGONS, _LABEL_MAP = 'bitmap masks', 'polygon masks', 'label map'
# ends the names of outputs of parts that mmrepro patches
_STOCK = ' of stock MMDetection'
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
    """A part of a config: where it is, its type, the names of its arguments, and the choices."""
    path: str
    type: str
    arguments: frozenset[str]
    settings: Mapping[str, Sequence[Any]]  # texts, truth values, and numbers that stand for methods


class _Place(NamedTuple):
    """Where the digests of a run stand in a table: the level, and the numbers of its version."""
    level: str
    numbers: Sequence[int]  # several where OpenCV built a version more than once


def effect(package: str, then: Any, now: Any, *runs: Mapping[str, Any]) -> Effect | None:
    """Return the changes between two versions of ``package`` in the configs of two runs.

    Args:
        package: its name among the facts, without ``version.``.
        then, now: the versions.
        runs: facts of both runs, in this order.

    Returns:
        None where the table has not both versions or no part of the configs, or where a run
        computes with other instructions than those of the table.
    """
    tables = [_rows_of(package, facts) for facts in runs]
    table = tables[0]
    if table is None or any(other is not table for other in tables):
        return None
    places = [place for version, facts in zip((then, now), runs)
              if (place := _place(table, str(version), facts))]
    # stock pipelines of albumentations have seeds of the operating system
    seeded = package != 'albumentations' or not any(run.get('mmrepro') is False for run in runs)
    if len(places) < len(runs) or not seeded:
        return None
    changed: dict[str, set[str]] = {}
    equal, unknown = set(), set()
    for run in runs:
        outputs = _outputs(run)
        for part in _called_parts(package, table, run):
            rows = _rows(table, part)
            different = _different(rows, outputs, places)
            if different:
                changed.setdefault(part.type, set()).update(different)
            elif different is None:
                unknown.add(part.type)
            else:
                equal.add(part.type)
    if not changed and not equal:
        return None
    return Effect(tuple(f'{name} ({listed(sorted(changed[name]), 6)})' for name in sorted(changed)),
                  tuple(sorted(equal - unknown - changed.keys())), tuple(sorted(unknown)))


def by_instructions(facts: Mapping[str, Any]) -> list[str]:
    """Return the transforms of a run that give other results on another CPU, with their outputs.

    These differ at AVX-512, or, where ``numerics.cpu`` pins AVX2, two CPUs disagreed at AVX2. A
    version that was not measured counts as all that were.
    """
    pinned = facts.get('randomness.numerics.cpu') is not None
    found = set()
    outputs = _outputs(facts)
    for package in ('cv2', 'albumentations'):  # others call no kernels of their own
        table = _table()['packages'][package]
        numbers = _numbers(table, str(facts.get(f'version.{package}'))) \
            or range(len(table['versions']))
        for part in _called_parts(package, table, facts):
            for row in _rows(table, part):
                for output, text in row.get(AVX512, {}).items():
                    pairs = [*zip(expanded(row['digests'][output]), expanded(text))]
                    different = {pairs[number] for number in numbers
                                 if pairs[number][0] != pairs[number][1]}
                    if pinned:
                        different = {pair for pair in different if pair[0] == HOLE}
                    if different and (output in outputs or output not in _OPTIONAL):
                        found.add(f'{part.type} ({output})')
    return sorted(found)


@functools.cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(
        Path(__file__).with_suffix('.json').read_text(encoding='utf-8'))
    return table


@functools.cache
def _measured_types() -> frozenset[str]:
    return frozenset(_type(name) for table in _table()['packages'].values()
                     for name in table['parts'])


def _rows_of(package: str, facts: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the rows of a package that hold for the CPU of a run."""
    packages: Mapping[str, Mapping[str, Any]] = _table()['packages']
    return packages.get(package) or packages.get(
        on_maker(package, maker_of(str(facts.get('hardware.cpu')))))


def on_maker(package: str, maker: str) -> str:
    """Return the name of the rows of a package that hold for CPUs of this maker only."""
    return f'{package} on {maker}'


def _place(table: Mapping[str, Any], version: str, facts: Mapping[str, Any]) -> _Place | None:
    """Return where the table has the digests of a version with the instructions of a run."""
    level = _level(facts, table[AVX512])
    if table['maker'] and (facts.get('hardware.gpu')
                           or facts.get('randomness.numerics.cpu') == 'portable'):
        return None  # other kernels
    numbers = _numbers(table, version)
    return _Place(level, numbers) if level and numbers else None


def _numbers(table: Mapping[str, Any], version: str) -> list[int]:
    """Return where a version stands among those of a table; [] where it was not measured."""
    return [number for number, built in enumerate(table['versions'])
            if built == version or re.fullmatch(re.escape(version) + r'\.\d+', built)]


def _level(facts: Mapping[str, Any], measured_on: Sequence[str]) -> str | None:
    """Return the instructions that libraries compute with; None: not those of the table.

    Args:
        measured_on: features of the CPUs that were measured at AVX-512.
    """
    features = str(facts.get('hardware.cpu_features'))
    pinned = facts.get('randomness.numerics.cpu') is not None
    set_by_user = any(facts.get(f'env.{name}') for name in _VARIABLES)
    # at AVX-512, parts that depend on OpenBLAS count as not measured
    set_by_user |= facts.get('env.OPENBLAS_CORETYPE') not in (None, 'Haswell')
    if 'avx2' not in features.split() or set_by_user and not pinned:
        return None
    if pinned or 'avx512f' not in features.split():
        return AVX2
    return AVX512 if features in measured_on else None


def maker_of(cpu: str) -> str:
    """Return the maker in the model name of a processor, or ''.

    >>> maker_of('AMD EPYC 9654 96-Core Processor')
    'AMD'
    """
    return cpu.partition(' ')[0]


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
    if _ARGUMENTS in covers and part.arguments - _ANY_NUMBER != {*covers[_ARGUMENTS]}:
        return False
    wanted: dict[str, Sequence[Any]] = {
        key: [value] for key, value in _DEFAULTS.items() if key in covers}
    wanted.update(part.settings)
    return all(_ANY in covers.get(key, ()) or value in covers.get(key, ())
               for key, values in wanted.items() for value in values)


def _different(rows: Sequence[Mapping[str, Any]], outputs: set[str],
               places: Sequence[_Place]) -> set[str] | None:
    """Return the outputs that differ; None where nothing or not everything was measured."""
    found, complete = set(), bool(rows)
    for row in rows:
        texts = row['digests']
        if _UINT8 in texts and not outputs & texts.keys() & {_UINT8, _FLOAT32}:
            complete = False  # measured with other images
        for output, text in texts.items():
            if output in _OPTIONAL and output not in outputs:
                continue
            if output.endswith(_STOCK) and _STOCK not in outputs:
                continue
            levels = {AVX2: expanded(text), AVX512: expanded(row.get(AVX512, {}).get(output, text))}
            seen = {levels[place.level][number] for place in places for number in place.numbers}
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


def _called_parts(package: str, table: Mapping[str, Any],
                  facts: Mapping[str, Any]) -> Iterator[_Part]:
    """Yield the parts of a config that may call a package, with the settings that rows know."""
    known: dict[str, set[str]] = {}
    for name, row in table['parts'].items():
        known.setdefault(_type(name), set()).update(row['covers'])
    callers = CALLED_BY.get(package)
    for part in _transforms(facts):
        outer = part.type.partition('.')[0]
        # who knows what transforms call that no table has
        stock = part.type in _measured_types() and outer != ALBU
        if outer in NOT_CALLED_BY.get(package, ()):
            continue
        if callers is None or outer in callers or not stock:
            yield part
    for part in _parts(facts, _OTHERS):
        computed = package == 'torch' and part.path in _COMPUTED
        if computed or part.type in (*known, *IN_TRANSFORMS.get(package, ()), *(callers or ())):
            # heads have settings that have nothing to do with the call of a library
            yield part._replace(settings={key: values for key, values in part.settings.items()
                                          if key in known.get(part.type, ())})


def _transforms(facts: Mapping[str, Any]) -> Iterator[_Part]:
    """Yield the transforms that a config names, those within other transforms as well."""
    for part in _parts(facts, _PIPELINES):
        if not part.type.endswith(_NO_TRANSFORMS):
            yield part


def _parts(facts: Mapping[str, Any], prefixes: tuple[str, ...]) -> Iterator[_Part]:
    """Yield the parts with a type in the settings whose names begin with one of ``prefixes``."""
    types = {name.rpartition('.')[0]: value.rpartition('.')[2] for name, value in facts.items()
             if name.startswith(prefixes) and name.endswith('.type') and isinstance(value, str)}
    albu = tuple(f'{path}.' for path, type_ in types.items() if type_ == ALBU)
    arguments: dict[str, set[str]] = {path: set() for path in types}
    settings: dict[str, dict[str, Sequence[Any]]] = {path: {} for path in types}
    for name, value in facts.items():
        path, _, key = name.rpartition('.')
        if path not in types or key == 'type':
            continue
        arguments[path].add(key)
        words = [value] if key in _CHOICES else _words(value)
        if words:
            settings[path][key] = words
    for path, type_ in types.items():
        if path.startswith(albu):
            type_ = f'{ALBU}.{type_}'
        yield _Part(path, type_, frozenset(arguments[path]), settings[path])


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
    if facts.get('mmrepro') is False:
        found.add(_STOCK)
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
