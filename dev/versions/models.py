"""Parts that torch computes: random numbers, operators, losses, optimizers and detectors.

Inputs and weights are NumPy's, so that a digest follows from torch alone. Gradients are taken of a
weighted sum of the results.
"""
from __future__ import annotations

import copy
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from . import inputs
from .calls import Found
from .digests import digest

SIZE = (128, 160)  # height and width of the images of detectors
RESULT, GRADIENTS = 'result', 'gradients'


def begin() -> None:
    """Compute as a deterministic training does, and log nothing."""
    logging.disable(logging.WARNING)
    torch.use_deterministic_algorithms(True)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return normal numbers of this shape that need a gradient."""
    values = np.random.RandomState(seed).standard_normal(shape).astype(np.float32)
    return torch.from_numpy(values).requires_grad_()


def classes(count: int, number: int) -> torch.Tensor:
    """Return ``count`` classes of ``number``."""
    return torch.from_numpy(np.random.RandomState(1).randint(0, number, count))


def result_and_gradients(call: Callable[..., Any], *arguments: Any) -> tuple[str, str]:
    """Return the digests of a result, and of the gradients of all arguments that need one."""
    given = [one.detach().clone().requires_grad_(one.requires_grad) if torch.is_tensor(one) else one
             for one in arguments]
    result = call(*given)
    found = result if isinstance(result, (tuple, list)) else [result]
    floating = [one for one in found if one.requires_grad]
    if floating:
        sum((one * numbers(*one.shape, seed=9).detach()).sum() for one in floating).backward()
    grads = [one.grad for one in given if torch.is_tensor(one) and one.grad is not None]
    return digest(list(found)), digest(grads)


def streams(arrays: Any) -> Found:
    """Yield digests of torch's random numbers, and of the initial values that MMEngine draws."""
    from mmengine.model import bias_init_with_prob, weight_init
    draws: dict[str, Callable[[], Any]] = {
        'rand': lambda: torch.rand(999), 'randn': lambda: torch.randn(999),
        'randn(7)': lambda: torch.randn(7), 'randint': lambda: torch.randint(0, 77, (999, )),
        'randperm': lambda: torch.randperm(999),
        'randperm(70000)': lambda: torch.randperm(70000),
        'bernoulli': lambda: torch.bernoulli(torch.full((999, ), .3)),
        'multinomial': lambda: torch.multinomial(torch.rand(50), 20),
        'normal': lambda: torch.normal(torch.zeros(999), 2.),
        'Tensor.uniform_': lambda: torch.empty(999).uniform_(-2, 3),
        'Tensor.exponential_': lambda: torch.empty(999).exponential_(2.),
        'Tensor.log_normal_': lambda: torch.empty(999).log_normal_(),
        'Tensor.cauchy_': lambda: torch.empty(999).cauchy_(),
        'Tensor.geometric_': lambda: torch.empty(999).geometric_(.2),
        'poisson': lambda: torch.poisson(torch.full((999, ), 12.)),
        'nn.functional.dropout': lambda: functional.dropout(torch.ones(999), .3),
        'nn.init.trunc_normal_': lambda: torch.nn.init.trunc_normal_(torch.empty(99, 9), std=.02),
        'nn.init.orthogonal_': lambda: torch.nn.init.orthogonal_(torch.empty(30, 20)),
        'nn.Conv2d': lambda: list(torch.nn.Conv2d(8, 16, 3).parameters()),
        'nn.Linear': lambda: list(torch.nn.Linear(30, 20).parameters()),
        'nn.Embedding': lambda: torch.nn.Embedding(30, 8).weight,
        'nn.MultiheadAttention': lambda: list(torch.nn.MultiheadAttention(16, 4).parameters())}
    for name, draw in draws.items():
        torch.manual_seed(0)
        yield f'torch.{name}', 'numbers', {}, digest(draw(), torch.rand(3))
    for name in ('Xavier', 'Normal', 'TruncNormal', 'Uniform', 'Kaiming', 'Caffe2Xavier'):
        torch.manual_seed(0)
        layers = torch.nn.Sequential(torch.nn.Conv2d(8, 16, 3), torch.nn.Linear(30, 20))
        getattr(weight_init, f'{name}Init')(layer=['Conv2d', 'Linear'])(layers)
        yield name, 'numbers', {}, digest(list(layers.parameters()), torch.rand(3))
    yield 'bias_prob', 'numbers', {}, digest(bias_init_with_prob(.01))


