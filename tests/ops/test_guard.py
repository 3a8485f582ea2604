"""The guard names operators that nobody has vouched for; the CPU plays the device here."""
import sys

import pytest
import torch
from harness import python

from mmrepro import ops
from mmrepro.ops import guard as guards
from mmrepro.ops.guard import OperatorGuard, extensions

_library = torch.library.Library('strangers', 'DEF')
_library.define('scale(Tensor x, float by) -> Tensor')
_library.define('scale_back(Tensor grad, float by) -> Tensor')
_library.define('scale.twice(Tensor x) -> Tensor')
_library.impl('scale.twice', lambda x: x * 2, 'CPU')
_library.impl('scale', lambda x, by: x * by, 'CPU')
_library.impl('scale_back', lambda grad, by: grad * by, 'CPU')


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.ops.strangers.scale(x, 2.)

    @staticmethod
    def backward(ctx, grad):
        return torch.ops.strangers.scale_back(grad, 2.)


class Neck(torch.nn.Module):
    def forward(self, x):
        return Scale.apply(x) + Scale.apply(x)


def model():
    return torch.nn.ModuleDict(dict(body=torch.nn.Linear(2, 2), neck=Neck()))


def step(parts):
    parts['neck'](parts['body'](torch.ones(3, 2))).square().sum().backward()


def test_an_operator_of_a_library_is_named_once_with_its_module():
    parts, told = model(), []
    guard = OperatorGuard(parts, ['cpu'], report=told.append)
    for _ in range(2):
        with guard.watch():
            step(parts)
    assert [(one.operator, one.kind) for one in guard.findings] == [
        ('strangers::scale', 'torch.library'), ('strangers::scale_back', 'torch.library')]
    assert guard.findings == told
    assert guard.findings[0].module == 'neck (Neck)'
    assert __file__ in guard.findings[0].call_site
    text = str(guard.findings[0])
    assert 'strangers::scale' in text and "allow=['strangers::scale']" in text and 'neck' in text


def test_overloads_of_one_name_are_one_finding():
    x = torch.ones(2)
    with OperatorGuard(None, ['cpu']).watch() as guard:
        torch.ops.strangers.scale(x, 1.)
        torch.ops.strangers.scale(x)
    assert [one.operator for one in guard.findings] == ['strangers::scale']


def test_operators_of_torch_that_no_source_vouches_for_are_named():
    x = torch.rand(4, 4)
    with OperatorGuard(None, ['cpu'], allow=['aten::_linalg_svd']).watch() as guard:
        (x @ x).sort()
        torch.linalg.svd(x)
        for _ in range(2):
            torch.fft.rfft2(x)
        x.to_sparse() @ x
    assert [one.operator for one in guard.findings] == ['aten::_fft_r2c', 'aten::mm']
    assert "allow=['aten::_fft_r2c']" in str(guard.findings[0])


@pytest.mark.parametrize('devices, allow, compiled', [
    (['cpu'], ['strangers::*'], False), (['cpu'], ['strangers::scale', 'strangers::scale_back'],
                                         False), (['cuda'], [], False), (['cpu'], [], True)])
def test_what_is_allowed_elsewhere_or_compiled_is_not_named(devices, allow, compiled):
    """A dispatcher mode would make a compiled model run uncompiled."""
    parts = model()
    if compiled:
        parts['neck']._compiled_call_impl = parts['neck'].forward  # what Module.compile() leaves
    with OperatorGuard(parts, devices, allow).watch() as guard:
        step(parts)
    assert guard.findings == []


def test_torch_itself_is_not_named():
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(),
                              torch.nn.MultiheadAttention(4, 2))
    with OperatorGuard(net, ['cpu']).watch() as guard:
        x = net[:3](torch.rand(2, 3, 8, 8)).flatten(2).permute(2, 0, 1)
        net[3](x, x, x)[0].sort()[0].sum().backward()
    assert guard.findings == []


def test_watching_does_not_import_the_compiler():
    """In a fresh process, because other tests may have."""
    code = ('import sys, torch; from mmrepro.ops.guard import OperatorGuard\n'
            'net = torch.nn.Linear(2, 2)\n'
            'with OperatorGuard(net, ["cpu"]).watch(): net(torch.ones(1, 2)).sum().backward()\n'
            'assert "torch._inductor" not in sys.modules')
    assert python('-c', code) == ''


def test_watching_ends_with_the_block_and_leaves_a_profiler_alone():
    def profiler(frame, event, arg):
        return None

    parts = model()
    guard = OperatorGuard(parts, ['cpu'])
    with pytest.raises(ZeroDivisionError), guard.watch():
        assert sys.getprofile() is not None
        1 / 0  # noqa: B018
    assert sys.getprofile() is None
    step(parts)
    assert guard.findings == []
    sys.setprofile(profiler)
    try:
        with guard.watch():
            step(parts)
            assert sys.getprofile() is profiler
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert len(guard.findings) == 2  # the dispatcher still tells


def test_a_function_of_an_extension_is_named(monkeypatch):
    """Without a compiler, a builtin of another module plays the extension."""
    import _bisect
    monkeypatch.setattr(guards, 'extensions', lambda: {'_bisect'})

    class Head(torch.nn.Module):
        def forward(self, x):
            at = _bisect.bisect_right([0., 1.], 0.5)
            return x * at

    head = Head()
    with OperatorGuard(head, ['cpu']).watch() as guard:
        _bisect.bisect_right([1], 1)  # no tensor in sight
        assert guard.findings == []
        head(torch.ones(2))
    finding, = guard.findings
    assert finding.operator == '_bisect.bisect_right' and finding.kind == 'extension'
    assert finding.module == ' (Head)' and __file__ in finding.call_site


def test_extensions_are_those_that_link_against_torch():
    import numpy  # noqa: F401
    found = extensions()
    assert not any(name.startswith(('torch', 'numpy')) for name in found)
    assert guards._links_torch(torch._C.__file__) or sys.platform == 'win32'


def test_compiled_mmcv_is_an_extension(compiled):
    """mmcv's kernels with atomics are named, those without are not."""
    import mmcv.ops
    assert 'mmcv._ext' in extensions()
    x = torch.rand(1, 2, 8, 8, requires_grad=True)
    rois = torch.tensor([[0., 1, 1, 5, 5]])
    align = mmcv.ops.RoIAlign(2)
    boxes = torch.tensor([[0., 0, 2, 2], [0, 0, 2, 2]])
    with compiled(), OperatorGuard(align, ['cpu']).watch() as guard:
        align(x, rois).sum().backward()
        mmcv.ops.nms(boxes, torch.tensor([.5, .6]), .5)
    assert [one.operator for one in guard.findings] == [
        'mmcv._ext.roi_align_forward', 'mmcv._ext.roi_align_backward']
    with ops.using('torch'), OperatorGuard(align, ['cpu']).watch() as guard:
        align(x, rois).sum().backward()
    assert guard.findings == []


def test_a_triton_kernel_is_named(monkeypatch):
    import types

    class JITFunction:
        def __init__(self, fn):
            self.fn = fn

        def run(self, x):
            return x + 1

    def my_kernel():
        """Stand for a kernel."""

    jit = types.SimpleNamespace(JITFunction=JITFunction)
    monkeypatch.setitem(sys.modules, 'triton.runtime.jit', jit)
    with OperatorGuard(None, ['cpu']).watch() as guard:
        JITFunction(my_kernel).run(torch.ones(1))
        JITFunction(my_kernel).run(torch.ones(1))
    finding, = guard.findings
    assert finding.operator == f'triton:{__name__}.my_kernel' and finding.kind == 'triton'
