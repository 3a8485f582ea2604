"""Every operator has a row: those that detectors reach, and all that the dispatcher knows."""
import json
import re

import pytest
import torch

from dev import detector_operators
from mmrepro.ops.aten import dispatch, kernel_table

if dispatch.release() < (2, 2):
    pytest.skip('operators have no tags yet', allow_module_level=True)

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


POINTWISE = {packet_of(name) for name, one in OPERATORS.items() if torch.Tag.pointwise in one.tags}


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
    return next((row for row in kernel_table.TABLE
                 if row.operator == name and row.since <= release < row.until),
                kernel_table.family_of(name))


def reached():
    recorded = json.loads(detector_operators.RESULT.read_text())
    assert recorded['configs'] == [*detector_operators.CONFIGS], 'record them again'
    names = (full.split('.', 1)[1] for full in recorded['operators'] if full.startswith('aten.'))
    return {re.sub(r'\.default$', '', name) for name in names}


def test_every_operator_that_detectors_reach_has_a_row():
    names = reached()
    assert len(names) > 200
    assert dispatch.release() != RELEASE or names <= set(OPERATORS)
    assert [name for name in names & set(OPERATORS)
            if not follows_a_rule(name) and behavior(name) is None] == []


def test_detectors_reach_nothing_that_is_refused_or_unknown():
    """What torch refuses is replaced; what it refuses in some modes only says which these are."""
    bad = {name: row.why for name in reached() & set(OPERATORS) if not follows_a_rule(name)
           for row in [behavior(name)] if row.torch in ('raises', 'silent', 'unknown')
           and (not getattr(row, 'target', '') or row.target.startswith('refusal'))}
    assert set(bad) == {'bincount'}
    assert 'no detector gives' in bad['bincount']


@pytest.mark.skipif(dispatch.release() != RELEASE, reason='names of operators change by release')
def test_every_operator_of_the_dispatcher_has_a_row():
    without = [name for name in OPERATORS if not follows_a_rule(name)
               and not ELSEWHERE.fullmatch(packet_of(name)) and behavior(name) is None]
    assert without == []


# Operators that depend on the order of threads somewhere: all of their forms have a row on any
# release, also those that no detector reaches.
DOUBTFUL = re.compile(
    r'cumprod|_?logcumsumexp|index_(add|put|copy|fill|reduce)|put|scatter.*|topk|sort|kthvalue|'
    r'(nan)?median|mode|segment_reduce|_cdist_backward|embedding_.*|_cudnn_rnn.*|_weight_norm_.*|'
    r'linalg_.*|_fft_.*|_sparse_(addmm|sparse_matmul)|histc|bincount|_?unique.*|nonzero|.*_scatter|'
    r'.*(pool|pad|upsample|grid_sampler).*_backward|(convolution|.*attention|.*ctc_loss)_backward|'
    r'nll_loss2d_.*|renorm|multinomial|randperm|bernoulli|native_dropout|roll')


def test_no_form_of_a_doubtful_operator_is_without_a_row():
    names = [name for name in OPERATORS if DOUBTFUL.fullmatch(packet_of(name))
             and not ELSEWHERE.fullmatch(packet_of(name))]
    assert len(names) > 150
    assert {'topk.values', 'kthvalue.values', 'median.dim_values', 'sort.values_stable'} < {*names}
    assert [name for name in names if not follows_a_rule(name) and behavior(name) is None] == []


def test_families_say_enough():
    for family in kernel_table.FAMILIES:
        assert family.torch in kernel_table.BEHAVIORS and family.why
        assert any(kernel_table.family_of(name) is family for name in OPERATORS), family.pattern
        if family.torch == 'silent':
            assert 'refused' in family.why