def _layers() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield name, function and arguments of the layers of detectors."""
    image = numbers(2, 16, 25, 34)
    for name, shape, settings in (
            ('3x3', (24, 16, 3, 3), dict(padding=1)), ('1x1', (24, 16, 1, 1), {}),
            ('7x7, stride 2', (24, 16, 7, 7), dict(padding=3, stride=2)),
            ('3x3, stride 2', (24, 16, 3, 3), dict(padding=1, stride=2)),
            ('3x3, dilated', (24, 16, 3, 3), dict(padding=2, dilation=2)),
            ('3x3, groups', (24, 4, 3, 3), dict(padding=1, groups=4)),
            ('5x5, depthwise', (16, 1, 5, 5), dict(padding=2, groups=16))):
        yield (f'conv2d({name})', lambda x, w, b, more=settings: functional.conv2d(x, w, b, **more),
               (image, numbers(*shape, seed=1), numbers(shape[0], seed=2)))
    yield 'conv_transpose2d', lambda x, w: functional.conv_transpose2d(x, w, stride=2), (
        image, numbers(16, 8, 2, 2, seed=1))
    yield 'linear', functional.linear, (
        numbers(90, 64), numbers(40, 64, seed=1), numbers(40, seed=2))
    yield 'linear(wide)', functional.linear, (numbers(2, 1024), numbers(91, 1024, seed=1))
    yield 'matmul', torch.matmul, (numbers(3, 30, 64), numbers(3, 64, 50, seed=1))
    yield 'einsum', lambda a, b: torch.einsum('bqc,bchw->bqhw', a, b), (
        numbers(2, 30, 16, seed=1), image)
    for name, training in (('training', True), ('frozen', False)):
        yield (f'batch_norm({name})', lambda x, w, b, on=training: functional.batch_norm(
            x, torch.zeros(16), torch.ones(16), w, b, on), (
                image, numbers(16, seed=1), numbers(16, seed=2)))
    yield 'group_norm', lambda x, w, b: functional.group_norm(x, 4, w, b), (
        image, numbers(16, seed=1), numbers(16, seed=2))
    yield 'layer_norm', lambda x, w, b: functional.layer_norm(x, (96, ), w, b), (
        numbers(2, 60, 96), numbers(96, seed=1), numbers(96, seed=2))
    yield 'normalize', lambda x: functional.normalize(x, dim=1), (image, )
    yield 'scaled_dot_product_attention', functional.scaled_dot_product_attention, (
        numbers(2, 4, 50, 16), numbers(2, 4, 70, 16, seed=1), numbers(2, 4, 70, 16, seed=2))
    yield 'max_pool2d', lambda x: functional.max_pool2d(x, 3, 2, 1), (image, )
    yield 'avg_pool2d', lambda x: functional.avg_pool2d(x, 2, 2, ceil_mode=True), (image, )
    yield 'adaptive_avg_pool2d', lambda x: functional.adaptive_avg_pool2d(x, 7), (image, )
    yield 'interpolate(nearest)', lambda x: functional.interpolate(x, scale_factor=2.), (image, )
    for mode in ('bilinear', 'bicubic'):
        yield (f'interpolate({mode})', lambda x, how=mode: functional.interpolate(
            x, (40, 61), mode=how, align_corners=False), (image, ))
    yield 'grid_sample', lambda x, grid: functional.grid_sample(
        x, grid.tanh(), align_corners=False), (image, numbers(2, 9, 11, 2, seed=1))
    yield 'unfold', lambda x: functional.unfold(x, 3, padding=1), (image, )
    yield 'kl_div', lambda x, y: functional.kl_div(
        x.log_softmax(1), y.softmax(1), reduction='batchmean'), (
            numbers(300, 81), numbers(300, 81, seed=1).detach())
    yield 'embedding', lambda weight: functional.embedding(classes(90, 30), weight), (
        numbers(30, 8), )


def _functions() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield name, function and arguments of what stands between layers."""
    rows, long = numbers(300, 81), numbers(100003)
    for name in 'relu silu gelu mish hardswish leaky_relu softplus elu'.split():
        yield name, getattr(functional, name), (rows, )
    for name in 'sigmoid tanh exp sin cos atan erf expm1'.split():
        yield name, getattr(torch, name), (rows, )
    for name in 'log sqrt rsqrt log1p reciprocal'.split():
        yield name, lambda x, name=name: getattr(torch, name)(x.abs() + .1), (rows, )
    yield 'pow', lambda x: (x.abs() + .1).pow(2.5), (rows, )
    yield 'softmax', lambda x: x.softmax(1), (rows, )
    yield 'log_softmax', lambda x: x.log_softmax(1), (rows, )
    for name in 'sum mean var std logsumexp prod norm'.split():
        call = getattr(torch, name)
        yield f'{name}(dim=1)', lambda x, call=call: call(x, dim=1), (rows, )
        if name not in ('logsumexp', 'prod'):
            yield name, call, (long, )
    yield 'sum(dim=0)', lambda x: x.sum(0), (rows, )
    yield 'cumsum', lambda x: x.cumsum(0), (long, )
    yield 'cdist', torch.cdist, (numbers(60, 4), numbers(70, 4, seed=1))
    yield 'bmm', torch.bmm, (numbers(8, 9, 30), numbers(8, 30, 7, seed=1))
    coarse = (rows.detach() * 3).round()  # many ties
    yield 'sort', lambda x: torch.sort(x, 1, descending=True), (coarse, )
    yield 'argsort', lambda x: torch.argsort(x, 1), (coarse, )
    yield 'topk', lambda x: torch.topk(x, 20, 1), (coarse, )
    yield 'topk(long)', lambda x: torch.topk((x * 50).round(), 1000), (long.detach(), )
    yield 'max(dim=1)', lambda x: torch.max(x, 1), (coarse, )
    yield 'argmax', lambda x: torch.argmax(x, 1), (coarse, )
    yield 'median', lambda x: torch.median(x, 1), (coarse, )
    yield 'unique', lambda x: torch.unique(x, return_inverse=True), (coarse, )
    yield 'quantile', lambda x: torch.quantile(x, .3, 1), (rows, )
    yield 'scatter_add', lambda x: torch.zeros(9, 81).scatter_add(
        0, classes(300 * 81, 9).view(300, 81), x), (rows, )
    yield 'index_add', lambda x: torch.zeros(9, 81).index_add(0, classes(300, 9), x), (rows, )
    yield 'index_put', lambda x: torch.zeros(9, 81).index_put(
        (classes(300, 9), ), x, accumulate=True), (rows, )
    yield 'gather', lambda x: x.gather(1, classes(900, 81).view(300, 3)), (rows, )
    target = classes(300, 81)
    yield 'cross_entropy', lambda x: functional.cross_entropy(x, target), (rows, )
    yield 'nll_loss', lambda x: functional.nll_loss(x, target), (rows, )
    yield 'binary_cross_entropy_with_logits', lambda x: functional.binary_cross_entropy_with_logits(
        x, functional.one_hot(target, 81).float()), (rows, )
    for name in ('smooth_l1_loss', 'l1_loss', 'mse_loss'):
        yield name, getattr(functional, name), (numbers(300, 4), numbers(300, 4, seed=1).detach())


