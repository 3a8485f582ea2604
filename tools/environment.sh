# shellcheck shell=bash
# Sourced by demo.sh and test.sh: .venv with the locked packages, and this checkout in it.
#
#   PYTHON          the interpreter to build it from (default: python3)
#   VENV            where it goes (default: .venv beside this checkout's README)
#
# torch for Linux comes with CUDA and takes several GB. The small CPU build:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu bash tools/demo.sh

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${VENV:-$ROOT/.venv}"

say() { printf '\n== %s\n' "$*"; }

# make_environment REQUIREMENTS...: create or complete $VENV; a finished one is used as it is.
# Does nothing where ENVIRONMENT_IS_MADE is set: .ci/run makes one environment for both scripts.
make_environment() {
    if [ -n "${ENVIRONMENT_IS_MADE:-}" ]; then return 0; fi
    local python="${PYTHON:-python3}" stamp files=() file
    for file in "$@"; do files+=("$ROOT/requirements/$file"); done
    if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then
        echo "requirements/lock.txt is for Python 3.11 to 3.13, and $python is" \
            "$("$python" --version 2>&1); name another one: PYTHON=python3.12 bash $0" >&2
        return 1
    fi
    if [ ! -x "$VENV/bin/python" ]; then
        say "making $VENV"
        "$python" -m venv "$VENV" || return 1
    fi
    # the contents of the lists are in the name, so that a changed list installs again
    stamp="$VENV/complete-$(cat "${files[@]}" | "$VENV/bin/python" -c \
        'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest()[:16])')"
    if [ ! -e "$stamp" ]; then
        say "installing $* into $VENV (a few minutes, most of it is torch)"
        local arguments=()
        for file in "${files[@]}"; do arguments+=(-r "$file"); done
        "$VENV/bin/python" -m pip install --disable-pip-version-check --only-binary :all: \
            "${arguments[@]}" || return 1
        touch "$stamp"
    fi
    say "installing mmrepro"
    rm -rf "$ROOT/build"
    # nothing is fetched: the packages are there, and setuptools is one of them
    "$VENV/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps \
        --no-build-isolation --no-index "$ROOT"
}
