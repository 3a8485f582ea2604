"""Report what decides about bits on this machine: hardware, versions, packages, operators.

Names of hosts and users stay out.
"""
from __future__ import annotations

import csv
import importlib
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from packaging.requirements import Requirement

from .. import determinism, ops
from ..errors import DIFFERENT, DONE, ConfigError, MissingPackageError
from ..facts.collect import collect_facts, cpu_name
from ..facts.compatibility import CHANGES, differences
from ..facts.own_code import TRANSFORMS, completed
from ..fingerprint.manifest import read_manifest
from ..ops import triton
from ..report.report import Report, Table
from ..runs.config_files import config_of
from ..util.libraries import installed_version, version_of
from ..version import __version__

_PACKAGES = ('numpy', 'opencv-python', 'opencv-python-headless', 'mmengine', 'mmcv', 'mmcv-lite',
             'mmdet', 'triton', 'torchvision')
_PROBLEM = ('packages', 'state', 'problem', 'source')  # columns of packages.csv that are shown
_VERSION = 'version.'  # prefix of facts
# a distribution whose version is a fact under the name of its module, by a pattern
_MODULES = {'opencv-(contrib-)?python(-headless)?': 'cv2', 'pillow': 'PIL', 'mmcv-lite': 'mmcv',
            'mmengine-lite': 'mmengine', 'albumentationsx': 'albumentations',
            'faster-coco-eval': 'pycocotools'}
# distributions of other packages that are imported under a name of `_MODULES`
_STAND_INS = ('albumentationsx', 'faster-coco-eval')
# facts on packages that a training may need, and that are not imported yet
_NOT_IMPORTED = tuple(f'{_VERSION}{name}' for name in (
    *TRANSFORMS, 'scipy', 'scikit-learn', 'shapely', 'timm'))
_OF_MACHINES = (_VERSION, 'hardware.', 'library.')  # beginnings of names of facts


def doctor(device: str | None = None) -> Report:
    """Report what decides about bits on this machine, and known problems of the packages.

    Args:
        device: ``'cpu'`` or ``'cuda'``; None: ``'cuda'`` if there is one.

    Returns:
        A report whose exit code is 1 if a package is broken or outdated.
    """
    parts, problems = environment(device or _default_device()), package_problems()
    tables = [Table((), [(name, str(value)) for name, value in rows.items()], part)
              for part, rows in parts.items()]
    verdict = 'no known problem of the installed packages'
    if problems:
        verdict = 'fix these known problems of the packages with, in this order:'
        tables.append(Table(_PROBLEM, [[row[name] for name in _PROBLEM] for row in problems]))
    serious = any(row['state'] != 'untried' for row in problems)
    return Report('', verdict, DIFFERENT if serious else DONE, tables,
                  advice=[row['command'] for row in problems], data=dict(parts, problems=problems))


def upgrade(path: str, versions: Sequence[str] = ()) -> Report:
    """Report what other versions of packages change in a training, as far as it was measured.

    Args:
        path: of a run with a manifest (a work directory, or the file), whose versions are compared
            with the installed ones; or of a config, for a training with the installed versions.
        versions: ``PACKAGE==VERSION``, each in place of the version that is installed.

    Returns:
        A report whose exit code is 1 if a version changes bits.

    Raises:
        ConfigError: the config cannot be read, or a version is not ``PACKAGE==VERSION`` of a
            package that is installed or that the run had.
        FingerprintError: the run has no manifest.
    """
    if os.path.isdir(path) or path.endswith('.json'):
        then = read_manifest(path).facts
        here = completed(then, collect_facts(Config(), {}, 1))
        now = {name: value for name, value in then.items() if not name.startswith(_OF_MACHINES)}
        now.update((name, value) for name, value in here.items() if name.startswith(_OF_MACHINES))
    else:
        config = config_of(path)
        then = collect_facts(config, dict(config.get('randomness') or {}), 1)
        then = completed(dict.fromkeys(_NOT_IMPORTED), then)
        now = dict(then)
    now.update(_version_of(text, then) for text in versions)
    rows = [row for row in differences(then, now) if row.name.startswith(_VERSION)]
    table = Table(('package', 'then', 'now', 'another version', 'what follows'), [
        (row.name[len(_VERSION):], str(row.then), str(row.now), row.severity, row.consequence)
        for row in rows])
    serious = [row.name[len(_VERSION):] for row in rows if row.severity == CHANGES]
    verdict = 'the versions are the same'
    if serious:
        verdict = f'other versions that change bits: {", ".join(serious)}'
    elif rows:
        verdict = 'no other version is known to change bits'
    return Report(path, verdict, DIFFERENT if serious else DONE, [table] if rows else [],
                  data=dict(versions=rows))


