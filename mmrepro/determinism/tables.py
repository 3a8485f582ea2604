"""What the policy sets, and why: one row per environment variable and per flag of torch.

A new case is a new row. The code that reads the tables is in ``policy.py``.
"""
from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Any, Callable, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import torch

Mode = Union[bool, str]

UNAVAILABLE = 'unavailable'  # this torch has no such switch
UNREADABLE = 'unreadable'  # torch refuses: its old and its new precision API were both used

# float32_precision -> what torch is told. TF32 repeats its bits like any other format; it is a
# choice of precision, so it is pinned rather than forbidden.
#   matmul  torch.set_float32_matmul_precision
#   tf32    torch.backends.cudnn.allow_tf32 (convolutions; torch's own default is True)
#   cuda    fp32_precision of cuBLAS and cuDNN, torch >= 2.9
#   cpu     fp32_precision of oneDNN matrix products, torch >= 2.9 (its convolutions stay float32)
PRECISIONS = {
    'highest': dict(matmul='highest', tf32=False, cuda='ieee', cpu='ieee'),
    'high': dict(matmul='high', tf32=True, cuda='tf32', cpu='tf32'),
    'medium': dict(matmul='medium', tf32=True, cuda='tf32', cpu='bf16'),
}

# What float32_precision=None means in deterministic mode: the one value whose bits do not depend on
# whether the device, or its next driver, happens to have a TF32 path.
DETERMINISTIC_PRECISION = 'highest'


@dataclass(frozen=True)
class PolicySettings:
    """What was asked for. ``None`` leaves a thing as it is."""

    mode: Mode = True
    float32_precision: Optional[str] = None
    fill_uninitialized_memory: bool = False
    num_threads: Optional[int] = None
    cudnn_enabled: Optional[bool] = None
    cudnn_benchmark: Optional[bool] = None

    @property
    def precision(self) -> Optional[dict]:
        """The row of ``PRECISIONS`` in force, or None."""
        name = self.float32_precision
        if name is None and self.mode:
            name = DETERMINISTIC_PRECISION
        return None if name is None else PRECISIONS[name]


class EnvRow(NamedTuple):
    """One environment variable that the policy has an opinion on.

    Attributes:
        accepted: PolicySettings -> values that a user may have set; an empty tuple: no opinion now.
        default: Set if the variable is missing; None: a missing variable is as good.
        at_start: It is read so early that setting it inside a running Python comes too late.
        matches: ``matches(value)`` replaces "is one of ``accepted``" where a list is too short.
    """

    name: str
    accepted: Callable[[PolicySettings], Tuple[str, ...]]
    default: Optional[str]
    why: str
    at_start: bool = False
    matches: Optional[Callable[[str], bool]] = None

    def accepts(self, value: str, settings: PolicySettings) -> bool:
        """Whether a user may have set ``value``."""
        accepted = self.accepted(settings)
        return not accepted or (value in accepted if self.matches is None else self.matches(value))


class Flag(NamedTuple):
    """One switch of torch.

    Attributes:
        get, set: May raise AttributeError: this torch does not have it.
        wanted: settings -> acceptable values, the first of which is written if the current one is
            not among them; an empty tuple: leave it.
        later: env -> what to restore if the switch was not there on the way in, but is now.
        setter: torch's function that sets it, where it is no attribute.
    """

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], None]
    wanted: Callable[[PolicySettings], Sequence[Any]]
    why: str
    later: Optional[Callable[[Mapping[str, str]], Any]] = None
    setter: str = ''


# -------------------------------------------------------------------------------- environment


def _deterministic(*values: str) -> Callable[[PolicySettings], Tuple[str, ...]]:
    return lambda s: values if s.mode else ()


def _tf32(off: Tuple[str, ...], on: Tuple[str, ...]) -> Callable[[PolicySettings], Tuple]:
    return lambda s: () if s.precision is None else on if s.precision['tf32'] else off


_NCCL_ALGORITHMS = {'ring', 'collnetdirect', 'collnetchain'}


def _is_nccl_algo(value: str) -> bool:
    tokens = {token.strip().lower() for token in value.lstrip('^').split(',')}
    if value.startswith('^'):
        return 'nvls' in tokens and not tokens & _NCCL_ALGORITHMS
    return tokens <= _NCCL_ALGORITHMS


def _is_hash_seed(value: str) -> bool:
    return re.fullmatch(r'[0-9]{1,10}', value) is not None and int(value) < 2**32


def _is_thread_count(value: str) -> bool:
    return re.fullmatch(r'[1-9][0-9]*(,[1-9][0-9]*)*', value) is not None


