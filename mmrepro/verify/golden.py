"""Goldens: the expected fingerprints of a short run of a config, kept in the repository.

Layout, all of it text for version control:

    GOLDENS/CONFIG_NAME/recipe.json     what to train: config, iterations, data, level, options
    GOLDENS/CONFIG_NAME/CLASS/          one for each class of hardware and versions
        facts.json                      the facts of the class, and all others of the run
        mmrepro/fingerprints.rank0.jsonl

A class is the kind of machine for which the same bits are promised: processor or GPU, versions of
what computes, number of threads.
"""
from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

from mmengine.config import Config

from ..errors import GoldenError
from ..facts.compatibility import CHANGES, FactDifference, differences, severity
from ..fingerprint.divergence import Divergence, difference_up_to
from ..fingerprint.manifest import read_manifest
from ..fingerprint.reader import RankLog, read_ranks
from ..fingerprint.schema import FACTS as FACTS_SHAPE
from ..fingerprint.schema import FOLDER
from ..report.report import plain
from ..runs.child import Training
from ..runs.config_edits import only_fingerprints, prepare
from ..runs.launcher import one_thread_each, plan
from ..runs.progress import run_with_progress
from ..util.files import checked, or_none, read_json, write_whole

RECIPE, FACTS = 'recipe.json', 'facts.json'
FORMAT = 1
_RECIPE = {'config': str, 'iterations': int, 'level': str, 'demo_data': or_none(str),
           'full': bool, 'options': [str]}
OF_A_CLASS = ('hardware.', 'version.', 'torch.num_threads')


class Recipe(NamedTuple):
    """What is trained. Paths are relative to the folder in which the command is started."""
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
    def equal(self) -> bool | None:
        """Whether the bits agree; None without a golden."""
        return None if self.golden is None else self.difference is None


def class_of(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts that decide whether two machines give the same bits."""
    return {name: value for name, value in sorted(facts.items())
            if name.startswith(OF_A_CLASS) and severity(name, facts) == CHANGES}


def class_name(facts: dict[str, Any]) -> str:
    """Return a readable name that differs for different classes.

    >>> class_name({'hardware.cpu': 'ACME X1', 'hardware.gpu': None, 'version.torch': '2.9.0'})
    'acme-x1_torch-2.9.0_28c5f1'
    """
    decisive = class_of(facts)
    cpu = decisive.get('hardware.cpu', 'x86-64' if 'hardware.cpu' in facts else 'unknown')
    machine = facts.get('hardware.gpu') or cpu
    digest = hashlib.sha256(json.dumps(decisive, default=str).encode()).hexdigest()[:6]
    text = f'{machine}_torch-{facts.get("version.torch")}'.lower()
    return f'{re.sub(r"[^a-z0-9._]+", "-", text).strip("-")}_{digest}'


def read_recipes(goldens: str, names: Sequence[str] = ()) -> list[Recipe]:
    """Read the recipes in a folder, or those of these configs (names or paths)."""
    wanted = [os.path.splitext(os.path.basename(name))[0] for name in names]
    recorded = sorted(name for name in (os.listdir(goldens) if os.path.isdir(goldens) else ())
                      if os.path.isfile(os.path.join(goldens, name, RECIPE)))
    missing = [name for name in wanted if name not in recorded]
    if missing or not recorded:
        raise GoldenError(f'{goldens}: no golden {"of " + missing[0] if missing else "at all"}; '
                          'mmrepro golden record CONFIG makes one')
    return [_read_recipe(os.path.join(goldens, name, RECIPE)) for name in wanted or recorded]


def _read_recipe(path: str) -> Recipe:
    content = read_json(path, GoldenError)
    if not isinstance(content, dict) or content.get('kind') != 'golden' or \
            content.get('format') != FORMAT:
        raise GoldenError(f'{path}: not a golden of format {FORMAT}')
    checked(path, content, GoldenError, _RECIPE)
    recipe = Recipe(**{name: value for name, value in content.items() if name in Recipe._fields})
    if recipe.name != os.path.basename(os.path.dirname(path)):
        raise GoldenError(f'{path}: config is {recipe.config!r}, and the folder has another name')
    return recipe


def train(recipe: Recipe, cfg: Config, work_dir: str,
          say: Callable[[str], None] = lambda text: None) -> str:
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
    run_with_progress([run], recipe.iterations, say)
    return folder


def record(recipe: Recipe, goldens: str, run: str) -> str:
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


def _whole(recipe: Recipe, folder: str, advice: str) -> dict[int, RankLog]:
    """Return the fingerprints in ``folder``, which must have all iterations of the recipe."""
    ranks = read_ranks(folder)
    steps = ranks[0].steps if 0 in ranks else {}
    if list(steps) != list(range(recipe.iterations)):
        raise GoldenError(f'{folder}: has {len(steps)} of {recipe.iterations} iterations; {advice}')
    return ranks


def _write(path: str, content: dict[str, Any]) -> None:
    write_whole(path, json.dumps(content, indent=1, default=str, sort_keys=True) + '\n')


def check(recipe: Recipe, goldens: str, run: str) -> Checked:
    """Compare the run in the folder ``run`` with the golden of its class."""
    facts = read_manifest(run).facts
    name = class_name(facts)
    folder = os.path.join(goldens, recipe.name)
    golden = os.path.join(folder, name)
    if not os.path.isdir(golden):
        classes = [path for path in sorted(os.listdir(folder))
                   if os.path.isdir(os.path.join(folder, path))]
        differing = {path: differences(class_of(_facts(os.path.join(folder, path))),
                                       class_of(facts)) for path in classes}
        nearest = min(classes, key=lambda path: len(differing[path]), default='')
        return Checked(recipe.name, name, None, facts=differing.get(nearest, ()), nearest=nearest)
    difference = difference_up_to(_whole(recipe, golden, 'record it again'), read_ranks(run),
                                  recipe.iterations)
    return Checked(recipe.name, name, golden,
                   recipe.iterations if difference is None else difference.iteration, difference,
                   differences(_facts(golden), facts))


def _facts(golden: str) -> dict[str, Any]:
    return read_json(os.path.join(golden, FACTS), GoldenError, {'facts': FACTS_SHAPE})['facts']
