"""Operators while a model is traced or exported: ``torch.jit.trace``, ``torch.onnx.export``.

``torch.jit.trace`` records the call of mmcv's autograd function, which calls the operator again in
the traced model. While it records, shapes are tensors, so an operator runs with tracing paused.
ONNX has operators of its own: RoiAlign, NonMaxSuppression and, from opset 19 on, DeformConv. Where
mmcv's functions describe others, ``symbolic`` is replaced.
"""
from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Callable

import torch
from torch import Tensor

from .contract import require

_ALL_BOXES = 2**31 - 1  # ONNX has no word for "no limit"
DEFORM_CONV_OPSET = 19
_HALF_PIXEL_OPSET = 16  # RoiAlign has `coordinate_transformation_mode`


# of torch 2.7 and later
_is_exporting = getattr(getattr(torch, 'compiler', None), 'is_exporting', bool)


def is_recorded() -> bool:
    """Whether the operators that run now become part of a traced or exported model."""
    return torch.jit.is_tracing() or _is_exporting()


@contextmanager
def _tracing_paused() -> Iterator[None]:
    of_torch: Any = torch._C  # its stubs lack one of the two
    state = of_torch._get_tracing_state()
    of_torch._set_tracing_state(None)
    try:
        yield
    finally:
        of_torch._set_tracing_state(state)


def traceable(name: str, form: Callable[..., Any]) -> Callable[..., Any]:
    """Return operator ``name`` that may be called while a model is traced or exported."""

    @functools.wraps(form)
    def operator(*args: Any, **kwargs: Any) -> Any:
        if not is_recorded():
            return form(*args, **kwargs)
        onnx = _IN_ONNX.get(name) if torch.onnx.is_in_onnx_export() else None
        if onnx is not None:
            return onnx(*args, **kwargs)
        with _tracing_paused():
            return form(*args, **kwargs)

    return operator


# ------------------------------------------------------------- symbolic functions of TorchScript

def _helper() -> Any:
    from torch.onnx import symbolic_helper  # imports much
    return symbolic_helper


def _opset(g: Any) -> int:
    return int(g.opset)


def _constant(g: Any, value: Any, dtype: torch.dtype) -> Any:
    return g.op('Constant', value_t=torch.tensor(value, dtype=dtype))


def _roi_align(stock: Callable[..., Any], g: Any, input: Any, rois: Any, output_size: Sequence[int],
               spatial_scale: float, sampling_ratio: int, pool_mode: str, aligned: bool) -> Any:
    if _opset(g) < _HALF_PIXEL_OPSET:
        return stock(g, input, rois, output_size, spatial_scale, sampling_ratio, pool_mode, aligned)
    image = _helper()._squeeze_helper(
        g, g.op('Gather', rois, _constant(g, [0], torch.int64), axis_i=1), [1])
    return g.op(
        'RoiAlign', input, g.op('Gather', rois, _constant(g, [1, 2, 3, 4], torch.int64), axis_i=1),
        g.op('Cast', image, to_i=torch.onnx.TensorProtoDataType.INT64),
        output_height_i=output_size[0], output_width_i=output_size[1],
        spatial_scale_f=spatial_scale, sampling_ratio_i=max(0, sampling_ratio), mode_s=pool_mode,
        coordinate_transformation_mode_s='half_pixel' if aligned else 'output_half_pixel')


