#!/usr/bin/env bash
# torchdata: StatefulDataLoader, offered as a drop-in replacement of torch's DataLoader that can be
# resumed, shuffles in another order than DataLoader from the same seed, and in an order that depends on
# whether there are workers: with workers, the first epoch has the order that is the second one without.
# The number of workers has no effect on the order of torch's DataLoader (if the dataset draws nothing).
# So a run does not repeat on a machine with another num_workers, nor after the replacement.
#
# Behaviour seen with torchdata 0.11.0, torch 2.13.0, numpy 2.4.6: three epochs of eight samples
# Exits with an error if that changes.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet --no-compile torch==2.13.0 torchdata==0.11.0 numpy==2.4.6
cat > look.py <<'END'
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

if __name__ == '__main__':
    for loader_type in (DataLoader, StatefulDataLoader):
        for workers in (0, 1, 2):
            torch.manual_seed(0)
            loader = loader_type(range(8), shuffle=True, num_workers=workers)
            epochs = [''.join(str(batch.item()) for batch in loader) for _ in range(3)]
            print(f'{loader_type.__name__}, {workers} workers:', *epochs)
END
venv/bin/python -W ignore look.py | tee seen
diff seen - <<'END'
DataLoader, 0 workers: 20531476 03716254 57162034
DataLoader, 1 workers: 20531476 03716254 57162034
DataLoader, 2 workers: 20531476 03716254 57162034
StatefulDataLoader, 0 workers: 25461703 61307245 42160573
StatefulDataLoader, 1 workers: 61307245 35167420 64305172
StatefulDataLoader, 2 workers: 61307245 35167420 64305172
END
