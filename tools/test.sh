#!/usr/bin/env bash
# Run the tests in the environment of tools/demo.sh. Needs Python 3.11 to 3.13 and pip.
#
#   bash tools/test.sh                       everything but the tests that take minutes
#   bash tools/test.sh --quick               no tests that train, except one short training
#   bash tools/test.sh --nightly             everything
#   bash tools/test.sh tests/demo/test_demo.py    arguments go to pytest
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/environment.sh
marks="not nightly"
packages=(lock.txt tests.txt)
case "${1:-}" in
    --quick) marks="not nightly and (not slow or smoke)"; shift ;;
    --nightly) marks=""; packages+=(notebook.txt); shift ;;
esac
# a test that hangs ends its process, is named, and is run once more (by xdist) in a new one
limit=(${marks:+--max-worker-restart 1 -o faulthandler_timeout=1200 -o faulthandler_exit_on_timeout=true})
make_environment "${packages[@]}"
python="$VENV/bin/python"
# CUDA builds of torch come with the one release that they work with; there are wheels for Linux only
if [ "$(uname -sm)" = "Linux x86_64" ] && ! "$python" -c 'import triton' 2> /dev/null; then
    say "installing triton.txt into $VENV"
    "$python" -m pip install --disable-pip-version-check --only-binary :all: --no-deps \
        -r requirements/triton.txt
fi

# tests that this machine cannot run are left out by name, and it is said
expression="${marks:+ and $marks}"
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
    || expression+=" and not gpu"
"$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("mmcv._ext") is None)' \
    || expression+=" and not compiled"
expression="${expression# and }"

# tests start many interpreters; each would compile mmrepro anew
unset PYTHONDONTWRITEBYTECODE

# types are checked beside the tests, which wait at times
types="$(mktemp)"
"$python" -m mypy > "$types" 2>&1 &
checker=$!
trap 'kill "$checker" 2> /dev/null || true; rm -f "$types"' EXIT

# bits of cpu='portable' are compared with those of another CPU
say "pytest -m \"$expression\" on $(sed -n 's/^model name[^:]*: //p;T;q' /proc/cpuinfo 2> /dev/null || uname -m)"
# one thread per operator: tests compare bits between processes, and cores are shared. Modules are
# dealt out in the order of tests/conftest.py to one process more than a small machine has cores,
# because tests also wait: for ranks, workers, fresh processes
OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" "$python" -m pytest -q -n "${TEST_PROCESSES:-3}" \
    --dist loadfile --no-loadscope-reorder --durations 20 "${limit[@]}" -m "$expression" "$@"
say "ruff"
"$python" -m ruff check .
say "mypy"
wait "$checker" && code=0 || code=$?
cat "$types"
exit "$code"