def operators(arrays: Any) -> Found:
    """Yield digests of operators: result, and gradients."""
    for first, second, found in ((functional, torch, _layers()), (torch, functional, _functions())):
        for name, call, arguments in found:
            result, gradients = result_and_gradients(call, *arguments)
            home = first if hasattr(first, name.partition('(')[0]) else second
            part = f'{home.__name__}.{name}'
            yield part, RESULT, {}, result
            if any(one.requires_grad for one in arguments):
                yield part, GRADIENTS, {}, gradients


def losses(arrays: Any) -> Found:
    """Yield digests of MMDetection's losses with their default settings."""
    from mmdet.registry import MODELS
    logits, labels = numbers(200, 20), classes(200, 20)
    corners = np.random.RandomState(3).rand(200, 2, 2, 2).astype(np.float32) * 90
    predicted, target = (torch.from_numpy(np.concatenate(
        [corners[:, which].min(1), corners[:, which].max(1) + 1], 1)) for which in range(2))
    predicted.requires_grad_()
    deltas, other = numbers(200, 4), numbers(200, 4, seed=1).detach()
    scores = torch.from_numpy(np.random.RandomState(4).rand(200).astype(np.float32))
    heat = scores.repeat(20, 1).t().contiguous()
    weights = torch.ones(200, 4)
    calls: dict[str, tuple[Any, ...]] = {
        'CrossEntropyLoss': (logits, labels), 'FocalLoss': (logits, labels),
        'QualityFocalLoss': (logits, (labels, scores)), 'VarifocalLoss': (logits, heat),
        'SeesawLoss': (numbers(200, 22), labels, torch.ones(200)), 'GHMR': (deltas, other, weights),
        'GHMC': (logits, labels, torch.ones(200)),
        'EQLV2Loss': (numbers(200, 21), labels), 'DiceLoss': (logits, heat.round()),
        'L1Loss': (deltas, other), 'SmoothL1Loss': (deltas, other), 'MSELoss': (deltas, other),
        'BalancedL1Loss': (deltas, other), 'DistributionFocalLoss': (logits, scores * 18),
        'KnowledgeDistillationKLDivLoss': (logits, numbers(200, 20, seed=2).detach()),
        **{name: (predicted, target) for name in (
            'IoULoss', 'BoundedIoULoss', 'GIoULoss', 'DIoULoss', 'CIoULoss', 'EIoULoss')}}
    more: dict[str, dict[str, Any]] = {
        'SeesawLoss': dict(num_classes=20), 'EQLV2Loss': dict(num_classes=20),
        'KnowledgeDistillationKLDivLoss': dict(T=10)}
    for name, arguments in calls.items():
        loss = MODELS.build(dict(type=name, **more.get(name, {})))

        def call(*given: Any, loss: Any = loss) -> Any:
            found = loss(*given)
            if isinstance(found, dict):
                return list(found.values())
            return found

        try:
            result, gradients = result_and_gradients(call, *arguments)
        except Exception as error:
            result = gradients = f'!{type(error).__name__}'
            print(f'{name}: {type(error).__name__}: {error}', file=sys.stderr)
        yield name, RESULT, {}, result
        yield name, GRADIENTS, {}, gradients


