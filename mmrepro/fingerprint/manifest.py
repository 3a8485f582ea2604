"""``manifest.json``: settings, data, code and environment of a run, and their comparison."""
from __future__ import annotations

import datetime
import functools
import hashlib
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from mmengine.dist import get_world_size

from ..distributed.process_group import process_count
from ..distributed.unwrap import unwrap
from ..errors import ConfigError, FingerprintError
from ..facts import collect, own_code
from ..facts.collect import collect_facts, flatten, read_settings, settings_of
from ..facts.compatibility import FactDifference, differences
from ..facts.training_data import training_data
from ..facts.variables import reads
from ..util.files import checked, write_whole
from .digest import Snapshot
from .reader import read_manifest_file
from .schema import FOLDER, FORMAT, REPEATED, SELF_CHECKS

# parts of a manifest that are compared in another form: as facts, or not at all
NOT_COMPARED = ('kind', 'format', 'config', 'facts', 'randomness', 'world_size', 'processes',
                'sources', SELF_CHECKS)


class Manifest(NamedTuple):
    """A manifest that was read: path of the file, and its JSON."""
    path: str
    content: dict[str, Any]

    @property
    def config_text(self) -> str:
        return str(self.content['config']['text'])

    @property
    def facts(self) -> dict[str, Any]:
        """The facts in the form of checkpoints: settings of the config are ``config.*``."""
        try:
            settings = settings_of(read_settings(self.config_text))
        except ConfigError as error:
            raise FingerprintError(f'{self.path}: config.text: {error}') from error
        return {**self.content['facts'], **settings}

    def check_repeatable(self) -> None:
        """Check that there is what a repetition of the run needs.

        Raises:
            FingerprintError: something is missing; the message names it.
        """
        checked(self.path, self.content, FingerprintError, REPEATED)
        if not any(name.startswith('config.model') for name in self.facts):
            raise FingerprintError(f'{self.path}: the run was built from arguments, not from a '
                                   'config: no command repeats it; start its program again')

    @property
    def variables(self) -> dict[str, dict[str, Any]]:
        """Variables that code outside of libraries has read: name -> value and reader."""
        return self.content.get('variables') or {}

    @property
    def values(self) -> dict[str, Any]:
        """Facts and all other fields by name; files and repositories count by their last name."""
        content = {name: value for name, value in self.content.items() if name not in NOT_COMPARED}
        content['data'] = dict(content.get('data') or {})
        content['variables'] = {name: read['value'] for name, read in self.variables.items()}
        for part, name in ((content, 'code'), (content, 'weights'),
                           (content['data'], 'annotations')):
            part[name] = by_last_name(part.get(name, {}))
        return {**self.facts, **flatten(content)}


def by_last_name(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace paths by their last names; the second of a name gets `` (2)``, and so on.

    >>> by_last_name({'a/x.json': 1, 'b/x.json': 2})
    {'x.json': 1, 'x.json (2)': 2}
    """
    counts: Counter[str] = Counter()
    named = {}
    for path, value in values.items():
        name = os.path.basename(path)
        counts[name] += 1
        named[name if counts[name] == 1 else f'{name} ({counts[name]})'] = value
    return named


def make_manifest(runner: Any) -> dict[str, Any]:
    """Describe a runner that is about to train, in values that JSON can hold."""
    text = runner.cfg.pretty_text
    randomness = dict(runner.cfg.get('randomness') or {})
    facts = collect_facts(runner.cfg, randomness, get_world_size())
    model, snapshot = unwrap(runner.model), Snapshot()
    snapshot.add('weights', [*model.named_parameters(), *model.named_buffers()])
    return dict(
        kind='manifest', format=FORMAT,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds'),
        command=collect.command(getattr(sys, 'orig_argv', [sys.executable, *sys.argv])),
        cwd=os.getcwd(),
        config=dict(text=collect.without_secrets(text, code=True), file=runner.cfg.filename,
                    sha256=hashlib.sha256(text.encode()).hexdigest()),
        work_dir=os.path.abspath(runner.work_dir),
        randomness=randomness,
        world_size=get_world_size(),
        processes=process_count(),
        iteration=runner.iter,
        resumed_from=runner._load_from if runner._resume else None,
        facts={name: value for name, value in facts.items() if not name.startswith('config.')},
        initial_weights=snapshot.fetch().combined('weights'),
        data=training_data(runner.train_dataloader.dataset),
        weights=collect.weights(dict(runner.cfg.to_dict(), load_from=None if runner._resume
                                     else runner.cfg.get('load_from'))),
        machine=collect.machine(),
        environment=collect.environment(),
        variables=collect.other_variables(reads()),
        packages=collect.packages(),
        code=collect.code(os.getcwd(), runner.cfg.filename, __file__), sources=_sources())


def _sources() -> dict[str, dict[str, str]]:
    return {name: source._asdict() for name, source in own_code.sources().items()}


def write_manifest(runner: Any, folder: str) -> str:
    """Write the manifest of this start into ``folder`` and return the name of the file.

    The first start writes ``manifest.json``, later ones ``manifest.1.json`` and so on.
    """
    os.makedirs(folder, exist_ok=True)
    name = next(name for name in map(_name, itertools.count())
                if not os.path.exists(os.path.join(folder, name)))
    path = os.path.join(folder, name)
    _write(path, make_manifest(runner))
    _write_code(path)
    return name


def complete_manifest(path: str, values: Mapping[str, Any]) -> None:
    """Add values that are known at the end of a run to its manifest, and what it has imported."""
    content = {**read_manifest_file(path), **values}
    sources = _sources()
    if sources != content.get('sources'):
        _write_code(path)
    content.update(sources=sources, facts={**content['facts'], **own_code.code_facts()})
    _write(path, content)


def code_of(path: str) -> str:
    """Return the path of the zip file with the own code of a manifest."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f'code{name.removeprefix("manifest").removesuffix(".json")}.zip')


def _write_code(path: str) -> None:
    own_code.write_copies(code_of(path), functools.partial(collect.without_secrets, code=True))


def _write(path: str, content: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(_clean(content), indent=1, default=str))


def _clean(value: Any) -> Any:
    """Return a part of a manifest without secrets; texts of code have been cleaned before."""
    if isinstance(value, Mapping):
        return {name: part if name in ('text', 'diff') else _clean(part)
                for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(part) for part in value]
    return collect.without_secrets(value) if isinstance(value, str) else value


def _name(number: int) -> str:
    return f'manifest.{number}.json' if number else 'manifest.json'


def read_manifest(path: str) -> Manifest:
    """Read a manifest: a file, or the first of a work directory or of the folder ``mmrepro`` in it.

    Raises:
        FingerprintError: the file is missing or is no manifest; the message names it.
    """
    if os.path.isdir(path):
        inner = os.path.join(path, FOLDER)
        path = os.path.join(inner if os.path.isdir(inner) else path, _name(0))
    if not os.path.exists(path):
        raise FingerprintError(f'{path}: No such file; FingerprintHook writes it when a training '
                               'starts')
    return Manifest(path, read_manifest_file(path))


def compare_manifests(first: Manifest, second: Manifest) -> list[FactDifference]:
    """Compare two manifests by :func:`mmrepro.facts.compatibility.differences`."""
    return differences(first.values, second.values)
