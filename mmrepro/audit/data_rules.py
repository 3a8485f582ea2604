"""Checks of data sets, transforms and samplers. The table of rules is in ``rules.py``."""
from __future__ import annotations

from typing import Iterator, NamedTuple, Tuple

from .findings import MAY, Found
from .subject import STOCK, Subject

Hits = Iterator[Found]


class Known(NamedTuple):
    """A part of MMDetection that mmrepro replaces or seeds, and that breaks without it.

    Attributes:
        names: types in a config.
        cause: number in docs/explanation/causes.md.
        what: in one line.
        only: ``key=value`` that has to be in the dict, or ''.
    """
    names: Tuple[str, ...]
    cause: str
    what: str
    only: str = ''


KNOWN: Tuple[Known, ...] = (
    Known(('CachedMosaic', 'CachedMixUp'), 'B12',
          'mixes in what this worker happened to load before'),
    Known(('RandomSamplingNegPos', ), 'C1',
          'negative class names go through a set of strings: depends on PYTHONHASHSEED'),
    Known(('InstanceBalancedPosSampler', 'CombinedSampler'), 'C2',
          'sets of tensors, in the order of memory addresses'),
    Known(('GroupMultiSourceSampler', ), 'C3',
          "groups are drawn from the main process's global generator"),
    Known(('ADE20KSegDataset', ), 'C7', 'images in the order of the file system'),
    Known(('RefCocoDataset', ), 'C8', 'a sentence per object is drawn while loading',
          'text_mode=random'),
    Known(('MultiBranch', ), 'C13', 'groups of a batch come in the order of hashed strings'),
    Known(('PAAHead', 'LADHead'), 'C14', 'a mixture fit that may move the global generator'),
    Known(('Albu', ), 'C16', 'albumentations >= 1.4.21 draws from generators of its own'),
    Known(('TridentResNet', ), 'C22', 'without pretrained weights it starts from old memory'),
    Known(('Corrupt', ), 'C17', "scikit-image's unseeded generator"),
    Known(('CustomSampleSizeSampler', ), 'B13', 'its cycle starts again after a resume'),
    Known(('ScoreHLRSampler', ), 'C15', "positives from the accelerator's generator, negatives "
          "from the CPU's"),
    Known(('YOLOXModeSwitchHook', 'PipelineSwitchHook'), 'B14',
          'restarts the workers at the switch, and again at a resume'),
    Known(('BatchSyncRandomResize', ), 'B11', 'the size of images is not saved for a resume'),
)


def known_parts(s: Subject) -> Hits:
    """Parts that break the contract, where nothing of ours stands in their place."""
    if s.keyed:
        return
    for part in s.training:
        for row in KNOWN:
            if part.name in row.names and _applies(row, part.node):
                yield Found(part.key, f'{part.name}: {row.what} ({row.cause})')


def _applies(row: Known, node: object) -> bool:
    key, _, value = row.only.partition('=')
    return not key or node.get(key) == value


def stock_workers(s: Subject) -> Hits:
    loader = s.cfg.get('train_dataloader') or {}
    if s.keyed or not isinstance(loader, dict):
        return
    workers = loader.get('num_workers', 0)
    if workers:
        yield Found('train_dataloader.num_workers',
                    f'{workers}: the augmentation of a sample depends on this number')
    if workers and not loader.get('persistent_workers'):
        yield Found('train_dataloader.persistent_workers',
                    'False: every epoch draws the same random numbers', MAY)


def stock_validation(s: Subject) -> Hits:
    if not s.keyed and s.cfg.get('val_dataloader') and s.cfg.get('train_dataloader'):
        interval = (s.cfg.get('train_cfg') or {}).get('val_interval', 1)
        yield Found('train_cfg.val_interval',
                    f'{interval}: each validation moves the generators of training')


def iterable(s: Subject) -> Hits:
    from torch.utils.data import IterableDataset
    if not s.attached or s.randomness.worker_seed != 'sample':
        return
    for part in s.parts_in('train_dataloader'):
        cls = s.class_of(part)
        if cls is not None and issubclass(cls, IterableDataset):
            yield Found(part.key, f'{part.name} is an IterableDataset: samples have no position')


def own_sampler(s: Subject) -> Hits:
    from ..data.sampling_orders import ORDERS
    if not s.keyed:
        return
    for part in s.parts_in('train_dataloader'):
        cls = s.class_of(part)
        if part.key == 'train_dataloader.sampler' and cls is not None \
                and cls.__module__.partition('.')[0] not in STOCK \
                and f'{cls.__module__}.{cls.__qualname__}' not in ORDERS:
            yield Found(part.key, f'{part.name}: an order that mmrepro does not know')


def ranks_differ(s: Subject) -> Hits:
    for part in s.parts_in('train_dataloader'):
        if part.name == 'MultiDataAspectRatioBatchSampler' and (s.world_size or 1) > 1:
            yield Found(part.key, f'{part.name}, {s.world_size} ranks')
