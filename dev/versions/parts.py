"""The parts that are measured, and their digests in this environment.

    python -m dev.versions.parts INPUTS.npz PACKAGE

A part is a transform, an assigner, an evaluator or a generator. A transform has a digest for each
of its outputs, because a version often changes images and leaves boxes alone.
"""
from __future__ import annotations

import copy
import importlib.util
import json
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from . import albu, calls, inputs, models
from .calls import Found
from .digests import digest

SEEDS = range(4)
# outputs of a transform
UINT8, FLOAT32 = 'uint8 image', 'float32 image'
BOXES, BITMAPS, POLYGONS, LABEL_MAP = 'boxes', 'bitmap masks', 'polygon masks', 'label map'


class Transform(NamedTuple):
    """A transform with its arguments, and the settings that are no numbers.

    ``covers`` are the values of such settings that the digests hold for (``*``: all, the setting
    changes no digest). Each of ``also`` is another set of arguments, whose results join the
    digests.
    """
    type: str
    arguments: dict[str, Any] = {}
    covers: dict[str, list[Any]] = {}
    also: tuple[dict[str, Any], ...] = ()


_SCALES = (dict(scale=(135, 95)), dict(scale=(333, 800)), dict(scale=(542, 382)),
           dict(scale=(200, 200), keep_ratio=False))
_RATIO = dict(keep_ratio=[True, False])


def _resizes() -> Iterator[Transform]:
    for method in ('bilinear', 'nearest', 'bicubic', 'area', 'lanczos'):
        yield Transform('Resize', dict(scale=(333, 200), keep_ratio=True, interpolation=method),
                        {**_RATIO, 'backend': ['cv2'], 'interpolation': [method]},
                        tuple({'keep_ratio': True, **one} for one in _SCALES))
    for method in ('bilinear', 'nearest', 'bicubic', 'lanczos'):
        yield Transform('Resize', dict(scale=(333, 200), keep_ratio=True, backend='pillow',
                                       interpolation=method),
                        {**_RATIO, 'backend': ['pillow'], 'interpolation': [method]},
                        tuple({'keep_ratio': True, **one} for one in _SCALES))


def _geometric() -> Iterator[Transform]:
    for name in ('Rotate', 'ShearX', 'ShearY', 'TranslateX', 'TranslateY'):
        for method in ('bilinear', 'nearest'):
            yield Transform(name, dict(interpolation=method), dict(interpolation=[method]))


