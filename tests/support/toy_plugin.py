"""A problem that trains in a second: which of two noisy moons a point belongs to."""
import math

import torch
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, METRICS, MODELS


@MODELS.register_module(force=True)
class MoonModel(BaseModel):
    """Two layers; ``width`` is what the two configs differ in."""

    def __init__(self, width=4, dropout=0.1):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(2, width), torch.nn.Tanh(), torch.nn.Dropout(dropout),
            torch.nn.Linear(width, 2))

    def forward(self, point, label, mode='tensor'):
        scores = self.layers(torch.stack(tuple(point)))
        label = torch.as_tensor(label)
        if mode == 'loss':
            return dict(loss=torch.nn.functional.cross_entropy(scores, label))
        return [dict(right=right) for right in (scores.argmax(1) == label).tolist()]


@DATASETS.register_module(force=True)
class Moons(torch.utils.data.Dataset):
    """Points on two half circles; the noise of a training sample is drawn every time."""

    def __init__(self, count, noise=0.35, fixed=False):
        self.count, self.noise, self.fixed = count, noise, fixed

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        label = i % 2
        angle = math.pi * (i + .5) / self.count
        point = torch.tensor([math.cos(angle), math.sin(angle)])
        if label:
            point = torch.tensor([1., .5]) - point
        generator = torch.Generator().manual_seed(i) if self.fixed else None
        return dict(point=point + self.noise * torch.randn(2, generator=generator), label=label)


@METRICS.register_module(force=True)
class Accuracy(BaseMetric):
    default_prefix = 'moons'

    def process(self, data_batch, data_samples):
        self.results += [sample['right'] for sample in data_samples]

    def compute_metrics(self, results):
        return dict(accuracy=sum(results) / len(results))
