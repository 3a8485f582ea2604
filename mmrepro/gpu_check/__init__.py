"""One command that finds out whether training repeats on this GPU, and what that costs.

``cases_mmcv`` and ``cases_torch`` hold one row per operator, ``detectors`` one per detector;
``operators`` runs a row of the former, ``report`` writes JSON and a table, ``main`` is the command.
docs/gpu.md says how to take it to a machine. Rows are run under a :class:`~.budget.Budget`: what
does not fit is left out by name, and a row that crashes is recorded and does not end the check.
"""
