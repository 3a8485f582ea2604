"""mmrepro: detector training that repeats bit for bit. Importing the package activates it."""
from __future__ import annotations

import importlib
from typing import Any

from .activation import activate, deactivate, is_active
from .selfcheck import diagnose_with
from .version import __version__, check_versions

# module -> public names in it; loaded when asked for, so that importing stays cheap
_PUBLIC = {name: module for module, names in {
    'checkpoint.kept_attributes': ('keep_attributes', ),
    'config': ('RandomnessConfig', ),
    'virtual': ('on_virtual_ranks', ),
    'dropin': ('init_random_seed', 'set_random_seed'),
    'errors': ('MMReproError', 'Preempted'),
    'report.report': ('Report', ),
    'run.hooks': ('FingerprintHook', ),
    'run.runner': ('ReproRunner', 'ReproRunnerMixin'),
    'seeds': ('isolate_rng', ),
}.items() for name in names}

__all__ = ['__version__', 'activate', 'deactivate', 'is_active', *_PUBLIC]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(importlib.import_module(f'{__name__}.{_PUBLIC[name]}'), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})


def _diagnose(*recordings: Any) -> Any:
    from .localise.diagnosis import diagnose
    return diagnose(*recordings)


check_versions()
diagnose_with(_diagnose)
activate()
