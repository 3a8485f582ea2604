#!/usr/bin/env bash
# torch 2.13.0: if an iterator of a DataLoader with workers is freed by the garbage collector, because
# it lies in a reference cycle, the process stands still for 5 seconds for each worker. Freed by its
# last reference, it takes a fraction of a second. The collector finalizes the queues of the workers
# before the iterator, so the message that ends a worker never arrives, and each join waits for its
# whole time limit (`torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL`). A Runner of MMEngine lies in
# such cycles (runner, loops, hooks), and so does its iterator: a second Runner in one process, a
# notebook, or a test pays 5 seconds for each worker at some later allocation.
#
# Behaviour seen with torch 2.13.0 (times to the nearest 5 seconds):
#   freed by its last reference: 0 s for each worker
#   freed as part of a cycle: 5 s for each worker
# Exits with an error if that changes.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy
cat > look.py <<'END'
import gc
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

WORKERS = 2


class Owner:
    """Something that holds a loader and its iterator, as a Runner and its loop do."""


def seconds(cycle):
    owner = Owner()
    owner.loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=2, num_workers=WORKERS)
    owner.batches = iter(owner.loader)
    next(owner.batches)
    if cycle:
        owner.me = owner
    start = time.monotonic()
    del owner
    gc.collect()
    return time.monotonic() - start


gc.disable()  # it runs where it is called
for name, cycle in (('by its last reference', False), ('as part of a cycle', True)):
    print(f'freed {name}: {round(seconds(cycle) / WORKERS / 5) * 5} s for each worker')
END
venv/bin/python -W ignore look.py | tee seen
diff seen - <<'END'
freed by its last reference: 0 s for each worker
freed as part of a cycle: 5 s for each worker
END
