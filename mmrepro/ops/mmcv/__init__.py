"""The operators of ``mmcv._ext`` in PyTorch, one module per family."""
