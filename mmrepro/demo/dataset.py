"""A small detection dataset of real photographs; the same seed gives the same bytes.

The photographs are the sample images inside the scikit-image wheel, so nothing is downloaded. The
outlines in ``outlines.json`` were drawn by hand, in pixels of the original photograph. Layout and
keys are those of COCO, so that configs for COCO read it:

    OUT/annotations/instances_train2017.json    OUT/train2017/000000000001.png ...
    OUT/annotations/instances_val2017.json      OUT/val2017/...
"""
from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
from mmengine.config import Config

from ..errors import ConfigError, MissingPackageError
from ..objects.walks import dicts
from ..runs.config_files import shipped

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
    pixels: np.ndarray = ((full + (_ONE * _ONE >> 1)) >> 2 * _BITS).astype(np.uint8)
    return pixels


_BITS = 11
_ONE = 1 << _BITS


def _taps(source: int, target: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return lower and upper source index, and the weight of the upper, for each target pixel."""
    center = (2 * np.arange(target, dtype=np.int64) + 1) * source * _ONE // (2 * target)
    position = np.clip(center - _ONE // 2, 0, (source - 1) * _ONE)
    low = position // _ONE
    return low, np.minimum(low + 1, source - 1), (position % _ONE).astype(np.int32)


SPLITS = ('train2017', 'val2017')
MARK = 'mmrepro demonstration data set'

# (width, height). Portrait and landscape alternate unevenly: aspect-ratio buckets fill at
# different speeds and keep a leftover at the end of the epoch.
SIZES = ((480, 320), (320, 480), (448, 336), (400, 400), (360, 480), (480, 360), (336, 448),
         (480, 336), (352, 416), (464, 352), (416, 480))

# category: longest side of a cut-out as a fraction of the image's shorter side
SCALES = {
    'person': (0.45, 0.85),
    'cat': (0.35, 0.75),
    'cup': (0.25, 0.65),
    'motorcycle': (0.45, 0.95),
    'rocket': (0.40, 0.90),
    'coin': (0.14, 0.30),
}
MAX_PASTES = 5
MIN_AREA = 200  # pixels of the smallest visible object
MIN_VISIBLE = 0.5  # a paste that hides more of an earlier object is drawn again
MAX_OVERHANG = 0.25  # fraction of a cut-out that may lie outside of the image
TRIES = 20


class Instance(NamedTuple):
    """One object on an image: category, visible pixels (bool, height x width), whole area."""
    category: str
    mask: np.ndarray
    area: int


def annotation_file(root: str, split: str) -> str:
    """Return the path of the annotations of a split."""
    return os.path.join(root, 'annotations', f'instances_{split}.json')


def write_dataset(out: str, seed: int = 0, num_train: int = 24, num_val: int = 8) -> str:
    """Write the dataset and return its digest (see :func:`data_digest`).

    Args:
        out: folder; made when missing. An earlier demonstration dataset in it is replaced.
        seed: chooses backgrounds, objects, scales, positions and flips.
        num_train, num_val: numbers of images.

    Raises:
        ConfigError: ``out`` holds annotations that this function did not write, or cannot be
            written.
        MissingPackageError: scikit-image, which ships the photographs, or pycocotools is missing.
    """
    photo_dir()  # before anything is written
    _coco_mask()
    try:
        for path, folder in ((annotation_file(out, split), os.path.join(out, split))
                             for split in SPLITS):
            if os.path.exists(path):
                with open(path, 'rb') as file:
                    foreign = MARK.encode() not in file.read(4096)
            else:  # the images may be those of the user
                path, foreign = folder, os.path.isdir(folder) and bool(os.listdir(folder))
            if foreign:
                raise ConfigError(f'{path} was not written by mmrepro; choose another folder for '
                                  'the demonstration dataset')
        os.makedirs(os.path.join(out, 'annotations'), exist_ok=True)
        for split, count in zip(SPLITS, (num_train, num_val)):
            folder = os.path.join(out, split)
            os.makedirs(folder, exist_ok=True)
            for stale in os.listdir(folder):
                os.remove(os.path.join(folder, stale))
            _write_split(out, split, seed, count)
    except OSError as error:
        raise ConfigError(f'{out} cannot be written: {error.strerror}') from error
    return data_digest(out)


def data_digest(root: str) -> str:
    """Return SHA-256 of annotations and decoded pixels; PNG bytes depend on the version of zlib."""
    digest = hashlib.sha256()
    for split in SPLITS:
        with open(annotation_file(root, split), 'rb') as file:
            text = file.read()
        digest.update(text)
        for record in json.loads(text)['images']:
            image: Any = cv2.imread(os.path.join(root, split, record['file_name']))
            digest.update(repr(image.shape).encode())
            digest.update(image.tobytes())
    return digest.hexdigest()


def _write_split(out: str, split: str, seed: int, count: int) -> None:
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    content = dict(
        info=dict(description=MARK, seed=seed), images=images, annotations=annotations,
        categories=[dict(id=number, name=name) for number, name in enumerate(CLASSES, 1)])
    _dump(out, split, content)  # where this is interrupted, the mark says whose images these are
    for image_id in range(1, count + 1):
        # a string seeds Python's generator through SHA-512, the same in every version since 3.2
        rng = random.Random(f'{seed} {split} {image_id}')
        pixels, instances = _compose(rng, SIZES[image_id % len(SIZES)])
        name = f'{image_id:012d}.png'
        path = os.path.join(out, split, name)
        if not cv2.imwrite(path, pixels, [cv2.IMWRITE_PNG_COMPRESSION, 3]):
            raise ConfigError(f'{path} cannot be written')
        height, width = pixels.shape[:2]
        images.append(dict(id=image_id, file_name=name, width=width, height=height))
        for annotation in filter(None, map(_annotation, instances)):
            annotations.append(dict(annotation, id=len(annotations) + 1, image_id=image_id))
    _dump(out, split, content)


def _dump(out: str, split: str, content: dict[str, Any]) -> None:
    with open(annotation_file(out, split), 'w', encoding='utf-8', newline='\n') as file:
        json.dump(content, file, separators=(',', ':'))


def _compose(rng: random.Random, size: tuple[int, int]) -> tuple[np.ndarray, list[Instance]]:
    """Compose an image of ``size`` (width, height); return it and its visible objects."""
    name = _pick(rng, BACKGROUNDS + tuple(PHOTOS))
    pixels, instances = _background(rng, name, size)
    wanted = 1 + int(rng.random() * MAX_PASTES)
    for _ in range(wanted):
        photo, outline = _pick(rng, objects_of(_pick(rng, CLASSES)))
        for _ in range(TRIES):
            placed = _paste(rng, pixels, instances, photo, outline)
            if placed is not None:
                pixels, instances = placed
                break
    return pixels, instances


def _background(rng: random.Random, name: str,
                size: tuple[int, int]) -> tuple[np.ndarray, list[Instance]]:
    """Return the largest crop with the shape of ``size``, at a random position."""
    width, height = size
    photo = read_photo(name)
    rows, columns = photo.shape[:2]
    ratio = min(columns / width, rows / height)
    crop_width, crop_height = int(width * ratio), int(height * ratio)
    left = int(rng.random() * (columns - crop_width + 1))
    top = int(rng.random() * (rows - crop_height + 1))
    pixels = resize(photo[top:top + crop_height, left:left + crop_width], width, height)
    instances = []
    for outline in PHOTOS.get(name, ()):
        points = [((x - left) / ratio, (y - top) / ratio) for x, y in outline.points]
        mask = _fill(points, size)
        if mask.sum() >= MIN_AREA:
            instances.append(Instance(outline.category, mask, int(mask.sum())))
    return pixels, instances


def _paste(rng: random.Random, pixels: np.ndarray, instances: Sequence[Instance], photo: str,
           outline: Outline) -> tuple[np.ndarray, list[Instance]] | None:
    """Try to paste a cut-out; None if it would hide too much of an earlier object."""
    height, width = pixels.shape[:2]
    points = np.array(outline.points)
    (left, top), (right, bottom) = points.min(0), points.max(0) + 1
    low, high = SCALES[outline.category]
    longest = (low + (high - low) * rng.random()) * min(width, height)
    ratio = longest / max(right - left, bottom - top)
    new_width = max(1, int((right - left) * ratio))
    new_height = max(1, int((bottom - top) * ratio))
    flip = rng.random() < 0.5
    x = _offset(rng, width, new_width)
    y = _offset(rng, height, new_height)

    source = read_photo(photo)
    cut = resize(source[max(top, 0):bottom, max(left, 0):right], new_width, new_height)
    shape = _fill([((px - left) * ratio, (py - top) * ratio) for px, py in outline.points],
                  (new_width, new_height))
    if flip:
        cut, shape = cut[:, ::-1], shape[:, ::-1]

    x0, y0, x1, y1 = max(x, 0), max(y, 0), min(x + new_width, width), min(y + new_height, height)
    shape = shape[y0 - y:y1 - y, x0 - x:x1 - x]
    cut = cut[y0 - y:y1 - y, x0 - x:x1 - x]
    mask = np.zeros((height, width), bool)
    mask[y0:y1, x0:x1] = shape
    if mask.sum() < MIN_AREA:
        return None
    left_over = [i._replace(mask=i.mask & ~mask) for i in instances]
    if any(i.mask.sum() < MIN_VISIBLE * i.area for i in left_over):
        return None
    pasted = pixels.copy()
    pasted[mask] = cut[shape]
    return pasted, [*left_over, Instance(outline.category, mask, int(mask.sum()))]


def _offset(rng: random.Random, room: int, length: int) -> int:
    overhang = MAX_OVERHANG * length
    return int(rng.random() * (room - length + 2 * overhang) - overhang)


def _annotation(instance: Instance) -> dict[str, Any] | None:
    """Return the COCO annotation of an object; None if too little of it is visible.

    Area and box are those of the polygons as pycocotools rasterizes them, so that all agree.
    """
    polygons = _polygons(instance.mask)
    if not polygons:
        return None
    coco_mask = _coco_mask()
    drawn = coco_mask.merge(coco_mask.frPyObjects(polygons, *instance.mask.shape))
    area = int(coco_mask.area(drawn))
    if area < MIN_AREA:
        return None
    return dict(category_id=CLASSES.index(instance.category) + 1,
                bbox=[int(v) for v in coco_mask.toBbox(drawn)], area=area, iscrowd=0,
                segmentation=polygons)


def _coco_mask() -> Any:
    return required('pycocotools.mask', 'has the format of COCO')


def _polygons(mask: np.ndarray) -> list[list[int]]:
    """Return the outer contours in a fixed order; the order of OpenCV is not documented."""
    contours, _ = cv2.findContours(mask.astype(np.uint8), cv2.RETR_EXTERNAL,
                                   cv2.CHAIN_APPROX_SIMPLE)
    polygons = []
    for contour in contours:
        points = [(int(x), int(y)) for x, y in contour.reshape(-1, 2)]
        if len(points) >= 3:
            start = points.index(min(points))
            ordered = points[start:] + points[:start]
            polygons.append([number for point in ordered for number in point])
    return sorted(polygons)


def _fill(points: Sequence[tuple[float, float]], size: tuple[int, int]) -> np.ndarray:
    width, height = size
    canvas = np.zeros((height, width), np.uint8)
    cv2.fillPoly(canvas, [np.array([[int(x), int(y)] for x, y in points], np.int32)], 1)
    return canvas.astype(bool)


def _pick(rng: random.Random, choices: Sequence[Any]) -> Any:
    # only random() is promised to give the same numbers in every version of Python
    return choices[int(rng.random() * len(choices))]


def demo_config(model: str, data_root: str | None = None) -> Config:
    """Read the config ``configs/demo/<model>_demo.py``, on the dataset in ``data_root``.

    >>> demo_config('faster-rcnn_r50_fpn').randomness.seed
    42
    """
    cfg = Config.fromfile(shipped(f'configs/demo/{model}_demo.py'))
    if data_root is not None:
        use_data(cfg, data_root)
    return cfg


def reads_coco(config: str) -> bool:
    """Whether a config reads a dataset in the format of COCO."""
    cfg = Config.fromfile(config, import_custom_modules=False)
    return 'ann_file' in str(cfg.get('train_dataloader'))


def use_data(cfg: Config, root: str) -> None:
    """Let all datasets and metrics of ``cfg`` read the COCO-format data in ``root``."""
    for node in dicts([cfg[key] for key in cfg
                       if key.endswith(('_dataloader', '_evaluator')) and cfg[key]]):
        if 'data_root' in node:
            node['data_root'] = root
        if os.path.basename(str(node.get('ann_file', ''))) and 'data_root' not in node:
            split = 'train2017' if 'train2017' in node['ann_file'] else 'val2017'
            node['ann_file'] = annotation_file(root, split)
