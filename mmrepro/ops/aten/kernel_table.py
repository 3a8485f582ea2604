"""The table of torch's own operators: their behavior under the deterministic flag.

One row per operator and span of releases. ``torch`` is the behavior of torch on CUDA:

    raises   raises, naming the operator
    silent   adds in the order in which threads arrive, without an error
    slow     deterministic, by a detour that costs time and memory
    ties     deterministic, but the choice among equal values is not specified
    good     deterministic
    unknown  no source says; the operator guard reports it where it runs

Rows with a ``target`` are replaced (or refused, by ``refusal``), the others are not; ``why`` is the
reason. A row named ``module.attribute`` is a *Python override*: torch takes its detour in Python,
before the dispatcher, so that function is replaced. :data:`FAMILIES` has what a reason holds for
by the dozen, as patterns; a test holds every operator of the dispatcher against both, but those
that are pointwise, views or compositions by torch's own tags. This module does not import torch.

Sources: "documented" is the documentation of ``torch.use_deterministic_algorithms`` (2.13); files
are of ``aten/src/ATen/native``, read in versions around 2.x, not measured. Spans of releases, in
pytorch/pytorch: cumsum #140887 (2.6), kthvalue #165762 (2.10), bilinear since 2.1, trilinear
#154239 (2.9), replication padding #148633 (2.8; 2-D since 2.1), scatter and scatter_reduce #98060
(2.1), max_pool3d #179104 (2.12). topk does not specify the order of equal values: on NVIDIA the
selection goes by prefix scans and the sort of the results is not stable; on ROCm the selection
takes equal values as threads arrive (#186653, which was reverted).
"""
from __future__ import annotations

import functools
import importlib
import re
from typing import Any, Callable, NamedTuple

BEHAVIORS = ('raises', 'silent', 'slow', 'ties', 'good', 'unknown')
# Spans of releases. 2.0 is the oldest that mmrepro runs on.
_FIRST, _LATER = (2, 0), (99, 0)
_CUDA, _BOTH = ('cuda',), ('cpu', 'cuda')
# Why a replacement is deterministic, or why an operator is not replaced.
_AXES = 'one filter per axis; every element is a sum over its own readers in ascending order'
_TAPS = 'corners are sorted by destination (stable), then every pixel is one ordered sum'
_FLAT = 'one flat index_put, which sorts by destination and adds in order'
_STEPS = 'log2(n) operations on whole tensors'
_TIES = 'equal values by lower index, on a CPU and on CUDA alike'
_DETOUR = 'straight to the kernel, whose backward is replaced here; no detour over index_put'
_LAST = "of equal indices the last one writes; sums are torch's sorted ones"
_UNUSED = 'no detector uses it; torch refuses it by name, which is the promise'
_REFUSED = 'no detector uses it; refused by name, because torch does not refuse it'


class KernelRow(NamedTuple):
    """One operator over a span of releases."""

    operator: str  # name in aten with its overload, or module.attribute
    torch: str  # a word of BEHAVIORS
    target: str  # module:function or module:function(literals) of the replacement, or ''
    why: str  # why the replacement is deterministic, or why there is none
    users: str = ''  # detectors and parts that reach it
    since: tuple[int, int] = _FIRST  # the first release (major, minor) that the row applies to
    until: tuple[int, int] = _LATER  # the first one that it does not apply to any more
    devices: tuple[str, ...] = _CUDA  # on which it is replaced
    key: str = ''  # of the dispatcher, if not the device's: above it, where torch's kernel remains

    @property
    def overrides_python(self) -> bool:
        """Whether the row names a Python function instead of an operator of ``aten``."""
        return self.operator.startswith('torch.')

    def load(self) -> Callable[..., Any]:
        """Return the function of ``target``, with its literals as the first arguments."""
        module, _, expression = self.target.partition(':')
        name, _, arguments = expression.rstrip(')').partition('(')
        function = getattr(importlib.import_module(f'mmrepro.ops.aten.{module}'), name)
        return functools.partial(function, *arguments.split(', ')) if arguments else function


class KernelFamily(NamedTuple):
    """Operators without a row in :data:`TABLE` that share a reason."""

    pattern: str  # of a name without the underscore of in-place forms, or name.overload
    torch: str  # a word of BEHAVIORS
    why: str


