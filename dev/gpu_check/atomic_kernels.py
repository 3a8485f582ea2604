"""Which kernels ran on the GPU, and which of them are known to add as threads arrive.

They add with atomics, or a block takes what its neighbors have finished by then (look-back). A
test has a name for every operator that the table of torch's operators calls refused or silent.

Repetition shows that bits were equal; the names of kernels show that they had to be. A name of this
table does not prove a difference (integers add in any order), and the table is not complete.
"""
from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Callable

import torch

# Floats in the arguments of a template: integers add in any order.
_FLOATS = r'.*(\bfloat\b|\bdouble\b|Half|BFloat16|complex)'
# Pattern of a kernel's name, and what runs it. Names are those of the sources of PyTorch
# (aten/src/ATen/native/cuda and .../transformers/cuda), of mmcv (mmcv/ops/csrc/common/cuda), and of
# cuDNN, for the algorithms that its documentation calls nondeterministic.
ATOMIC: tuple[tuple[str, str], ...] = (
    (r'scatter_gather_elementwise_kernel.*Reduce(Add|Mul)', 'scatter_add, gather backward'),
    (r'indexFunc(Small|Large)Index.*Reduce|index(Add|Reduce)(Small|Large)Index',
     'index_add, index_reduce'),
    (r'upsample_(linear1d|bilinear2d|bicubic2d|trilinear3d|gen2d_aa)_backward',
     'interpolate backward'),
    (r'grid_sampler_[23]d_backward_kernel|cudnn.*sampler.*(bwd|backward)', 'grid_sample backward'),
    (r'atomic_?adaptive_?(average|max)_?grad_?input', 'adaptive pooling backward'),
    (r'(max_pool3d_with_indices|fractional_max_pool[23]d)_backward', 'max pooling backward'),
    (r'avg_pool3d_cuda_update_grad_input_atomic', 'avg_pool3d backward'),
    (r'(reflection|replication)_pad\w*_backward', 'padding backward'),
    (r'EmbeddingBag_accGradParametersKernel_max', "embedding_bag(mode='max') backward"),
    (r'nll_loss2d_forward_kernel', 'nll_loss of maps'),
    (r'gatherMedian|gatherKthValue|take_put_kernel|max_unpooling\dd_forward',
     'median, kthvalue, put_, max_unpool'),
    (r'Device(Scan|ReduceByKey)\w*Kernel' + _FLOATS + r'|\btriton_spl_',
     'a scan by look-back: cumprod, logcumsumexp, compiled cumsum'),
    (r'flash_bwd|flash_bprop|fmha.*(bwd|backward|cutlassB)|AttentionBackwardKernel',
     'attention backward; in order in deterministic mode, but for cuDNN'),
    (r'(?i)split_?k(?!_?reduce)|stream_?k', 'a product in parts; in order with a workspace'),
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
    """Return the names of all kernels that ``run`` starts on the GPU, each once, in order.

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
    """Return those of :data:`ATOMIC` among ``names``, and what runs them."""
    return {name: operator for name in names for pattern, operator in ATOMIC
            if re.search(pattern, name)}
