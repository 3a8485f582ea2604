"""Whether training repeats bit for bit on this machine, and what that costs.

``command`` is ``tools/gpu_check.py``. ``checking`` runs every row within a time limit:
``detectors`` is the catalogue of detectors, and the rows of operators are those of
``dev/operator_check``. ``report`` writes the result. docs/evidence/gpu.md describes the use.
"""
