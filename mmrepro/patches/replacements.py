"""Code inside MMDetection that breaks reproducibility: a row for each cause, with its replacement.

For each row, attributes of a stock class or module are replaced in place. A registered subclass is
found only where a config names the class as a *string*; pure-Python configs pass the class itself,
user code subclasses it, a spawned worker unpickles it by its module path. All of these see the
stock class, so the stock class has to change. It also keeps ``repr``, ``isinstance`` and the path
in each pickle. ``docs/reference/causes.md`` says where the stock code is and whom it affects.
"""
from __future__ import annotations

import functools
from typing import Any, Callable, NamedTuple


class StockCause(NamedTuple):
    """A cause of differences."""
    id: str  # of the cause in the documentation; several rows may share one
    why: str  # what goes wrong
    # the replacement changes what is drawn from, or read out of, the data streams, so it is left
    # out when an old run is repeated with MMEngine's own streams
    affects_data: bool
    replacement: str  # 'module:function' of this package; see `Patch`
    targets: tuple[str, ...]
    types: tuple[str, ...] = ()  # in a config; empty for what no training config names
    condition: str = ''  # ``key=value`` that has to be in the type's dict, or ''


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


def around(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Turn ``function(stock, *args, **kwargs)`` into what a table row names: stock -> replacement.

    >>> @around
    ... def doubled(stock, value):
    ...     return 2 * stock(value)
    >>> doubled(abs)(-3)
    6
    """

    @functools.wraps(function)
    def make(stock: Callable[..., Any]) -> Callable[..., Any]:

        @functools.wraps(stock)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(stock, *args, **kwargs)

        return replacement

    return make


_TRANSFORMS = 'mmdet.datasets.transforms'
_DRAWING = 'mmdet.visualization.local_visualizer'
_ASSIGNERS = 'mmdet.models.task_modules.assigners'
_EVALUATION = 'mmdet.evaluation'
_ELEMENT = 'mmengine.structures.base_data_element:BaseDataElement'

CAUSES: tuple[StockCause, ...] = (
    StockCause(
        'B12', 'Partners are what this worker loaded before: depends on workers and on a resume',
        True, 'cached_transforms:pure',
        (f'{_TRANSFORMS}.transforms:CachedMosaic.transform',
         f'{_TRANSFORMS}.transforms:CachedMixUp.transform'), ('CachedMosaic', 'CachedMixUp')),
    StockCause(
        'B12', 'With `use_cached`, partners are what this worker loaded before, as in MMDetection',
        True, 'cached_transforms:pure_by_chance',
        ('mmyolo.datasets.transforms.mix_img_transforms:BaseMixImageTransform.transform', ),
        ('Mosaic', 'Mosaic9', 'YOLOv5MixUp', 'YOLOXMixUp'), 'use_cached=True'),
    StockCause(
        'C1', 'Names of negative classes go through a set of strings: depends on `PYTHONHASHSEED`',
        True, 'methods:ordered_set', (f'{_TRANSFORMS}.text_transformers:set', ),
        ('RandomSamplingNegPos', )),
    StockCause(
        'C1', "A worker's first sample chooses the name of a class `a/b` for all later samples",
        True, 'methods:own_class_names',
        (f'{_TRANSFORMS}.text_transformers:RandomSamplingNegPos.od_aug', ),
        ('RandomSamplingNegPos', )),
    StockCause(
        'C2', 'Tensors hash by address: their set difference removes nothing, in any order',
        False, 'methods:ordered_set',
        ('mmdet.models.task_modules.samplers.instance_balanced_pos_sampler:set', ),
        ('InstanceBalancedPosSampler', 'CombinedSampler')),
    StockCause(
        'C5', '`np.random.seed(track id)` on the global generator, never restored',
        True, 'methods:keep_generators', (f'{_DRAWING}:random_color', )),
    StockCause(
        'C6', 'Mask colors are jittered with the global generator',
        True, 'methods:keep_generators', (f'{_DRAWING}:DetLocalVisualizer.add_datasample', )),
    StockCause(
        'C6', 'The palette is drawn from the global generator',
        True, 'methods:keep_generators',
        ('mmdet.engine.hooks.visualization_hook:GroundingVisualizationHook.after_test_iter', )),
    StockCause(
        'C7', 'Images are indexed in the order in which the file system lists them',
        True, 'methods:sorted_by_path',
        ('mmdet.datasets.ade20k:ADE20KSegDataset.load_data_list', ), ('ADE20KSegDataset', )),
    StockCause(
        'C8', 'One sentence per object is drawn while loading; what ran before moved the generator',
        True, 'methods:keyed_sentences', ('mmdet.datasets.refcoco:RefCocoDataset._init_refs', ),
        ('RefCocoDataset', ), 'text_mode=random'),
    StockCause(
        'C13', 'Fields live in a set of strings: order of keys depends on `PYTHONHASHSEED`',
        False, 'methods:sorted_names', (f'{_ELEMENT}.keys', f'{_ELEMENT}.metainfo_keys')),
    StockCause(
        'C13', 'Groups of a semi-supervised batch come in the order of hashed tags',
        False, 'methods:ordered_set', ('mmdet.utils.split_batch:set', ), ('MultiBranch', )),
    StockCause(
        'C14', 'Fitting a Gaussian mixture may move the global NumPy generator',
        True, 'methods:seeded_mixture', ('mmdet.models.dense_heads.paa_head:skm', ),
        ('PAAHead', 'LADHead')),
    StockCause(
        'C16', 'From albumentations 1.4.21 on, the operating system seeds the pipelines',
        True, 'methods:seeded_pipeline', ('albumentations.core.composition:Compose.__call__', ),
        ('Albu', )),
    StockCause(
        'C17', 'Impulse noise and compiled glass blur draw from unseeded generators',
        True, 'methods:seeded_corruption', (f'{_TRANSFORMS}.transforms:Corrupt.transform', ),
        ('Corrupt', )),
    StockCause(
        'C20', 'Figures of images are added in the order in which ten processes compute them',
        False, 'methods:added_by_size',
        (f'{_EVALUATION}.metrics.crowdhuman_metric:CrowdHumanMetric.gather', ),
        ('CrowdHumanMetric', )),
    StockCause(
        'C21', 'Overlaps of images are added in as many parts as the machine has cores', False,
        'methods:as_many_parts_anywhere',
        (f'{_EVALUATION}.functional.panoptic_utils:multiprocessing', ), ('CocoPanopticMetric', )),
    StockCause(
        'C22', 'Trident convolutions start from uninitialized memory without pretrained weights',
        False, 'methods:initialized',
        ('mmdet.models.backbones.trident_resnet:TridentConv.__init__', ), ('TridentResNet', )),
    StockCause(
        'C23', 'Inference asks every head for its `loss_cls`; that of SSD has none',
        False, 'methods:with_loss_attribute',
        ('mmdet.models.dense_heads.ssd_head:SSDHead.__init__', )),
    StockCause(
        'C24', 'Each object takes its own `topk` of the costs, in any order of equal costs',
        False, 'methods:matching_at_once',
        (f'{_ASSIGNERS}.sim_ota_assigner:SimOTAAssigner.dynamic_k_matching',
         f'{_ASSIGNERS}.dynamic_soft_label_assigner:DynamicSoftLabelAssigner.dynamic_k_matching')),
    StockCause(
        'C26', 'Points are numbered on the CPU and selected by a mask on the GPU: an error', False,
        'methods:on_device_of_priors', (f'{_ASSIGNERS}.point_assigner:PointAssigner.assign', ),
        ('PointAssigner', )),
    StockCause(
        'C27', 'An unstable sort orders equal scores by the instruction set of the CPU', False,
        'methods:stable_numpy',
        (f'{_EVALUATION}.functional.mean_ap:np', f'{_EVALUATION}.functional.recall:np',
         f'{_EVALUATION}.metrics.reid_metric:np'),
        ('VOCMetric', 'OpenImagesMetric', 'ReIDMetrics')),
    StockCause(
        'C28', 'The pickle file of dumped predictions has memory addresses in it', False,
        'methods:dump_by_content', ('mmengine.evaluator.metric:dump', ),
        ('DumpResults', 'DumpDetResults')),
    StockCause(
        'C29', 'A profiler may be stopped twice: torch ends the process without an error',
        False, 'methods:stopped_once',
        ('mmengine.hooks.profiler_hook:ProfilerHook._export_chrome_trace', ), ('ProfilerHook', )),
)

PATCHES: tuple[Patch, ...] = tuple(
    Patch(target, f'mmrepro.patches.{cause.replacement}', cause)
    for cause in CAUSES for target in cause.targets)