# CUDA_LAUNCH_BLOCKING=1 is deliberately not here: work on one stream runs in order without it, so
# it buys no bit and costs the overlap of host and device. MKL_CBWR is not either: it makes
# matrix products independent of the number of threads but not convolutions, and it changes the
# bits of products with one thread (docs/explanation/limits.md). Both are recorded below.
ENV = (
    EnvRow(
        'CUBLAS_WORKSPACE_CONFIG', _deterministic(':4096:8', ':16:8'), ':4096:8',
        'cuBLAS otherwise sizes its workspace itself and picks kernels that share it between '
        'streams; read when the first handle is made, and demanded by older torch',
        at_start=True),
    EnvRow(
        'PYTHONHASHSEED', _deterministic('an integer from 0 to 4294967295'), None,
        'the order of a set of strings; read by the interpreter before any code runs',
        at_start=True, matches=_is_hash_seed),
    EnvRow(
        'OMP_NUM_THREADS', _deterministic('a positive integer'), None,
        'a sum that is split over threads depends on their number; OpenMP reads it when loaded',
        at_start=True, matches=_is_thread_count),
    EnvRow(
        'MKL_NUM_THREADS', _deterministic('a positive integer'), None,
        'the same for matrix products on the CPU',
        at_start=True, matches=_is_thread_count),
    EnvRow(
        'NCCL_ALGO',
        _deterministic('a list of Ring, CollnetDirect, CollnetChain',
                       'an exclusion list that names NVLS, such as ^NVLS'), 'Ring',
        'NCCL otherwise picks the algorithm, and with it the order of a sum, by message size and '
        'topology; NVLS sums inside the switch, in an order that nobody controls',
        matches=_is_nccl_algo),
    EnvRow(
        'TORCHINDUCTOR_DETERMINISTIC', _deterministic('1'), '1',
        'inductor otherwise times candidate kernels on the device, and the fastest differs from '
        'run to run'),
    EnvRow(
        'FLASH_ATTENTION_DETERMINISTIC', _deterministic('1'), '1',
        'the flash-attn package, as transformers call it: its backward adds up dQ atomically'),
    EnvRow(
        'NVTE_ALLOW_NONDETERMINISTIC_ALGO', _deterministic('0'), '0',
        'Transformer Engine allows attention kernels with atomics unless told not to'),
    EnvRow(
        'NVIDIA_TF32_OVERRIDE', _tf32(off=('0', ), on=('1', )), None,
        'overrules the TF32 setting of every NVIDIA library'),
    EnvRow(
        'TORCH_ALLOW_TF32_CUBLAS_OVERRIDE', _tf32(off=('0', ), on=('0', '1')), None,
        'overrules the precision of matrix products, whatever the program sets'),
    EnvRow(
        'DNNL_DEFAULT_FPMATH_MODE', _tf32(off=('STRICT', 'strict'), on=()), None,
        'lets oneDNN round float32 inputs on the CPU'),
    EnvRow(
        'ONEDNN_DEFAULT_FPMATH_MODE', _tf32(off=('STRICT', 'strict'), on=()), None,
        'the newer name of the variable above'),
)

# Rows of ENV that nothing on a CPU reads.
CUDA_ENV = ('CUBLAS_WORKSPACE_CONFIG', 'NCCL_ALGO', 'NVIDIA_TF32_OVERRIDE',
            'TORCH_ALLOW_TF32_CUBLAS_OVERRIDE', 'NVTE_ALLOW_NONDETERMINISTIC_ALGO',
            'FLASH_ATTENTION_DETERMINISTIC')

# Never set and never refused, but they change bits, so they belong into every snapshot.
RECORDED_ENV = (
    'OPENBLAS_NUM_THREADS',  # threads of NumPy's linear algebra
    'MKL_CBWR',  # the code path of MKL
    'MKL_ENABLE_INSTRUCTIONS',  # the instruction set of MKL
    'ATEN_CPU_CAPABILITY',  # the instruction set of torch's own kernels
    'ONEDNN_MAX_CPU_ISA',  # the instruction set of oneDNN
    'CUDA_LAUNCH_BLOCKING',  # no bits, but a different schedule; explains timings
    'CUBLASLT_WORKSPACE_SIZE',  # cuBLASLt chooses among kernels that fit
    'TORCH_BLAS_PREFER_CUBLASLT',  # cuBLAS or cuBLASLt
    'TORCH_LINALG_PREFER_CUSOLVER',  # cuSOLVER or MAGMA
    'TORCHINDUCTOR_BATCH_INVARIANT',  # other kernels when compiled
    'NCCL_PROTO',  # the chunks that a sum is cut into
    'NCCL_MAX_NCHANNELS',  # likewise
    'NCCL_MIN_NCHANNELS',  # likewise
    'PYTORCH_CUDA_ALLOC_CONF',  # addresses, for code that orders by them
)

