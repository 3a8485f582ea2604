"""Places inside MMDetection that break reproducibility: one row each, with the reason.

One mechanism serves every row: an attribute of a stock class or module is replaced in place. A
registered subclass would be the obvious alternative, but it is only found where a config names the
class as a *string*; pure-Python configs pass the class itself, user code subclasses it, a
spawned worker unpickles it by its module path. All of these see the stock class, so the stock class
is what has to change. It also keeps ``repr``, ``isinstance`` and the path in every pickle.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Tuple

__all__ = ['PATCHES', 'WORKER_PACKAGES', 'Patch']

# Code of these packages runs inside ``dataset[i]``; a data loading worker needs only their rows.
WORKER_PACKAGES = ('mmdet.datasets', 'mmengine.structures', 'albumentations')


@dataclass(frozen=True)
class Patch:
    """One replacement.

    Attributes:
        target: what is replaced, ``'package.module:attribute'`` or
            ``'package.module:Class.attribute'``. A bare name of a builtin (``set``) that the module
            does not define is shadowed in that module only.
        replacement: ``'package.module:function'``; the function receives the stock object and
            returns the new one.
        cause: number of the cause in ``docs/causes.md``.
        why: what goes wrong without it, in one line.
        affects_data: it changes what is drawn from, or read out of, the data streams, so it is left
            out when an old run is repeated with MMEngine's own streams.
    """
    target: str
    replacement: str
    cause: str
    why: str
    affects_data: bool

    @property
    def module(self) -> str:
        """Dotted path of the module that holds the target."""
        return self.target.partition(':')[0]

    @property
    def in_worker(self) -> bool:
        """Whether a data loading worker needs this row."""
        return any(f'{self.module}.'.startswith(f'{name}.') for name in WORKER_PACKAGES)


PATCHES: Tuple[Patch, ...] = (
    Patch('mmdet.datasets.transforms.transforms:CachedMosaic.transform',
          'mmrepro.patches.cached_transforms:pure',
          'B12', 'mixes in what this worker happened to load before: depends on the number of '
          'workers, their lifetime and a resume', True),
    Patch('mmdet.datasets.transforms.transforms:CachedMixUp.transform',
          'mmrepro.patches.cached_transforms:pure',
          'B12', 'as CachedMosaic', True),
    Patch('mmdet.datasets.transforms.text_transformers:set',
          'mmrepro.patches.ordered:ordered_set',
          'C1', 'sampled negative class names go through a set of strings before the shuffle: '
          'captions and labels depend on PYTHONHASHSEED', True),
    Patch('mmdet.datasets.transforms.text_transformers:RandomSamplingNegPos.od_aug',
          'mmrepro.patches.text:own_class_names',
          'C1', "the choice for a class named 'a/b' is written into the shared table of names: the "
          'first sample of a worker decides for all later ones', True),
    Patch('mmdet.models.task_modules.samplers.instance_balanced_pos_sampler:set',
          'mmrepro.patches.ordered:ordered_set',
          'C2', 'a set of tensors hashes by memory address: the difference removes nothing and '
          'comes in the order of addresses', False),
    Patch('mmdet.visualization.local_visualizer:random_color',
          'mmrepro.patches.visualization:keep_generators',
          'C5', 'drawing a track puts the global NumPy generator at the track id', True),
    Patch('mmdet.visualization.local_visualizer:DetLocalVisualizer.add_datasample',
          'mmrepro.patches.visualization:keep_generators',
          'C6', 'drawing masks jitters their colours with the global NumPy generator', True),
    Patch('mmdet.engine.hooks.visualization_hook:GroundingVisualizationHook.after_test_iter',
          'mmrepro.patches.visualization:keep_generators',
          'C6', 'drawing draws its palette from the global NumPy generator', True),
    Patch('mmdet.datasets.ade20k:ADE20KSegDataset.load_data_list',
          'mmrepro.patches.datasets:sorted_by_path',
          'C7', 'images are indexed in the order in which the file system lists them', True),
    Patch('mmdet.datasets.refcoco:RefCocoDataset._init_refs',
          'mmrepro.patches.datasets:keyed_sentences',
          'C8', 'one sentence per object is drawn while loading, from a generator that whatever '
          'ran before has moved', True),
    Patch('mmengine.structures.base_data_element:BaseDataElement.keys',
          'mmrepro.patches.structures:sorted_names',
          'C13', 'fields live in a set of strings: the order of keys, and so of dumped '
          'predictions, depends on PYTHONHASHSEED', False),
    Patch('mmengine.structures.base_data_element:BaseDataElement.metainfo_keys',
          'mmrepro.patches.structures:sorted_names',
          'C13', 'the same for the meta information', False),
    Patch('mmdet.utils.split_batch:set',
          'mmrepro.patches.ordered:ordered_set',
          'C13', 'groups of a semi-supervised batch come in the order of hashed strings', False),
    Patch('mmdet.models.dense_heads.paa_head:skm',
          'mmrepro.patches.heads:seeded_mixture',
          'C14', 'fitting a mixture moves the global NumPy generator, by an amount that depends on '
          "scikit-learn's version", True),
    Patch('albumentations.core.composition:Compose.__call__',
          'mmrepro.patches.albumentations:seeded_from_sample',
          'C16', 'from 1.4.21 on, a pipeline draws from generators of its own, seeded by the '
          'operating system', True),
    Patch('mmdet.datasets.transforms.transforms:Corrupt.transform',
          'mmrepro.patches.corruptions:seeded_from_sample',
          'C17', "impulse noise draws from scikit-image's unseeded generator, compiled glass blur "
          "from Numba's", True),
    Patch('mmdet.models.dense_heads.ssd_head:SSDHead.__init__',
          'mmrepro.patches.heads:without_loss_of_its_own',
          'C23', 'since 3.1 inference asks every head for its loss_cls; SSD has none and ends with '
          'an AttributeError', False),
    Patch('mmdet.models.backbones.trident_resnet:TridentConv.__init__',
          'mmrepro.patches.backbones:initialised',
          'C22', 'its weights are the memory that they were given: without pretrained weights '
          'training starts from whatever was there before', False),
)
