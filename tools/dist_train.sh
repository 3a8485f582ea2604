#!/usr/bin/env bash
# Train on the GPUs of one machine, or of several:
#
#   tools/dist_train.sh CONFIG GPUS [arguments of tools/train.py]
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 PORT=29500 tools/dist_train.sh CONFIG GPUS
set -euo pipefail
if [ $# -lt 2 ]; then
    sed -n '2,5s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
config="$1" gpus="$2"
shift 2
exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes="${NNODES:-1}" --node_rank="${NODE_RANK:-0}" --nproc_per_node="$gpus" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" --master_port="${PORT:-29500}" \
    "$(dirname "$0")/train.py" "$config" --launcher pytorch "$@"
