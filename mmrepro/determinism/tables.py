"""Tables of environment variables and flags of torch, with the reason for each row.

A new case is a new row. ``policy.py`` reads the tables.
"""
from __future__ import annotations

import functools
import importlib
import operator
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Union

from . import compiled

Mode = Union[bool, str]

UNAVAILABLE = 'unavailable'  # this torch has no such switch
UNREADABLE = 'unreadable'  # torch refuses: its old and its new precision API were both used

# float32_precision -> settings of torch. TF32 repeats its bits like any other format: None keeps
# the precision that torch has, and deterministic mode only watches that it stays.
#   matmul  torch.set_float32_matmul_precision
#   tf32    torch.backends.cudnn.allow_tf32 (convolutions; torch's own default is True)
#   cuda    fp32_precision of cuBLAS and cuDNN, torch >= 2.9
#   cpu     fp32_precision of oneDNN matrix products, torch >= 2.9 (its convolutions stay float32)
PRECISIONS = {
    'highest': dict(matmul='highest', tf32=False, cuda='ieee', cpu='ieee'),
    'high': dict(matmul='high', tf32=True, cuda='tf32', cpu='tf32'),
    'medium': dict(matmul='medium', tf32=True, cuda='tf32', cpu='bf16'),
}


@dataclass(frozen=True)
class PolicySettings:
    """The arguments of ``enable``; None leaves a setting as it is."""

    mode: Mode = True
    float32_precision: str | None = None
    num_threads: int | None = None
    cudnn_benchmark: bool | None = None
    cpu: str | None = None

    @property
    def precision(self) -> dict[str, Any] | None:
        """Row of ``PRECISIONS``, or None."""
        name = self.float32_precision
        return None if name is None else PRECISIONS[name]


class EnvRow(NamedTuple):
    """An environment variable that the policy checks."""

    name: str
    # values that a user may have set; an empty tuple: no opinion with these settings
    accepted: Callable[[PolicySettings], tuple[str, ...]]
    default: str | None  # set if the variable is missing; None: a missing one is as good
    why: str
    at_start: bool = False  # read so early that setting it inside a running Python comes too late
    # replaces "is one of `accepted`" where a list is too short
    matches: Callable[[str], Any] | None = None
    verified: str = ''  # file of the repository that shows the effect; '': read, not measured

    def accepts(self, value: str, settings: PolicySettings) -> bool:
        """Whether a user may have set ``value``."""
        accepted = self.accepted(settings)
        return not accepted or bool(
            value in accepted if self.matches is None else self.matches(value))


class Flag(NamedTuple):
    """A switch of torch."""

    name: str
    get: Callable[[], Any]  # raises AttributeError where this torch does not have it
    set: Callable[[Any], None]
    # acceptable values, the first of which is written if the current one is not among them; an
    # empty tuple: leave it
    wanted: Callable[[PolicySettings], Sequence[Any]]
    why: str
    # env -> what to restore if the switch was not there on the way in, but is now
    later: Callable[[Mapping[str, str]], Any] | None = None
    setter: str = ''  # torch's function that sets it, where it is no attribute
    module: str = ''  # whose import brings the switch, where torch's own does not
    pinned: bool = False  # in deterministic mode it may not change, also where it is left as it is
    verified: str = ''  # file of the repository that shows the effect; '': read, not measured


def _deterministic(*values: Any) -> Callable[[PolicySettings], tuple[Any, ...]]:
    return lambda s: values if s.mode else ()


def _portable(value: bool) -> Callable[[PolicySettings], tuple[bool, ...]]:
    return lambda s: (value, ) if s.cpu == 'portable' else ()


def _tf32(off: tuple[str, ...], on: tuple[str, ...]) -> Callable[[PolicySettings], tuple[Any, ...]]:
    def chosen(s: PolicySettings) -> tuple[Any, ...]:
        if s.precision is None:
            return ()
        return on if s.precision['tf32'] else off

    return chosen


def _debug_mode(s: PolicySettings) -> tuple[int, ...]:
    if s.mode == 'warn':
        return (1, )
    return (2, ) if s.mode else ()


CUBLAS_WORKSPACE = ':4096:8'  # size and number of buffers

_NCCL_ALGORITHMS = {'ring', 'collnetdirect', 'collnetchain'}