# -------------------------------------------------------------------------------- flags


def _attribute(owner: Callable[[], Any], name: str) -> Tuple[Callable, Callable]:
    return lambda: getattr(owner(), name), lambda value: setattr(owner(), name, value)


def _functions(owner: Callable[[], Any], getter: str, setter: str) -> Tuple[Callable, Callable]:
    return lambda: getattr(owner(), getter)(), lambda value: getattr(owner(), setter)(value)


def _inductor_config() -> Any:
    """Only when it is imported already: importing it takes seconds, and it then reads
    TORCHINDUCTOR_DETERMINISTIC, a row of ``ENV``."""
    module = sys.modules.get('torch._inductor.config')
    if module is None:
        raise AttributeError('torch._inductor is not in use')
    return module


def _reduction(kind: str) -> Tuple[Callable, Callable]:
    name = f'allow_{kind}_reduced_precision_reduction'

    def put(value: bool) -> None:
        matmul = torch.backends.cuda.matmul
        split_k = getattr(matmul, f'{name}_split_k', None)
        # A bare bool would also turn split-K on again; True is only valid together with split-K.
        setattr(matmul, name, value if split_k is None else (value, bool(value or split_k)))

    return lambda: getattr(torch.backends.cuda.matmul, name), put


def _debug_mode(s: PolicySettings) -> Sequence[int]:
    return (1, ) if s.mode == 'warn' else (2, ) if s.mode else ()


def _benchmark(s: PolicySettings) -> Sequence[bool]:
    if s.mode is True:
        return (False, )
    # In 'warn' mode a conflict is kept and said; without determinism the request is all there is.
    return (bool(s.cudnn_benchmark), ) if s.mode or s.cudnn_benchmark is not None else ()


def _when_deterministic(value: Any) -> Callable[[PolicySettings], Sequence[Any]]:
    return lambda s: (value, ) if s.mode else ()


def _precision(key: str) -> Callable[[PolicySettings], Sequence[Any]]:

    def wanted(s: PolicySettings) -> Sequence[Any]:
        if s.precision is None:
            return ()
        value = s.precision[key]
        return ('ieee', 'none') if value == 'ieee' else (value, )  # torch computes 'none' as 'ieee'

    return wanted


def _ieee(s: PolicySettings) -> Sequence[str]:
    return () if s.precision is None else ('ieee', 'none')


def _given(name: str) -> Callable[[PolicySettings], Sequence[Any]]:
    return lambda s: () if getattr(s, name) is None else (getattr(s, name), )


def _cudnn() -> Any:
    return torch.backends.cudnn


def _has_native_operators() -> bool:
    module = sys.modules.get('mmrepro.ops.aten')
    return module is not None and bool(module.installed())


def _set_native_operators(wanted: bool) -> None:
    from ..ops import aten
    (aten.install if wanted else aten.uninstall)()


