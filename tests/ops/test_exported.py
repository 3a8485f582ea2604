"""Two-stage detectors are traced and exported; the second input is another than the traced one."""
import io
import sys
import warnings
from pathlib import Path

import pytest
import torch
from mmcv.ops import (
    DeformConv2dPack,
    ModulatedDeformConv2dPack,
    RoIAlign,
    batched_nms,
    modulated_deform_conv2d,
    nms,
)
from mmdet.structures import DetDataSample
from mmengine.config import ConfigDict
from mmengine.registry import MODELS, init_default_scope

import mmrepro
from mmrepro import seeds
from mmrepro.util.scoped import replaced

ROOT = Path(__file__).resolve().parents[2]

SCRIPT, EXPORT = 'dynamo=False', 'dynamo=True'


class Calls(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def boxes(count):
    corner, size = 64 * torch.rand(2, count, 2)
    return torch.cat((corner, corner + size), 1)


def rois(count):
    return torch.cat((torch.zeros(count, 1), boxes(count)), 1)


def deformed(kind):
    layer = kind(4, 6, 3, padding=1)
    torch.nn.init.normal_(layer.conv_offset.weight)
    return layer


def scored(count):
    return boxes(count), torch.rand(count)


def without_bias():
    weight = torch.randn(6, 4, 3, 3)
    return Calls(lambda x, offset, mask: modulated_deform_conv2d(
        x, offset, mask, weight, None, 1, 1, 1, 1, 1))


# model, inputs of a size, the dimensions that may change
CASES = {
    'RoIAlign, adaptive': (lambda: RoIAlign(7, 0.25, 0), lambda n: (
        torch.randn(1, 8, 32, 30 + n), rois(20 * n)), [{3}, {0}]),
    'RoIAlign, 2 samples': (lambda: RoIAlign(7, 0.25, 2, aligned=False), lambda n: (
        torch.randn(1, 8, 32, 30 + n), rois(20 * n)), [{3}, {0}]),
    'nms': (lambda: Calls(lambda boxes, scores: nms(boxes, scores, 0.5)),
            lambda n: scored(30 * n), [{0}, {0}]),
    'nms, offset 1': (lambda: Calls(lambda boxes, scores: nms(boxes, scores, 0.5, 1)),
                      lambda n: scored(30 * n), [{0}, {0}]),
    'batched_nms': (lambda: Calls(lambda boxes, scores, classes: batched_nms(
        boxes, scores, classes, dict(type='nms', iou_threshold=0.5))),
        lambda n: (*scored(30 * n), torch.arange(30 * n) % 3), [{0}, {0}, {0}]),
    'DCN': (lambda: deformed(DeformConv2dPack), lambda n: (torch.randn(1, 4, 16, 16), ), [{}]),
    'DCNv2': (lambda: deformed(ModulatedDeformConv2dPack),
              lambda n: (torch.randn(1, 4, 16, 16), ), [{}]),
    'DCNv2 without bias': (without_bias, lambda n: (
        torch.randn(1, 4, 16, 16), torch.randn(1, 18, 16, 16), torch.rand(1, 9, 16, 16)),
        [{}, {}, {}]),
}


class TwoStages(torch.nn.Module):
    """A small Faster R-CNN: proposals, their suppression, RoIAlign, classes and boxes."""

    def __init__(self):
        super().__init__()
        init_default_scope('mmdet')
        anchors = dict(type='AnchorGenerator', scales=[4], ratios=[1.0], strides=[8])
        boxes = dict(type='DeltaXYWHBBoxCoder', target_means=[0.] * 4, target_stds=[1.] * 4)
        self.model = MODELS.build(ConfigDict(
            type='FasterRCNN',
            backbone=dict(type='ResNet', depth=18, num_stages=1, strides=(1, ), dilations=(1, ),
                          out_indices=(0, ), base_channels=8),
            rpn_head=dict(type='RPNHead', in_channels=8, feat_channels=8,
                          anchor_generator=anchors, bbox_coder=boxes),
            roi_head=dict(
                type='StandardRoIHead',
                bbox_roi_extractor=dict(
                    type='SingleRoIExtractor', out_channels=8, featmap_strides=[4],
                    roi_layer=dict(type='RoIAlign', output_size=7, sampling_ratio=0)),
                bbox_head=dict(type='Shared2FCBBoxHead', in_channels=8, fc_out_channels=16,
                               num_classes=3, bbox_coder=boxes)),
            train_cfg=None,
            test_cfg=dict(rpn=dict(nms_pre=50, max_per_img=20, min_bbox_size=0,
                                   nms=dict(type='nms', iou_threshold=0.7)), rcnn=None)))
        size = (64, 64)
        self.samples = [DetDataSample(metainfo=dict(
            img_shape=size, ori_shape=size, scale_factor=(1., 1.), pad_shape=size,
            batch_input_shape=size))]

    def forward(self, x):
        return self.model(x, self.samples, mode='tensor')


def core_of_version_2():
    """Return the modules that MMDetection 3.3 imports in an export and does not have."""
    text = (ROOT / 'docs/how-to/without-compiling-mmcv.md').read_text()
    code = text.partition('```python\nimport sys, types')[2].partition('```')[0]
    defined = {}
    with replaced(sys, modules=dict(sys.modules)):
        exec(f'import sys, types{code}', defined)
        return {name: sys.modules[name] for name in ('mmdet.core', 'mmdet.core.export')}


def extractor():
    """As in a detector with a pyramid: each box is read from the level of its size."""
    init_default_scope('mmdet')
    layer = MODELS.build(dict(
        type='SingleRoIExtractor', out_channels=8, featmap_strides=[4, 8], finest_scale=20,
        roi_layer=dict(type='RoIAlign', output_size=7, sampling_ratio=0)))
    return Calls(lambda fine, coarse, rois: layer((fine, coarse), rois))


CASES['levels of a pyramid'] = (extractor, lambda n: (
    torch.randn(1, 8, 32, 32), torch.randn(1, 8, 16, 16), rois(20 * n)), [{}, {}, {0}])
CASES['Faster R-CNN'] = (TwoStages, lambda n: (torch.randn(1, 3, 64, 64), ), [{}])


@pytest.fixture(params=CASES)
def case(request):
    make, inputs, dynamic = CASES[request.param]
    seeds.seed_all(3, 'init', 'model')
    with torch.no_grad():
        yield request.param, make().eval(), inputs(1), inputs(2), dynamic


def tensors(result):
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for part in result for tensor in tensors(part)]


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        yield


