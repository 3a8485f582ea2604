"""The check of whether training repeats on this GPU, and what that costs.

``detectors`` is the catalogue of detectors and runs a row, ``check_loop`` runs all rows within a
limit of time, and ``check_report`` writes the result. The rows of operators are those of
``dev/operator_check`` in a checkout. docs/how-to/check-a-gpu.md describes its use.
"""
