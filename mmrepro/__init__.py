"""mmrepro: detector training that repeats bit for bit. Importing it activates it."""
from __future__ import annotations

import importlib
from typing import Any

from .activation import activate, deactivate, is_active
from .version import __version__, check_versions

# public name -> module that defines it; loaded when asked for, so that importing stays cheap
_PUBLIC = {
    'AgreementError': 'errors',
    'CheckpointError': 'errors',
    'ConfigError': 'errors',
    'DeterminismError': 'errors',
    'FingerprintHook': 'hooks.fingerprint',
    'MMReproError': 'errors',
    'Preempted': 'errors',
    'RandomnessConfig': 'config',
    'RandomnessError': 'errors',
    'Report': 'report.report',
    'ReproRunner': 'runner',
    'ReproRunnerMixin': 'runner',
    'SampleDiffersError': 'errors',
    'StepDiffersError': 'errors',
    'ResumeError': 'errors',
    'RunError': 'errors',
    'TrainingError': 'errors',
    'derive': 'seeds',
    'init_random_seed': 'dropin',
    'on_virtual_ranks': 'distributed.virtual.entry',
    'isolate_rng': 'seeds',
    'seed_all': 'seeds',
    'seed_worker': 'dropin',
    'seeded_generator': 'dropin',
    'set_random_seed': 'dropin',
    'worker_init_fn': 'dropin',
}

__all__ = ['__version__', 'activate', 'deactivate', 'is_active', *_PUBLIC]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(importlib.import_module(f'{__name__}.{_PUBLIC[name]}'), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})


check_versions()
activate()
