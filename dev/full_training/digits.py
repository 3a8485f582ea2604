"""A detection dataset of real handwritten digits on real photographs.

The digits are those of scikit-learn (UCI, "Optical Recognition of Handwritten Digits": 1,797 scans
of 8 x 8 pixels), the photographs those of scikit-image; both are in the wheels, so that nothing is
downloaded. No digit and no part of a photograph is in both the images that are trained on and those
of the validation. Layout and keys are COCO's.
"""
from __future__ import annotations

import gzip
import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from mmrepro.demo.dataset import read_photo, resize

SIZE = 96  # pixels of an image's side
COUNTS = {'pretrain2017': 1000, 'train2017': 500, 'val2017': 100}
PHOTOS = ('astronaut.png', 'brick.png', 'chelsea.png', 'coffee.png', 'grass.png', 'gravel.png',
          'hubble_deep_field.jpg', 'ihc.png', 'motorcycle_left.png', 'rocket.jpg')
SIDES = (16, 40)  # pixels of a digit's side, from and up to
MOST = 4  # digits on an image
TRIES = 20  # to find a place that no other digit covers


def scans() -> tuple[np.ndarray, np.ndarray]:
    """Return scans as uint8 (1797, 8, 8), ink 255, and their digits (1797,)."""
    sklearn = importlib.util.find_spec('sklearn')
    if sklearn is None or sklearn.origin is None:
        raise SystemExit('the dataset is made of the digits of scikit-learn: pip install '
                         'scikit-learn')
    path = Path(sklearn.origin).parent / 'datasets' / 'data' / 'digits.csv.gz'
    with gzip.open(path, 'rt') as file:
        rows = np.loadtxt(file, delimiter=',')
    pixels = np.minimum(rows[:, :64] * 16, 255).astype(np.uint8)
    return pixels.reshape(-1, 8, 8), rows[:, 64].astype(int)


def write(out: Path) -> None:
    """Write images and annotations to a folder; the same pixels on every machine."""
    pixels, labels = scans()
    last = len(labels) * 4 // 5
    seen, unseen = range(last), range(last, len(labels))
    (out / 'annotations').mkdir(parents=True, exist_ok=True)
    for split, count in COUNTS.items():
        (out / split).mkdir(exist_ok=True)
        images, annotations = [], []
        for number in range(1, count + 1):
            # a string seeds Python's generator through SHA-512, the same in every version
            rng = random.Random(f'{split} {number}')
            validates = split == 'val2017'
            image, boxes = compose(rng, validates, pixels, labels, unseen if validates else seen)
            name = f'{number:012d}.png'
            cv2.imwrite(str(out / split / name), image)
            images.append(dict(id=number, file_name=name, width=SIZE, height=SIZE))
            annotations += [dict(id=len(annotations) + index, image_id=number, iscrowd=0, **box)
                            for index, box in enumerate(boxes, 1)]
        content = dict(images=images, annotations=annotations,
                       categories=[dict(id=digit, name=str(digit)) for digit in range(10)])
        (out / 'annotations' / f'instances_{split}.json').write_text(json.dumps(content))


def compose(rng: random.Random, validates: bool, pixels: np.ndarray, labels: np.ndarray,
            part: range) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Return an image (SIZE, SIZE, 3) and the category and box of each digit on it."""
    image = background(rng, validates)
    boxes: list[dict[str, Any]] = []
    taken = np.zeros((SIZE, SIZE), bool)
    for _ in range(1 + _below(rng, MOST)):
        index = part[_below(rng, len(part))]
        side = SIDES[0] + _below(rng, SIDES[1] - SIDES[0])
        ink = resize(np.repeat(pixels[index][:, :, None], 3, 2), side, side).astype(np.int32)
        color = np.array([_below(rng, 256) for _ in range(3)])
        for _ in range(TRIES):
            x, y = _below(rng, SIZE - side), _below(rng, SIZE - side)
            if taken[y:y + side, x:x + side].any():
                continue
            taken[y:y + side, x:x + side] = True
            under = image[y:y + side, x:x + side].astype(np.int32)
            image[y:y + side, x:x + side] = (under * (255 - ink) + color * ink + 127) // 255
            rows, columns = np.nonzero(ink[:, :, 0] > 64)
            left, top = int(columns.min()), int(rows.min())
            width, height = int(columns.max()) + 1 - left, int(rows.max()) + 1 - top
            boxes.append(dict(category_id=int(labels[index]), area=width * height,
                              bbox=[x + left, y + top, width, height]))
            break
    return image, boxes


def background(rng: random.Random, validates: bool) -> np.ndarray:
    """Return a crop of a photograph (SIZE, SIZE, 3): of its lower fifth in validations."""
    photo = read_photo(PHOTOS[_below(rng, len(PHOTOS))])
    last = photo.shape[0] * 4 // 5
    photo = photo[last:] if validates else photo[:last]
    side = min(photo.shape[:2])
    side -= _below(rng, side // 3)
    top, left = _below(rng, photo.shape[0] - side + 1), _below(rng, photo.shape[1] - side + 1)
    return resize(photo[top:top + side, left:left + side], SIZE, SIZE)


def _below(rng: random.Random, end: int) -> int:
    return int(rng.random() * end)  # only random() gives the same numbers in every version
