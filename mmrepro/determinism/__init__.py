"""Determinism of kernels and libraries: flags of torch and environment variables.

``tables.py`` holds what is set and why, one row each; ``policy.py`` applies it. Seeds are not in
here, they are in ``mmrepro.seeds``.

Every function that touches the environment takes it as an argument:

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
    Change,
    Report,
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
from .tables import ENV, FLAGS, PRECISIONS, PolicySettings


