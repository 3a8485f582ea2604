#!/usr/bin/env bash
# Train with other versions of Python, torch, NumPy, OpenCV and MMEngine: makes the environments one
# after the other (nothing is compiled, several GB each), runs a short suite in each, removes each.
#
#   bash tools/matrix.sh                          all rows of dev/matrix.py
#   bash tools/matrix.sh --rows oldest --keep     one row; its environment stays
#
# The table goes to docs/results/matrix_cpu.json.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${PYTHON:-python3}" -m dev.matrix "$@"