_CROP = dict(crop_type=['absolute', 'relative_range'])
TRANSFORMS = (
    *_resizes(), *_geometric(),
    Transform('FixScaleResize', dict(scale=(333, 200), keep_ratio=True),
              {**_RATIO, 'backend': ['cv2'], 'interpolation': ['bilinear']},
              (dict(scale=(135, 95), keep_ratio=False), )),
    Transform('FixShapeResize', dict(width=320, height=256, keep_ratio=True),
              {**_RATIO, 'backend': ['cv2'], 'interpolation': ['bilinear']},
              (dict(keep_ratio=False), )),
    Transform('ResizeShortestEdge', dict(scale=100, max_size=180), dict(resize_type=['Resize']),
              (dict(scale=300), )),
    Transform('RandomResize', dict(scale=[(333, 200), (600, 500)], keep_ratio=True),
              {**_RATIO, 'resize_type': ['Resize']},
              (dict(scale=(320, 320), ratio_range=(.1, 2.), keep_ratio=False), )),
    Transform('RandomChoiceResize', dict(scales=[(333, 200), (150, 120)], keep_ratio=True),
              {**_RATIO, 'resize_type': ['Resize']}),
    Transform('RandomFlip', dict(prob=.5), dict(direction=['horizontal', 'vertical', 'diagonal']),
              (dict(direction='vertical'), dict(direction='diagonal'))),
    Transform('RandomShift', dict(prob=1.)),
    Transform('Pad', dict(size_divisor=32), dict(padding_mode=['constant'],
                                                 pad_to_square=[True, False]),
              (dict(size_divisor=None, pad_to_square=True), dict(size=(300, 320),
                                                                 size_divisor=None))),
    Transform('RandomCrop', dict(crop_size=(120, 150)), {
        **_CROP, 'allow_negative_crop': [True, False], 'recompute_bbox': [True, False],
        'bbox_clip_border': [True, False]},
        (dict(crop_size=(.5, .5), crop_type='relative_range', allow_negative_crop=True),
         dict(recompute_bbox=True, bbox_clip_border=False))),
    Transform('SegRescale', dict(scale_factor=.125), dict(backend=['cv2'])),
    Transform('PhotoMetricDistortion'),
    Transform('Expand', dict(prob=1., mean=(123.675, 116.28, 103.53), seg_ignore_label=255),
              dict(to_rgb=[True, False]),
              (dict(to_rgb=False), )),
    Transform('MinIoURandomCrop', dict(), dict(bbox_clip_border=[True])),
    Transform('RandomCenterCropPad', dict(
        crop_size=(160, 160), ratios=(.6, .8, 1., 1.2), mean=[0, 0, 0], std=[1, 1, 1], to_rgb=True,
        test_pad_mode=None),
        dict(to_rgb=[True], test_mode=[False], bbox_clip_border=[True])),
    Transform('CutOut', dict(n_holes=(2, 5), cutout_shape=[(8, 8), (16, 24)])),
    Transform('RandomErasing', dict(n_patches=(2, 4), ratio=(.05, .2)),
              dict(squared=[True], img_border_value=[128])),
    Transform('RandomAffine', dict(), dict(bbox_clip_border=[True])),
    Transform('YOLOXHSVRandomAug'),
    *(Transform(name) for name in (
        'Color', 'Brightness', 'Contrast', 'Sharpness', 'Solarize', 'SolarizeAdd', 'Posterize',
        'Equalize', 'AutoContrast', 'Invert')),
    Transform('AutoAugment', dict(), dict()),
    Transform('RandAugment', dict(), dict()),
    Transform('RandomOrder', dict(transforms=[dict(type='Color'), dict(type='Invert')])),
    Transform('RandomChoice', dict(transforms=[[dict(type='Invert')], [dict(type='RandomFlip',
                                                                            prob=1.)]])),
    Transform('RandomApply', dict(transforms=[dict(type='Invert')])),
    Transform('RandomGrayscale', dict(prob=1.), dict(keep_channels=[True, False],
                                                     color_format=['bgr']),
              (dict(keep_channels=True), )),
    Transform('Normalize', dict(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375]),
              dict(to_rgb=[True, False]), (dict(to_rgb=False), )),
    Transform('CopyPaste'), Transform('Mosaic', dict(img_scale=(160, 160))),
    Transform('MixUp', dict(img_scale=(160, 160), flip_ratio=.5)),
    Transform('CachedMosaic', dict(img_scale=(160, 160), random_pop=False),
              dict(random_pop=[False])),
    Transform('CachedMixUp', dict(img_scale=(160, 160), random_pop=False),
              dict(random_pop=[False])),
    Transform('FilterAnnotations', dict(min_gt_bbox_wh=(10, 10)), dict(
        by_box=[True], by_mask=[True, False], keep_empty=[True, False]),
        (dict(by_mask=True, keep_empty=False), )),
    Transform('PackDetInputs', dict(), dict(meta_keys=['*'])),
    Transform('Transpose', dict(keys=['img'], order=(2, 0, 1)), dict(keys=['img'])),
)
MIXING = ('CopyPaste', 'Mosaic', 'MixUp', 'CachedMosaic', 'CachedMixUp')  # need other samples
# transforms from which on images are float32, whatever they were
ONLY_FLOAT32 = ('Normalize', )
# transforms that take bytes only
ONLY_UINT8 = ('Posterize', 'Equalize', 'AutoContrast', 'AutoAugment', 'RandAugment')
NO_POLYGONS = ('CopyPaste', 'RandomErasing', 'Expand')  # they take bitmaps only
NO_MASKS = ('RandomAffine', 'RandomCenterCropPad')
TAKES_FLOAT32 = ('RandomCenterCropPad', )  # and nothing else


def name_of(part: Transform) -> str:
    """Return the name of a row: the type, and the settings that other rows vary."""
    varied = {key: values[0] for key, values in part.covers.items()
              if key in ('interpolation', 'backend') and len(values) == 1}
    if not varied or part.type not in ('Resize', 'Rotate', 'ShearX', 'ShearY', 'TranslateX',
                                       'TranslateY'):
        return part.type
    return f'{part.type}({", ".join(f"{key}={value}" for key, value in varied.items())})'


# ------------------------------------------------------------------------------------ parts