# Applied, and restored, from the top down. The old precision API stands before the new one, because
# writing the old one also writes the new one, never the other way round. The global switch comes
# last, when everything that it relies on is in place.
FLAGS = (
    Flag('torch.float32_matmul_precision',
         *_functions(lambda: torch, 'get_float32_matmul_precision', 'set_float32_matmul_precision'),
         _precision('matmul'), 'float32 or TF32 in matrix products, on every release',
         setter='torch.set_float32_matmul_precision'),
    Flag('torch.backends.cudnn.allow_tf32', *_attribute(_cudnn, 'allow_tf32'),
         _precision('tf32'), 'float32 or TF32 in convolutions; on by default'),
    Flag('torch.backends.cuda.matmul.fp32_precision',
         *_attribute(lambda: torch.backends.cuda.matmul, 'fp32_precision'),
         _precision('cuda'), 'the newer switch of matrix products; it may be set on its own'),
    Flag('torch.backends.cudnn.conv.fp32_precision',
         *_attribute(lambda: torch.backends.cudnn.conv, 'fp32_precision'),
         _precision('cuda'), 'the newer switch of convolutions; it may be set on its own'),
    Flag('torch.backends.cudnn.rnn.fp32_precision',
         *_attribute(lambda: torch.backends.cudnn.rnn, 'fp32_precision'),
         _precision('cuda'), 'the newer switch of recurrent layers; it may be set on its own'),
    Flag('torch.backends.mkldnn.matmul.fp32_precision',
         *_attribute(lambda: torch.backends.mkldnn.matmul, 'fp32_precision'),
         _precision('cpu'), 'oneDNN rounds inputs where the CPU has units for it'),
    Flag('torch.backends.mkldnn.conv.fp32_precision',
         *_attribute(lambda: torch.backends.mkldnn.conv, 'fp32_precision'),
         _ieee, 'convolutions on the CPU stay float32'),
    Flag('torch.backends.mkldnn.rnn.fp32_precision',
         *_attribute(lambda: torch.backends.mkldnn.rnn, 'fp32_precision'),
         _ieee, 'recurrent layers on the CPU stay float32'),
    Flag('torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction', *_reduction('fp16'),
         _when_deterministic(False),
         'partial sums kept in 16 bits: the result depends on how many pieces a heuristic chose'),
    Flag('torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction', *_reduction('bf16'),
         _when_deterministic(False), 'the same for bfloat16'),
    Flag('torch.num_threads', *_functions(lambda: torch, 'get_num_threads', 'set_num_threads'),
         _given('num_threads'), 'a sum that is split over threads depends on their number',
         setter='torch.set_num_threads'),
    Flag('torch.backends.cudnn.enabled', *_attribute(_cudnn, 'enabled'),
         _given('cudnn_enabled'), 'cuDNN and the native kernels give different bits'),
    Flag('torch.backends.cudnn.benchmark', *_attribute(_cudnn, 'benchmark'),
         _benchmark, 'cuDNN times its kernels and takes the fastest, a matter of chance'),
    Flag('torch.backends.cudnn.deterministic', *_attribute(_cudnn, 'deterministic'),
         _when_deterministic(True), 'the fastest backward convolutions add up atomically'),
    Flag('torch.backends.mkldnn.deterministic',
         *_attribute(lambda: torch.backends.mkldnn, 'deterministic'),
         _when_deterministic(True), 'oneDNN on Intel GPUs adds up atomically'),
    Flag('torch.backends.cuda.cudnn_sdp_enabled',
         *_functions(lambda: torch.backends.cuda, 'cudnn_sdp_enabled', 'enable_cudnn_sdp'),
         _when_deterministic(False),
         'backward of attention in cuDNN has no deterministic form; the flash and '
         'memory-efficient backends have one, and torch picks it',
         setter='torch.backends.cuda.enable_cudnn_sdp'),
    Flag('torch._inductor.config.deterministic', *_attribute(_inductor_config, 'deterministic'),
         _when_deterministic(True), 'no timing of candidate kernels',
         later=lambda env: env.get('TORCHINDUCTOR_DETERMINISTIC') == '1'),
    Flag('torch.utils.deterministic.fill_uninitialized_memory',
         *_attribute(lambda: torch.utils.deterministic, 'fill_uninitialized_memory'),
         lambda s: (s.fill_uninitialized_memory, ) if s.mode else (),
         'most of the price of determinism, and only of use to find reads of unset memory'),
    Flag('mmrepro.native_operators', _has_native_operators, _set_native_operators,
         _when_deterministic(True),
         "torch's own kernels that would raise, or break ties as they like: "
         'docs/reference/operators.md'),
    # Not torch.use_deterministic_algorithms: recent releases import inductor in there, 1.6 s.
    Flag('torch.deterministic_debug_mode',
         *_functions(lambda: torch, 'get_deterministic_debug_mode', 'set_deterministic_debug_mode'),
         _debug_mode, 'deterministic algorithms; without one, an error (2) or a warning (1)',
         setter='torch.set_deterministic_debug_mode'),
)

# name -> getter, for the snapshot only
RECORDED_FLAGS = {
    'torch.num_interop_threads': lambda: torch.get_num_interop_threads(),
    'torch.backends.mkldnn.enabled': lambda: torch.backends.mkldnn.enabled,
    'torch.backends.cuda.matmul.allow_fp16_accumulation':
    lambda: torch.backends.cuda.matmul.allow_fp16_accumulation,
    'torch.backends.cuda.flash_sdp_enabled': lambda: torch.backends.cuda.flash_sdp_enabled(),
    'torch.backends.cuda.mem_efficient_sdp_enabled':
    lambda: torch.backends.cuda.mem_efficient_sdp_enabled(),
    'torch.backends.cuda.math_sdp_enabled': lambda: torch.backends.cuda.math_sdp_enabled(),
    # without importing OpenCV: a module that is not there raises AttributeError
    'cv2.num_threads': lambda: sys.modules.get('cv2').getNumThreads(),
}
