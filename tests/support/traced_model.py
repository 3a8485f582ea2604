"""A model of three layers, for tests/localise/test_compare_modules.py; it needs no mmrepro."""
import torch
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, MODELS

FACTOR = 1.  # of code between two modules


@MODELS.register_module()
class Traced(BaseModel):
    def __init__(self, stride=1, eps=1e-5, factor=1., norm='BatchNorm2d', groups=()):
        super().__init__()
        self.body = torch.nn.Module()
        self.body.conv = torch.nn.Conv2d(3, 4, 3, stride)
        self.body.norm = getattr(torch.nn, norm)(*groups, 4, eps=eps)
        self.act = torch.nn.ReLU(inplace=True)
        self.head = torch.nn.Linear(4, 2)
        self.factor = factor

    def forward(self, x, mode='tensor'):
        x = self.act(self.body.norm(self.body.conv(torch.stack(x))))
        found = self.head(x.mean((2, 3)) * self.factor * FACTOR)
        return dict(loss=found.square().mean()) if mode == 'loss' else list(found)


@DATASETS.register_module()
class Noise(torch.utils.data.Dataset):
    metainfo = {}

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return dict(x=torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(i)))
