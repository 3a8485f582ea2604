"""The table of torch's own operators, and putting our kernels in front of torch's."""
import importlib

import pytest
import torch
import torch.nn.functional as F

from mmrepro import determinism
from mmrepro.ops import aten
from mmrepro.ops.aten import dispatch
from mmrepro.ops.aten.kernel_table import BEHAVIORS
from mmrepro.ops.kernel_library import overloads

RELEASES = [(2, minor) for minor in range(14)]
REPLACED = [row for row in aten.TABLE if row.target]


def has_kernel(operator, key):
    return torch._C._dispatch_has_kernel_for_dispatch_key(f'aten::{operator}', key)


@pytest.fixture(autouse=True)
def as_it_was():
    assert aten.installed() == ()
    yield
    aten.uninstall()


def test_every_row_says_enough():
    for row in aten.TABLE:
        assert row.torch in BEHAVIORS and row.why, row.operator
        assert row.since < row.until and set(row.devices) <= {'cpu', 'cuda'}
        # what is good is left; what crashes or drifts in a shipped detector is replaced
        assert not (row.torch == 'good' and row.target), row.operator
        if row.torch in ('silent', 'slow', 'ties', 'raises'):
            assert row.target, row.operator
        if row.target.startswith('refusal'):
            assert 'no detector uses it' in row.why and not row.users, row.operator


@pytest.mark.parametrize('release', RELEASES)
def test_one_row_per_operator_and_release(release):
    names = [row.operator for row in aten.TABLE if row.since <= release < row.until]
    assert len(names) == len(set(names))


def test_every_operator_and_target_exists_here():
    now = dispatch.release()
    for row in aten.TABLE:
        if row.target:
            assert callable(row.load()), row.operator
        if not row.overrides_python:
            assert row.operator in overloads(row.operator.partition('.')[0]), row.operator
        elif row.since <= now < row.until:
            module, _, attribute = row.operator.rpartition('.')
            assert hasattr(importlib.import_module(module), attribute), row.operator


def test_old_releases_get_more_replacements():
    old = {row.operator for row in dispatch.active('cuda', '2.0.1')}
    new = {row.operator for row in dispatch.active('cuda', '2.13.0')}
    assert {'cumsum', 'kthvalue', 'scatter_add'} <= old and not {'cumsum', 'kthvalue'} & new
    assert {'grid_sampler_2d_backward', 'upsample_bilinear2d_backward', 'topk'} <= old & new
    assert {row.operator for row in dispatch.active('cpu')} == {'topk', 'sort'}


def test_cuda_kernels_register_without_a_gpu_and_come_off_again():
    operators = {row.operator: row.key or 'CUDA' for row in dispatch.active('cuda')
                 if not row.overrides_python}
    before = {name: has_kernel(name, key) for name, key in operators.items()}
    for _ in range(2):  # again: nothing to do
        aten.install(['cuda'])
        assert aten.installed() == ('cuda',)
        assert all(has_kernel(name, key) for name, key in operators.items())
    aten.uninstall()
    assert aten.installed() == ()
    assert {name: has_kernel(name, key) for name, key in operators.items()} == before


def test_a_tensor_of_another_device_reaches_the_replacement(monkeypatch):
    """A device's key is all that matters: 'meta' stands in for the GPU."""
    seen = []

    def backward(grad, output_size, input_size, *rest):
        seen.append((grad.device.type, tuple(output_size), tuple(input_size)))
        return grad.new_empty(list(input_size))

    row = aten.KernelRow('upsample_bilinear2d_backward', 'raises', 'x:y', 'test', devices=('meta',))
    monkeypatch.setattr(dispatch, 'TABLE', [row])
    monkeypatch.setattr(aten.KernelRow, 'load', lambda self: backward)
    grad = torch.empty(1, 2, 6, 8, device='meta')
    aten.install(['meta'])
    for _ in range(2):
        out = torch.ops.aten.upsample_bilinear2d_backward(grad, [6, 8], [1, 2, 3, 4], False)
        assert out.device.type == 'meta' and out.shape == (1, 2, 3, 4)
        assert seen == [('meta', (6, 8), (1, 2, 3, 4))]
        aten.uninstall()


