#!/usr/bin/env bash
# How many atomic instructions on global memory each kernel of one training iteration executes, by
# NVIDIA Nsight Compute, and which kernels read memory that nobody wrote, by Compute Sanitizer.
#
#   bash tools/gpu_atomics.sh OUT 'detectors/Faster R-CNN$'      a row of the check, see docs
#
# Leaves OUT/atomics.csv (every launch), OUT/atomics.txt (kernels with atomics, with their counts) and
# OUT/initcheck.txt. Needs ncu with permission to read performance counters, and compute-sanitizer; both
# come with the CUDA toolkit. Slow: every kernel runs several times. Repetition and its names are in
# tools/gpu_report.sh; this is the proof by counting.
set -euo pipefail
if [ $# -ne 2 ] || [ "${1#-}" != "$1" ]; then
    sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
out="$1" row="$2"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python3}"
for tool in ncu compute-sanitizer; do
    if ! command -v "$tool" > /dev/null; then
        echo "$tool is not on the path; it comes with the CUDA toolkit" >&2
        exit 2
    fi
done
mkdir -p "$out"
check=("$python" -W ignore "$root/dev/import_stubs.py" --only "$row" --iters 1 --quick)

# Atomics on shared memory too: the warps of a block have no order. The exit code of the check itself
# is not of interest here.
ncu --target-processes all --csv --log-file "$out/atomics.csv" --metrics \
    smsp__inst_executed_op_global_atom.sum,smsp__inst_executed_op_global_red.sum,smsp__inst_executed_op_shared_atom.sum \
    "${check[@]}" --out "$out/counted" || true
"$python" - "$out" <<'END'
import collections, csv, sys
lines = [line for line in open(f'{sys.argv[1]}/atomics.csv') if line.startswith('"')]
if not lines:
    sys.exit(f'ncu recorded nothing; {sys.argv[1]}/atomics.csv says why')
total = collections.Counter()
for row in csv.DictReader(lines):
    if row['Metric Value'].replace(',', '').replace('.', '').isdigit():
        total[row['Kernel Name'], row['Metric Name']] += float(row['Metric Value'].replace(',', ''))
with open(f'{sys.argv[1]}/atomics.txt', 'w') as file:
    for (kernel, metric), count in total.most_common():
        if count:
            print(f'{count:14.0f}  {metric}  {kernel}', file=file)
print(open(f'{sys.argv[1]}/atomics.txt').read() or 'no kernel with atomics')
END
compute-sanitizer --tool initcheck --print-limit 20 "${check[@]}" --out "$out/checked" \
    > "$out/initcheck.txt" 2>&1 || true
tail -n 3 "$out/initcheck.txt"
