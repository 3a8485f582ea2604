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
from .policy import (
    PolicyReport,
    deterministic,
    disable,
    drifted,
    enable,
    filled_memory,
    import_flags,
    in_force,
    is_enabled,
    missing_at_start,
    snapshot,
    unwritten,
)
from .tables import PolicySettings
