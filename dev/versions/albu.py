"""Transforms of albumentations in MMDetection's ``Albu``, as mmrepro seeds them."""
from __future__ import annotations

import copy
import inspect
import random
import sys
import warnings
from typing import Any

import numpy as np

from . import inputs
from .calls import Found
from .digests import digest

SEEDS = range(8)
BOX_PARAMS = dict(type='BboxParams', format='pascal_voc', min_visibility=.0,
                  label_fields=['gt_bboxes_labels', 'gt_ignore_flags'], filter_lost_elements=True)
COORDINATES = 'coord_format'
KEYS = {'img': 'image', 'gt_masks': 'masks', 'gt_bboxes': 'bboxes'}
_QUALITY = dict(quality_lower=85, quality_upper=95)
_SHIFT = dict(shift_limit=.0625, scale_limit=.1, rotate_limit=15)
# type -> sets of arguments, each a part. Those of MMDetection's example are among them
TRANSFORMS: dict[str, tuple[dict[str, Any], ...]] = {
    'ShiftScaleRotate': (dict(_SHIFT, interpolation=1), _SHIFT, dict(_SHIFT, border_mode=0), {}),
    'RandomBrightnessContrast': (dict(brightness_limit=[.1, .3], contrast_limit=[.1, .3]), {}),
    'RGBShift': (dict(r_shift_limit=10, g_shift_limit=10, b_shift_limit=10), {}),
    'HueSaturationValue': (
        dict(hue_shift_limit=20, sat_shift_limit=30, val_shift_limit=20), {}),
    'JpegCompression': (_QUALITY, {}),
    'ImageCompression': (_QUALITY, dict(quality_range=(85, 95)), {}),
    'ChannelShuffle': ({}, ),
    **dict.fromkeys(('Blur', 'MedianBlur', 'GaussianBlur', 'MotionBlur'), (dict(blur_limit=7), {})),
    'GaussNoise': (dict(var_limit=(10., 50.)), dict(std_range=(.01, .05)), {}),
    'CLAHE': (dict(clip_limit=2.), {}),
    'RandomGamma': (dict(gamma_limit=(80, 120)), {}),
    'ColorJitter': (dict(brightness=.2, contrast=.2, saturation=.2, hue=.1), {}),
    'Rotate': (dict(limit=30), {}),
    'Resize': (dict(height=160, width=240), ),
    'LongestMaxSize': (dict(max_size=160), ),
    'PadIfNeeded': (dict(min_height=256, min_width=320), ),
    'RandomCrop': (dict(height=120, width=150), ),
    'RandomSizedBBoxSafeCrop': (dict(height=120, width=150), ),
    **dict.fromkeys((
        'HorizontalFlip', 'VerticalFlip', 'RandomRotate90', 'ISONoise', 'ToGray', 'Equalize',
        'Sharpen', 'Emboss', 'InvertImg', 'CoarseDropout', 'RandomFog', 'RandomRain', 'RandomSnow',
        'RandomShadow', 'GridDistortion', 'Perspective', 'PixelDropout', 'Downscale', 'Affine'),
        ({}, )),
}
# settings whose numbers choose among methods
CHOICES = ('interpolation', 'border_mode')


def pipelines(arrays: Any) -> Found:
    """Yield digests of pipelines of one transform, of ``OneOf`` and of parameters of boxes."""
    from mmrepro import patches
    patches.apply()
    warnings.simplefilter('ignore')
    for kind, variants in TRANSFORMS.items():
        for arguments in variants:
            covers = {name: [value] for name, value in arguments.items() if name in CHOICES}
            covers['arguments'] = sorted(arguments)
            name = f'Albu.{kind}({", ".join(covers["arguments"])})'
            yield from _outputs(name, covers, [dict(type=kind, p=.8, **arguments)], arrays)
    blurs = [dict(type='Blur', p=1.), dict(type='MedianBlur', p=1.)]
    yield from _outputs('Albu.OneOf()', dict(arguments=[]),
                        [dict(type='OneOf', transforms=blurs, p=.8)], arrays)
    flips = [dict(type='HorizontalFlip', p=.5), dict(type='VerticalFlip', p=.5)]
    yield from _outputs('Albu', dict(skip_img_without_anno=[True, False]), flips, arrays)
    for key in ('format', COORDINATES):  # albumentationsx has another name for it
        covers = {key: ['pascal_voc'], 'label_fields': BOX_PARAMS['label_fields'],
                  'filter_lost_elements': [True]}
        if key == _name_of_format():
            yield from _outputs(f'Albu.BboxParams({key})', covers, flips, arrays)


def _name_of_format() -> str:
    import albumentations
    if 'format' in inspect.signature(albumentations.BboxParams).parameters:
        return 'format'
    return COORDINATES


def _outputs(name: str, covers: dict[str, list[Any]], transforms: list[dict[str, Any]],
             arrays: Any) -> Found:
    """Yield digests of each output, and of the random numbers that follow."""
    from mmdet.datasets.transforms import Albu
    boxes = copy.deepcopy(BOX_PARAMS)
    boxes[_name_of_format()] = boxes.pop('format')
    seen: dict[str, list[Any]] = {}
    try:
        pipeline = Albu(transforms=copy.deepcopy(transforms),
                        bbox_params=boxes, keymap=KEYS,
                        skip_img_without_anno=True)
        for seed in SEEDS:
            given = inputs.results(arrays, 'uint8')
            del given['gt_seg_map']
            random.seed(seed)
            np.random.seed(seed)
            result = pipeline(given)
            own = getattr(pipeline.aug, 'py_random', random), getattr(
                pipeline.aug, 'random_generator', np.random)
            seen.setdefault('random numbers', []).append(
                [own[0].random(), float(own[1].random())])
            if result is None:
                result = dict(img=None, gt_bboxes=None, gt_bboxes_labels=None, gt_masks=None)
            else:
                result['gt_masks'] = result['gt_masks'].masks
                result['gt_bboxes'] = result['gt_bboxes'].tensor
            seen.setdefault('uint8 image', []).append(result['img'])
            seen.setdefault('boxes', []).append([result['gt_bboxes'], result['gt_bboxes_labels']])
            seen.setdefault('bitmap masks', []).append(result['gt_masks'])
    except Exception as error:
        print(f'{name}: {type(error).__name__}: {error}'[:300], file=sys.stderr)
        seen = {'uint8 image': f'!{type(error).__name__}'}
        yield name, 'uint8 image', covers, f'!{type(error).__name__}'
        return
    for output, values in seen.items():
        yield name, output, covers, digest(*values)
