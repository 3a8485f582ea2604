"""Code inside MMDetection that breaks reproducibility: a row for each cause, with its replacements.

For each row, attributes of a stock class or module are replaced in place. A registered subclass is
found only where a config names the class as a *string*; pure-Python configs pass the class itself,
user code subclasses it, a spawned worker unpickles it by its module path. All of these see the
stock class, so the stock class has to change. It also keeps ``repr``, ``isinstance`` and the path
in each pickle.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class StockCause:
    """A cause of differences, as ``docs/explanation/causes.md`` shows it."""
    id: str  # of the cause in the documentation; several rows may share one
    why: str  # what goes wrong
    where: str  # file and line in MMDetection 3.3.0, relative to its package, or MMEngine 0.10.7
    affects: str  # users that meet it
    fix: str  # what mmrepro does
    # the replacements change what is drawn from, or read out of, the data streams, so they are left
    # out when an old run is repeated with MMEngine's own streams
    affects_data: bool
    replaces: tuple[tuple[str, str], ...]  # (target, replacement) pairs, see `Patch`
    types: tuple[str, ...] = ()  # in a config; empty for what no training config names
    condition: str = ''  # ``key=value`` that has to be in the type's dict, or ''
    details: str = ''  # more than fits a cell


class Patch(NamedTuple):
    """A replacement of an attribute."""
    # 'package.module:attribute' or 'package.module:Class.attribute'; a bare name of a builtin
    # (`set`) that the module does not define is shadowed in that module only
    target: str
    replacement: str  # 'package.module:function', which takes the stock object and returns the new
    cause: StockCause

    @property
    def module(self) -> str:
        """Dotted path of the module that holds the target."""
        return self.target.partition(':')[0]


_TRANSFORMS = 'mmdet.datasets.transforms'
_DRAWING = 'mmdet.visualization.local_visualizer'

CAUSES: tuple[StockCause, ...] = (
    StockCause('B12',
        'Partners are what this worker loaded before: depends on workers and on a resume',
        '`CachedMosaic`, `CachedMixUp` in `datasets/transforms/transforms.py` 3420-3457, 3671-3712',
        'RTMDet', "Partners follow from the sample's position in the global order", True,
        ((f'{_TRANSFORMS}.transforms:CachedMosaic.transform', 'cached_transforms:pure'),
         (f'{_TRANSFORMS}.transforms:CachedMixUp.transform', 'cached_transforms:pure')),
        ('CachedMosaic', 'CachedMixUp')),
    StockCause('B12',
        'With `use_cached`, partners are what this worker loaded before, as in MMDetection',
        '`BaseMixImageTransform` in MMYOLO 0.6 `datasets/transforms/mix_img_transforms.py` 92-182',
        "MMYOLO's RTMDet", "Partners follow from the sample's position in the global order", True,
        (('mmyolo.datasets.transforms.mix_img_transforms:BaseMixImageTransform.transform',
          'cached_transforms:pure_by_chance'), ),
        ('Mosaic', 'Mosaic9', 'YOLOv5MixUp', 'YOLOXMixUp'), 'use_cached=True'),
    StockCause('C1',
        'Names of negative classes go through a set of strings: depends on `PYTHONHASHSEED`',
        '`datasets/transforms/text_transformers.py` 195-208', 'MM-Grounding-DINO',
        'In that module `set` keeps the order of insertion', True,
        ((f'{_TRANSFORMS}.text_transformers:set', 'ordered:ordered_set'), ),
        ('RandomSamplingNegPos', )),
    StockCause('C1',
        "A worker's first sample chooses the name of a class `a/b` for all later samples",
        '`RandomSamplingNegPos.od_aug`, same file 163-165',
        'MM-Grounding-DINO with `label_map_file`', 'Each sample gets a copy of the table', True,
        ((f'{_TRANSFORMS}.text_transformers:RandomSamplingNegPos.od_aug',
          'methods:own_class_names'), ),
        ('RandomSamplingNegPos', ), '',
        '`RandomSamplingNegPos` writes the name that it draws into the table that all samples '
        'share.'),
    StockCause('C2', 'Tensors hash by address: their set difference removes nothing, in any order',
        '`models/task_modules/samplers/instance_balanced_pos_sampler.py` 47-48',
        'Libra R-CNN, QDTrack', 'In that module `set` compares tensors by value, in order', False,
        (('mmdet.models.task_modules.samplers.instance_balanced_pos_sampler:set',
          'ordered:ordered_set'), ),
        ('InstanceBalancedPosSampler', 'CombinedSampler'), '',
        'The order of the result is that of memory addresses, and positives are drawn twice.'),
    StockCause('C5', '`np.random.seed(track id)` on the global generator, never restored',
        '`random_color` in `visualization/local_visualizer.py` 514', 'tracking with drawing on',
        'The generator is put back', True,
        ((f'{_DRAWING}:random_color', 'generators:keep_generators'), )),
    StockCause('C6', 'Mask colors are jittered with the global generator',
        '`jitter_color`, called by `DetLocalVisualizer.add_datasample`',
        'drawing masks during validation', 'The generators are put back after each image', True,
        ((f'{_DRAWING}:DetLocalVisualizer.add_datasample', 'generators:keep_generators'), )),
    StockCause('C6', 'The palette is drawn from the global generator',
        '`GroundingVisualizationHook.after_test_iter` in `engine/hooks/visualization_hook.py` 408',
        'Grounding DINO with drawing on', 'The generators are put back', True,
        (('mmdet.engine.hooks.visualization_hook:GroundingVisualizationHook.after_test_iter',
          'generators:keep_generators'), )),
    StockCause('C7', 'Images are indexed in the order in which the file system lists them',
        '`ADE20KSegDataset.load_data_list` in `datasets/ade20k.py` 246',
        'semantic ADE20K (its base class sorts)', 'Sorted by path', True,
        (('mmdet.datasets.ade20k:ADE20KSegDataset.load_data_list', 'methods:sorted_by_path'), ),
        ('ADE20KSegDataset', )),
    StockCause('C8',
        'One sentence per object is drawn while loading; what ran before moved the generator',
        '`datasets/refcoco.py` 133', "RefCOCO with `text_mode='random'`",
        'Chosen by root seed and reference id', True,
        (('mmdet.datasets.refcoco:RefCocoDataset._init_refs', 'methods:keyed_sentences'), ),
        ('RefCocoDataset', ), 'text_mode=random'),
    StockCause('C13', 'Fields live in a set of strings: order of keys depends on `PYTHONHASHSEED`',
        '`BaseDataElement` in MMEngine `structures/base_data_element.py` 212-327',
        'comparing dumped predictions byte by byte', 'Sorted names', False,
        (('mmengine.structures.base_data_element:BaseDataElement.keys', 'ordered:sorted_names'),
         ('mmengine.structures.base_data_element:BaseDataElement.metainfo_keys',
          'ordered:sorted_names')), (), '',
        '`keys()`, `items()` and `to_dict()` of `BaseDataElement` follow that order. No gradient '
        'of a stock model was found to depend on it.'),
    StockCause('C13', 'Groups of a semi-supervised batch come in the order of hashed tags',
        '`utils/split_batch.py` 41', 'no stock detector of 3.x; ported 2.x ones',
        'In that module `set` keeps the order of insertion', False,
        (('mmdet.utils.split_batch:set', 'ordered:ordered_set'), ), ('MultiBranch', )),
    StockCause('C14', 'Fitting a Gaussian mixture may move the global NumPy generator',
        '`models/dense_heads/paa_head.py` 322', 'PAA, LAD', 'A fixed `random_state`', True,
        (('mmdet.models.dense_heads.paa_head:skm', 'generators:seeded_mixture'), ),
        ('PAAHead', 'LADHead'), '',
        'scikit-learn 1.2 and 1.3 move the generator, 1.9 does not. The fit does not depend on the '
        'seed: means, weights and precisions are given.'),
    StockCause('C16', 'From albumentations 1.4.21 on, the operating system seeds the pipelines',
        '`Albu` in `datasets/transforms/transforms.py` 1630; any `Compose` of your own',
        'any config with albumentations',
        "Each call of a pipeline without `seed` draws its generators from the sample's", True,
        (('albumentations.core.composition:Compose.__call__',
          'generators:seeded_pipeline'), ),
        ('Albu', ), '',
        "albumentations 1.4.20 and older follow Python's global generator. A pipeline that you "
        'gave a seed keeps its own stream, which belongs to a worker. Transforms of albumentations '
        'that are called alone, outside a `Compose`, are not covered.'),
    StockCause('C17', "Impulse noise and compiled glass blur draw from unseeded generators",
        '`Corrupt` in `datasets/transforms/transforms.py` 1527',
        'robustness tests, training with corruptions',
        "Both are seeded from the sample's generator for the call", True,
        ((f'{_TRANSFORMS}.transforms:Corrupt.transform', 'generators:seeded_corruption'), ),
        ('Corrupt', ), '',
        "Impulse noise draws from scikit-image's generator. Glass blur draws from Numba's in the "
        'development version of `imagecorruptions`.'),
    StockCause('C22',
        'Trident convolutions start from uninitialized memory without pretrained weights',
        '`models/backbones/trident_resnet.py` 54', 'TridentNet trained from scratch',
        'They start like the `Conv2d` of a ResNet', False,
        (('mmdet.models.backbones.trident_resnet:TridentConv.__init__',
          'methods:initialized'), ),
        ('TridentResNet', )),
    StockCause('C23', 'Inference asks every head for its `loss_cls`; that of SSD has none',
        '`models/dense_heads/base_dense_head.py` 376, `ssd_head.py`', 'SSD, SSDLite, PISA-SSD',
        'The head gets `loss_cls = None`', False,
        (('mmdet.models.dense_heads.ssd_head:SSDHead.__init__',
          'methods:with_loss_attribute'), ),
        (), '',
        'Since 3.1 validation of SSD ends with an `AttributeError`, with or without mmrepro.'),
    StockCause('C24', 'Each object takes its own `topk` of the costs, in any order of equal costs',
        '`dynamic_k_matching` of two assigners in `models/task_modules/assigners`', 'YOLOX, RTMDet',
        'One `topk` for all objects, lower index first; with `deterministic=True` only', False,
        tuple((f'mmdet.models.task_modules.assigners.{name}.dynamic_k_matching',
               'methods:matching_at_once')
              for name in ('sim_ota_assigner:SimOTAAssigner',
                           'dynamic_soft_label_assigner:DynamicSoftLabelAssigner')), (), '',
        '`SimOTAAssigner` and `DynamicSoftLabelAssigner`. On CUDA the host waits for the device '
        'once per object. The matching is that of the stock code with ties by index.'),
)

PATCHES: tuple[Patch, ...] = tuple(
    Patch(target, f'mmrepro.patches.{replacement}', cause)
    for cause in CAUSES for target, replacement in cause.replaces)
