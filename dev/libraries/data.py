"""The data of the rows: drawn images in the formats that the libraries read."""
from __future__ import annotations

import json
import os
from typing import Any

import cv2
import numpy as np

__all__ = ['DATASETS', 'write']

IMAGES, SIDE = 24, 160
CLASSES = ('person', 'cat', 'cup')
VIDEOS, FRAMES = 8, 8  # as many as four batches of two


def picture(number: int) -> np.ndarray:
    """Return the image of a number: noise of a few pixels, and three rectangles."""
    generator = np.random.RandomState(number)
    small = generator.randint(0, 256, (20, 20, 3)).astype(np.uint8)
    image = cv2.resize(small, (SIDE, SIDE), interpolation=cv2.INTER_LINEAR)
    for label, (x, y, width, height) in enumerate(boxes(number)):
        color = [int(v) for v in generator.randint(0, 256, 3)]
        cv2.rectangle(image, (x, y), (x + width, y + height), color, -1 if label else 3)
    return image


def boxes(number: int) -> list[list[int]]:
    """Return x, y, width, height of the three objects of an image; their classes are 0, 1, 2."""
    generator = np.random.RandomState(1000 + number)
    return [[*map(int, generator.randint(5, 80, 2)), *map(int, generator.randint(36, 70, 2))]
            for _ in CLASSES]


def _corners(box: list[int]) -> list[int]:
    x, y, width, height = box
    return [x, y, x + width, y, x + width, y + height, x, y + height]


def _save(path: str, content: Any) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if isinstance(content, np.ndarray):
        cv2.imwrite(path, content)
        return
    with open(path, 'w', encoding='utf-8') as file:
        file.write(content if isinstance(content, str) else json.dumps(content))


def _coco(keypoints: bool) -> dict[str, Any]:
    images = [dict(id=n, file_name=f'{n}.png', width=SIDE, height=SIDE) for n in range(IMAGES)]
    annotations: list[dict[str, Any]] = []
    for n in range(IMAGES):
        for label, box in enumerate(boxes(n)[:1] if keypoints else boxes(n)):
            points = np.random.RandomState(n).rand(17, 2) * box[2:] + box[:2]
            annotations.append(dict(
                id=len(annotations) + 1, image_id=n, category_id=label + 1, bbox=box,
                area=box[2] * box[3], iscrowd=0, segmentation=[_corners(box)],
                **(dict(num_keypoints=17, keypoints=[
                    value for x, y in points for value in (float(x), float(y), 2)])
                   if keypoints else {})))
    return dict(images=images, annotations=annotations, categories=[
        dict(id=k + 1, name=name) for k, name in enumerate(CLASSES)])


def _boxes(root: str) -> dict[str, Any]:
    _save(f'{root}/boxes.json', _coco(keypoints=False))
    return dict(data_root=root, ann_file='boxes.json', data_prefix=dict(img='images/'))


def _keypoints(root: str) -> dict[str, Any]:
    _save(f'{root}/keypoints.json', _coco(keypoints=True))
    return dict(data_root=root, ann_file='keypoints.json', data_prefix=dict(img='images/'))


def _segmentation(root: str) -> dict[str, Any]:
    for n in range(IMAGES):
        labels = np.zeros((SIDE, SIDE), np.uint8)
        for label, (x, y, width, height) in enumerate(boxes(n)):
            labels[y:y + height, x:x + width] = label + 1
        _save(f'{root}/labels/{n}.png', labels)
    return dict(data_root=root, img_suffix='.png', seg_map_suffix='.png',
                data_prefix=dict(img_path='images', seg_map_path='labels'))


def _classes(root: str) -> dict[str, Any]:
    for n in range(IMAGES):
        _save(f'{root}/classes/{CLASSES[n % 3]}/{n}.png', picture(n))
    return dict(type='CustomDataset', data_root=root, data_prefix='classes', split=None)


def _text(root: str) -> dict[str, Any]:
    _save(f'{root}/text.json', dict(
        metainfo=dict(dataset_type='TextDetDataset', task_name='textdet',
                      category=[dict(id=0, name='text')]),
        data_list=[dict(img_path=f'images/{n}.png', height=SIDE, width=SIDE, instances=[
            dict(bbox=[x, y, x + width, y + height], polygon=_corners([x, y, width, height]),
                 bbox_label=0, ignore=False) for x, y, width, height in boxes(n)])
            for n in range(IMAGES)]))
    return dict(data_root=root, ann_file='text.json')


def _videos(root: str) -> dict[str, Any]:
    lines = []
    for n in range(VIDEOS):
        path = f'{root}/videos/{n}.avi'
        os.makedirs(os.path.dirname(path), exist_ok=True)
        writer = cv2.VideoWriter(path, cv2.VideoWriter_fourcc(*'MJPG'), 4, (SIDE, SIDE))
        for frame in range(FRAMES):
            writer.write(picture(n * FRAMES + frame))
        writer.release()
        lines.append(f'{n}.avi {n % 3}\n')
    _save(f'{root}/videos.txt', ''.join(lines))
    return dict(ann_file=f'{root}/videos.txt', data_prefix=dict(video=f'{root}/videos'))


# name -> function that writes the annotations and returns keys for the config's dataset
DATASETS = {'boxes': _boxes, 'keypoints': _keypoints, 'segmentation': _segmentation,
            'classes': _classes, 'text': _text, 'videos': _videos}


def write(kind: str, root: str) -> dict[str, Any]:
    """Write a dataset below ``root``; returns the keys of the config's dataset that change."""
    for n in range(IMAGES):
        _save(f'{root}/images/{n}.png', picture(n))
    return DATASETS[kind](root)
