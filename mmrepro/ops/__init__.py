"""mmcv's compiled operators in PyTorch: nothing to build, and the same bits on every run.

``operator_table`` has one row per operator, ``provider`` chooses the implementations and installs
them as ``mmcv._ext``, ``gather`` is the primitive that most of them use, and
``mmcv`` has a module per family. ``aten`` replaces torch's own operators, ``triton`` has fused
kernels for CUDA, ``portable`` has operators whose bits do not depend on the CPU, and ``guard``
reports operators of unknown determinism. Importing this package does not import torch.
"""
from .operator_table import TABLE
from .provider import (
    catalogue,
    install,
    is_compiled,
    other_providers,
    provider,
    provider_of,
    uninstall,
    use,
    use_from_import,
    using,
)
