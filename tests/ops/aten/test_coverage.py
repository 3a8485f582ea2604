"""Every operator has a row: those that detectors reach, and all that the dispatcher knows."""
from __future__ import annotations

import json
import re

import pytest
import torch

from dev import detector_operators
from mmrepro.ops import aten
from mmrepro.ops.aten import dispatch, kernel_table

# The release whose operators the table was written for.
RELEASE = (2, 13)
# Operators of other devices and of quantized or nested tensors, and torch's own tests.
ELSEWHERE = re.compile(
    r'.*(mkldnn|miopen|mps|quantize|nested|nnpack|semi_structured|cslt|jagged|int[48]|dyn_quant|'
    r'for_cpu|cpu_fallback|qparams|hash_tensor|affine_cachemask|fq_helper|learnable|'
    r'overrideable).*|_test_.*|_foobar|q_per_.*|int_repr|dequantize')
# Lists of tensors, element by element; norms are reductions of each.
LISTS = re.compile(r'_foreach_.*|_fused_(adam|adamw|sgd|adagrad)')
HAS_KERNEL = torch._C._dispatch_has_kernel_for_dispatch_key


def operators():
    """Name -> overload of every operator of ``aten``; the default overload is not written."""
    found = {}
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full.partition('::')
        packet, _, overload = name.partition('.')
        function = getattr(getattr(torch.ops.aten, packet, None), overload or 'default', None)
        if namespace == 'aten' and function is not None:
            found[name] = function
    return found


OPERATORS = operators()


def packet_of(name):
    return name.partition('.')[0].rstrip('_')


POINTWISE = {packet_of(name) for name, one in OPERATORS.items()
             if torch.Tag.pointwise in one.tags}


def follows_a_rule(name):
    """Whether an operator needs no row: it computes nothing, or each element on its own.

    Compositions are dispatched part by part, and a generated out= form calls the other form.
    """
    function = OPERATORS[name]
    schema = function._schema
    aliases = [result.alias_info for result in schema.returns]
    tensors = [argument for argument in schema.arguments if 'Tensor' in str(argument.type)]
    results = [result for result in schema.returns if 'Tensor' in str(result.type)]
    return (HAS_KERNEL(f'aten::{name}', 'CompositeImplicitAutograd')
            or torch.Tag.generated in function.tags
            or packet_of(name) in POINTWISE or bool(LISTS.fullmatch(packet_of(name)))
            or torch.Tag.view_copy in function.tags
            or any(alias is not None and not alias.is_write for alias in aliases)
            or not tensors or not results)


def behavior(name, release=RELEASE):
    """The row or family of an operator, None if it has neither."""
    return next((row for row in kernel_table.TABLE
                 if row.operator == name and row.since <= release < row.until),
                kernel_table.family_of(name))


def reached():
    recorded = json.loads(detector_operators.RESULT.read_text())['operators']
    names = (full.split('.', 1)[1] for full in recorded if full.startswith('aten.'))
    return {re.sub(r'\.default$', '', name) for name in names}


def test_every_operator_that_detectors_reach_has_a_row():
    names = reached()
    assert len(names) > 200
    without = [name for name in names if name not in OPERATORS
               or not follows_a_rule(name) and behavior(name) is None]
    assert without == []


def test_detectors_reach_nothing_that_is_refused_or_unknown():
    """What torch refuses is replaced; what it refuses in some modes only says which these are."""
    bad = {name: row.why for name in reached() if not follows_a_rule(name)
           for row in [behavior(name)] if row.torch in ('raises', 'silent', 'unknown')
           and (not getattr(row, 'target', '') or row.target.startswith('refusal'))}
    assert set(bad) == {'bincount', 'nll_loss2d_forward'}
    assert all('MMDetection asks' in why or 'no detector gives' in why for why in bad.values())


@pytest.mark.skipif(dispatch.release() != RELEASE, reason='names of operators change by release')
def test_every_operator_of_the_dispatcher_has_a_row():
    without = [name for name in OPERATORS if not follows_a_rule(name)
               and not ELSEWHERE.fullmatch(packet_of(name)) and behavior(name) is None]
    assert without == []


# Operators known to depend on the order of threads somewhere, with their out= forms.
ORDER = '''cumprod cumprod_ cumprod.out _logcumsumexp _logcumsumexp.out index_add index_add_
    index_put_ put_ put index_copy index_copy_ index_fill_.int_Scalar index_reduce index_reduce_
    index_reduce.out scatter.src scatter_.src scatter.reduce scatter_.value_reduce scatter_add
    scatter_reduce.two scatter_reduce_.two topk topk.values sort sort.values sort.values_stable
    kthvalue kthvalue.values median median.dim median.dim_values nanmedian.dim_values mode
    mode.values segment_reduce _cdist_backward embedding_renorm_ embedding_dense_backward
    _cudnn_rnn _cudnn_rnn_backward _weight_norm_interface_backward linalg_lu_factor_ex _linalg_svd
    _fft_r2c _fft_c2c _fft_c2r _sparse_sparse_matmul _sparse_addmm sspaddmm histc bincount _unique2
    unique_dim nonzero masked_scatter_ _ctc_loss_backward nll_loss2d_forward
    adaptive_max_pool3d_backward adaptive_max_pool3d_backward.grad_input avg_pool3d_backward
    upsample_bicubic2d_backward grid_sampler_3d_backward convolution_backward renorm multinomial
    randperm bernoulli native_dropout roll _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_efficient_attention_backward _efficient_attention_backward
    _scaled_dot_product_cudnn_attention_backward max_unpool2d fractional_max_pool2d_backward'''


@pytest.mark.parametrize('name', ORDER.split())
def test_an_operator_of_a_doubtful_kind_has_a_row_of_its_own_kind(name):
    if name in OPERATORS:  # some have come with a release
        assert behavior(name) is not None


def test_a_composition_is_seen_part_by_part():
    for name in ('quantile', 'argsort', 'argsort.stable', 'nanquantile', 'cov', 'embedding_bag'):
        assert follows_a_rule(name), name


def test_families_say_enough():
    for family in kernel_table.FAMILIES:
        assert family.torch in kernel_table.BEHAVIORS and family.why
        assert any(kernel_table.family_of(name) is family for name in OPERATORS), family.pattern
        if family.torch == 'silent':
            assert 'refused' in family.why


def test_operators_of_mmrepro_are_not_replaced_by_a_pattern():
    """A family never hides a row: a row is found first, whatever its release."""
    for row in aten.TABLE:
        if row.target and row.since <= RELEASE < row.until and not row.overrides_python:
            assert behavior(row.operator) is row
