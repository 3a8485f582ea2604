"""The photographs of the demonstration dataset, and the outlines of what is on them.

The photographs are the sample images inside the scikit-image wheel, so nothing is downloaded. The
outlines were drawn by hand, in pixels of the original photograph.
"""
from __future__ import annotations

import importlib
import math
import os
from functools import cache
from typing import Any, NamedTuple

import cv2
import numpy as np

from ..errors import MissingPackageError

CLASSES = ('person', 'cat', 'cup', 'motorcycle', 'rocket', 'coin')

Point = tuple[int, int]


class Outline(NamedTuple):
    """One object on a photograph: its category and a closed polygon of (x, y) pixels."""
    category: str
    points: tuple[Point, ...]


def _pairs(text: str) -> tuple[Point, ...]:
    numbers = [int(word) for word in text.split()]
    return tuple(zip(numbers[::2], numbers[1::2]))


# Falcon 9 and the shuttle model are one category.
_PERSON = _pairs(
    '153 80 156 62 165 46 190 32 212 18 235 15 262 22 285 40 297 62 301 88 293 116 276 132 264 '
    '140 256 172 284 190 299 214 304 240 322 244 342 262 352 300 360 346 385 343 412 343 440 '
    '353 470 381 489 420 499 468 505 511 60 511 34 480 20 402 28 332 40 290 46 270 76 235 110 '
    '210 119 196 113 186 128 163 150 150 183 148 181 132 164 112')
_SHUTTLE = _pairs(
    '387 42 393 58 396 40 399 12 412 0 428 0 436 25 438 46 444 40 452 65 455 110 455 205 456 '
    '230 457 265 472 274 440 284 400 288 368 278 372 270 368 262 380 235 355 222 357 208 377 '
    '180 378 110 381 60')
_CAT = _pairs(
    '30 104 36 45 48 0 398 0 376 45 354 76 362 125 355 165 331 190 313 215 308 245 290 262 260 '
    '270 225 277 180 272 130 250 90 220 60 190 40 150')
_CUP = _pairs(
    '77 215 82 172 100 131 130 101 173 76 186 50 215 30 250 20 290 18 330 24 370 40 390 58 400 '
    '67 412 66 424 75 420 97 426 110 455 140 472 175 479 215 476 260 455 305 420 345 370 372 '
    '310 386 260 388 200 375 150 350 110 310 88 265')
_MOTORCYCLE = _pairs(
    '93 203 120 199 144 200 137 173 144 149 160 145 170 160 200 166 233 166 254 180 293 193 346 '
    '190 363 200 400 176 383 166 360 170 400 133 427 120 444 143 466 150 467 130 497 116 503 '
    '100 493 73 507 40 514 76 540 100 534 120 557 130 580 120 580 140 563 144 560 173 550 193 '
    '577 260 620 273 643 300 637 313 667 347 683 393 677 427 657 447 627 450 587 433 547 393 '
    '517 347 505 327 507 300 533 273 507 233 490 213 477 243 477 293 477 333 453 370 420 381 '
    '360 377 340 373 344 400 333 437 323 433 333 407 320 373 293 367 273 363 247 393 207 403 '
    '160 387 130 347 122 307 130 267 150 243 110 248 100 240 117 223 93 217')
_FALCON = _pairs(
    '323 126 331 138 334 150 334 178 337 188 335 240 333 300 332 350 332 406 311 406 311 350 '
    '311 240 309 190 311 178 311 150 315 138')
# center x, center y, half width, half height
_COINS = (
    (44, 53, 22, 20), (100, 55, 19, 17), (155, 50, 23, 22), (216, 51, 23, 22),
    (275, 51, 20, 19), (335, 43, 29, 28), (45, 124, 20, 20), (103, 125, 19, 19),
    (153, 127, 19, 17), (206, 124, 20, 20), (271, 119, 24, 23), (336, 124, 19, 19),
    (43, 197, 18, 19), (102, 195, 21, 21), (154, 198, 19, 18), (212, 193, 23, 23),
    (274, 194, 22, 21), (347, 187, 32, 31), (46, 260, 28, 27), (114, 266, 21, 21),
    (172, 262, 28, 26), (244, 263, 24, 23), (301, 264, 25, 24), (358, 268, 22, 20))


# file: what is on it
PHOTOS = {
    'astronaut.png': (Outline('person', _PERSON), Outline('rocket', _SHUTTLE)),
    'chelsea.png': (Outline('cat', _CAT), ),
    'coffee.png': (Outline('cup', _CUP), ),
    'motorcycle_left.png': (Outline('motorcycle', _MOTORCYCLE), ),
    'rocket.jpg': (Outline('rocket', _FALCON), ),
    'coins.png': tuple(Outline('coin', tuple(
        (x + round(half_width * math.cos(2 * math.pi * step / 24)),
         y + round(half_height * math.sin(2 * math.pi * step / 24))) for step in range(24)))
        for x, y, half_width, half_height in _COINS),
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
