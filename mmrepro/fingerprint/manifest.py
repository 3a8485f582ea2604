"""``manifest.json``: all that a run was made of, and what follows where two runs differ in it."""
from __future__ import annotations

import datetime
import fnmatch
import hashlib
import itertools
import json
import os
import tempfile
from collections.abc import Mapping
from typing import Any, NamedTuple

from mmengine.dist import get_world_size

from ..distributed.process_group import process_count
from ..distributed.unwrap import unwrap
from ..errors import FingerprintError
from ..facts.collect import collect_facts, flatten, read_settings, settings_of
from ..facts.compatibility import CHANGES, HARMLESS, FactDifference, differences
from ..facts.training_data import training_data
from . import provenance
from .reader import read_json
from .schema import FOLDER, SELF_CHECKS
from .snapshot import Snapshot

FORMAT = 1
MAY = 'may change bits'
ORDER = (CHANGES, MAY, HARMLESS)

# What facts do not cover; the first row that matches counts: pattern, severity, consequence.
RULES = (
    ('initial_weights', CHANGES, 'the training starts from other weights'),
    ('data.samples', CHANGES, 'the training data are not the same'),
    ('data.annotations.*.sha256', CHANGES, 'the training data are not the same'),
    ('data.annotations.*', MAY, 'another annotation file'),
    ('data.images.*', CHANGES, 'other images, or in another order'),
    ('data.*', MAY, 'the training data may not be the same'),
    ('weights.*.sha256', CHANGES, 'the training starts from other weights'),
    ('weights.*', MAY, 'the training may start from other weights'),
    ('resumed_from*', MAY, 'the run begins in the middle'),
    ('machine.torch_git', MAY, 'another build of torch'),
    ('machine.torch_config', MAY, 'another build of torch'),
    ('machine.nccl', MAY, 'another order of the sums over ranks'),
    ('machine.gpus*', MAY, 'other kernels'),
    ('machine.torch_parallel', HARMLESS, 'the number of threads is compared by itself'),
    ('machine.*', HARMLESS, 'nothing reads it'),
    ('code.*.commit', MAY, 'another version of the code'),
    ('code.*.diff_sha256', MAY, 'the code was changed'),
    ('code.*', HARMLESS, 'what changed is compared by its digest'),
    ('environment.PYTHONHASHSEED', HARMLESS, 'no order comes from hashes'),
    ('environment.*_NUM_THREADS', HARMLESS, 'the number of threads is compared by itself'),
    ('environment.MMREPRO_*', HARMLESS, 'how the process was started'),
    ('environment.CUDA_VISIBLE_DEVICES', HARMLESS, 'which GPU, not what kind'),
    ('environment.*WORLD_SIZE', HARMLESS, 'ranks and processes are compared by themselves'),
    # torchrun sets it
    ('environment.TORCH_NCCL_ASYNC_ERROR_HANDLING', HARMLESS, 'when a lost rank is noticed'),
    ('environment.SLURM_NTASKS', HARMLESS, 'ranks and processes are compared by themselves'),
    ('environment.*_DIR', HARMLESS, 'where files lie'),
    ('environment.TZ', HARMLESS, 'no training reads the time'),
    ('environment.LC_*', HARMLESS, 'no training reads the language'),
    ('environment.LANG', HARMLESS, 'no training reads the language'),
    ('environment.*', MAY, 'libraries may choose other kernels'),
    ('packages.torch*', MAY, 'another implementation'),
    ('packages.nvidia-*', MAY, 'other kernels'),
    ('packages.*', HARMLESS, 'packages that compute are compared by what is imported'),
    ('*', HARMLESS, 'says when and how, not what'),
)


class Manifest(NamedTuple):
    """A manifest that was read: its file, and the JSON in it."""
    path: str
    content: dict[str, Any]

    @property
    def config_text(self) -> str:
        return self.content['config']['text']

    @property
    def facts(self) -> dict[str, Any]:
        """As a checkpoint keeps them: settings of the config are ``config.*``."""
        return {**self.content['facts'], **settings_of(read_settings(self.config_text))}

    @property
    def processes(self) -> int:
        """That trained: one for each rank, unless ranks were virtual."""
        return process_count_of(self.content)


def process_count_of(content: Mapping[str, Any]) -> int:
    """Of a manifest's content; older ones were of runs with a process for each rank."""
    return content.get('processes', content.get('world_size', 1))


