#!/usr/bin/env bash
# Evaluate a checkpoint on the GPUs of one machine, or of several:
#
#   tools/dist_test.sh CONFIG CHECKPOINT GPUS [arguments of tools/test.py]
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 PORT=29500 tools/dist_test.sh CONFIG CHECKPOINT GPUS
set -euo pipefail
if [ $# -lt 3 ]; then
    sed -n '2,5s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
config="$1" checkpoint="$2" gpus="$3"
shift 3
exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes="${NNODES:-1}" --node_rank="${NODE_RANK:-0}" --nproc_per_node="$gpus" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" --master_port="${PORT:-29500}" \
    "$(dirname "$0")/test.py" "$config" "$checkpoint" --launcher pytorch "$@"
