"""mmcv's compiled operators in PyTorch: nothing to build, equal bits on every device.

``table`` has one row per operator, ``provider`` puts them where mmcv looks for them, ``gather`` is
the primitive that most of them are made of, and each family has a file. Nothing here imports torch
until an operator is called.
"""
from __future__ import annotations

from .operator_table import TABLE
from .provider import catalogue, install, installed, provider, provider_of, uninstall, use, using

__all__ = ['TABLE', 'catalogue', 'install', 'installed', 'provider', 'provider_of', 'uninstall',
           'use', 'using']
