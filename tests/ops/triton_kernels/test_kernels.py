"""Kernels in Triton: against the PyTorch forms in Triton's interpreter, and as machine code.

What a GPU computes with them is not shown here; that they compile for one, and into what, is.
"""
import collections
import glob
import json
import re

import pytest
import torch
from harness import ROOT, python
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mmengine.hooks import Hook
from small_runs import finish, small_run

from dev.triton_kernels import DTYPES, FIRST_WITH
from mmrepro import ops
from mmrepro.config import RandomnessConfig
from mmrepro.ops import contract, triton
from mmrepro.ops.guard import OperatorGuard
from mmrepro.ops.mmcv import ms_deform_attn, nms, roi_align

# as far as possible from what rounding does, as near as half an ulp of the output's dtype
CLOSE = {torch.float64: 1e-14, torch.float32: 3e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def check_close(results, wanted, asked=torch.float64):
    for found, expected in zip(results, wanted):
        assert found.shape == expected.shape and found.dtype == expected.dtype
        found, expected = found.double(), expected.double()
        assert torch.equal(found.isnan(), expected.isnan())
        found, expected = found.nan_to_num(), expected.nan_to_num()
        limit = CLOSE[asked] * max(1., float(expected.abs().max()))
        assert float((found - expected).abs().max()) <= limit


def boxes(wave, number, width, height, dtype):
    """(K, 5) RoIs: some regular ones, outside of the map, empty, and inside out."""
    middle = (wave(number, 2) + 1) / 2 * torch.tensor([width, height])
    size = (wave(number, 2, phase=1.) + 1) * 25
    rois = torch.cat((torch.arange(number)[:, None] % 2, middle - size / 2, middle + size / 2), 1)
    rois[0, 1:] = torch.tensor([-50., -60, -20, -10])
    rois[1, 1:] = torch.tensor([10., 10, 10, 10])
    rois[2, 1:] = torch.tensor([40., 40, 20, 30])
    return rois.to(dtype)


def align(module, feature, rois, grad, *arguments):
    result, nothing = feature.new_zeros(grad.shape), feature.new_zeros(0)
    sizes = grad.shape[2:]
    module.roi_align_forward(feature, rois, result, nothing, nothing, *sizes, *arguments)
    gradient = torch.ones_like(feature)  # operators add to what is there
    module.roi_align_backward(grad, rois, nothing, nothing, gradient, *sizes, *arguments)
    return result, gradient


@pytest.mark.parametrize('dtype, sampling_ratio, aligned', [
    (torch.float64, 1, True), (torch.float32, 0, True), (torch.float32, 2, False),
    (torch.float16, 0, True), (torch.bfloat16, 2, True)])
def test_roi_align(interpreted, wave, dtype, sampling_ratio, aligned):
    feature, rois = wave(2, 5, 9, 13, dtype=dtype), boxes(wave, 6, 100., 70., dtype)
    grad = wave(6, 5, 3, 2, phase=2., dtype=dtype)
    arguments = (1 / 8, sampling_ratio, 1, aligned)
    check_close(*(align(module, feature, rois, grad, *arguments)
                  for module in (interpreted.roi_align_kernels, roi_align)), dtype)


def test_roi_align_of_other_layouts(interpreted, wave):
    """One bin, a map of one line, more channels than a program has, tensors that are
    not contiguous, and infinite features and gradients that no sample reads."""
    feature = wave(1, 9, 40, 70).permute(0, 3, 1, 2)
    rois = torch.tensor([[0., 8, 8, 40, 60], [0, 30, 0, 66, 70]], dtype=torch.float64)
    grad = wave(2, 1, 1, 70).permute(0, 3, 1, 2)
    feature = feature.clone(memory_format=torch.preserve_format)
    feature[0, :, -1, 0] = float('inf')
    assert not feature.is_contiguous()
    for changed in (feature, feature[:, :, :1]):
        for found, expected in zip(
                align(interpreted.roi_align_kernels, changed, rois, grad, 1 / 8, 2, 1, True),
                align(roi_align, changed, rois, grad, 1 / 8, 2, 1, True)):
            assert found.isfinite().all() and expected.isfinite().all()
            check_close([found], [expected])


def test_roi_align_of_a_box_that_is_no_number(interpreted, wave):
    rois = torch.tensor([[0., float('nan'), 8, 40, 60], [0, 8, 8, 40, 60]], dtype=torch.float64)
    feature, grad = wave(1, 3, 9, 13), wave(2, 3, 2, 2)
    for ratio in (0, 2):
        check_close(*(align(module, feature, rois, grad, 1 / 8, ratio, 1, True)[:1]
                      for module in (interpreted.roi_align_kernels, roi_align)))


@pytest.mark.parametrize('box, message', [
    ([2., 8, 8, 40, 60], 'rois name image 2, and their input has fewer'),
    ([-1., 8, 8, 40, 60], 'rois name an image that is negative or NaN'),
    ([float('nan'), 8, 8, 40, 60], 'rois name an image that is negative or NaN'),
    ([0., 8, 8, 40, 1e9], 'a bin asks for 131072 or more samples')])
def test_a_bad_roi_is_an_error_once(interpreted, wave, box, message):
    """On a GPU in a later pass; until then it reads nothing, and gets no gradient."""
    feature, grad = wave(2, 3, 9, 13), wave(1, 3, 2, 2)
    rois, nothing = torch.tensor([box], dtype=torch.float64), feature.new_zeros(0)
    module, arguments = interpreted.roi_align_kernels, (2, 2, 1 / 8, 0, 1, True)
    result, gradient = torch.zeros_like(grad), torch.zeros_like(feature)
    with pytest.raises(RuntimeError, match=message):
        module.roi_align_forward(feature, rois, result, nothing, nothing, *arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module._Faults, 'check', lambda self: None)
        module.roi_align_forward(feature, rois, result, nothing, nothing, *arguments)
        module.roi_align_backward(grad, rois, nothing, nothing, gradient, *arguments)
    assert not result.any() and not gradient.any()
    good = torch.tensor([[0., 8, 8, 40, 60]], dtype=torch.float64)
    with pytest.raises(RuntimeError, match=message):
        module.roi_align_forward(feature, good, result, nothing, nothing, *arguments)
    module.roi_align_forward(feature, good, result, nothing, nothing, *arguments)
    assert result.any()


def test_a_bad_roi_of_the_last_call_is_an_error_before_a_checkpoint(interpreted, wave, tmp_path):
    module, feature, nothing = interpreted.roi_align_kernels, wave(2, 3, 9, 13), torch.zeros(0)
    rois = torch.tensor([[2., 8, 8, 40, 60]], dtype=torch.float64)

    class BadRoi(Hook):
        def after_train_iter(self, runner, *args, **kwargs):
            if runner.iter == 2:
                with pytest.MonkeyPatch.context() as patch:  # not in the host's memory yet
                    patch.setattr(module._Faults, 'check', lambda self: None)
                    module.roi_align_forward(feature, rois, wave(1, 3, 2, 2), nothing, nothing,
                                             2, 2, 1 / 8, 0, 1, True)

    with pytest.raises(RuntimeError, match='rois name image 2'):
        finish(small_run(tmp_path, custom_hooks=[BadRoi()]))
    assert not glob.glob(f'{tmp_path}/**/*_3.pth', recursive=True)
    contract.run_deferred_checks()


def test_roi_align_of_no_box_and_what_is_refused(interpreted, wave):
    feature, grad, module = wave(1, 3, 9, 13), wave(1, 3, 2, 2), interpreted.roi_align_kernels
    rois = torch.zeros(1, 5, dtype=torch.float64)
    empty = align(module, feature, rois[:0], grad[:0], 1 / 8, 0, 1, True)
    assert empty[0].shape == (0, 3, 2, 2) and (empty[1] == 1).all()
    for features, boxes, message in (
            (feature[:, :, :0], rois, 'has no pixels'), (feature, rois.float(), 'rois')):
        with pytest.raises(RuntimeError, match=message):
            align(module, features, boxes, grad, 1 / 8, 0, 1, True)


@settings(max_examples=6, deadline=None, derandomize=True, database=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_roi_align_of_any_shape(interpreted, wave, data):
    def number(low, high):
        return data.draw(st.integers(low, high))
    images, rois, channels = number(1, 2), number(1, 3), number(1, 5)
    bins = number(1, 3), number(1, 3)
    feature = wave(images, channels, number(1, 9), number(1, 20))
    middle, size = wave(rois, 2) * 30 + 20, wave(rois, 2, phase=1.) * 30 + 20
    box = torch.cat((torch.arange(rois)[:, None] % images, middle - size, middle + size), 1)
    arguments = (data.draw(st.sampled_from([1., 1 / 4, 1 / 16])), number(0, 2), 1,
                 data.draw(st.booleans()))
    grad = wave(rois, channels, *bins, phase=2.)
    check_close(align(interpreted.roi_align_kernels, feature, box, grad, *arguments),
                align(roi_align, feature, box, grad, *arguments))


@settings(max_examples=10, deadline=None, derandomize=True, database=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_attention_of_any_shape(interpreted, wave, data):
    def number(low, high):
        return data.draw(st.integers(low, high))
    shapes = torch.tensor([[number(1, 4), number(1, 4)] for _ in range(number(1, 3))])
    keys = shapes.prod(1)
    batch, queries, heads, points = number(1, 2), number(1, 4), number(1, 3), number(1, 3)
    bags = batch, queries, heads, len(shapes), points
    inputs = (wave(batch, int(keys.sum()), heads, number(1, 5)), shapes, keys.cumsum(0) - keys,
              wave(*bags, 2) * 0.9 + 0.5, wave(*bags, phase=1.))
    grad = wave(batch, queries, heads * inputs[0].shape[3], phase=2.)
    check_close(attend(interpreted.attention_kernels, *inputs, grad=grad),
                attend(ms_deform_attn, *inputs, grad=grad))


def test_an_infinite_gradient_stays_where_it_belongs(interpreted, wave):
    """Pixels beside a bin are computed together with those in it, and get nothing of it."""
    feature, grad = wave(1, 3, 9, 13), wave(1, 3, 2, 2)
    grad[0, 1, 0, 1] = float('inf')
    rois = torch.tensor([[0., 9, 9, 70, 49]], dtype=torch.float64)
    found, expected = (align(module, feature, rois, grad, 1 / 8, 2, 1, True)[1]
                       for module in (interpreted.roi_align_kernels, roi_align))
    assert torch.equal(found.isinf(), expected.isinf()) and 0 < int(found.isinf().sum()) < 40
    assert not found.isnan().any()


@pytest.mark.parametrize('number', [1, 2, 31, 32, 33, 150])
@pytest.mark.parametrize('offset', [0, 1])
def test_nms_keeps_the_same_boxes(interpreted, wave, number, offset):
    middle, size = wave(number, 2) * 60, (wave(number, 2, phase=1.) + 1.1) * 20
    box = torch.cat((middle - size, middle + size), 1).float()
    scores = (wave(number) * 20).round().float() / 20  # many ties
    box[number // 2, 1] = float('nan')
    box[-1] = box[0]
    scores[number // 3] = float('nan')
    for threshold in (0., 0.3, 0.5, 1.):
        expected = nms.nms(box, scores, threshold, offset)
        assert torch.equal(interpreted.nms_kernels.nms(box, scores, threshold, offset), expected)


def test_nms_at_the_threshold_to_the_last_bit(interpreted):
    """Overlaps one ulp around the threshold: a fused or approximate operation would move some."""
    heights = torch.linspace(0.1, 9.9, 400)
    box = torch.stack((torch.zeros(400), torch.zeros(400), torch.full((400,), 7.3), heights), 1)
    base = torch.tensor([[0., 0, 7.3, 10.]])
    from mmrepro.ops.mmcv.box_iou import columns, overlaps
    found = 0
    for i in range(0, 400, 26):
        pair = torch.cat((base, box[i:i + 1]))
        cols = columns(pair, 0)
        at = float(overlaps(cols[:, :1], cols[:, 1:], 0))
        for threshold in (at, float(torch.nextafter(torch.tensor(at), torch.tensor(0.)))):
            scores = torch.tensor([1., .5])
            expected = nms.nms(pair, scores, threshold, 0)
            found += len(expected)
            assert torch.equal(interpreted.nms_kernels.nms(pair, scores, threshold, 0), expected)
    assert found == 16 * 3, 'at the threshold both stay, one ulp below one goes'


def attend(module, *inputs, grad):
    value, shapes, starts, location, share = inputs
    out = module.ms_deform_attn_forward(*inputs, 64)
    grads = [torch.ones_like(tensor) for tensor in (value, location, share)]
    module.ms_deform_attn_backward(*inputs, grad, *grads, 64)
    return out, *grads


@pytest.mark.parametrize('dtype', CLOSE, ids=str)
def test_attention(interpreted, wave, dtype):
    batch, queries, heads, depth, points = 2, 5, 3, 6, 2
    shapes, starts = torch.tensor([[5, 7], [3, 4], [1, 1]]), torch.tensor([0, 35, 47])
    location = (wave(batch, queries, heads, 3, points, 2) * 0.8 + 0.5).to(dtype)
    location[0, 0, 0, 0, 0, 0] = float('nan')
    inputs = (wave(batch, 48, heads, depth, dtype=dtype), shapes, starts, location,
              wave(batch, queries, heads, 3, points, phase=1., dtype=dtype))
    grad = wave(batch, queries, heads * depth, phase=2., dtype=dtype)
    check_close(attend(interpreted.attention_kernels, *inputs, grad=grad),
                attend(ms_deform_attn, *inputs, grad=grad), dtype)


def test_attention_in_groups_of_heads(interpreted, wave, monkeypatch):
    """Where the taps of all heads are too many at once, groups of heads are used; same bits."""
    inputs = (wave(2, 12, 4, 5), torch.tensor([[3, 4]]), torch.tensor([0]),
              wave(2, 7, 4, 1, 2, 2) * 0.6 + 0.5, wave(2, 7, 4, 1, 2))
    grad = wave(2, 7, 20)
    whole = attend(interpreted.attention_kernels, *inputs, grad=grad)
    monkeypatch.setattr(ms_deform_attn.gather, 'chunk_taps', lambda device: 7 * 8 * 3)
    for found, expected in zip(attend(interpreted.attention_kernels, *inputs, grad=grad), whole):
        assert torch.equal(found, expected)


@pytest.fixture(scope='module', ids=str, params=[
    pytest.param((architecture, *DTYPES), marks=pytest.mark.nightly)
    for architecture in (80, 90, 100)])
def machine_code(request, tmp_path_factory):
    """What dev/triton_kernels.py compiles for a generation of GPUs, and types of features."""
    if triton.version() is None:
        pytest.skip('no triton here')
    architecture, *dtypes = request.param
    path = tmp_path_factory.mktemp('kernels') / 'kernels.json'
    python('-m', 'dev.triton_kernels', '--code', '--out', path, '--architectures', architecture,
           '--dtypes', *dtypes, TRITON_INTERPRET=None)
    rows = json.loads(path.read_text())['rows']
    if not rows and architecture in FIRST_WITH:
        pytest.skip(f'triton {triton.version()} does not compile for {architecture}')
    return rows


def words(text):
    return collections.Counter(re.findall(r'[A-Za-z_][\w.]*', text))


def test_kernels_compile_for_a_gpu(machine_code):
    assert {row['kernel'] for row in machine_code} == {
        'filter_kernel', 'mean_kernel', 'list_kernel', 'scatter_kernel', 'attend_kernel',
        'slope_kernel', 'conflict_kernel', 'sweep_kernel', 'peak_kernel', 'add_kernel',
        'convert_kernel', 'write_kernel'}
    for row in machine_code:
        assert re.search(r'\.target sm_(\d+)', row['ptx'])[1] == str(row['architecture'])


def test_atomics_are_on_integers(machine_code):
    """Their results do not depend on the order."""
    for row in machine_code:
        found = [word for word in words(row['ptx']) if re.match(r'(atom|red)\.', word)]
        # REDUX is an integer reduction within a warp
        code = [word for word in words(row['sass'])
                if re.match(r'(ATOM|ATOMG|ATOMS|RED)(\.|$)', word)]
        assert bool(found) == (row['kernel'] in (
            'peak_kernel', 'add_kernel', 'filter_kernel')), (row, found)
        assert all(re.search(r'\.(max\.s32|add\.u64|or\.b32)$', word) for word in found), found
        assert not [word for word in code if re.search(r'F(16|32|64)|BF16', word)], (row, code)


def test_products_and_sums_are_not_contracted(machine_code):
    """Or bits would depend on the compiler. Divisions are made of fused operations, rightly."""
    for row in machine_code:
        # a sum of bfloat16 is written as a product with 1
        found = [word for word in words(row['ptx']) if re.match(r'fma\.(?!rn\.bf16)', word)]
        if row['kernel'] in ('mean_kernel', 'scatter_kernel', 'attend_kernel', 'slope_kernel',
                             'add_kernel'):
            found += {'FFMA', 'DFMA'} & {word.split('.')[0] for word in words(row['sass'])}
        assert not found, row
        assert 'div.full.f32' not in words(row['ptx']), row


def test_resources_of_kernels_are_within_limits(machine_code):
    """A thread has 255 registers; what does not fit goes to memory, which is slow."""
    for row in machine_code:
        assert row['registers'] < 200 and row['stack'] <= 8 and not row['local'], row
        assert row['shared'] <= 48 << 10, row


def test_the_published_resources_are_of_all_kernels(machine_code):
    published = json.loads((ROOT / 'docs' / 'results' / 'triton_kernels.json').read_text())['rows']
    assert {row['kernel'] for row in published} == {row['kernel'] for row in machine_code}
    assert {row['architecture'] for row in published} == {80, 90, 100}


def test_provider(monkeypatch):
    with ops.using('triton') if not triton.requirement() else pytest.raises(RuntimeError):
        if triton.requirement():
            ops.use('triton')
        assert ops.provider() == 'triton'
        assert ops.provider_of('nms', 'cuda') == 'triton' and ops.provider_of('nms') == 'torch'
        assert ops.provider_of('softnms', 'cuda') == 'torch'
        # tensors of the CPU never reach a kernel
        import mmcv.ops
        box, scores = torch.tensor([[0., 0, 9, 9], [0, 0, 9, 8]]), torch.tensor([.5, .9])
        assert mmcv.ops.nms(box, scores, 0.5)[1].tolist() == [1]
    assert ops.provider() != 'triton'


@pytest.mark.parametrize('found, words', [
    (None, 'the package triton is not installed'),
    ('2.3.1', 'triton 3.0 or newer is needed, and 2.3.1 is installed')])
def test_what_is_missing_is_said(monkeypatch, found, words):
    monkeypatch.setattr(triton, 'version', lambda: found)
    before = ops.provider()
    with pytest.raises(RuntimeError, match=words):
        ops.use('triton')
    assert ops.provider() == before


def test_a_c_compiler_is_needed(monkeypatch):
    if triton.version() is None:
        pytest.skip('no triton here')
    monkeypatch.delenv('TRITON_INTERPRET', raising=False)
    monkeypatch.delenv('CC', raising=False)
    monkeypatch.setattr('shutil.which', lambda name: None)
    assert 'no C compiler' in triton.requirement() and triton.default_requirement()
    monkeypatch.setenv('CC', 'cc')
    monkeypatch.setattr('os.path.exists', lambda path: False)
    assert 'Python.h' in triton.requirement()
    monkeypatch.setenv('TRITON_INTERPRET', '1')
    assert triton.requirement() == ''


@pytest.mark.parametrize('capability, words', [((7, 5), '8.0 or newer'), ((8, 0), ''),
                                               ((9, 0), '')])
def test_the_default_is_for_gpus_that_triton_supports(monkeypatch, capability, words):
    monkeypatch.setattr(triton, 'requirement', lambda: '')
    monkeypatch.setattr('torch.cuda.is_available', lambda: True)
    monkeypatch.setattr('torch.cuda.get_device_capability', lambda: capability)
    assert (words in triton.default_requirement()) and bool(words) == bool(
        triton.default_requirement())


@pytest.mark.parametrize('operators, deterministic, expected', [
    ('triton', False, 'triton'), ('triton', True, 'triton'), ('torch', False, 'torch'),
    ('auto', False, 'auto'), (None, True, 'auto'), (None, False, None)])
def test_a_run_asks_for_its_provider(monkeypatch, operators, deterministic, expected):
    from mmrepro.run import process_settings
    asked = []
    monkeypatch.setattr(process_settings.ops, 'use_from_import', asked.append)
    monkeypatch.setattr(process_settings.patches, 'apply', lambda **settings: None)
    monkeypatch.setattr(process_settings.seeds, 'set_root', lambda root: None)
    monkeypatch.setattr(process_settings.ProcessSettings, '_enable', lambda self: None)
    randomness = RandomnessConfig.parse(
        dict(seed=0, operators=operators, deterministic=deterministic))
    process_settings.ProcessSettings(randomness).apply(randomness)
    assert asked == [expected]


def test_the_check_of_a_gpu_has_rows_for_kernels(monkeypatch):
    from dev.operator_check.groups import fused_cases, scatter_cases
    monkeypatch.delenv('TRITON_INTERPRET', raising=False)
    monkeypatch.setattr(triton, 'requirement', lambda: '')
    assert {'RoIAlign', 'NMS', 'MSDeformAttn'} <= set(fused_cases('cuda'))
    assert 'RoIPool' not in fused_cases('cuda') and not fused_cases('cpu')
    fixed = {name for name in scatter_cases('cuda') if name.endswith(': fixed point')}
    assert len(fixed) * 2 == len(scatter_cases('cuda')) and not fixed & set(scatter_cases('cpu'))
    monkeypatch.setattr(triton, 'requirement', lambda: 'no triton')
    assert not fused_cases('cuda') and not fixed & set(scatter_cases('cuda'))


def test_the_guard_knows_our_kernels(interpreted):
    found = []
    guard = OperatorGuard(report=found.append)

    class Frame:
        f_back = None
        f_locals = dict(self=interpreted.nms_kernels._sweep_kernel)
    guard._launched(Frame)
    assert not found