def make_manifest(runner: Any) -> dict[str, Any]:
    """The manifest of a runner that is about to train, as what JSON can hold."""
    text = runner.cfg.pretty_text
    repro = getattr(runner, '_repro', None)
    randomness = dict(repro.as_dict() if repro else runner.cfg.get('randomness') or {})
    facts = collect_facts(runner.cfg, randomness, get_world_size())
    model, snapshot = unwrap(runner.model), Snapshot()
    snapshot.add('weights', [*model.named_parameters(), *model.named_buffers()])
    return dict(
        kind='manifest', format=FORMAT,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds'),
        **provenance.started_as(),
        config=dict(text=text, sha256=hashlib.sha256(text.encode()).hexdigest(),
                    file=runner.cfg.filename),
        work_dir=os.path.abspath(runner.work_dir),
        randomness=randomness,
        world_size=get_world_size(),
        processes=process_count(),
        iteration=runner.iter,
        resumed_from=runner._load_from if runner._resume else None,
        facts={name: value for name, value in facts.items() if not name.startswith('config.')},
        initial_weights=snapshot.fetch().combined('weights'),
        data=training_data(runner.train_dataloader.dataset),
        weights=provenance.weights(dict(runner.cfg.to_dict(), load_from=None if runner._resume
                                        else runner.cfg.get('load_from'))),
        machine=provenance.machine(),
        environment=provenance.environment(),
        packages=provenance.packages(),
        code=provenance.code(os.getcwd(), runner.cfg.filename, __file__))


def write_manifest(runner: Any, folder: str) -> str:
    """Write the manifest of this start into ``folder``; returns the name of the file.

    The first start writes ``manifest.json``, later ones ``manifest.1.json`` and so on.
    """
    os.makedirs(folder, exist_ok=True)
    name = next(name for name in map(_name, itertools.count())
                if not os.path.exists(os.path.join(folder, name)))
    _write(os.path.join(folder, name), make_manifest(runner))
    return name


def complete_manifest(path: str, found: Mapping[str, Any]) -> None:
    """Add what is known at the end of a run to its manifest."""
    _write(path, {**read_json(path), **found})


def _write(path: str, content: Mapping[str, Any]) -> None:
    with tempfile.NamedTemporaryFile('w', dir=os.path.dirname(path), suffix='.partial',
                                     encoding='utf-8', delete=False) as file:
        json.dump(content, file, indent=1, default=str)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def _name(number: int) -> str:
    return f'manifest.{number}.json' if number else 'manifest.json'


def read_manifest(path: str, name: str | None = None) -> Manifest:
    """Read a manifest: a file, or that of a work directory's first start.

    Args:
        path: a ``manifest.json``, a work directory, or the folder ``mmrepro`` in it.
        name: of the file in the folder, for a later start.

    Raises:
        FingerprintError: names the file, and what is wrong with it.
    """
    if os.path.isdir(path):
        inner = os.path.join(path, FOLDER)
        path = os.path.join(inner if os.path.isdir(inner) else path, name or _name(0))
    try:
        content = read_json(path)
    except OSError as error:
        raise FingerprintError(f'{path}: {error.strerror}; FingerprintHook writes it when a '
                               'training starts') from error
    if not isinstance(content, dict) or content.get('kind') != 'manifest':
        raise FingerprintError(f'{path}: not a manifest of mmrepro')
    if content.get('format') != FORMAT:
        raise FingerprintError(f'{path}: format {content.get("format")!r} is not known to this '
                               f'version of mmrepro, which reads format {FORMAT}')
    return Manifest(path, content)


# in another form among the facts, or not comparable
_ELSEWHERE = ('kind', 'format', 'config', 'facts', 'randomness', 'world_size', 'processes',
              SELF_CHECKS)


def compare_manifests(first: Manifest, second: Manifest) -> list[FactDifference]:
    """What differs, by severity: CHANGES, then MAY, then HARMLESS; by name within."""
    found = differences(first.facts, second.facts)
    fields = [_fields(manifest.content) for manifest in (first, second)]
    for name in set().union(*fields):
        before, after = (one.get(name, _ABSENT) for one in fields)
        if before != after:
            severity, why = next(row for pattern, *row in RULES
                                 if fnmatch.fnmatchcase(name, pattern))
            found.append(FactDifference(name, before, after, severity, why))
    return sorted(found, key=lambda one: (ORDER.index(one.severity), one.name))


_ABSENT = '(not set)'


def _fields(content: Mapping[str, Any]) -> dict[str, Any]:
    """Everything beside the facts, flat. Files and repositories count by their last name."""
    content = {name: value for name, value in content.items() if name not in _ELSEWHERE}
    content['data'] = dict(content.get('data') or {})
    for part, name in ((content, 'code'), (content, 'weights'), (content['data'], 'annotations')):
        part[name] = {os.path.basename(path): value for path, value in part.get(name, {}).items()}
    return flatten(content)
