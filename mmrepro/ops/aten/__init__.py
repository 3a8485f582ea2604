"""Replacements of torch's own operators that raise, vary or are slow under the deterministic flag.

``kernel_table`` lists the operators by release, and ``dispatch`` installs the replacements, or
refuses an operator: ``separable`` (resize, average pooling, padding), ``grid_sample``, ``sums``
(max pooling among them), ``indexed_writes``, and ``selection`` (topk, sort and others, with ties by
index). ``sync_bn`` makes torch's SyncBatchNorm work on CPU ranks.

Every function runs on any device and is tested on a CPU. The dispatcher calls them for CUDA, and
those of ``selection`` also for CPU.
"""
from .dispatch import active, install, installed, uninstall
from .kernel_table import TABLE, KernelRow