def test_python_overrides_are_replaced_and_restored():
    from torch._decomp import decompositions
    before = decompositions._upsample_linear_vec, decompositions._replication_pad
    aten.install(['cuda'])
    assert decompositions._upsample_linear_vec is not before[0]
    x = torch.arange(48.).view(1, 2, 4, 6)
    # what F.interpolate and F.pad would call on CUDA gives what their kernels give
    assert torch.equal(decompositions._upsample_linear_vec(x, None, False, [2., 1.5]),
                       F.interpolate(x, scale_factor=(2., 1.5), mode='bilinear'))
    assert torch.equal(decompositions._replication_pad(x, [1, 2, 3, 0]),
                       F.pad(x, (1, 2, 3, 0), 'replicate'))
    # volumes have no backward here: they take torch's own way
    grown = decompositions._upsample_linear_vec(x[None].requires_grad_(), [2, 5, 3], True, None)
    assert 'Upsample' not in grown.grad_fn.name()
    assert torch.equal(decompositions._replication_pad(x[0], [1, 2]), before[1](x[0], [1, 2]))
    aten.uninstall()
    assert (decompositions._upsample_linear_vec, decompositions._replication_pad) == before


@pytest.mark.skipif(dispatch.release() < (2, 12), reason='F.pad does not call it so yet')
def test_a_compiled_model_may_call_a_python_override():
    from torch._decomp import decompositions

    def pad(x):  # as F.pad does for CUDA
        return torch._dynamo.decorators.nonstrict_trace(decompositions._replication_pad)(
            x, [1, 2, 3, 0])

    aten.install(['cuda'])
    x = torch.arange(48.).view(1, 2, 4, 6)
    assert torch.equal(torch.compile(pad, backend='eager', fullgraph=True)(x), pad(x))


def test_a_failure_half_way_leaves_nothing(monkeypatch):
    from torch._decomp import decompositions
    before = decompositions._replication_pad
    good, = (row._replace(devices=('cpu',)) for row in REPLACED
             if row.operator.endswith('._replication_pad'))
    broken = aten.KernelRow('topk', 'ties', 'selection:no_such_function', 'test', devices=('cpu',))
    monkeypatch.setattr(dispatch, 'TABLE', [good, broken])
    with pytest.raises(AttributeError, match='no_such_function'):
        aten.install(['cpu'])
    assert aten.installed() == () and decompositions._replication_pad is before


@pytest.mark.parametrize('mode', [True, 'warn'])
def test_determinism_installs_them_and_takes_them_away(mode):
    assert determinism.snapshot(env={})['mmrepro.native_operators'] is False
    with determinism.deterministic(mode, env={}) as report:
        assert 'cpu' in aten.installed()
        assert ('cuda' in aten.installed()) == torch.backends.cuda.is_built()
        assert ('mmrepro.native_operators', False, True) in [one[:3] for one in report.changes]
        with determinism.deterministic(False, env={}):
            assert aten.installed() == ()
        assert 'cpu' in aten.installed()
        aten.uninstall()
        assert [change.name for change in determinism.drifted()] == ['mmrepro.native_operators']
    assert aten.installed() == ()


def test_half_precision_sums_in_float32(wave):
    """The gradient of a half map is rounded once, at the end."""
    x = wave(1, 1, 40, 40).half()
    grad = wave(1, 1, 3, 3, phase=1.).half()
    row, = [row for row in REPLACED if row.operator == '_adaptive_avg_pool2d_backward']
    backward = row.load()
    expected = backward(grad.float(), x.float()).half()
    assert torch.equal(backward(grad, x), expected)
