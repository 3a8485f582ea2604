"""The hardware and versions of a measurement, without names of hosts or users."""
from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import torch

from ..facts.collect import cpu_name
from ..version import __version__
from .disturbance import fewer_multiprocessors

_PACKAGES = ('numpy', 'opencv-python', 'opencv-python-headless', 'mmengine', 'mmcv', 'mmcv-lite',
             'mmdet', 'triton', 'torchvision')


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe(device: str) -> dict[str, Any]:
    """Names of the processor and, on CUDA, of the GPU, and versions of packages."""
    versions = {name: _version(name) for name in _PACKAGES}
    facts: dict[str, Any] = dict(
        device=device, cpu=cpu_name(), cores=os.cpu_count(), threads=torch.get_num_threads(),
        system=platform.system(), python=platform.python_version(), torch=torch.__version__,
        mmrepro=__version__, **{name: text for name, text in versions.items() if text})
    if device == 'cuda':
        gpu = torch.cuda.get_device_properties(0)
        facts.update(gpu=gpu.name, capability=f'{gpu.major}.{gpu.minor}',
                     memory_gib=round(gpu.total_memory / 2 ** 30, 1),
                     multiprocessors=gpu.multi_processor_count, cuda=torch.version.cuda,
                     cudnn=torch.backends.cudnn.version(),
                     green_contexts=fewer_multiprocessors()[1] or 'yes')
    return facts