def _is_nccl_algo(value: str) -> bool:
    tokens = {token.strip().lower() for token in value.lstrip('^').split(',')}
    if value.startswith('^'):
        return 'nvls' in tokens and not tokens & _NCCL_ALGORITHMS
    return tokens <= _NCCL_ALGORITHMS


def _is_hash_seed(value: str) -> bool:
    return re.fullmatch(r'[0-9]{1,10}', value) is not None and int(value) < 2**32


_is_thread_count = re.compile(r'[1-9][0-9]*(,[1-9][0-9]*)*').fullmatch


# CUDA_LAUNCH_BLOCKING=1 is deliberately not here: work on one stream runs in order without it, so
# it buys no bit and costs the overlap of host and device. MKL_CBWR is not either: it makes
# matrix products independent of the number of threads but not convolutions, and it changes the
# bits of products with one thread (docs/reference/limits.md). Both are recorded below.
ENV = (
    EnvRow('CUBLAS_WORKSPACE_CONFIG', _deterministic(CUBLAS_WORKSPACE, ':16:8'), CUBLAS_WORKSPACE,
           'cuBLAS otherwise sizes its workspace itself and picks kernels that share it between '
           'streams; read when the first handle is made, and demanded by older torch',
           at_start=True),
    EnvRow('PYTHONHASHSEED', _deterministic('an integer from 0 to 4294967295'), None,
           'the order of a set of strings; read by the interpreter before any code runs',
           at_start=True, matches=_is_hash_seed, verified='tests/patches/test_hash_order.py'),
    EnvRow('OMP_NUM_THREADS', _deterministic('a positive integer'), None,
           'a sum that is split over threads depends on their number; OpenMP reads it when loaded',
           at_start=True, matches=_is_thread_count, verified='docs/reference/limits.md'),
    EnvRow('MKL_NUM_THREADS', _deterministic('a positive integer'), None,
           'the same for matrix products on the CPU', at_start=True, matches=_is_thread_count,
           verified='docs/reference/limits.md'),
    EnvRow('NCCL_ALGO',
           _deterministic('a list of Ring, CollnetDirect, CollnetChain',
                          'an exclusion list that names NVLS, such as ^NVLS'), 'Ring',
           'NCCL otherwise picks the algorithm, and with it the order of a sum, by message size '
           'and topology; NVLS sums inside the switch, in an order that nobody controls',
           matches=_is_nccl_algo),
    EnvRow('NCCL_PROTO', _deterministic('Simple', 'LL', 'LL128'), 'Simple',
           'NCCL otherwise picks the protocol by message size, and with it the pieces that a sum '
           'is cut into', matches=lambda value: value.lower() in ('simple', 'll', 'll128')),
    EnvRow('NCCL_COLLNET_ENABLE', _deterministic('0', '1'), '0',
           'sums inside network switches; 1 is for those who ask for it in NCCL_ALGO'),
    EnvRow('NCCL_NVLS_ENABLE', _deterministic('0'), '0',
           'sums inside NVLink switches, in an order that nobody controls'),
    EnvRow('TORCHINDUCTOR_DETERMINISTIC', _deterministic('1'), '1',
           'inductor otherwise times candidate kernels on the device, and the fastest differs from '
           'run to run'),
    EnvRow('FLASH_ATTENTION_DETERMINISTIC', _deterministic('1'), '1',
           'the flash-attn package, as transformers call it: its backward adds up dQ atomically'),
    EnvRow('NVTE_ALLOW_NONDETERMINISTIC_ALGO', _deterministic('0'), '0',
           'Transformer Engine allows attention kernels with atomics unless told not to'),
    EnvRow('NVIDIA_TF32_OVERRIDE', _tf32(off=('0', ), on=('1', )), None,
           'overrules the TF32 setting of every NVIDIA library'),
    EnvRow('TORCH_ALLOW_TF32_CUBLAS_OVERRIDE', _tf32(off=('0', ), on=('0', '1')), None,
           'overrules the precision of matrix products, whatever the program sets'),
    EnvRow('DNNL_DEFAULT_FPMATH_MODE', _tf32(off=('STRICT', 'strict'), on=()), None,
           'lets oneDNN round float32 inputs on the CPU'),
    EnvRow('ONEDNN_DEFAULT_FPMATH_MODE', _tf32(off=('STRICT', 'strict'), on=()), None,
           'the newer name of the variable above'),
)

