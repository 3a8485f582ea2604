"""The check of whether training repeats on this GPU, and what that costs.

``cases_mmcv`` and ``cases_torch`` are the catalogue of operators, ``detectors`` that of detectors.
``operator_check`` and ``detectors`` run a row, ``check_loop`` runs all of them within a limit of
time, and ``check_report`` writes the result. docs/how-to/check-a-gpu.md describes its use.
"""