def test_a_traced_model_is_right_for_another_input(case):
    _, model, first, second, _ = case
    traced = torch.jit.trace(model, first, check_trace=False)
    for inputs in (first, second):
        found, wanted = tensors(traced(*inputs)), tensors(model(*inputs))
        assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))


@pytest.mark.parametrize('way', [SCRIPT, EXPORT])
def test_an_exported_model_is_right_for_another_input(case, way, monkeypatch):
    onnxruntime = pytest.importorskip('onnxruntime')
    if way == EXPORT:
        pytest.importorskip('onnxscript')
    name, model, first, second, dynamic = case
    if isinstance(model, TwoStages):
        if way == EXPORT:
            pytest.skip("MMDetection's two stages branch on data, which torch.export refuses")
        for module, content in core_of_version_2().items():
            monkeypatch.setitem(sys.modules, module, content)
    if way == EXPORT and name == 'levels of a pyramid':
        pytest.skip("MMDetection's extractor branches on data, which torch.export refuses")
    names = [f'input{i}' for i in range(len(first))]
    if way == SCRIPT:
        shapes = dict(dynamic_axes={name: {d: f'{name}_{d}' for d in dims}
                                    for name, dims in zip(names, dynamic)})
    else:
        shapes = dict(dynamic_shapes=[tuple({d: torch.export.Dim.DYNAMIC for d in dims}
                                            for dims in dynamic)]
                      if isinstance(model, Calls) else tuple(
                          {d: torch.export.Dim.DYNAMIC for d in dims} for dims in dynamic))
    file = io.BytesIO()
    torch.onnx.export(model, first, file, dynamo=way == EXPORT, opset_version=19,
                      input_names=names, **shapes)
    session = onnxruntime.InferenceSession(file.getvalue(), providers=['CPUExecutionProvider'])
    for inputs in (first, second):
        found = session.run(None, {name: value.numpy() for name, value in zip(names, inputs)})
        wanted = tensors(model(*inputs))
        assert [value.shape for value in found] == [tuple(value.shape) for value in wanted]
        for value, expected in zip(found, wanted):
            torch.testing.assert_close(torch.from_numpy(value), expected, rtol=1e-4, atol=1e-4)


def test_deactivation_gives_mmcv_its_descriptions_back():
    from mmcv.ops.roi_align import RoIAlignFunction
    ours = RoIAlignFunction.symbolic
    mmrepro.deactivate()
    assert RoIAlignFunction.symbolic is not ours and RoIAlignFunction.symbolic.__module__ == \
        'mmcv.ops.roi_align'
