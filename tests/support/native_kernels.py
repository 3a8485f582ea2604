"""mmrepro's forms of torch's operators for the length of a block."""
from __future__ import annotations

import contextlib

from torch.nn import SyncBatchNorm

from mmrepro.ops import aten
from mmrepro.ops.aten import sync_bn
from mmrepro.scoped import replaced


@contextlib.contextmanager
def installing(*devices):
    aten.install(devices)
    try:
        yield
    finally:
        aten.uninstall()


def sync_bn_on_cpu():
    """SyncBatchNorm of CPU ranks."""
    return replaced(SyncBatchNorm, forward=sync_bn.forward)
