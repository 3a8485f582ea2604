"""Clocks and memory of one process, for both kinds of cases."""
from __future__ import annotations

import ctypes
import os
import platform
import re
import time
from pathlib import Path
from typing import Any, Callable

import torch
from children import Child

from mmrepro import ops


def bytes_of(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def clock() -> float:
    """Seconds; of this process alone where it has one thread, so that others do not count."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process in bytes (Linux)."""
    text = Path('/proc/self/status').read_text()
    return int(re.search(rf'{field}:\s+(\d+) kB', text).group(1)) * 1024


def reset_peak() -> None:
    """Give freed memory back, so that using it again shows, and forget the peak."""
    ctypes.CDLL(None).malloc_trim(0)
    Path('/proc/self/clear_refs').write_text('5')


def in_child(function: Callable[..., dict], *args: Any) -> dict[str, float] | None:
    """Call ``function`` in a forked child, whose peak of memory is its own.

    None on systems that cannot forget a peak. One thread only: threads do not survive a fork.
    """
    if not Path('/proc/self/clear_refs').exists() or torch.get_num_threads() != 1:
        return None
    return Child(function, *args).result()


def machine(threads: int) -> dict[str, Any]:
    import mmcv
    cpu = next((line.split(':')[1].strip() for line in Path('/proc/cpuinfo').read_text().split('\n')
                if line.startswith('model name')), platform.processor()) if Path(
                    '/proc/cpuinfo').exists() else platform.processor()
    return {'cpu': cpu, 'cores': os.cpu_count(), 'threads': threads, 'torch': torch.__version__,
            'mmcv': mmcv.__version__, 'compiled': ops.provider() == 'compiled',
            'python': platform.python_version(),
            'capability': torch.backends.cpu.get_cpu_capability()}
