#!/usr/bin/env bash
# Build a compiled mmcv on a GPU machine from its source distribution, for the torch that is there,
# to compare with its kernels. Needs nvcc and g++; nothing is fetched.
#
#   pip download --no-deps --no-binary :all: --no-build-isolation mmcv==2.1.0   (where there is a network)
#   bash tools/build_mmcv.sh mmcv-2.1.0.tar.gz FOLDER      leaves a wheel in FOLDER
#   pip install --no-index --no-deps --target site FOLDER/mmcv-*.whl   (instead of mmcv-lite)
#
# A build takes some minutes, so it is not part of tools/gpu_report.sh. It was not tried on a GPU.
set -euo pipefail
if [ $# -ne 2 ]; then
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
python="${PYTHON:-python3}"
command -v nvcc > /dev/null || { echo "build_mmcv.sh: nvcc is not in PATH" >&2; exit 2; }
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
tar -xzf "$1" -C "$work"
mkdir -p "$2"
target="$(cd "$2" && pwd)"
cd "$work"/mmcv-*
# only for the GPU of this machine
TORCH_CUDA_ARCH_LIST="${TORCH_CUDA_ARCH_LIST:-$("$python" -c \
    'import torch; print("%d.%d" % torch.cuda.get_device_capability())')}"
export TORCH_CUDA_ARCH_LIST MMCV_WITH_OPS=1 FORCE_CUDA=1 MAX_JOBS="${MAX_JOBS:-$(nproc)}"
"$python" -m pip wheel --no-index --no-deps --no-build-isolation -w "$target" .
ls "$target"/mmcv-*.whl
