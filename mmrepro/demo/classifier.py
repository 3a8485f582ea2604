"""A small image classifier on the same photographs, for MMEngine without MMDetection and mmcv.

Its config is ``configs/demo/classifier_demo.py``. A sample is a cut-out of a photograph around an
object; nothing is written to a disk.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from mmengine.dataset import BaseDataset
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from torch import nn

from .dataset import CLASSES, objects_of, photo_dir, read_photo, resize


class PhotoDataset(BaseDataset):
    """Objects on the photographs, ``length`` of them; all categories are equally frequent."""
    METAINFO: dict[str, Any] = dict(classes=CLASSES)

    def __init__(self, length: int = 24, **kwargs: Any) -> None:
        self._length = length
        super().__init__(**kwargs)

    def load_data_list(self) -> list[dict[str, Any]]:
        photo_dir()  # raises if the photographs are not installed
        samples = []
        for number in range(self._length):
            turn, label = divmod(number, len(CLASSES))
            objects = objects_of(CLASSES[label])
            photo, outline = objects[turn % len(objects)]
            points = np.array(outline.points)
            box = np.concatenate([points.min(0), points.max(0)]).tolist()
            samples.append(dict(photo=photo, box=box, label=label))
        return samples


class CutOut:
    """Cut an object out of its photograph and resize it to a square.

    Args:
        size: side of the square, in pixels.
        jitter: each side of the cut moves by up to this fraction of the longer side.
        flip: probability of a horizontal flip.
    """

    def __init__(self, size: int = 32, jitter: float = 0.0, flip: float = 0.0) -> None:
        self.size, self.jitter, self.flip = size, jitter, flip

    def __call__(self, results: dict[str, Any]) -> dict[str, Any]:
        photo = read_photo(results['photo'])
        rows, columns = photo.shape[:2]
        left, top, right, bottom = results['box']
        reach = self.jitter * max(right - left, bottom - top)
        moved = np.array(results['box']) + np.random.uniform(-reach, reach, 4)
        x0, y0, x1, y1 = moved.round().astype(int).clip(0, [columns, rows, columns, rows])
        image = resize(photo[y0:max(y1, y0 + 1), x0:max(x1, x0 + 1)], self.size, self.size)
        if np.random.rand() < self.flip:
            image = image[:, ::-1]
        return dict(results, image=np.ascontiguousarray(image))


class Pack:
    """Convert to the inputs of the model: ``inputs`` (3, H, W) in [0, 1], and ``label``."""

    def __call__(self, results: dict[str, Any]) -> dict[str, Any]:
        image = torch.from_numpy(results['image']).permute(2, 0, 1)
        return dict(inputs=image.float() / 255, label=results['label'])


class PhotoClassifier(BaseModel):
    """Three convolutions, dropout and a linear layer."""

    def __init__(self, channels: Sequence[int] = (16, 32, 64), dropout: float = 0.2) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in zip((3, *channels), channels):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False),
                       nn.BatchNorm2d(after), nn.ReLU()]
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(channels[-1], len(CLASSES)))

    def forward(self, inputs: torch.Tensor, label: torch.Tensor, mode: str = 'tensor') -> Any:
        """Compute the loss, predictions or scores.

        Args:
            inputs: (N, 3, H, W).
            label: (N, ), numbers of categories.
            mode: 'loss', 'predict' or 'tensor', as MMEngine asks.
        """
        scores = self.head(self.features(inputs))
        if mode == 'loss':
            return dict(loss=nn.functional.cross_entropy(scores, label))
        return list(zip(scores.argmax(1), label)) if mode == 'predict' else scores


class Accuracy(BaseMetric):
    """Fraction of samples with the right category."""

    def process(self, data_batch: Any, data_samples: Sequence[Any]) -> None:
        self.results += [float(predicted == label) for predicted, label in data_samples]

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        return dict(accuracy=float(np.mean(results)))
