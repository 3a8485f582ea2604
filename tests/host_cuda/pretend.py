"""Puts the devices of ``device.cpp`` under ``torch.cuda``, and gives their kernels a behaviour.

Import it before anything asks for CUDA. ``MMREPRO_HOST_CUDA`` is the path of the built library.
"""
import contextlib
import ctypes
import os
import time
import types
import warnings

# before torch, whose first question about CUDA decides for good
_library = ctypes.CDLL(os.environ['MMREPRO_HOST_CUDA'])
_library.all_calls.restype = ctypes.c_char_p
_library.memory_now.restype = _library.memory_peak.restype = ctypes.c_int64

import batch_norm  # noqa: E402, F401
import torch  # noqa: E402
import torch.storage  # noqa: E402

DEVICES = 2

# Bits of a behaviour, as in device.cpp.
REFUSED, DRIFTS, DRIFTS_WITHOUT_FLAG, DRIFTS_WITHOUT_CUDNN_FLAG = 1, 2, 4, 8
_RAISES = REFUSED | DRIFTS_WITHOUT_FLAG

# Which CUDA kernels of torch 2.13 add with atomics, and whether torch says so: its documentation of
# torch.use_deterministic_algorithms (version 2.13) and the calls of alertNotDeterministic in
# aten/src/ATen/native/cuda. Written down apart from mmrepro's own table, which it is to check.
BEHAVIOUR = {name: how for how, names in {
    _RAISES: (
        '_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward _ctc_loss_backward '
        '_upsample_bicubic2d_aa_backward _upsample_bilinear2d_aa_backward '
        'adaptive_max_pool2d_backward avg_pool3d_backward bincount '
        'fractional_max_pool2d_backward fractional_max_pool3d_backward '
        'grid_sampler_2d_backward grid_sampler_3d_backward histc index_reduce '
        'max_pool3d_with_indices_backward max_unpool2d max_unpool3d median nanmedian '
        'nll_loss2d_forward put_ reflection_pad1d_backward reflection_pad2d_backward '
        'reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward '
        'replication_pad3d_backward upsample_bicubic2d_backward upsample_bilinear2d_backward '
        'upsample_linear1d_backward upsample_trilinear3d_backward'),
    DRIFTS: 'adaptive_max_pool3d_backward _logcumsumexp cudnn_grid_sampler_backward cumprod',
    DRIFTS_WITHOUT_FLAG: 'index_add index_add_ scatter_add scatter_add_',
    DRIFTS_WITHOUT_CUDNN_FLAG: 'convolution_backward',
}.items() for name in names.split()}


def calls(name):
    return _library.count_calls(f'aten::{name}'.encode())


def all_calls():
    lines = _library.all_calls().decode().splitlines()
    return {name: int(count) for name, count in (line.split('\t') for line in lines)}


forget_calls = _library.forget_calls


def _nothing(*args, **kwargs):
    return None


def _bytes(storage):
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _clone(self):
    """UntypedStorage.clone, whose constructor knows devices that were compiled in only."""
    return _bytes(self).clone().untyped_storage()


_to_elsewhere = torch.storage._to


def _to(self, device, non_blocking=False):
    if torch.device(device).type != 'cuda' or self.device == torch.device(device):
        return _to_elsewhere(self, device, non_blocking)
    moved = torch.empty(self.nbytes(), dtype=torch.uint8, device=device).untyped_storage()
    _bytes(moved).copy_(_bytes(self))
    return moved


class _Event:
    """The clock of the host: a call has done its work when it returns."""

    def __init__(self, enable_timing=False):
        self._at = 0.

    def record(self):
        self._at = time.perf_counter()

    def elapsed_time(self, end):
        return (end._at - self._at) * 1e3


class _Start:
    """CUDA starts with the first tensor, or the first question about devices, and not before."""

    def __init__(self):
        self.done = False
        self._queued = len(torch.cuda._queued_calls)  # those before are for a compiled CUDA

    def __call__(self):
        """Start, and make up for the seeds that were given before."""
        if not self.done:
            self.done = True
            for call, _ in (*torch.cuda._queued_calls[self._queued:], *filter(
                    None, torch.cuda._lazy_seed_tracker.get_calls())):
                call()


def _put():
    start = _Start()

    def _set_device(index):
        if index >= DEVICES:  # as cudaSetDevice
            raise torch.AcceleratorError('CUDA error: invalid device ordinal')
        start()
        _library.set_device(index)

    for name, how in BEHAVIOUR.items():
        _library.set_behaviour(f'aten::{name}'.encode(), how)
    generators = tuple(torch.Generator() for _ in range(DEVICES))
    for index, generator in enumerate(generators):
        torch.ops.host_cuda.adopt(generator, index)
    # of an age at which deterministic mode takes no kernels in Triton: they cannot run here
    properties = types.SimpleNamespace(name='host', major=7, minor=0, total_memory=1 << 34,
                                       multi_processor_count=1)
    # no functions of ctypes, which have no hash: torch._dynamo wants one
    replaced = {
        '_exchange_device': lambda index: _library.set_device(index), '_lazy_init': start,
        '_maybe_exchange_device': lambda index: _library.set_device(index),
        'Stream': _nothing, 'default_generators': generators,
        'device_count': lambda: DEVICES, 'empty_cache': _nothing, 'Event': _Event,
        'get_device_name': lambda *args: 'host', 'get_device_properties': lambda *args: properties,
        'is_available': lambda: True, 'is_current_stream_capturing': lambda: False,
        'is_initialized': lambda: start.done,
        'max_memory_allocated': lambda *args, **kwargs: _library.memory_peak(),
        'max_memory_reserved': lambda *args, **kwargs: _library.memory_peak(),
        'mem_get_info': lambda *args: (int(os.environ.get('HOST_CUDA_FREE', 1 << 33)), 1 << 34),
        'memory_allocated': lambda *args, **kwargs: _library.memory_now(),
        'reset_peak_memory_stats': lambda *args: _library.reset_memory_peak(),
        'stream': lambda stream: contextlib.nullcontext(), 'synchronize': _nothing,
        '_sleep': _nothing,
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
        if hasattr(torch.cuda.random, name):  # imported there by name
            setattr(torch.cuda.random, name, value)
    torch.backends.cuda.is_built = lambda: True
    torch._C._cuda_getDevice = lambda: _library.get_device()
    torch._C._cuda_setDevice = _set_device
    torch._C._cuda_getDriverVersion = lambda: 13000
    torch.UntypedStorage.clone = _clone
    torch.storage._to = _to
    # detectors of MMDetection 3.3 name autocast as torch did before
    warnings.filterwarnings('ignore', 'torch.cuda.amp', FutureWarning)


_put()
