"""The hardware, versions and settings of a measurement, without names of hosts or users."""
from __future__ import annotations

import csv
import gc
import importlib
import os
import platform
import re
import time
from pathlib import Path
from typing import Any, Callable

import torch
from packaging.requirements import Requirement

from .. import determinism, ops
from ..facts.collect import cpu_name
from ..ops import triton
from ..util.libraries import installed_version, version_of
from ..version import __version__

_PACKAGES = ('numpy', 'opencv-python', 'opencv-python-headless', 'mmengine', 'mmcv', 'mmcv-lite',
             'mmdet', 'triton', 'torchvision')


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


def free_memory(device: str) -> None:
    """Collect circular references, and return cached memory to the device."""
    gc.collect()
    if device == 'cuda':
        torch.cuda.empty_cache()


def timed(function: Callable[[], Any], device: str) -> tuple[Any, float]:
    """Return (result, milliseconds until the device has done what ``function`` asked of it)."""
    if device != 'cuda':
        start = time.perf_counter()
        result = function()
        return result, (time.perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    result = function()
    end.record()
    torch.cuda.synchronize()
    return result, begin.elapsed_time(end)
