#!/usr/bin/env bash
# Train on a Slurm cluster:
#
#   tools/slurm_train.sh PARTITION JOB_NAME CONFIG WORK_DIR [arguments of tools/train.py]
#   GPUS=16 GPUS_PER_NODE=8 CPUS_PER_TASK=5 SRUN_ARGS=--exclusive tools/slurm_train.sh ...
set -euo pipefail
if [ $# -lt 4 ]; then
    sed -n '2,5s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
partition="$1" job="$2" config="$3" work_dir="$4"
shift 4
gpus="${GPUS:-8}"
per_node="${GPUS_PER_NODE:-$((gpus < 8 ? gpus : 8))}"
# SRUN_ARGS is split into words on purpose
# shellcheck disable=SC2086
exec srun --partition="$partition" --job-name="$job" --gres="gpu:$per_node" \
    --ntasks="$gpus" --ntasks-per-node="$per_node" --cpus-per-task="${CPUS_PER_TASK:-5}" \
    --kill-on-bad-exit=1 ${SRUN_ARGS:-} \
    "${PYTHON:-python}" -u "$(dirname "$0")/train.py" "$config" --work-dir "$work_dir" \
    --launcher slurm "$@"
