"""Goldens: expected bits in the repository, of a short run of a config, and of values in tests.

Layout, all of it text for version control:

    GOLDENS/CONFIG_NAME/recipe.json     what to train: config, iterations, data, level, options
    GOLDENS/CONFIG_NAME/CLASS/          one for each class of hardware and versions
        facts.json                      the facts of the class, and all others of the run
        mmrepro/fingerprints.rank0.jsonl
    TESTS/same_bits/MODULE.json         digests of the values of a test module, for each class

A class is the kind of machine for which the same bits are promised: processor or GPU, versions of
what computes, number of threads.
"""
from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Callable, NamedTuple

from mmengine.config import Config

from ..demo import use_data, write_dataset
from ..errors import DIFFERENT, DONE, NOTHING_TO_COMPARE, GoldenError
from ..facts.collect import collect_facts
from ..facts.compatibility import CHANGES, FactDifference, differences, severity, table
from ..fingerprint.divergence import Divergence, difference_up_to, differing_names
from ..fingerprint.manifest import read_manifest
from ..fingerprint.reader import RankLog, read_ranks
from ..fingerprint.schema import FACTS as FACTS_SHAPE
from ..fingerprint.schema import FOLDER
from ..objects.digests import state_digest
from ..ops import portable
from ..report.report import Report, plain
from ..runs.child import Training
from ..runs.config_edits import only_fingerprints, prepare
from ..runs.config_files import read_config, setting
from ..runs.launcher import one_thread_each, plan, run_with_progress
from ..util.files import checked, or_none, read_json, write_whole
from ..util.text import counted

GOLDENS = 'goldens'
WORK_DIR = os.path.join('work_dirs', 'golden')
ITERATIONS, LEVEL = 3, 'step'  # of a run, unless the caller says otherwise
RECIPE, FACTS = 'recipe.json', 'facts.json'
FORMAT = 1
_RECIPE = {'config': str, 'iterations': int, 'level': str, 'demo_data': or_none(str),
           'full': bool, 'options': [str]}
OF_A_CLASS = ('hardware.', 'version.', 'torch.num_threads')


OnProgress = Callable[[str], None]


def record_goldens(configs: Sequence[str], *, goldens: str = GOLDENS, iterations: int = ITERATIONS,
                   level: str = LEVEL, demo_data: str | None = None, full: bool = False,
                   options: Sequence[str] = (), work_dir: str = WORK_DIR,
                   on_start: OnProgress = lambda text: None,
                   on_progress: OnProgress = lambda text: None) -> Report:
    """Train configs for a few iterations, and keep their fingerprints in a folder.

    Args:
        configs: paths, relative to the folder in which checks will be started.
        goldens: the folder.
        iterations: number of iterations of each run.
        level: level of the fingerprints.
        demo_data: folder for the demonstration dataset, to train on it.
        full: images, batch and weights as in the config, instead of small ones.
        options: changes of the configs, as ``KEY=VALUE``.
        work_dir: where the runs write.
        on_start: called with a line for each config that is trained.
        on_progress: called with lines about the progress.

    Raises:
        GoldenError: a config cannot have a golden, or the folder has another one of it.
        TrainingFailed: a training ended with an error.
    """
    kept = {}
    for config in configs:
        recipe = GoldenRecipe(os.path.normpath(config), iterations, level, demo_data, full,
                              list(options))
        run = _trained(recipe, work_dir, on_start, on_progress)
        kept[config] = record(recipe, goldens, run)
    return Report('', '\n'.join(f'recorded {path}' for path in kept.values()),
                  data=dict(goldens=kept))


def check_goldens(configs: Sequence[str] = (), *, goldens: str = GOLDENS, missing: str = 'fail',
                  work_dir: str = WORK_DIR,
                  on_report: Callable[[Report], None] = lambda report: None,
                  on_start: OnProgress = lambda text: None,
                  on_progress: OnProgress = lambda text: None) -> Report:
    """Train what was recorded, and compare the fingerprints with those that were kept.

    Args:
        configs: names or paths; none: all that the folder has.
        goldens: the folder.
        missing: where there is no golden for this machine: ``'fail'``, ``'pass'``, or
            ``'record'`` one.
        work_dir: where the runs write.
        on_report: called with the report on each config.
        on_start, on_progress: as for :func:`record_goldens`.

    Returns:
        A report whose exit code is 0 (all are equal), 1 (one is different) or 3 (a golden is
        missing).

    Raises:
        GoldenError: there is no golden, or it is damaged.
        TrainingFailed: a training ended with an error.
    """
    results: list[Checked] = []
    for recipe in read_recipes(goldens, configs):
        run = _trained(recipe, work_dir, on_start, on_progress)
        result = check(recipe, goldens, run)
        results.append(result)
        on_report(Report('', _text(result, missing, run), DONE if result.equal else DIFFERENT))
        if result.golden is None and missing == 'record':
            on_start(f'recorded {record(recipe, goldens, run)}')
    code = DONE
    if any(result.difference for result in results):
        code = DIFFERENT
    elif missing == 'fail' and any(result.golden is None for result in results):
        code = NOTHING_TO_COMPARE
    return Report('', '', code, data=dict(goldens=[dict(
        config=result.name, machine=result.class_name, golden=result.golden,
        equal=result.equal if result.golden else None,
        iterations=result.iterations, nearest=result.nearest or None,
        difference=result.difference.as_dict() if result.difference else None,
        facts=result.facts) for result in results]))


