#!/usr/bin/env bash
# Everything that is to be known of a GPU, within ten minutes and without the network: the check of
# operators and detectors, once more in another process whose digests must be the same, and files to
# compare with other machines.
#
#   bash tools/gpu_report.sh OUT                  on CUDA
#   bash tools/gpu_report.sh OUT --device cpu     a rehearsal, small, anywhere
#   PYTHONPATH=site SECONDS_FIRST=330 SECONDS_SECOND=170 bash tools/gpu_report.sh OUT
#
# Leaves OUT/first and OUT/second with gpu_check.json and gpu_check.html, OUT/digests.txt, and
# OUT/machine.txt. Further arguments go to the check (docs/evidence/gpu.md). Exit code 0: every
# row that ran gave equal bits, in both processes; the tables say how many of the rows ran.
set -uo pipefail
if [ $# -lt 1 ] || [ "${1#-}" != "$1" ]; then
    sed -n '2,13s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
out="$1"
shift
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python3}"
first="${SECONDS_FIRST:-330}" second="${SECONDS_SECOND:-170}"
case " $* " in *" --device cpu "* | *" --device=cpu "*) set -- --quick "$@" ;; esac
mkdir -p "$out" || exit 2

# names of machines and users stay out
{
    if command -v nvidia-smi > /dev/null; then
        nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,mig.mode.current \
            --format=csv
    else
        echo "no nvidia-smi here"
    fi
    "$python" -c 'import torch; print(torch.__config__.show())'
} > "$out/machine.txt" 2>&1

code=0
"$python" -W ignore "$root/dev/import_stubs.py" --out "$out/first" --seconds "$first" "$@" || code=$?
if [ "$code" -gt 1 ]; then exit "$code"; fi
"$python" -W ignore "$root/dev/import_stubs.py" --out "$out/second" --seconds "$second" \
    --against "$out/first/gpu_check.json" "$@" || code=$?

"$python" - "$out" <<'END'
import json, sys
result = json.load(open(f'{sys.argv[1]}/first/gpu_check.json'))
with open(f'{sys.argv[1]}/digests.txt', 'w') as file:
    for group, rows in result.items():
        if isinstance(rows, dict):
            for name, row in rows.items():
                if isinstance(row, dict) and 'digest' in row:
                    print(f'{row["digest"]}  {group}/{name}', file=file)
END
echo "$out/first/gpu_check.html $out/second/gpu_check.html $out/digests.txt $out/machine.txt"
exit "$code"