class NotCalled(types.ModuleType):
    """The compiled operators of mmcv, which no part calls."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(name)
        return lambda *args, **kwargs: sys.exit(f'{name} was called')


def transform_digests(part: Transform, arrays: Any) -> dict[str, str]:
    """Return a digest for each output of a transform, over all seeds and arguments."""
    from mmdet.registry import TRANSFORMS as REGISTRY
    seen: dict[str, list[Any]] = {}
    kinds = [('uint8', False), ('float32', True)]
    if part.type in ONLY_UINT8 or part.covers.get('backend') == ['pillow']:
        kinds = [('uint8', False), ('uint8', True)]
    if part.type in TAKES_FLOAT32:
        kinds = [('float32', False)]
    for dtype, polygon in kinds:
        for arguments in ({}, *part.also):
            for seed in SEEDS:
                settings = dict(type=part.type, **{**part.arguments, **arguments})
                transform = REGISTRY.build(copy.deepcopy(settings))
                # masks are channels of OpenCV, which has other kernels for up to three
                count = 6
                if seed % 2:
                    count = 3
                given = inputs.results(arrays, dtype, polygon, count)
                if part.type in NO_POLYGONS and polygon:
                    given['gt_masks'] = inputs.results(arrays, dtype, count=count)['gt_masks']
                if part.type in NO_MASKS:
                    del given['gt_masks'], given['gt_seg_map']
                if part.type in MIXING:
                    others = [inputs.results(arrays, dtype) for _ in range(3)]
                    given['mix_results'] = others[:1] if part.type == 'CopyPaste' else others
                if part.type == 'MixUp':
                    given['mix_results'] = given['mix_results'][:1]
                if part.type.startswith('Cached'):
                    given['dataset'] = None
                random.seed(seed)
                np.random.seed(seed)
                calls = 1
                if part.type.startswith('Cached'):
                    calls = 6
                for _ in range(calls):
                    result = transform(copy.deepcopy(given))
                _collect(seen, dtype, polygon and part.type not in NO_POLYGONS, result)
    if part.type in ONLY_FLOAT32:
        seen.pop(UINT8)
        seen['image'] = seen.pop(FLOAT32)
    return {name: digest(*values) for name, values in seen.items()}


def _collect(seen: dict[str, list[Any]], dtype: str, polygon: bool, result: Any) -> None:
    image, maps = UINT8, BITMAPS
    if dtype == 'float32':
        image = FLOAT32
    if polygon:
        maps = POLYGONS
    if result is None:
        for name in (image, maps, BOXES, LABEL_MAP):
            seen.setdefault(name, []).append(None)
        return
    if 'data_samples' in result:
        seen.setdefault(image, []).append(result['inputs'])
        seen.setdefault(BOXES, []).append(result['data_samples'].gt_instances.bboxes.tensor)
        return
    seen.setdefault(image, []).append(result['img'])
    seen.setdefault(BOXES, []).append([result['gt_bboxes'].tensor, result['gt_bboxes_labels']])
    if 'gt_masks' in result:
        masks = result['gt_masks'].masks
        seen.setdefault(maps, []).append(masks)
    if 'gt_seg_map' in result and dtype == 'uint8':
        seen.setdefault(LABEL_MAP, []).append(result['gt_seg_map'])


def loading(arrays: Any) -> Found:
    """Yield part, output, covered settings and digest of images that are decoded."""
    import mmcv
    for backend in ('cv2', 'pillow'):
        for flag in ('color', 'grayscale', 'unchanged', 'color_ignore_orientation'):
            for name in sorted(arrays.files):
                if not name.startswith('file_'):
                    continue
                try:
                    image = mmcv.imfrombytes(arrays[name].tobytes(), flag=flag, backend=backend)
                    found = digest(image)
                except Exception as error:
                    found = f'!{type(error).__name__}'
                yield (f'LoadImageFromFile(imdecode_backend={backend}, color_type={flag})',
                       name[len('file_'):], dict(imdecode_backend=[backend], color_type=[flag],
                                                 to_float32=[True, False], ignore_empty=[False]),
                       found)


def annotations(arrays: Any) -> Found:
    """Yield the same of masks that LoadAnnotations makes of polygons."""
    from mmdet.registry import TRANSFORMS as REGISTRY
    height, width = arrays['image'].shape[:2]
    given = dict(height=height, width=width, img_shape=(height, width), ori_shape=(height, width),
                 instances=[dict(bbox=list(box), bbox_label=label, ignore_flag=0,
                                 mask=[one.tolist() for one in polygon])
                            for box, label, polygon in zip(inputs.BOXES, inputs.LABELS,
                                                           inputs.polygons())])
    for poly2mask, output in ((True, BITMAPS), (False, POLYGONS)):
        transform = REGISTRY.build(dict(type='LoadAnnotations', with_bbox=True, with_mask=True,
                                        poly2mask=poly2mask))
        result = transform(copy.deepcopy(given))
        covers = dict(with_bbox=[True], with_label=[True], with_mask=[True, False],
                      with_seg=[False], poly2mask=[True, False], box_type=['hbox'])
        yield 'LoadAnnotations', output, covers, digest(result['gt_masks'].masks)
    yield 'LoadAnnotations', BOXES, covers, digest(result['gt_bboxes'].tensor)
    import torch
    from mmdet.structures.mask import bitmap_to_polygon, mask2bbox
    yield 'mask2bbox', BOXES, {}, digest(mask2bbox(torch.from_numpy(arrays['masks'] > 0)))
    yield 'bitmap_to_polygon', POLYGONS, {}, digest(
        [bitmap_to_polygon(mask) for mask in arrays['masks']])
    masks = inputs.results(arrays, 'uint8')['gt_masks']
    boxes = np.array(inputs.BOXES, np.float32)
    yield 'BitmapMasks.get_bboxes', BOXES, {}, digest(masks.get_bboxes('hbox').tensor)
    polygons = inputs.results(arrays, 'uint8', True)['gt_masks']
    yield 'PolygonMasks.to_bitmap', BITMAPS, {}, digest(polygons.to_bitmap().masks)
    yield 'PolygonMasks.areas', 'areas', {}, digest(polygons.areas)
    yield 'PolygonMasks.crop_and_resize', POLYGONS, {}, digest(
        polygons.crop_and_resize(boxes, (28, 28), np.arange(len(boxes))).masks)
    yield 'PolygonMasks.crop', POLYGONS, {}, digest(
        polygons.crop(np.array([30., 20., 180., 150.])).masks)


def transforms(arrays: Any) -> Found:
    """Yield digests of transforms."""
    for part in TRANSFORMS:
        try:
            digests = transform_digests(part, arrays)
        except Exception as error:
            digests = {'image': f'!{type(error).__name__}'}
            print(f'{name_of(part)}: {type(error).__name__}: {error}', file=sys.stderr)
        for output, value in digests.items():
            yield name_of(part), output, part.covers, value


# package -> the functions whose parts it may change
GROUPS: dict[str, tuple[Callable[[Any], Found], ...]] = {
    'cv2': (transforms, loading, annotations),
    'numpy': (transforms, loading, calls.streams, annotations, calls.voc),
    'PIL': (transforms, loading, annotations),
    'scipy': (calls.assigners, ),
    'scikit-learn': (calls.mixtures, ),
    'pycocotools': (calls.coco, annotations),
    'timm': (calls.backbones, ),
    'shapely': (annotations, ),
    'lvis': (calls.lvis, ),
    'cityscapesscripts': (calls.cityscapes, ),
    'albumentations': (albu.pipelines, ),
    'torch': (transforms, models.streams, models.operators, models.losses, models.optimizers,
              models.detectors),
}
WITHOUT_MMDET = ('scipy', 'scikit-learn', 'timm')  # their parts call what MMDetection calls


def main(path: str, package: str) -> None:
    """Print the digests of this environment as JSON."""
    if importlib.util.find_spec('faster_coco_eval'):
        # as its users do, before MMDetection imports pycocotools
        importlib.import_module('faster_coco_eval').init_as_pycocotools()
    if package == 'torch':  # detectors call operators
        import mmrepro  # noqa: F401
        models.begin()
    elif package not in WITHOUT_MMDET:
        sys.modules['mmcv._ext'] = NotCalled('mmcv._ext')
    if package not in WITHOUT_MMDET:
        import cv2
        import mmdet.datasets  # noqa: F401
        from mmengine.registry import init_default_scope
        init_default_scope('mmdet')
        cv2.setNumThreads(1)
    parts: dict[str, dict[str, Any]] = {}
    with np.load(path) as arrays:
        for group in GROUPS[package]:
            try:
                for name, output, covers, found in group(arrays):
                    part = parts.setdefault(name, dict(covers=covers, digests={}))
                    part['digests'][output] = found
            except Exception as error:
                print(f'{group.__name__}: {type(error).__name__}: {error}', file=sys.stderr)
    print(json.dumps(parts))


if __name__ == '__main__':
    main(*sys.argv[1:])
