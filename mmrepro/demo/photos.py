"""The photographs of the demonstration dataset, and the outlines of what is on them.

The photographs are the sample images inside the scikit-image wheel, so nothing is downloaded. The
outlines in ``outlines.json`` were drawn by hand, in pixels of the original photograph.
"""
from __future__ import annotations

import importlib
import json
import math
import os
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np

from ..errors import MissingPackageError

CLASSES = ('person', 'cat', 'cup', 'motorcycle', 'rocket', 'coin')


class Outline(NamedTuple):
    """One object on a photograph: its category and a closed polygon of (x, y) pixels."""
    category: str
    points: tuple[tuple[int, int], ...]


# Falcon 9 and the shuttle model are one category. Of a coin: center x and y, half width and height.
_DRAWN = json.loads(Path(__file__).with_name('outlines.json').read_text('utf-8'))
# file: what is on it
PHOTOS = {
    **{photo: tuple(Outline(category, tuple(zip(numbers[::2], numbers[1::2])))
                    for category, numbers in objects.items())
       for photo, objects in _DRAWN['polygons'].items()},
    'coins.png': tuple(Outline('coin', tuple(
        (x + round(half_width * math.cos(2 * math.pi * step / 24)),
         y + round(half_height * math.sin(2 * math.pi * step / 24))) for step in range(24)))
        for x, y, half_width, half_height in _DRAWN['coins']),
}

# photographs without any of the objects
BACKGROUNDS = ('grass.png', 'gravel.png', 'brick.png', 'hubble_deep_field.jpg', 'ihc.png')


def required(module: str, what_for: str) -> Any:
    """Import a module that the demonstration needs.

    Raises:
        MissingPackageError: it is not installed; says what to install.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f'the demonstration dataset {what_for}; to install what it needs: pip install '
            'scikit-image pycocotools') from error


def photo_dir() -> str:
    """Return the folder of the sample images of scikit-image."""
    skimage = required('skimage', "is made of scikit-image's sample photographs")
    return os.path.join(os.path.dirname(skimage.__file__), 'data')


def objects_of(category: str) -> list[tuple[str, Outline]]:
    """Return the objects of a category, each with the name of its photograph."""
    return [(photo, outline) for photo, outlines in PHOTOS.items() for outline in outlines
            if outline.category == category]


@cache
def read_photo(name: str) -> np.ndarray:
    """Return a photograph as read-only uint8 (height, width, 3), channels blue, green, red."""
    path = os.path.join(photo_dir(), name)
    image = cv2.imread(path, cv2.IMREAD_COLOR)
    if image is None:
        raise MissingPackageError(f'{path}: this scikit-image does not ship the photograph; '
                                  'versions 0.25 and 0.26 do')
    image.flags.writeable = False
    return image


def resize(image: np.ndarray, width: int, height: int) -> np.ndarray:
    """Resize a uint8 image (height, width, 3) bilinearly, in integers only.

    The bytes of OpenCV depend on instruction set and build.
    Shrinking averages 2x2 blocks first, so that no pixel is left out.
    """
    while image.shape[1] >= 2 * width and image.shape[0] >= 2 * height:
        even = image[:image.shape[0] // 2 * 2, :image.shape[1] // 2 * 2].astype(np.uint16)
        total = even[::2, ::2] + even[1::2, ::2] + even[::2, 1::2] + even[1::2, 1::2]
        image = ((total + 2) >> 2).astype(np.uint8)
    low_y, high_y, part_y = _taps(image.shape[0], height)
    low_x, high_x, part_x = _taps(image.shape[1], width)
    wide = image.astype(np.int32)  # a weight is at most 1 << 22, a pixel 255
    part_x, part_y = part_x[None, :, None], part_y[:, None, None]
    rows = wide[:, low_x] * (_ONE - part_x) + wide[:, high_x] * part_x
    full = rows[low_y] * (_ONE - part_y) + rows[high_y] * part_y
    return ((full + (_ONE * _ONE >> 1)) >> 2 * _BITS).astype(np.uint8)


_BITS = 11
_ONE = 1 << _BITS


def _taps(source: int, target: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return lower and upper source index, and the weight of the upper, for each target pixel."""
    center = (2 * np.arange(target, dtype=np.int64) + 1) * source * _ONE // (2 * target)
    position = np.clip(center - _ONE // 2, 0, (source - 1) * _ONE)
    low = position // _ONE
    return low, np.minimum(low + 1, source - 1), (position % _ONE).astype(np.int32)