def _version_of(text: str, facts: Mapping[str, Any]) -> tuple[str, str]:
    """Return the name of a fact and its value for ``PACKAGE==VERSION``.

    Raises:
        ConfigError: it is something else, or no version of the package is known.
    """
    name, equals, version = text.partition('==')
    if not (name and equals and version):
        raise ConfigError(f'{text}: must be PACKAGE==VERSION, such as opencv-python==5.0.0')
    if name.lower() in _STAND_INS:  # the fact names them
        version = f'{name.lower()} {version}'
    for pattern, module in _MODULES.items():
        if re.fullmatch(pattern, name.lower()):
            name = module
    if name == 'cv2':  # the fourth number counts the builds of the wheel
        version = '.'.join(version.split('.')[:3])
    fact = f'{_VERSION}{name}'
    if fact not in facts:
        known = sorted(known[len(_VERSION):] for known in facts if known.startswith(_VERSION))
        raise ConfigError(f'{text}: no version of {name} is known; packages: {", ".join(known)}')
    return fact, version


def operators(device: str | None = None, choice: str = 'auto') -> Report:
    """Report the provider of each operator of mmcv, and whether it gives the same bits every time.

    Args:
        device: ``'cpu'`` or ``'cuda'``, which need not be there; None: ``'cuda'`` if there is one.
        choice: ``randomness.operators``, or ``'compiled'`` for mmcv's own.

    Raises:
        MissingPackageError: neither mmcv nor mmcv-lite is installed.
    """
    device = device or _default_device()
    try:
        entries = ops.catalogue(device, choice)
    except ModuleNotFoundError as error:
        raise MissingPackageError(f'{error}; install "mmcv-lite<2.2" or mmcv') from error
    same = [_same_bits(entry) for entry in entries]
    table = Table(
        ('operator', 'provider', f'same bits on {device}', 'why this provider', 'used by'),
        [(entry.operator, entry.provider, bits, entry.reason, entry.users)
         for entry, bits in zip(entries, same)])
    return Report(
        '', f'{len(entries)} operators, operators={choice!r}: {same.count("NO")} not '
        f'deterministic on {device}, {same.count("-")} not available (they import, and say what '
        'to install when called)', tables=[table],
        data=dict(provider=choice, device=device, operators=entries))


def _same_bits(entry: Any) -> str:
    if entry.provider == 'none':
        return '-'
    return 'yes' if entry.deterministic else 'NO'


def _default_device() -> str:
    return 'cuda' if torch.cuda.is_available() else 'cpu'


def machine(device: str) -> dict[str, Any]:
    """Describe the processor, the GPU (for ``device='cuda'``), and the versions of packages."""
    facts: dict[str, Any] = dict(
        device=device, cpu=cpu_name(), cores=os.cpu_count(), threads=torch.get_num_threads(),
        system=platform.system(), python=platform.python_version(), torch=torch.__version__,
        mmrepro=__version__, **{package: version for package in _PACKAGES
                                if (version := installed_version(package)) is not None})
    # a fork is a distribution of another name
    facts.update((module, version) for module in ('mmengine', 'mmcv', 'mmdet')
                 if not {module, f'{module}-lite'} & facts.keys()
                 and (version := version_of(module)) is not None)
    if device == 'cuda':
        gpu = torch.cuda.get_device_properties(0)
        facts.update(gpu=gpu.name, capability=f'{gpu.major}.{gpu.minor}',
                     memory_gib=round(gpu.total_memory / 2 ** 30, 1),
                     multiprocessors=gpu.multi_processor_count, cuda=torch.version.cuda,
                     cudnn=torch.backends.cudnn.version())
    return facts


def environment(device: str) -> dict[str, dict[str, Any]]:
    """Report what may decide about bits on this machine, before any run.

    Returns:
        ``machine``: :func:`machine`. ``operators``: the kind of mmcv, and what the Triton kernels
        lack. ``settings``: flags of torch and environment variables that change bits, without the
        variables that are not set.
    """
    ops.install()
    lacks = triton.default_requirement() if device == 'cuda' else triton.requirement()
    return dict(
        machine=machine(device),
        operators=dict(mmcv=_import_error('mmcv._ext') or (
            'compiled' if ops.is_compiled() else 'without compiled operators'),
            triton=lacks or 'available'),
        settings={name: value for name, value in determinism.snapshot().items()
                  if value is not None})


def package_problems() -> list[dict[str, str]]:
    """Return the rows of ``packages.csv`` that apply: all ``packages`` are installed and, where
    wheels of one version differ, the import of ``module`` fails with a message like ``error``."""
    with Path(__file__).with_name('packages.csv').open(encoding='utf-8') as file:
        return [row for row in csv.DictReader(file) if all(map(_installed, row['packages'].split()))
                and (not row['module'] or re.search(row['error'], _import_error(row['module'])))]


def _installed(requirement: str) -> bool:
    wanted = Requirement(requirement)
    version = installed_version(wanted.name)
    return version is not None and wanted.specifier.contains(version, prereleases=True)


def _import_error(module: str) -> str:
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001  a wheel that does not fit raises anything
        return str(error)
    return ''