class GoldenRecipe(NamedTuple):
    """The training of a golden. Paths are relative to the folder in which the command starts."""
    config: str
    iterations: int
    level: str = 'step'  # of the fingerprints
    demo_data: str | None = None  # folder to which the demonstration dataset is written
    full: bool = False  # images, batch and weights as in the config
    options: Sequence[str] = ()  # ``KEY=VALUE``

    @property
    def name(self) -> str:
        return os.path.splitext(os.path.basename(self.config))[0]


class Checked(NamedTuple):
    """The outcome of the check of one config."""
    name: str
    class_name: str  # of this machine
    golden: str | None  # folder; None if this machine has no golden
    iterations: int = 0  # number of equal iterations
    difference: Divergence | None = None
    facts: Sequence[FactDifference] = ()  # from the golden, else from the nearest class
    nearest: str = ''  # the class that differs in the fewest facts

    @property
    def equal(self) -> bool:
        """Whether there is a golden, and the bits agree with it."""
        return self.golden is not None and self.difference is None


def machine_class(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts that decide whether two machines give the same bits."""
    return {name: value for name, value in sorted(facts.items())
            if name.startswith(OF_A_CLASS) and severity(name, facts) == CHANGES}


def class_name(facts: dict[str, Any]) -> str:
    """Return a readable name that differs for different classes.

    >>> class_name({'hardware.cpu': 'ACME X1', 'hardware.gpu': None, 'version.torch': '2.9.0'})
    'acme-x1_torch-2.9.0_28c5f1'
    """
    decisive = machine_class(facts)
    cpu = decisive.get('hardware.cpu', 'x86-64' if 'hardware.cpu' in facts else 'unknown')
    machine = facts.get('hardware.gpu') or cpu
    digest = hashlib.sha256(json.dumps(decisive, default=str).encode()).hexdigest()[:6]
    text = f'{machine}_torch-{facts.get("version.torch")}'.lower()
    return f'{re.sub(r"[^a-z0-9._]+", "-", text).strip("-")}_{digest}'


def read_recipes(goldens: str, names: Sequence[str] = ()) -> list[GoldenRecipe]:
    """Read the recipes in a folder, or those of these configs (names or paths)."""
    wanted = [os.path.splitext(os.path.basename(name))[0] for name in names]
    recorded = sorted(name for name in (os.listdir(goldens) if os.path.isdir(goldens) else ())
                      if os.path.isfile(os.path.join(goldens, name, RECIPE)))
    missing = [name for name in wanted if name not in recorded]
    if missing or not recorded:
        of = f'of {missing[0]}' if missing else 'at all'
        raise GoldenError(f'{goldens}: no golden {of}; mmrepro golden record CONFIG makes one')
    return [_read_recipe(os.path.join(goldens, name, RECIPE)) for name in wanted or recorded]


def _read_recipe(path: str) -> GoldenRecipe:
    content = read_json(path, GoldenError)
    if not isinstance(content, dict) or content.get('kind') != 'golden' or \
            content.get('format') != FORMAT:
        raise GoldenError(f'{path}: not a golden of format {FORMAT}')
    checked(path, content, GoldenError, _RECIPE)
    recipe = GoldenRecipe(**{name: value for name, value in content.items()
                             if name in GoldenRecipe._fields})
    if recipe.name != os.path.basename(os.path.dirname(path)):
        raise GoldenError(f'{path}: config is {recipe.config!r}, and the folder has another name')
    return recipe


def train(recipe: GoldenRecipe, cfg: Config, work_dir: str,
          on_progress: Callable[[str], None] = lambda text: None) -> str:
    """Train a recipe in a fresh process, and return the folder of the run within ``work_dir``.

    ``cfg``, its config with its options, is changed. An earlier run in the folder is replaced.
    """
    randomness = cfg.get('randomness') or {}
    for key, valid in (('seed', randomness.get('seed') is not None),
                       ('deterministic', randomness.get('deterministic') is True)):
        if not valid:
            raise GoldenError(f'{recipe.config}: randomness.{key}={randomness.get(key)!r}: a '
                              'golden needs randomness = dict(seed=..., deterministic=True)')
    prepare(cfg, (), recipe.full)
    only_fingerprints(cfg, recipe.level)
    folder = os.path.abspath(os.path.join(work_dir, recipe.name))
    path = os.path.join(folder, 'config.py')
    cfg.work_dir, cfg.resume = folder, False
    run = plan(recipe.name, folder, [Training(path, iterations=recipe.iterations)],
               {'PYTHONHASHSEED': '0', **one_thread_each()})
    cfg.dump(path)
    run_with_progress([run], recipe.iterations, on_progress)
    return folder


def record(recipe: GoldenRecipe, goldens: str, run: str) -> str:
    """Keep the fingerprints of the run in the folder ``run``; return the folder of its class."""
    folder = os.path.join(goldens, recipe.name)
    path = os.path.join(folder, RECIPE)
    if os.path.exists(path):
        earlier = plain(_read_recipe(path))
        changed = [name for name, value in plain(recipe).items()
                   if value != earlier[name]]
        if changed:
            raise GoldenError(
                f'{path} has {changed[0]}={earlier[changed[0]]!r}, and now it is '
                f'{getattr(recipe, changed[0])!r}; record the same, or remove {folder} first')
    _whole(recipe, run, 'the training ended early: record fewer, --iters')
    facts = read_manifest(run).facts
    into = os.path.join(folder, class_name(facts))
    shutil.rmtree(into, ignore_errors=True)
    os.makedirs(os.path.join(into, FOLDER))
    _write(path, dict(kind='golden', format=FORMAT, **recipe._asdict()))
    _write(os.path.join(into, FACTS), dict(kind='facts', format=FORMAT, facts=facts))
    for name in os.listdir(os.path.join(run, FOLDER)):
        if name.startswith('fingerprints'):
            shutil.copyfile(os.path.join(run, FOLDER, name), os.path.join(into, FOLDER, name))
    return into


def _whole(recipe: GoldenRecipe, folder: str, advice: str) -> dict[int, RankLog]:
    """Return the fingerprints in ``folder``, which must have all iterations of the recipe."""
    ranks = read_ranks(folder)
    steps = ranks[0].steps if 0 in ranks else {}
    if list(steps) != list(range(recipe.iterations)):
        raise GoldenError(f'{folder}: has {len(steps)} of '
                          f'{counted(recipe.iterations, "iteration")}; {advice}')
    return ranks


def _write(path: str, content: dict[str, Any]) -> None:
    write_whole(path, json.dumps(content, indent=1, default=str, sort_keys=True) + '\n')


def check(recipe: GoldenRecipe, goldens: str, run: str) -> Checked:
    """Compare the run in the folder ``run`` with the golden of its class."""
    facts = read_manifest(run).facts
    name = class_name(facts)
    folder = os.path.join(goldens, recipe.name)
    golden = os.path.join(folder, name)
    if not os.path.isdir(golden):
        classes = [path for path in sorted(os.listdir(folder))
                   if os.path.isdir(os.path.join(folder, path))]
        differing = {path: differences(machine_class(_facts(os.path.join(folder, path))),
                                       machine_class(facts)) for path in classes}
        nearest = min(classes, key=lambda path: len(differing[path]), default='')
        return Checked(recipe.name, name, None, facts=differing.get(nearest, ()), nearest=nearest)
    difference = difference_up_to(_whole(recipe, golden, 'record it again'), read_ranks(run),
                                  recipe.iterations)
    return Checked(recipe.name, name, golden,
                   recipe.iterations if difference is None else difference.iteration, difference,
                   differences(_facts(golden), facts))


def _facts(golden: str) -> dict[str, Any]:
    facts: dict[str, Any] = read_json(
        os.path.join(golden, FACTS), GoldenError, {'facts': FACTS_SHAPE})['facts']
    return facts


def _trained(recipe: GoldenRecipe, work_dir: str, on_start: OnProgress,
             on_progress: OnProgress) -> str:
    """Train a recipe with the config and the data that it names; return the folder of the run."""
    if not os.path.isfile(recipe.config):
        raise GoldenError(f'{recipe.config}: no such config (seen from {os.getcwd()})')
    cfg = read_config(recipe.config, dict(map(setting, recipe.options)))
    if recipe.demo_data is not None:
        write_dataset(recipe.demo_data)
        # as the recipe says it, because batches hold the paths of their images
        use_data(cfg, recipe.demo_data)
    size = 'images, batch and weights as in the config' if recipe.full else 'small'
    on_start(f'{recipe.name}: {size}; no validation, no checkpoints; fingerprints')
    return train(recipe, cfg, work_dir, on_progress)


def _text(result: Checked, missing: str, run: str) -> str:
    if result.equal:
        length = counted(result.iterations, 'iteration')
        return f'EQUAL: {result.name}, {length}, {result.class_name}'
    if result.golden is None:
        lines = [f'NO GOLDEN for this machine: {result.name}, {result.class_name}']
        if result.nearest:
            lines.append(f'  the nearest is {result.nearest}; different:\n{table(result.facts)}')
        if missing != 'record':
            lines.append('  --missing record keeps the bits of this machine')
        return '\n'.join(lines)
    difference = result.difference.text() if result.difference else ''
    lines = [f'DIFFERENT after {result.iterations} equal iterations: {result.name}, '
             f'{difference} (first the golden, then this run)']
    if result.facts:
        lines.append(f'different since it was recorded:\n{table(result.facts)}')
    return '\n'.join([*lines, f'  mmrepro compare {result.golden} {run}',
                      '  if the change is meant: mmrepro golden record, and commit the result'])


_SAME_BITS_FORMAT = 1
_SAME_BITS = {'kind': str, 'format': int, 'classes': {str: dict}, 'bits': {str: dict}}


class NoBits(GoldenError):
    """No bits are kept for machines of this class."""


def digests(value: Any, name: str = '') -> Iterator[tuple[str, str]]:
    """Yield the name and a digest of 16 digits of each value in nested dicts, lists and tuples.

    An empty one is a value.

    >>> [name for name, _ in digests(dict(loss=1., weights=[2, 3]))]
    ['loss', 'weights.0', 'weights.1']
    """
    if not isinstance(value, (dict, list, tuple)) or not value:
        yield name or 'the value', state_digest(value)[:16]
        return
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield from digests(part, f'{name}.{key}' if name else str(key))


class KeptBits:
    """The calls of one test, in order, and the JSON file with their bits, which need not exist."""

    def __init__(self, path: Path, test: str) -> None:
        self.path, self.test = path, test
        self._calls: list[dict[str, str]] = []

    def next(self, value: Any, update: bool = False) -> str:
        """Return the difference in the next call of the test; '' for none.

        Args:
            update: note the bits for :meth:`write`, and compare nothing.

        Raises:
            NoBits: the file has bits of this test, but of other classes of machines only.
            GoldenError: the file is damaged, or two values have one name.
        """
        found: dict[str, str] = {}
        for part, digest in digests(value):
            if part in found:
                raise GoldenError(f'same_bits in {self.test}: two values are called {part!r}')
            found[part] = digest
        self._calls.append(found)
        if update:
            return ''
        bits, name = self._read()['bits'], class_name(_facts_here())
        again = 'pytest --mmrepro-update keeps them'
        if not any(self.test in tests for tests in bits.values()):
            return f'{self.path} has no bits of {self.test}; {again}'
        if self.test not in bits.get(name, ()):
            raise NoBits(f'{self.path} has bits of {self.test} for other machines and versions, '
                         f'and this is {name}; {again}')
        calls, number = bits[name][self.test], len(self._calls)
        if number > len(calls):
            return f'call {number} of same_bits in {self.test} is new; {again}'
        expected = calls[number - 1]
        differing = differing_names(expected, found)
        if not differing:
            return ''
        return (f'{len(differing)} of {len(found)} values have different bits from those in '
                f'{self.path} ({name}), the first one is {differing[0]}. If that is intended, '
                f'{again}')

    def missing(self) -> str:
        """Return the calls that a finished test did not compare, as text; '' for none."""
        kept = self._read()['bits'].get(class_name(_facts_here()), {}).get(self.test, [])
        return '' if len(self._calls) >= len(kept) else (
            f'same_bits was called {len(self._calls)} times in {self.test}, and {self.path} has '
            f'{len(kept)} calls; pytest --mmrepro-update keeps these')

    def write(self) -> None:
        """Put the bits of all calls into the file, for this class of machines."""
        content, facts = self._read(), _facts_here()
        name = class_name(facts)
        content['classes'][name] = machine_class(facts)
        content['bits'].setdefault(name, {})[self.test] = self._calls
        self.path.parent.mkdir(exist_ok=True)
        _write(str(self.path), content)

    def _read(self) -> dict[str, Any]:
        if not self.path.exists():
            return dict(kind='same_bits', format=_SAME_BITS_FORMAT, classes={}, bits={})
        content: dict[str, Any] = read_json(str(self.path), GoldenError, _SAME_BITS)
        if (content['kind'], content['format']) != ('same_bits', _SAME_BITS_FORMAT):
            raise GoldenError(f'{self.path}: not a file of same_bits of format {_SAME_BITS_FORMAT}')
        return content


def _facts_here() -> dict[str, Any]:
    randomness = dict(numerics=dict(cpu='portable')) if portable.installed() else {}
    return collect_facts(Config(), randomness, 1)