class _Suppression(torch.autograd.Function):
    """NonMaxSuppression of ONNX."""

    @staticmethod
    def forward(ctx: Any, boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
        with _tracing_paused():
            from .mmcv.nms import nms
            return nms(boxes, scores, iou_threshold, 0)

    @staticmethod
    def symbolic(g: Any, boxes: Any, scores: Any, iou_threshold: float) -> Any:
        found = g.op('NonMaxSuppression', _helper()._unsqueeze_helper(g, boxes, [0]),
                     _helper()._unsqueeze_helper(g, scores, [0, 1]),
                     _constant(g, [_ALL_BOXES], torch.int64),
                     _constant(g, [iou_threshold], torch.float32))
        column = g.op('Gather', found, _constant(g, [2], torch.int64), axis_i=1)
        return _helper()._squeeze_helper(g, column, [1])


def _deform_conv(stock: Callable[..., Any], g: Any, input: Any, offset: Any, weight: Any,
                 stride: Any, padding: Any, dilation: Any, groups: int, deform_groups: int,
                 *rest: Any) -> Any:
    if _opset(g) < DEFORM_CONV_OPSET:
        return stock(g, input, offset, weight, stride, padding, dilation, groups, deform_groups,
                     *rest)
    return _standard(g, [input, weight, offset], stride, padding, dilation, groups, deform_groups)


def _modulated_deform_conv(stock: Callable[..., Any], g: Any, input: Any, offset: Any, mask: Any,
                           weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any,
                           groups: int, deform_groups: int) -> Any:
    if _opset(g) < DEFORM_CONV_OPSET:
        return stock(g, input, offset, mask, weight, bias, stride, padding, dilation, groups,
                     deform_groups)
    if _helper()._is_none(bias):
        bias = g.op('Constant', value_t=torch.zeros(weight.type().sizes()[0]))
    return _standard(g, [input, weight, offset, bias, mask], stride, padding, dilation, groups,
                     deform_groups)


def _pair(value: Any) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


def _standard(g: Any, inputs: list[Any], stride: Any, padding: Any, dilation: Any, groups: int,
              deform_groups: int) -> Any:
    return g.op('DeformConv', *inputs, strides_i=_pair(stride), pads_i=2 * _pair(padding),
                dilations_i=_pair(dilation), group_i=groups, offset_group_i=deform_groups,
                kernel_shape_i=list(inputs[1].type().sizes()[2:]))


# module of mmcv -> its function, and the description in ONNX
SYMBOLIC: dict[str, tuple[str, Callable[..., Any]]] = {
    'mmcv.ops.roi_align': ('RoIAlignFunction', _roi_align),
    'mmcv.ops.deform_conv': ('DeformConv2dFunction', _deform_conv),
    'mmcv.ops.modulated_deform_conv': ('ModulatedDeformConv2dFunction', _modulated_deform_conv),
}
_stock: dict[str, Any] = {}  # module -> what its function had


def describe(module: ModuleType) -> None:
    """Let the function of a module of :data:`SYMBOLIC` be exported as an operator of ONNX."""
    name, symbolic = SYMBOLIC[module.__name__]
    function = getattr(module, name, None)
    stock = vars(function).get('symbolic') if function is not None else None
    if stock is None or function is None or module.__name__ in _stock:
        return
    _stock[module.__name__] = stock
    function.symbolic = staticmethod(functools.partial(symbolic, stock.__func__))


def undescribe() -> None:
    """Undo :func:`describe`."""
    for module, stock in _stock.items():
        getattr(sys.modules[module], SYMBOLIC[module][0]).symbolic = stock
    _stock.clear()


# ----------------------------------------------------------------------------------- torch.export

def _onnx_roi_align(input: Tensor, rois: Tensor, output: Tensor, argmax_y: Tensor,
                    argmax_x: Tensor, aligned_height: int, aligned_width: int,
                    spatial_scale: float, sampling_ratio: int, pool_mode: int, aligned: bool
                    ) -> None:
    if torch.jit.is_tracing():
        return  # mmcv's function describes itself
    require(pool_mode == 1, 'roi_align',
            "pool_mode='max' cannot be exported: ONNX takes the maximum of pixels, not of samples")
    output.copy_(torch.onnx.ops.symbolic(
        'RoiAlign', (input, rois[:, 1:], rois[:, 0].to(torch.int64)),
        dict(output_height=aligned_height, output_width=aligned_width,
             spatial_scale=float(spatial_scale), sampling_ratio=max(0, sampling_ratio), mode='avg',
             coordinate_transformation_mode='half_pixel' if aligned else 'output_half_pixel'),
        dtype=output.dtype, shape=output.shape, version=_HALF_PIXEL_OPSET))


def _onnx_nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    if offset:  # widths and heights are x2 - x1 in ONNX
        boxes = torch.cat((boxes[:, :2], boxes[:, 2:] + offset), 1)
    if torch.jit.is_tracing():
        found: Tensor = _Suppression.apply(boxes, scores, iou_threshold)
        return found
    # a size that is known when the model runs
    count: Any = (scores > 0).sum().item()
    torch._check_is_size(count)
    limit = torch.full((1, ), _ALL_BOXES, dtype=torch.int64)
    threshold = torch.full((1, ), iou_threshold)
    return torch.onnx.ops.symbolic(
        'NonMaxSuppression', (boxes[None], scores[None, None], limit, threshold), {},
        dtype=torch.int64, shape=(count, 3), version=11)[:, 2]


def _onnx_deform_conv(input: Tensor, weight: Tensor, offset: Tensor, output: Tensor,
                      columns: Tensor, ones: Tensor, kW: int, kH: int, dW: int, dH: int,
                      padW: int, padH: int, dilationW: int, dilationH: int, group: int,
                      deformable_group: int, im2col_step: int) -> None:
    _write_deform_conv(output, (input, weight, offset), (dH, dW), (padH, padW),
                       (dilationH, dilationW), group, deformable_group)


def _onnx_modulated_deform_conv(input: Tensor, weight: Tensor, bias: Tensor, ones: Tensor,
                                offset: Tensor, mask: Tensor, output: Tensor, columns: Tensor,
                                kernel_h: int, kernel_w: int, stride_h: int, stride_w: int,
                                pad_h: int, pad_w: int, dilation_h: int, dilation_w: int,
                                group: int, deformable_group: int, with_bias: bool) -> None:
    _write_deform_conv(output, (input, weight, offset, bias if with_bias else None, mask),
                       (stride_h, stride_w), (pad_h, pad_w), (dilation_h, dilation_w), group,
                       deformable_group)


def _write_deform_conv(output: Tensor, inputs: Sequence[Tensor | None], stride: tuple[int, int],
                       padding: tuple[int, int], dilation: tuple[int, int], groups: int,
                       deform_groups: int) -> None:
    if torch.jit.is_tracing():
        return  # mmcv's function describes itself
    output.copy_(torch.onnx.ops.symbolic(
        'DeformConv', inputs,
        dict(strides=list(stride), pads=2 * list(padding), dilations=list(dilation), group=groups,
             offset_group=deform_groups),
        dtype=output.dtype, shape=output.shape, version=DEFORM_CONV_OPSET))


_IN_ONNX: dict[str, Callable[..., Any]] = {
    'deform_conv_forward': _onnx_deform_conv,
    'modulated_deform_conv_forward': _onnx_modulated_deform_conv,
    'nms': _onnx_nms,
    'roi_align_forward': _onnx_roi_align,
}
