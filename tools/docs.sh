#!/usr/bin/env bash
# Check the docs and build the site in build/site, without the network once the packages are there.
# Needs Python 3.11 to 3.13 and pip.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/environment.sh
make_environment lock.txt tests.txt docs.txt
python="$VENV/bin/python"
say "generated pages"
"$python" dev/generate_docs.py --check
if [ -z "${ENVIRONMENT_IS_MADE:-}" ]; then  # .ci/run runs all tests next
    say "links and tables"
    "$python" -m pytest -q -m "not slow and not nightly" tests/docs
fi
say "build/site"
NO_MKDOCS_2_WARNING=1 "$python" -m mkdocs build --strict --quiet
echo "build/site/index.html"