_BACKWARD = (
    KernelRow('upsample_bicubic2d_backward', 'raises', 'separable:resize_backward(cubic)', _AXES,
              'position embeddings of vision transformers (ViTDet)'),
    KernelRow('upsample_bilinear2d_backward', 'raises', 'separable:resize_backward(linear)', _AXES,
              'SOLO, SOLOv2, HTC, SCNet, PanopticFPN, DyHead, NAS-FCOS, FPG, RTMDet-Ins, CondInst, '
              'BoxInst, YOLACT, Mask2Former, HRFPN, PVT'),
    KernelRow('torch._decomp.decompositions.upsample_bilinear2d_vec', 'slow',
              'python_overrides:upsample_bilinear',
              _DETOUR, 'F.interpolate', since=(2, 1), until=(2, 4)),
    KernelRow('torch._decomp.decompositions._upsample_linear_vec', 'slow',
              'python_overrides:upsample_bilinear', _DETOUR, 'F.interpolate', since=(2, 2)),
    KernelRow('_adaptive_avg_pool2d_backward', 'raises', 'separable:adaptive_avg_pool_backward',
              _AXES, 'HTC, SCNet (1x1 outputs are a mean and never get here)'),
    KernelRow('adaptive_max_pool2d_backward', 'raises', 'scatter:adaptive_max_pool_backward', _FLAT,
              'Libra R-CNN (BFP)'),
    KernelRow('reflection_pad2d_backward', 'raises', 'separable:pad_backward(reflection)', _AXES,
              'DetectoRS (SAC)'),
    KernelRow('replication_pad2d_backward', 'raises', 'separable:pad_backward(replication)', _AXES,
              'CondInst, BoxInst'),
    KernelRow('torch._decomp.decompositions._replication_pad', 'slow',
              'python_overrides:replication_pad', _DETOUR, 'F.pad(mode="replicate")', since=(2, 1)),
    KernelRow('grid_sampler_2d_backward', 'raises', 'grid_sample:grid_sample_backward', _TAPS,
              'Mask2Former, PointRend; Deformable DETR in pure Python'),
    KernelRow('cudnn_grid_sampler_backward', 'silent', 'grid_sample:cudnn_grid_sample_backward',
              _TAPS, 'bilinear grid_sample with align_corners=True'),
)

_SELECTION = (
    KernelRow('topk', 'silent', 'selection:topk', _TIES,
              'RPN, ATSS, SimOTA, DETR queries, every dense head', devices=_BOTH),
    KernelRow('sort', 'ties', 'selection:sort', _TIES,
              'candidates before NMS, PISA, rank losses', devices=_BOTH),
    KernelRow('kthvalue', 'raises', 'selection:kthvalue', _TIES,
              'Dynamic R-CNN, CenterNet (update)', until=(2, 10)),
    KernelRow('kthvalue', 'good', '', 'the lowest index of equal values',
              'Dynamic R-CNN, CenterNet (update)', since=(2, 10)),
)

_SUMS = (
    KernelRow('cumsum', 'raises', 'sums:cumsum', _STEPS,
              'sine position encodings: DETR, Deformable DETR, DINO, Mask2Former and all relatives',
              until=(2, 6)),
    KernelRow('cumsum_', 'raises', 'sums:cumsum_', _STEPS, until=(2, 6)),
    # of one dimension: a scan whose blocks take the sums of their neighbors as these arrive
    *(KernelRow(name, 'silent', f'refusal:refuse({name})', _REFUSED)
      for name in ('cumprod', 'cumprod_', 'cumprod.out', '_logcumsumexp', '_logcumsumexp.out',
                   'adaptive_max_pool3d_backward', 'adaptive_max_pool3d_backward.grad_input')),
    KernelRow('nll_loss2d_forward', 'raises', 'sums:nll_loss2d_forward', 'gathered, then torch.sum',
              'cross_entropy of maps in losses of users; MMDetection reduces itself'),
    # Sources do not agree on whether 2.0 is in order for more than one dimension: taken as not.
    KernelRow('_index_put_impl_', 'slow', 'indexed_writes:index_put', _LAST,
              'assigners, targets of every head', key='BackendSelect'),
    KernelRow('scatter_add', 'raises', 'scatter:scatter_add', _FLAT,
              'FreeAnchor, CornerNet, two-stage DETRs (backward of gather)', until=(2, 1)),
    KernelRow('scatter_add_', 'raises', 'scatter:scatter_add_', _FLAT,
              'backward of gather', until=(2, 1)),
)

TABLE: tuple[KernelRow, ...] = (*_BACKWARD, *_SELECTION, *_SUMS)

