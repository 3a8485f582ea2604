#!/usr/bin/env bash
# torch 2.13.0 with CPython 3.11: if a sampler raises before a DataLoader with workers has asked for
# its first batch, and the error is kept in a reference cycle (a list that its own traceback reaches,
# as in code that collects errors of threads), one file number is closed twice. What another thread has
# opened under that number in between loses its file: here and there, an unrelated
# `OSError: Bad file descriptor`. The collector finalizes the iterator first, which sends its workers
# their last message and so starts the feeder thread of a queue that had none; then it finalizes the
# connections of that queue, which the thread has by now. Both close them. The thread prints two
# tracebacks, the last one `ValueError: semaphore or lock released too many times`.
#
# Without a cycle, the iterator goes before its queue, and every file is closed once.
#
# Which thread comes first is left to the machine, so the script does it ten times.
#
# Behaviour seen with torch 2.13.0 on CPython 3.11.7:
#   the error is freed by its last reference: no file closed twice
#   the error is freed as part of a cycle: files closed twice
# Exits with an error if that changes.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy
cat > look.py <<'END'
import gc
import os
import threading
from multiprocessing.connection import Connection

from torch.utils.data import DataLoader, Sampler


class Raises(Sampler):
    def __iter__(self):
        raise ValueError('no order')

    def __len__(self):
        return 4


twice = []


def counted(self):
    try:
        os.close(self._handle)
    except OSError:
        twice.append(self._handle)
        raise


Connection._close = counted


def load(cycle):
    errors = []
    try:
        next(iter(DataLoader(range(4), sampler=Raises(), num_workers=2)))
    except ValueError as error:
        errors.append(error if cycle else str(error))


gc.disable()  # it runs where it is called
for name, cycle in (('by its last reference', False), ('as part of a cycle', True)):
    for _ in range(10):
        load(cycle)
        gc.collect()
        for thread in threading.enumerate():
            if thread is not threading.current_thread():
                thread.join(10)
    print(f'the error is freed {name}: {"files" if twice else "no file"} closed twice')
    twice.clear()
END
venv/bin/python -W ignore look.py 2> errors | tee seen
grep -q 'semaphore or lock released too many times' errors
diff seen - <<'END'
the error is freed by its last reference: no file closed twice
the error is freed as part of a cycle: files closed twice
END