# Rows of ENV that nothing on a CPU reads.
CUDA_ENV = ('CUBLAS_WORKSPACE_CONFIG', 'NCCL_ALGO', 'NCCL_PROTO', 'NCCL_COLLNET_ENABLE',
            'NCCL_NVLS_ENABLE', 'NVIDIA_TF32_OVERRIDE',
            'TORCH_ALLOW_TF32_CUBLAS_OVERRIDE', 'NVTE_ALLOW_NONDETERMINISTIC_ALGO',
            'FLASH_ATTENTION_DETERMINISTIC')

# Never set and never refused, but they change bits, so they belong into every snapshot.
RECORDED_ENV = (
    'OPENBLAS_NUM_THREADS',  # threads of NumPy's linear algebra
    'MKL_CBWR',  # the code path of MKL
    'MKL_ENABLE_INSTRUCTIONS',  # the instruction set of MKL
    'ATEN_CPU_CAPABILITY',  # the instruction set of torch's own kernels
    'ONEDNN_MAX_CPU_ISA',  # the instruction set of oneDNN
    'OPENCV_CPU_DISABLE',  # the instruction set of OpenCV
    'OPENCV_IPP',  # the instruction set of Intel's part of OpenCV, or without it
    'NPY_DISABLE_CPU_FEATURES',  # the instruction set of NumPy
    'NPY_ENABLE_CPU_FEATURES',  # likewise
    'OPENBLAS_CORETYPE',  # the instruction set of NumPy's and SciPy's linear algebra
    'CUDA_LAUNCH_BLOCKING',  # no bits, but a different schedule; explains timings
    'CUBLASLT_WORKSPACE_SIZE',  # cuBLASLt chooses among kernels that fit
    'TORCH_BLAS_PREFER_CUBLASLT',  # cuBLAS or cuBLASLt
    'TORCH_LINALG_PREFER_CUSOLVER',  # cuSOLVER or MAGMA
    'TORCHINDUCTOR_BATCH_INVARIANT',  # other kernels when compiled
    # NCCL derives the number of channels from the size of a message, which is the same in every
    # run; pinning it to one, as some do, costs most of the bandwidth
    # the pieces that a sum is cut into
    'NCCL_MAX_NCHANNELS', 'NCCL_MIN_NCHANNELS', 'NCCL_MAX_CTAS', 'NCCL_MIN_CTAS', 'NCCL_CTA_POLICY',
    'NCCL_NTHREADS', 'NCCL_BUFFSIZE',
    # the order in which NCCL connects GPUs; the topology that it detects has no variable
    'NCCL_TOPO_FILE', 'NCCL_GRAPH_FILE', 'NCCL_CONF_FILE', 'NCCL_CROSS_NIC', 'NCCL_IB_DISABLE',
    'NCCL_P2P_DISABLE', 'NCCL_P2P_LEVEL', 'NCCL_SHM_DISABLE', 'NCCL_NET', 'NCCL_NET_PLUGIN',
    # plugins may choose the algorithm, and registered memory has kernels of its own
    'NCCL_TUNER_PLUGIN', 'NCCL_TUNER_CONFIG_FILE', 'NCCL_WIN_ENABLE',
    'PYTORCH_CUDA_ALLOC_CONF',  # addresses, for code that orders by them
)

# All variables that are known to change bits, or to explain timings.
BIT_VARIABLES = (*(row.name for row in ENV), *RECORDED_ENV)


def _find(name: str) -> Any:
    """Return ``torch.a.b``, looked up at each call, because releases lack some switches."""
    import torch
    return operator.attrgetter(name.partition('.')[2])(torch)


def _call(name: str) -> Any:
    return _find(name)()


def _attribute(name: str, wanted: Callable[[PolicySettings], Sequence[Any]], why: str) -> Flag:
    owner, _, attribute = name.rpartition('.')
    return Flag(name, lambda: _find(name), lambda value: setattr(_find(owner), attribute, value),
                wanted, why)


def _functions(name: str, getter: str, setter: str,
               wanted: Callable[[PolicySettings], Sequence[Any]], why: str, verified: str = ''
               ) -> Flag:
    return Flag(name, functools.partial(_call, getter), lambda value: _find(setter)(value), wanted,
                why, setter=setter, verified=verified)


