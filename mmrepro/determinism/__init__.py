"""Determinism of kernels and libraries: flags of torch and environment variables.

``tables.py`` has a row for each, with its reason; ``policy.py`` applies them. Functions that touch
the environment take it as an argument:

>>> from mmrepro import determinism
>>> env = {}
>>> with determinism.deterministic(env=env) as report:
...     env['CUBLAS_WORKSPACE_CONFIG'], determinism.is_enabled()
(':4096:8', True)
>>> env, determinism.is_enabled()
({}, False)
"""
from ..errors import DeterminismError
from .compiled import check_compiled
from .initial_memory import filled_memory, unwritten
from .policy import (
    PolicyReport,
    deterministic,
    disable,
    drifted,
    enable,
    import_flags,
    in_force,
    is_enabled,
    missing_at_start,
    snapshot,
)
from .tables import PolicySettings
