"""Annotations and results in the format of COCO, drawn at random: no images are needed."""
from __future__ import annotations

from typing import Any

import numpy as np
from pycocotools import mask

SIDES = (8, 24, 60, 150)  # pixels: small, small, medium, large


def draw_dataset(images: int, categories: int, seed: int = 0, objects: int = 7) -> dict[str, Any]:
    """Annotations: about ``objects`` boxes an image, some of them crowds."""
    draw = np.random.RandomState(seed)
    annotations = []
    for image in range(images):
        for _ in range(draw.poisson(objects)):
            side = draw.choice(SIDES) * draw.uniform(.7, 1.4, 2)
            x, y = draw.uniform(0, 400, 2)
            annotations.append(dict(
                id=len(annotations) + 1, image_id=image + 1, iscrowd=int(draw.rand() < .02),
                category_id=int(draw.randint(categories)) + 1, area=float(side.prod()),
                bbox=[float(x), float(y), float(side[0]), float(side[1])]))
    return dict(images=[dict(id=image + 1, width=640, height=480) for image in range(images)],
                categories=[dict(id=one + 1, name=f'c{one}') for one in range(categories)],
                annotations=annotations)


def draw_results(dataset: dict[str, Any], seed: int = 0, noise: float = .08, extra: int = 3
                 ) -> list[dict[str, Any]]:
    """Results: most objects with noise, and ``extra`` wrong ones an image. All scores differ."""
    draw = np.random.RandomState(seed)
    results = []

    def add(image: int, category: int, box: np.ndarray, score: float) -> None:
        results.append(dict(image_id=image, category_id=category, bbox=box.tolist(),
                            score=float(score)))

    for one in dataset['annotations']:
        for _ in range(draw.choice([0, 1, 1, 1, 2])):
            box = np.array(one['bbox'])
            box = box + draw.normal(0, noise, 4) * np.tile(box[2:], 2)
            add(one['image_id'], one['category_id'], box, draw.beta(4, 2))
    for image in dataset['images']:
        for _ in range(extra):
            size = draw.choice(SIDES) * draw.uniform(.7, 1.4, 2)
            add(image['id'], int(draw.randint(len(dataset['categories']))) + 1,
                np.concatenate([draw.uniform(0, 400, 2), size]), draw.beta(2, 4))
    return results


def with_masks(dataset: dict[str, Any], results: list[dict[str, Any]]
               ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The same with masks: an ellipse in each box, of a result as what MMDetection writes."""
    height, width = (dataset['images'][0][name] for name in ('height', 'width'))
    turn = np.linspace(0, 2 * np.pi, 16, endpoint=False)

    def ellipse(box: list[float]) -> list[float]:
        x, y, across, down = box
        points = np.stack([x + across / 2 * (1 + np.cos(turn)), y + down / 2 * (1 + np.sin(turn))])
        return points.T.reshape(-1).tolist()

    def encoded(box: list[float]) -> dict[str, Any]:
        found, = mask.frPyObjects([ellipse([*box[:2], *np.maximum(box[2:], 1)])], height, width)
        return dict(found, counts=found['counts'].decode())

    objects = []
    for one in dataset['annotations']:
        shape = encoded(one['bbox']) if one['iscrowd'] else [ellipse(one['bbox'])]
        objects.append(dict(one, segmentation=shape, area=float(np.prod(one['bbox'][2:]) * .785)))
    # boxes stay, and would decide on areas if anybody looked at them
    return (dict(dataset, annotations=objects),
            [dict(one, segmentation=encoded(one['bbox'])) for one in results])


def copied(dataset: dict[str, Any], results: list[dict[str, Any]], copies: np.ndarray
           ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A dataset with so many copies of each image, one next to the other, and their results."""
    most = int(copies.max()) + 1
    number = dict(zip((one['id'] for one in dataset['images']), copies))

    def of(entries: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
        return [{**one, key: one[key] * most + copy}
                for one in entries for copy in range(number[one[key]])]

    annotations = [{**one, 'id': index + 1}
                   for index, one in enumerate(of(dataset['annotations'], 'image_id'))]
    return ({**dataset, 'images': of(dataset['images'], 'id'), 'annotations': annotations},
            of(results, 'image_id'))
