#!/usr/bin/env bash
# Train RTMDet-tiny on real photographs with different numbers of workers, without mmrepro and with
# it, and compare every iteration. Needs Python 3.11 to 3.13 and pip.
#
#   bash tools/demo.sh                 the demonstration dataset
#   bash tools/demo.sh --help          the other arguments
#
# Data and logs go to data/demo and work_dirs/demo of the current folder.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
make_environment lock.txt
say "training four times"
exec "$VENV/bin/mmrepro" demo "$@"
