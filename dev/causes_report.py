"""The part of ``docs/results/replaced_parts.md`` that is made from the table of replacements."""
from __future__ import annotations

from typing import NamedTuple

from mmrepro.patches import CAUSES

__all__ = ['NOTES', 'Note', 'entries', 'entry']


class Note(NamedTuple):
    """What the page says of a cause beside the reason."""

    where: str  # file and line in MMDetection 3.3.0, relative to its package, or MMEngine 0.10.7
    affects: str  # users that meet it
    fix: str  # what mmrepro does
    details: str = ''  # more than fits a cell


# By the end of the cause's first target.
NOTES: dict[str, Note] = {
    'transforms:CachedMosaic.transform': Note(
        '`CachedMosaic`, `CachedMixUp` in `datasets/transforms/transforms.py` 3420-3457, 3671-3712',
        'RTMDet', "Partners follow from the sample's position in the global order"),
    'mix_img_transforms:BaseMixImageTransform.transform': Note(
        '`BaseMixImageTransform` in MMYOLO 0.6 `datasets/transforms/mix_img_transforms.py` 92-182',
        "MMYOLO's RTMDet", "Partners follow from the sample's position in the global order"),
    'text_transformers:set': Note(
        '`datasets/transforms/text_transformers.py` 195-208',
        'MM-Grounding-DINO', 'In that module `set` keeps the order of insertion'),
    'text_transformers:RandomSamplingNegPos.od_aug': Note(
        '`RandomSamplingNegPos.od_aug`, same file 163-165',
        'MM-Grounding-DINO with `label_map_file`', 'Each sample gets a copy of the table',
        '`RandomSamplingNegPos` writes the name that it draws into the table that all samples '
        'share.'),
    'instance_balanced_pos_sampler:set': Note(
        '`models/task_modules/samplers/instance_balanced_pos_sampler.py` 47-48',
        'Libra R-CNN, QDTrack', 'In that module `set` compares tensors by value, in order',
        'The order of the result is that of memory addresses, and positives are drawn twice.'),
    'local_visualizer:random_color': Note(
        '`random_color` in `visualization/local_visualizer.py` 514', 'tracking with drawing on',
        'The generator is put back'),
    'local_visualizer:DetLocalVisualizer.add_datasample': Note(
        '`jitter_color`, called by `DetLocalVisualizer.add_datasample`',
        'drawing masks during validation', 'The generators are put back after each image'),
    'visualization_hook:GroundingVisualizationHook.after_test_iter': Note(
        '`GroundingVisualizationHook.after_test_iter` in `engine/hooks/visualization_hook.py` 408',
        'Grounding DINO with drawing on', 'The generators are put back'),
    'ade20k:ADE20KSegDataset.load_data_list': Note(
        '`ADE20KSegDataset.load_data_list` in `datasets/ade20k.py` 246',
        'semantic ADE20K (its base class sorts)', 'Sorted by path'),
    'refcoco:RefCocoDataset._init_refs': Note(
        '`datasets/refcoco.py` 133',
        "RefCOCO with `text_mode='random'`", 'Chosen by root seed and reference id'),
    'base_data_element:BaseDataElement.keys': Note(
        '`BaseDataElement` in MMEngine `structures/base_data_element.py` 212-327',
        'comparing dumped predictions byte by byte', 'Sorted names',
        '`keys()`, `items()` and `to_dict()` of `BaseDataElement` follow that order. No gradient '
        'of a stock model was found to depend on it.'),
    'split_batch:set': Note(
        '`utils/split_batch.py` 41',
        'no stock detector of 3.x; ported 2.x ones',
        'In that module `set` keeps the order of insertion'),
    'paa_head:skm': Note(
        '`models/dense_heads/paa_head.py` 322', 'PAA, LAD',
        'A fixed `random_state`',
        'scikit-learn 1.2 and 1.3 move the generator, 1.9 does not. The fit does not depend on the '
        'seed: means, weights and precisions are given.'),
    'composition:Compose.__call__': Note(
        '`Albu` in `datasets/transforms/transforms.py` 1630; any `Compose` of your own',
        'any config with albumentations',
        "Each call of a pipeline without `seed` draws its generators from the sample's",
        "albumentations 1.4.20 and older follow Python's global generator. A pipeline that you "
        'gave a seed keeps its own stream, which belongs to a worker. Transforms of albumentations '
        'that are called alone, outside a `Compose`, are not covered.'),
    'transforms:Corrupt.transform': Note(
        '`Corrupt` in `datasets/transforms/transforms.py` 1527',
        'robustness tests, training with corruptions',
        "Both are seeded from the sample's generator for the call",
        "Impulse noise draws from scikit-image's generator. Glass blur draws from Numba's in the "
        'development version of `imagecorruptions`.'),
    'crowdhuman_metric:CrowdHumanMetric.gather': Note(
        '`CrowdHumanMetric.eval_ji` in `evaluation/metrics/crowdhuman_metric.py` 408',
        'the Jaccard index of CrowdHuman', 'They are added in the order of their size',
        'Last bits, before the value is rounded to four digits.'),
    'panoptic_utils:multiprocessing': Note(
        '`pq_compute_multi_core` in `evaluation/functional/panoptic_utils.py` 206',
        'panoptic quality', 'There are `nproc` parts, in at most as many processes as cores',
        'Last bits of the qualities.'),
    'trident_resnet:TridentConv.__init__': Note(
        '`models/backbones/trident_resnet.py` 54',
        'TridentNet trained from scratch', 'They start like the `Conv2d` of a ResNet'),
    'ssd_head:SSDHead.__init__': Note(
        '`models/dense_heads/base_dense_head.py` 376, `ssd_head.py`',
        'SSD, SSDLite, PISA-SSD', 'The head gets `loss_cls = None`',
        'Since 3.1 validation of SSD ends with an `AttributeError`, with or without mmrepro.'),
    'sim_ota_assigner:SimOTAAssigner.dynamic_k_matching': Note(
        '`dynamic_k_matching` of two assigners in `models/task_modules/assigners`',
        'YOLOX, RTMDet',
        'One `topk` for all objects, lower index first; with `deterministic=True` only',
        '`SimOTAAssigner` and `DynamicSoftLabelAssigner`. On CUDA the host waits for the device '
        'once per object. The matching is that of the stock code with ties by index.'),
    'point_assigner:PointAssigner.assign': Note(
        '`models/task_modules/assigners/point_assigner.py` 107', 'RepPoints on a GPU',
        'New tensors of that method are on the device of the points',
        'MMDetection #10436. On a CPU nothing changes.'),
    'mean_ap:np': Note(
        '`evaluation/functional/mean_ap.py` 676, `recall.py` 98, `metrics/reid_metric.py` 97',
        'VOC, OpenImages, proposals, ReID', 'In these modules `np.argsort` is stable',
        'With tied scores, mAP differs by 0.003 to 0.010 between CPUs. Processes of the evaluation '
        'that are not forked (Python 3.14) sort as before.'),
    'metric:dump': Note(
        '`DumpResults` in MMEngine `evaluator/metric.py` 183', '`test --out`',
        'Tensors are written as in a checkpoint, and equal parts without references',
        'The predictions are equal, the files are not. What is written loads without mmrepro.'),
    'profiler_hook:ProfilerHook._export_chrome_trace': Note(
        '`ProfilerHook._export_chrome_trace` in MMEngine `hooks/profiler_hook.py` 242',
        "MMEngine's `ProfilerHook`", 'A stopped profiler is not stopped again'),
}


def entry(number: str, affects: str, where: str, why: str, fix: str, details: str = '') -> str:
    """Return a cause as an entry of a Markdown definition list."""
    return '\n'.join((f'**{number}** · {affects} · {where}',
                      f':   {why}. {details}'.rstrip(), '',
                      f'    *mmrepro:* {fix}.', ''))


def entries() -> str:
    """Return all causes of the table of replacements, in its order."""
    found: list[str] = []
    for one in CAUSES:
        note = next(note for end, note in NOTES.items() if one.targets[0].endswith(f'.{end}'))
        streams = ' (data)' if one.affects_data else ''
        found.append(entry(f'{one.id}{streams}', note.affects, note.where, one.why, note.fix,
                           note.details))
    return '\n'.join(found)
