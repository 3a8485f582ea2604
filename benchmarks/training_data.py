"""Measure the cost of describing training data of the size of COCO at the start of a run.

    python benchmarks/training_data.py [--images N] [--out FILE]

Writes an annotation file like instances_train2017.json (118,287 images, 860,001 annotations, 0.47
GB) and loads it with MMDetection's CocoDataset; then measures in the same process what a run with
mmrepro does with the dataset besides. Of the images, only those of the sample exist. Processor
time. Prints a Markdown table, writes JSON.
"""
from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from typing import Any, Callable

from mmrepro.data.dataset_changes import DatasetSnapshot
from mmrepro.facts import training_data

IMAGES, ANNOTATIONS, CATEGORIES = 118_287, 860_001, 80
IMAGE = 160_000  # bytes
POINTS = 24  # of a polygon: with them the file has the size of COCO's


def write_annotations(path: str, images: int) -> None:
    """Write line by line, because the whole would take gigabytes of memory."""
    draw = random.Random(0)
    count = ANNOTATIONS * images // IMAGES
    categories = [dict(id=1 + i, name=f'class {i}', supercategory='thing')
                  for i in range(CATEGORIES)]
    with open(path, 'w') as file:
        file.write(f'{{"categories": {json.dumps(categories)}, "images": [')
        for i in range(images):
            file.write(f'{"," * bool(i)}\n' + json.dumps(dict(
                license=3, file_name=f'{i:012}.jpg', height=480, width=640, id=i,
                coco_url=f'http://images.cocodataset.org/train2017/{i:012}.jpg',
                date_captured='2013-11-14 11:18:45',
                flickr_url=f'http://farm9.staticflickr.com/8186/8119368305_{i:010}_z.jpg')))
        file.write('], "annotations": [')
        for i in range(count):
            x, y = draw.randrange(500), draw.randrange(350)
            polygon = [round(corner + 100 * draw.random(), 2)
                       for _ in range(POINTS) for corner in (x, y)]
            file.write(f'{"," * bool(i)}\n' + json.dumps(dict(
                segmentation=[polygon], area=5000.5, iscrowd=0, image_id=draw.randrange(images),
                bbox=[x, y, 100.5, 100.25], category_id=1 + i % CATEGORIES, id=i)))
        file.write(']}')


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    result = function()
    return result, time.process_time() - start


def measure(folder: str, images: int) -> dict[str, Any]:
    from mmdet.datasets import CocoDataset
    path = os.path.join(folder, 'instances_train2017.json')
    write_annotations(path, images)
    metainfo = dict(classes=tuple(f'class {i}' for i in range(CATEGORIES)))
    dataset, load = timed(lambda: CocoDataset(
        data_root=folder, ann_file='instances_train2017.json', data_prefix=dict(img='train2017/'),
        filter_cfg=dict(filter_empty_gt=True, min_size=32), metainfo=metainfo, pipeline=[]))
    rows: dict[str, float] = {}
    _, rows['digest of the annotation file'] = timed(lambda: training_data.file_record(path))
    _, rows['list of the images'] = timed(lambda: training_data.training_facts(dataset))
    os.mkdir(os.path.join(folder, 'train2017'))
    for index in training_data.sample_of(len(dataset)):
        with open(dataset.get_data_info(index)['img_path'], 'wb') as file:
            file.truncate(IMAGE)
    _, rows['sample of the files'] = timed(lambda: training_data.sampled_files(dataset))
    snapshot, rows['snapshot of the dataset'] = timed(lambda: DatasetSnapshot(dataset))
    _, rows['comparison with the snapshot'] = timed(snapshot.change)
    _, rows['manifest, after these'] = timed(lambda: training_data.training_data(dataset))
    return dict(images=len(dataset), file_bytes=os.path.getsize(path), load_s=load, rows=rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--images', type=int, default=IMAGES)
    parser.add_argument('--out', help='write JSON here')
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(folder, args.images)
    print(f'| {found["images"]:,} images, {found["file_bytes"] / 1e9:.2f} GB | seconds | of '
          f'loading |\n|---|---|---|\n| MMDetection loads the dataset | {found["load_s"]:.1f} | |')
    for name, seconds in found['rows'].items():
        print(f'| {name} | {seconds:.4f} | {seconds / found["load_s"]:.2%} |')
    if args.out:
        with open(args.out, 'w') as file:
            json.dump(found, file, indent=1)


if __name__ == '__main__':
    main()