FAMILIES: tuple[KernelFamily, ...] = (
    # ---- refused by torch
    KernelFamily('upsample_(linear1d|bilinear2d|trilinear3d)_backward|'
                 'reflection_pad.d_backward|_?adaptive_avg_pool.d_backward|'
                 'adaptive_max_pool2d_backward|'
                 'avg_pool3d_backward|fractional_max_pool.d_backward|max_unpool.d|'
                 r'grid_sampler_.d_backward|put|histc|median\.dim(_values)?|'
                 '_ctc_loss_backward', 'raises', f'{_UNUSED} (documented)'),
    KernelFamily(r'index_reduce|scatter\.(value_)?reduce(_out)?|nanmedian\.dim(_values)?|'
                 '_upsample_bi(linear|cubic)2d_aa_backward', 'raises',
                 f'{_UNUSED} (cuda/: Indexing.cu, ScatterGatherKernel.cu, Sorting.cpp, '
                 'UpSampleBilinear2d.cu)'),
    KernelFamily('replication_pad.d_backward|max_pool3d_with_indices_backward', 'raises',
                 f'{_UNUSED}; F.pad from 2.8 and F.max_pool3d from 2.12 on take a detour'),
    KernelFamily('logcumsumexp', 'silent', 'calls _logcumsumexp, which is refused here'),
    KernelFamily('bincount', 'raises', 'counts are integers; with weights torch refuses it '
                 '(documented), and no detector gives any'),
    KernelFamily('scatter_reduce', 'raises', 'refused before 2.1; then amin and amax are in any '
                 'order, sum and mean in order, and "prod" is refused (documented)'),
    KernelFamily('_(scaled_dot_product_)?cudnn_attention(_forward|_backward)?', 'raises',
                 'switched off by the flags; torch leaves it out in deterministic mode'),
    # ---- in order under the flag
    KernelFamily('index_(add|copy|put)|_index_put_impl|_unsafe_(masked_)?index_put(_accumulate)?',
                 'good', 'sorted by destination (documented), also for index_select, gather and '
                 'repeat_interleave backward; serial on a CPU'),
    KernelFamily('scatter(_add)?', 'good', 'a sorted index_put (documented; refused before 2.1)'),
    KernelFamily('cumsum', 'good', 'a scan in a fixed order (cuda/ScanUtils.cuh; refused before '
                 '2.6)'),
    KernelFamily(r'sort\.(values_)?stable', 'good', 'stable, by its documentation'),
    KernelFamily('kthvalue', 'good', 'the lowest index of equal values; refused before 2.10'),
    KernelFamily('_?convolution.*|_?conv_.*|cudnn_convolution.*|_?slow_conv.*|_cudnn_ctc_loss',
                 'good', "cuDNN's deterministic algorithms (documented); others without atomics"),
    KernelFamily('_?(flash|efficient)_attention_.*|'
                 '_scaled_dot_product_(flash|efficient)_attention(_backward)?|'
                 '_flash_attention_forward_no_dropout_inplace|_fill_mem_eff_dropout_mask', 'good',
                 'one split of the keys, or a deterministic kernel, without warn_only '
                 '(transformers/cuda/attention_backward.cu; not looked up before 2.3)'),
    KernelFamily('_?addmm(_activation)?|add(mv|bmm|r)|(badd)?bmm|mm|mv|v?dot|_trilinear|trace|'
                 '_int_mm|_(scaled_)?grouped_mm.*|_scaled_mm.*|_mixed_dtypes_linear|linear.*|'
                 'matmul_backward|conv_tbc|linalg_matrix_exp|_compute_linear_combination', 'good',
                 'cuBLAS with a fixed workspace (documented); the guard reports sparse factors'),
    # ---- deterministic as they are
    KernelFamily('embedding(_dense_backward)?|_embedding_bag(_forward_only|_dense_backward|'
                 '_backward|_per_sample_weights_backward)?|embedding_renorm', 'good',
                 'sorted by destination; indices of max_norm are made unique first '
                 '(cuda/Embedding.cu); torch refuses the gradient of EmbeddingBag(mode="max")'),
    KernelFamily('(topk|sort)', 'ties', 'the same elements on every run (prefix scans, sorting '
                 'networks); an explicit out= or stable=False is left alone'),
    KernelFamily('mode|median|nanmedian|unique_(dim|consecutive|dim_consecutive)|_unique2?|'
                 'searchsorted|bucketize|isin|nonzero(_static)?|masked_select|masked_scatter.*|'
                 'index_fill|histogram|_histogramdd_.*', 'good',
                 'values by sorting, or integers by scans; duplicates write the same value'),
    KernelFamily('(_|arg)?(a?max|a?min|aminmax)|argmax|argmin|cummax|cummin', 'good',
                 'the first of equal values, by the documentation; scans go along each row'),
    KernelFamily('all|any|_is_(all|any)_true|count_nonzero|mean|(nan)?sum|prod|(std|var)(_mean)?|'
                 '(native_)?norm|dist|logsumexp|linalg_(vector_norm|_powsum)|renorm|'
                 '_?(safe_|masked_)?(log_)?softmax(_backward(_data)?)?|'
                 '(native_)?(layer|group|batch)_norm.*|_(native_)?batch_norm_.*|'
                 'cudnn_batch_norm.*|_fused_rms_norm_backward|_weight_norm_interface(_backward)?|'
                 '(huber|mse|nll|_ctc|smooth_l1|soft_margin|multi(label)?_margin)_loss(2d)?'
                 '(_(for|back)ward)?|binary_cross_entropy.*|_thnn_fused_.*|'
                 '_?segment_reduce(_backward)?', 'good',
                 'blocks reduce, and their parts are added in the order of blocks '
                 '(cuda/Reduce.cuh); a row or segment is one block or thread'),
    KernelFamily('_?[cp]dist_(for|back)ward|_euclidean_dist', 'good',
                 'one row of a buffer per pair, then a sum (cuda/DistanceKernel.cu)'),
    KernelFamily('_?upsample_(?!lanczos2d_aa_backward).*|_?adaptive_.*pool.*|avg_pool.*|'
                 '(fractional_)?max_pool.*|im2col|col2im|unfold_backward|'
                 '(reflection|replication)_pad.d|(cudnn_)?grid_sampler(_.d)?|'
                 '(cudnn_)?affine_grid_generator', 'good',
                 'every element reads its own sources'),
    KernelFamily('bernoulli|binomial|cauchy|exponential|geometric|(log_)?normal.*|poisson|uniform|'
                 'random|rand.*|multinomial|(native|_fused)_dropout|rrelu_with_noise.*|_philox_.*|'
                 '_standard_gamma(_grad)?|_sample_dirichlet|_dirichlet_grad|'
                 '_cudnn_init_dropout_state', 'good',
                 'drawn by position from the seed; how many threads draw depends on the number of '
                 'multiprocessors (cuda/DistributionTemplates.h)'),
    KernelFamily('_add_relu|_amp_.*|arange|as_strided.*|.*_window|block_diag|_?(chunk_)?cat|'
                 '_?stack|_?copy.*|_to_copy|narrow_copy|channel_shuffle|complex|polar|'
                 'constant_pad_nd|(_lazy_)?clone|detach|diag.*|(new_)?empty.*|eye|fill|flip|rot90|'
                 '_functional_.*|from_file|(new_)?full(_like)?|gather|_?index|index_select|'
                 '_unsafe_.*|fft_r?fftfreq|glu.*|'
                 '(elu|hard.*|leaky_relu|soft.*|log_sigmoid)_(for|back)ward|hardswish|__irshift|'
                 'floor_divide|lift|linspace|logspace|linalg_cross|lu_unpack|_masked_scale|'
                 '(new_)?(ones|zeros?)(_like)?|_new_zeros_with_.*|_pack_padded_sequence|'
                 '_pin_memory|pixel_(un)?shuffle|_prelu_kernel.*|range|repeat(_interleave)?|'
                 '_reshape_copy|_?resize.*|roll|scalar_tensor|(select|slice)_(backward|scatter)|'
                 'set|squeeze|unsqueeze|t|transpose|take|to_padded_tensor|tri[lu](_indices)?|'
                 'unsafe_split.*|_efficientzerotensor|_coalesced|_convert_indices_.*|'
                 '_transform_bias_.*', 'good',
                 'every output element depends on its own inputs only'),
    KernelFamily('_coalesce|_to_dense|_to_sparse.*|_sparse_(coo_tensor.*|sum.*)|'
                 'sparse_(coo|compressed)_tensor|sparse_(mask|resize.*)', 'good',
                 'duplicates are sorted and one thread adds a group, or an index_add '
                 '(sparse/cuda/SparseCUDATensor.cu)'),
    # ---- the guard reports these
    KernelFamily('_sparse_.*|sparse_sampled_addmm|sspaddmm|hspmm|_spsolve|_spdiags', 'unknown',
                 'cuSPARSE promises the same bits for some of its algorithms only'),
    KernelFamily('_cudnn_rnn.*', 'unknown',
                 'documented (torch.nn.LSTM) to vary with some versions of cuDNN'),
    KernelFamily('_?linalg_.*|_?cholesky.*|geqrf|ormqr|triangular_solve', 'unknown',
                 'cuSOLVER and MAGMA were not looked up'),
    KernelFamily('_fft_.*', 'unknown', 'cuFFT does not say'),
    KernelFamily('_native_multi_head_attention|_transformer_encoder_layer_fwd|_triton_.*|'
                 '_upsample_lanczos2d_aa_backward|cudnn_affine_grid_generator_backward', 'unknown',
                 'not looked up'),
)


def family_of(operator: str) -> KernelFamily | None:
    """Return the first of :data:`FAMILIES` that fits the name of an operator, or None."""
    packet, dot, overload = operator.partition('.')
    name = packet.rstrip('_')
    return next((family for family in FAMILIES if re.fullmatch(family.pattern, name)
                 or re.fullmatch(family.pattern, f'{name}{dot}{overload}')), None)