def _of_compiler(module: str, name: str, value: bool, why: str,
                 later: Callable[[Mapping[str, str]], Any], verified: str = '') -> Flag:
    """Return the row of a setting of torch's compiler, which takes seconds to import."""

    return Flag(f'{module}.{name}', lambda: getattr(compiled.imported(module), name),
                lambda wanted: setattr(compiled.imported(module), name, wanted),
                _deterministic(value), why, later=later, module=module, verified=verified)


def _reduction(kind: str, why: str) -> Flag:
    name = f'allow_{kind}_reduced_precision_reduction'

    def put(value: bool) -> None:
        matmul = _find('torch.backends.cuda.matmul')
        try:
            split_k = getattr(matmul, f'{name}_split_k')
        except (AttributeError, AssertionError):  # AssertionError: torch 2.0
            split_k = None
        # A bare bool would also turn split-K on again; True is only valid together with split-K.
        setattr(matmul, name, value if split_k is None else (value, bool(value or split_k)))

    return _attribute(f'torch.backends.cuda.matmul.{name}', _deterministic(False),
                      why)._replace(set=put)


def _benchmark(s: PolicySettings) -> Sequence[bool]:
    if s.mode is True:
        return (False, )
    # In 'warn' mode a conflict is kept and said; without determinism the request is all there is.
    return (bool(s.cudnn_benchmark), ) if s.mode or s.cudnn_benchmark is not None else ()


# torch computes 'none' as 'ieee'
_IEEE = ('ieee', 'none')


def unchanged(value: Any) -> tuple[Any, ...]:
    """Return the values of a pinned flag that mean the same as ``value``."""
    return _IEEE if value in _IEEE else (value, )


def _precision(key: str) -> Callable[[PolicySettings], Sequence[Any]]:
    return lambda s: () if s.precision is None else unchanged(s.precision[key])


def _operators(kind: str, package: str, wanted: Callable[[PolicySettings], Sequence[Any]],
               why: str, verified: str) -> Flag:
    """Return the row of a package of operators, which is imported when it is wanted."""

    def installed() -> bool:
        return package in sys.modules and bool(sys.modules[package].installed())

    def put(value: bool) -> None:
        operators = importlib.import_module(package)
        (operators.install if value else operators.uninstall)()

    return Flag(f'mmrepro.{kind}_operators', installed, put, wanted, why, verified=verified)


