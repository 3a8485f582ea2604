"""Which kernels ran on the GPU, and which of them are known to add with atomics.

Repetition shows that bits were equal; the names of kernels show that they had to be. A name of this
table does not prove a difference (integers add in any order), and the table is not complete.
"""
from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Callable

import torch

# Pattern of a kernel's name, and what runs it. Names are those of the sources of PyTorch
# (aten/src/ATen/native/cuda), of mmcv (mmcv/ops/csrc/common/cuda), and of cuDNN, for the algorithms
# that its documentation calls nondeterministic.
ATOMIC: tuple[tuple[str, str], ...] = (
    (r'scatter_gather_elementwise_kernel.*ReduceAdd', 'scatter_add, gather backward'),
    (r'indexFunc(Small|Large)Index.*ReduceAdd|indexAdd(Small|Large)Index', 'index_add'),
    (r'upsample_(linear1d|bilinear2d|bicubic2d|trilinear3d)_backward', 'interpolate backward'),
    (r'grid_sampler_[23]d_backward_kernel', 'grid_sample backward'),
    (r'atomic_?adaptive_?(average|max)_?grad_?input', 'adaptive pooling backward'),
    (r'(max_pool3d_with_indices|fractional_max_pool[23]d)_backward', 'max pooling backward'),
    (r'avg_pool3d_cuda_update_grad_input_atomic', 'avg_pool3d backward'),
    (r'(reflection|replication)_pad\w*_backward', 'padding backward'),
    (r'EmbeddingBag_accGradParametersKernel_max', "embedding_bag(mode='max') backward"),
    (r'nll_loss2d_forward_kernel', 'nll_loss of maps'),
    (r'kernelHistogram1D', 'histc, bincount with weights'),
    (r'ctc_loss_backward', 'ctc_loss backward'),
    (r'(roi_align|roi_pool|roi_align_rotated|riroi_align_rotated|border_align|prroi_pool|'
     r'deform_roi_pool|bezier_align|rotated_feature_align)_backward\w*_kernel',
     "mmcv's RoI operators backward"),
    (r'ms_deformable_col2im_gpu_kernel', "mmcv's deformable attention backward"),
    (r'deformable_col2im(_coord)?_gpu_kernel', "mmcv's deformable convolution backward"),
    (r'CARAFE(Naive)?Backward|BilinearUpsampleBackward', "mmcv's CARAFE backward"),
    (r'wgrad_alg0_engine|wgrad_alg3', "cuDNN's filter gradient, algorithms 0 and 3"),
    (r'cudnn.*\bdgrad_engine\b', "cuDNN's data gradient, algorithm 0"),
)


def recorded_kernels(run: Callable[[], Any]) -> list[str]:
    """The names of all kernels that ``run`` starts on the GPU, each once, in order.

    Empty where this torch cannot record kernels.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile, supported_activities
    if ProfilerActivity.CUDA not in supported_activities():
        return []
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return list(dict.fromkeys(event.name for event in profiler.events()
                              if event.device_type == DeviceType.CUDA))


def atomic_kernels(names: Iterable[str]) -> dict[str, str]:
    """Those of :data:`ATOMIC` among ``names``, and what runs them."""
    return {name: operator for name in names for pattern, operator in ATOMIC
            if re.search(pattern, name)}
