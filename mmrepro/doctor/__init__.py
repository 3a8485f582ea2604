"""What this machine does to reproducibility: its environment, and whether training repeats here.

:func:`check` runs every row of the check within a time limit: ``detectors`` is the catalogue of
detectors, and the rows of operators are those of ``dev/operator_check`` in a checkout. ``report``
writes the result, and :func:`environment` describes the machine and the settings in force.
docs/how-to/check-a-gpu.md describes the use.
"""
from .checking import check
from .environment import environment, machine, package_problems
from .rows import Row, RowGroup, Settings