# Applied, and restored, from the top down. The old precision API stands before the new one, because
# writing the old one also writes the new one, never the other way round. The global switch comes
# last, when everything that it relies on is in place.
FLAGS = (
    *(flag._replace(pinned=True) for flag in (
        _functions('torch.float32_matmul_precision', 'torch.get_float32_matmul_precision',
                   'torch.set_float32_matmul_precision', _precision('matmul'),
                   'float32 or TF32 in matrix products, on every release'),
        _attribute('torch.backends.cudnn.allow_tf32', _precision('tf32'),
                   'float32 or TF32 in convolutions; TF32 by default'),
        *(_attribute(f'torch.backends.{owner}.fp32_precision', _precision('cuda'),
                     f'the newer switch of {what}; it may be set on its own')
          for owner, what in (('cuda.matmul', 'matrix products'), ('cudnn.conv', 'convolutions'),
                              ('cudnn.rnn', 'recurrent layers'))),
        _attribute('torch.backends.mkldnn.matmul.fp32_precision', _precision('cpu'),
                   'oneDNN rounds inputs where the CPU has units for it'),
        *(_attribute(f'torch.backends.mkldnn.{owner}.fp32_precision',
                     lambda s: () if s.precision is None else _IEEE,
                     f'{what} on the CPU stay float32')
          for owner, what in (('conv', 'convolutions'), ('rnn', 'recurrent layers'))))),
    _reduction('fp16', 'partial sums kept in 16 bits: the result depends on how many pieces a '
               'heuristic chose'),
    _reduction('bf16', 'the same for bfloat16'),
    _functions('torch.num_threads', 'torch.get_num_threads', 'torch.set_num_threads',
               lambda s: () if s.num_threads is None else (s.num_threads, ),
               'a sum that is split over threads depends on their number',
               'docs/reference/limits.md'),
    _attribute('torch.backends.cudnn.benchmark', _benchmark,
               'cuDNN times its kernels and takes the fastest, a matter of chance'),
    _attribute('torch.backends.cudnn.deterministic', _deterministic(True),
               'the fastest backward convolutions add up atomically'),
    _attribute('torch.backends.mkldnn.deterministic', _deterministic(True),
               'oneDNN on Intel GPUs adds up atomically'),
    _functions('torch.backends.cuda.cudnn_sdp_enabled', 'torch.backends.cuda.cudnn_sdp_enabled',
               'torch.backends.cuda.enable_cudnn_sdp', _deterministic(False),
               'backward of attention in cuDNN has no deterministic form; the flash and '
               'memory-efficient backends have one, and torch picks it'),
    # the variable is a row of ENV, read when the module is imported
    _of_compiler('torch._inductor.config', 'deterministic', True, 'no timing of candidate kernels',
                 lambda env: env.get('TORCHINDUCTOR_DETERMINISTIC') == '1'),
    _of_compiler('torch._dynamo.config', 'automatic_dynamic_shapes', False,
                 'otherwise the second size makes kernels for all sizes, tuned to those that came '
                 'first: a resumed run would have others', lambda env: True,
                 'tests/determinism/test_compiled.py'),
    _of_compiler('torch._dynamo.config', 'fail_on_recompile_limit_hit', True,
                 'beyond the limit of sizes a model runs uncompiled, without a word',
                 lambda env: False, 'tests/determinism/test_compiled.py'),
    Flag('mmrepro.split_scans', compiled.splits_scans, compiled.split_scans, _deterministic(False),
         'compiled cumulative sums of many elements are split, and each part adds what others have '
         'finished by then (PyTorch #190946)', later=lambda env: True, module=compiled.SCANS,
         verified='tests/determinism/test_compiled.py'),
    _attribute('torch.utils.deterministic.fill_uninitialized_memory', _deterministic(False),
               'most of the price of determinism, and only of use to find reads of unset memory'),
    _operators('native', 'mmrepro.ops.aten', _deterministic(True),
               "torch's own kernels that would raise, or break ties as they like",
               'tests/ops/aten/test_kernels_of_torch.py'),
    _functions('torch.backends.cuda.flash_sdp_enabled', 'torch.backends.cuda.flash_sdp_enabled',
               'torch.backends.cuda.enable_flash_sdp', _portable(False),
               'fused attention on the CPU calls MKL; products and softmax take its place',
               'tests/ops/portable/test_no_calls_of_mkl.py'),
    _functions('torch.backends.mha.fastpath_enabled', 'torch.backends.mha.get_fastpath_enabled',
               'torch.backends.mha.set_fastpath_enabled', _portable(False),
               'the fused layer of evaluations calls MKL',
               'tests/ops/portable/test_no_calls_of_mkl.py'),
    _operators('portable', 'mmrepro.ops.portable', _portable(True),
               'MKL has other kernels for the CPUs of each maker',
               'tests/ops/portable/test_no_calls_of_mkl.py'),
    # Not torch.use_deterministic_algorithms: recent releases import inductor in there, 1.6 s.
    _functions('torch.deterministic_debug_mode', 'torch.get_deterministic_debug_mode',
               'torch.set_deterministic_debug_mode',
               _debug_mode,
               'deterministic algorithms; without one, an error (2) or a warning (1)',
               'tests/host_cuda/test_host_cuda.py'),
)

# name -> getter, for the snapshot only
RECORDED_FLAGS: dict[str, Callable[[], Any]] = {
    'torch.num_interop_threads': lambda: _call('torch.get_num_interop_threads'),
    **{name: functools.partial(_find, name) for name in (
        'torch.backends.cudnn.enabled', 'torch.backends.mkldnn.enabled',
        'torch.backends.cuda.matmul.allow_fp16_accumulation')},
    **{name: functools.partial(_call, name) for name in (
        'torch.backends.cuda.mem_efficient_sdp_enabled',
        'torch.backends.cuda.math_sdp_enabled')},
    # without importing OpenCV: a module that is not there raises AttributeError
    'cv2.num_threads': lambda: getattr(sys.modules.get('cv2'), 'getNumThreads')(),  # noqa: B009
}
