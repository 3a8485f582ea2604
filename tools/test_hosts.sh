#!/usr/bin/env bash
# Run the tests under the settings of other machines, from a copy in a folder whose name has a space.
# As root, run it for an ordinary user too: some errors only an ordinary user meets.
#
#   bash tools/test_hosts.sh                     all hosts, one after the other
#   bash tools/test_hosts.sh avx2 tests/ops      one host; further arguments go to tools/test.sh
set -euo pipefail
cd "$(dirname "$0")/.."

declare -A HOSTS=(
    # no vector instructions in torch's own kernels; an offset that is no whole hour
    [plain]="ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
        TZ=Asia/Kathmandu LC_ALL=C"
    # AVX2 in every library, on a CPU that has more
    [avx2]="ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
        OPENCV_CPU_DISABLE=AVX512-SKX OPENCV_IPP=avx2 OPENBLAS_CORETYPE=Haswell
        TZ=America/St_Johns LC_ALL=C.UTF-8"
)
hosts=(plain avx2)
if [ -n "${HOSTS[${1:-}]:-}" ]; then
    hosts=("$1")
    shift
fi

export VENV="${VENV:-$PWD/.venv}"
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
copy="$folder/a checkout"
mkdir "$copy"
git ls-files -z | xargs -0 cp --parents -t "$copy"
for host in "${hosts[@]}"; do
    printf '\n== host %s: %s\n' "$host" "$(echo ${HOSTS[$host]})"
    # shellcheck disable=SC2086  # words on purpose
    env ${HOSTS[$host]} bash "$copy/tools/test.sh" "$@"
done