def optimizers(arrays: Any) -> Found:
    """Yield digests of weights after five steps of an optimizer on the same gradients."""
    settings: dict[str, dict[str, Any]] = {
        'SGD': dict(lr=.02, momentum=.9, weight_decay=1e-4),
        'Adam': dict(lr=1e-3), 'AdamW': dict(lr=1e-4, weight_decay=.05), 'Adamax': dict(lr=1e-3),
        'NAdam': dict(lr=1e-3), 'RAdam': dict(lr=1e-3), 'Adagrad': dict(lr=.01),
        'Adadelta': dict(lr=.5), 'RMSprop': dict(lr=1e-3, momentum=.9), 'Rprop': dict(lr=.01),
        'ASGD': dict(lr=.01)}
    for name, arguments in settings.items():
        weights = [numbers(40, 30), numbers(30, 9, 3, 3, seed=1), numbers(77, seed=2)]
        optimizer = getattr(torch.optim, name)(weights, **arguments)
        for step in range(5):
            for place, one in enumerate(weights):
                one.grad = numbers(*one.shape, seed=10 * step + place + 3).detach()
            norm = torch.nn.utils.clip_grad_norm_(weights, 35.)
            optimizer.step()
        yield name, 'weights', {}, digest(weights)
    yield 'torch.nn.utils.clip_grad_norm_', 'norm', {}, digest(norm)


# the type of a detector or a backbone -> a config that has it
DETECTORS = {
    'FasterRCNN': 'faster_rcnn/faster-rcnn_r50_fpn_1x_coco',
    'MaskRCNN': 'mask_rcnn/mask-rcnn_r50_fpn_1x_coco',
    'RetinaNet': 'retinanet/retinanet_r50_fpn_1x_coco',
    'FCOS': 'fcos/fcos_r50-caffe_fpn_gn-head_1x_coco',
    'ATSS': 'atss/atss_r50_fpn_1x_coco',
    'GFL': 'gfl/gfl_r50_fpn_1x_coco',
    'TOOD': 'tood/tood_r50_fpn_1x_coco',
    'VFNet': 'vfnet/vfnet_r50_fpn_1x_coco',
    'RTMDet': 'rtmdet/rtmdet_tiny_8xb32-300e_coco',
    'YOLOX': 'yolox/yolox_tiny_8xb8-300e_coco',
    'YOLOV3': 'yolo/yolov3_mobilenetv2_8xb24-320-300e_coco',
    'CenterNet': 'centernet/centernet_r18_8xb16-crop512-140e_coco',
    'SOLOv2': 'solov2/solov2_r50_fpn_1x_coco',
    'DETR': 'detr/detr_r50_8xb2-150e_coco',
    'DeformableDETR': 'deformable_detr/deformable-detr_r50_16xb2-50e_coco',
    'DINO': 'dino/dino-4scale_r50_8xb2-12e_coco',
    'Mask2Former': 'mask2former/mask2former_r50_8xb2-lsj-50e_coco',
}
BACKBONES = {
    'SwinTransformer': 'swin/retinanet_swin-t-p4-w7_fpn_1x_coco',
    'PyramidVisionTransformerV2': 'pvt/retinanet_pvtv2-b0_fpn_1x_coco',
    'RegNet': 'regnet/retinanet_regnetx-800MF_fpn_1x_coco',
    'HRNet': 'hrnet/fcos_hrnetv2p-w18-gn-head_4xb4-1x_coco',
}


def set_everywhere(node: Any, key: str, value: Any) -> None:
    """Replace the values of a key in a config that has it, at any depth."""
    if isinstance(node, dict):
        if key in node:
            node[key] = value
        for part in node.values():
            set_everywhere(part, key, value)
    elif isinstance(node, (list, tuple)):
        for part in node:
            set_everywhere(part, key, value)


def _settings(name: str) -> Any:
    """Return the model of a config without pretrained weights, and without a threshold."""
    from mmengine.hub import get_config
    config = get_config(f'mmdet::{name}.py')
    set_everywhere(config.model, 'score_thr', 0.)
    set_everywhere(config.model, 'nms_pre', 100)
    if config.model.get('num_queries') == 900:
        config.model.num_queries = 100  # of images of this size
    for part in (config.model, config.model.backbone):
        if 'checkpoint' in (part.get('init_cfg') or {}):
            part.init_cfg = None
    config.model.data_preprocessor.batch_augments = None  # they ask MMEngine for the iteration
    return config.model


def _batch(arrays: Any, masks: bool) -> dict[str, Any]:
    """Return two images with boxes, and masks."""
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks
    from mmengine.structures import InstanceData
    height, width = SIZE
    samples, images = [], []
    for place in range(2):
        image = arrays['image'][place * 30:][:height, place * 60:][:, :width]
        images.append(torch.from_numpy(image.copy()).permute(2, 0, 1))
        boxes = torch.tensor(inputs.BOXES[place:place + 3], dtype=torch.float32)
        boxes[:, 0::2] = boxes[:, 0::2].clamp(0, width - 1) * .55
        boxes[:, 1::2] = boxes[:, 1::2].clamp(0, height - 1) * .6
        sample = DetDataSample(metainfo=dict(
            img_id=place, img_shape=SIZE, ori_shape=SIZE, batch_input_shape=SIZE, pad_shape=SIZE,
            scale_factor=(1., 1.), border=(0, 0, 0, 0)))
        sample.gt_instances = InstanceData(
            bboxes=boxes, labels=torch.tensor(inputs.LABELS[place:place + 3]))
        if masks:
            maps = np.zeros((3, *SIZE), np.uint8)
            for one, (left, top, right, bottom) in zip(maps, boxes.int().tolist()):
                one[top:bottom + 1, left:right + 1] = 1
            sample.gt_instances.masks = BitmapMasks(maps, *SIZE)
        samples.append(sample)
    return dict(inputs=images, data_samples=samples)


def _refill(model: torch.nn.Module) -> None:
    """Give weights numbers of NumPy that are as large as their initial ones."""
    generator = np.random.default_rng(0)
    with torch.no_grad():
        for weight in model.parameters():
            spread = float(np.std(weight.numpy(), dtype=np.float64))
            if spread:
                values = generator.standard_normal(weight.shape, np.float32)
                weight.copy_(torch.from_numpy(values * np.float32(f'{spread:.1e}')))


def _of_model(part: str, model: Any, batch: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield outputs and digests of a detector: initial weights, a step, and detections."""
    from mmengine.logging import MessageHub
    yield 'initial weights', digest([one.float() for one in model.state_dict().values()])
    _refill(model)
    torch.manual_seed(0)
    model.train()
    MessageHub.get_current_instance().update_info('epoch', 0)  # TOOD asks for it
    found = model(**model.data_preprocessor(copy.deepcopy(batch), True), mode='loss')
    values = [one for loss in found.values() for one in (
        loss if isinstance(loss, (list, tuple)) else [loss])]
    yield 'losses', digest(values)
    total = sum(one.mean() for name, loss in found.items() if 'loss' in name for one in (
        loss if isinstance(loss, (list, tuple)) else [loss]))
    total.backward()
    if not math.isfinite(float(total)):
        raise ValueError(f'{part}: losses are {values}')
    yield GRADIENTS, digest([one.grad for one in model.parameters() if one.grad is not None])
    model.eval()
    with torch.no_grad():
        results = model(**model.data_preprocessor(copy.deepcopy(batch), False), mode='predict')
    if sum(len(one.pred_instances) for one in results):  # else the digest is that of nothing
        yield 'detections', digest([[one.pred_instances.scores, one.pred_instances.labels,
                                     *_boxes(one.pred_instances)] for one in results])


def _boxes(instances: Any) -> Iterable[torch.Tensor]:
    if 'bboxes' in instances:
        yield instances.bboxes


def detectors(arrays: Any) -> Found:
    """Yield digests of detectors, and of detectors with other backbones than ResNet-50."""
    from mmdet.registry import MODELS
    for name, config in {**DETECTORS, **BACKBONES}.items():
        try:
            torch.manual_seed(0)
            settings = _settings(config)
            model = MODELS.build(settings)
            model.init_weights()
            masks = name in ('MaskRCNN', 'SOLOv2', 'Mask2Former')
            for output, found in _of_model(name, model, _batch(arrays, masks)):
                yield name, output, {}, found
        except Exception as error:
            print(f'{name}: {type(error).__name__}: {error}', file=sys.stderr)
            yield name, 'losses', {}, f'!{type(error).__name__}'
