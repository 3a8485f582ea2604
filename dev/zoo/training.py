"""A config of the zoo as a training of a few iterations on the demonstration dataset.

The model, the pipelines, the optimizer and the hooks are the config's own. Smaller are the
images, the numbers of candidates and queries, and as far as the model allows the channels.
"""
from __future__ import annotations

import importlib.util
import json
import os
import pickle
from collections import Counter
from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
from narrowing import RESNETS, WIDTHS, listed, quarter

from dev.gpu_check.zoo_configs import load
from mmrepro.demo.dataset import CLASSES, annotation_file, demo_config
from mmrepro.objects.walks import dicts as nodes

from .families import Member

__all__ = ['EPOCHS', 'ITERATIONS', 'RESUMED_AT', 'VAL_IMAGES', 'WIDTHS', 'training', 'write_extras']

EPOCHS, ITERATIONS = 2, 4
RESUMED_AT = ITERATIONS // EPOCHS
BATCH = 2  # images of a rank: statistics of a pixel need more than one
VAL_IMAGES = 2  # fewer than there are ranks; all of the split: recall counts them
TRAIN, VAL = 'train2017', 'val2017'
PROPOSALS, VIDEOS = 'annotations/proposals_{}.pkl', 'annotations/videos_{}.json'
STUFF = 'stuff_{}/'
LANGUAGE = 'language'  # a small BERT, for models that read text
ZOO_HEIGHT = 800  # of the images that most configs were written for
SMALLEST = 16  # pixels, for scaled sizes
STRIDE = 32  # backbones without padding divide by it
# keys of pipelines that hold sizes in pixels
SIZES = ('scale', 'scales', 'img_scale', 'size', 'crop_size', 'border', 'max_size', 'scale_step',
         'random_size_range')
LAYERS = 3


# ------------------------------------------------------------------------------- the model

def _shrink(model: Any) -> None:
    """Reduce layers, use the classes of the dataset, and train statistics of normalization."""
    for node in nodes(model):
        if node.get('depth') in (101, 152) and node.get('type') in RESNETS:
            node['depth'] = 50
        if node.get('type') == 'HourglassNet':  # the stem makes 256 channels, always
            node['stage_channels'] = [256] + [64] * 5
        if node.get('norm_eval'):
            node['norm_eval'] = False  # without pretrained weights activations would overflow
        if node.get('std') == [1.0, 1.0, 1.0]:
            node['std'] = [57.0, 57.0, 57.0]
        if isinstance(node.get('num_layers'), int):
            node['num_layers'] = min(node['num_layers'], LAYERS)
        if 'num_cp' in node:
            node['num_cp'] = 0  # layers that run again in the backward pass need fairscale
    _set_classes(model)


def _set_classes(node: Any) -> None:
    count = len(CLASSES)
    for key, value in list(node.items()) if isinstance(node, dict) else enumerate(node):
        if key in ('num_classes', 'num_things_classes') and isinstance(value, int):
            node[key] = count
        elif key == 'num_stuff_classes':
            node[key] = 0
        elif key == 'class_weight' and isinstance(value, list):
            node[key] = [1.0] * count + [value[-1]]
        elif key != 'rpn_head' and isinstance(value, (dict, list, tuple)):
            _set_classes(value)


# -------------------------------------------------------------------------------- the data

def _scaled(value: Any, factor: float) -> Any:
    if isinstance(value, (list, tuple)):
        if len(value) == 2 and value[0] == value[1] and isinstance(value[0], int):
            return type(value)([_side(value[0], factor)] * 2)
        return type(value)(_scaled(one, factor) for one in value)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) >= SMALLEST:
        return max(SMALLEST, round(abs(value) * factor)) * (1 if value > 0 else -1)
    return value


def _side(value: int, factor: float) -> int:
    """Return the side of a square; a multiple of the stride stays a multiple."""
    scaled = _scaled(value, factor)
    return scaled if value % STRIDE else STRIDE * (
        -(-scaled // STRIDE) if scaled > 0 else scaled // STRIDE)


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _numbers(one)
    elif isinstance(value, (int, float)):
        yield value


def _scale_pipelines(cfg: Any, size: int) -> None:
    """Scale sizes of the config so that images are about ``size`` pixels high."""
    steps = [node for key in ('train_dataloader', 'val_dataloader', 'custom_hooks')
             for node in nodes(cfg.get(key) or ()) if isinstance(node.get('type'), str)]
    largest = max((number for node in steps for key in SIZES if key in node
                   for number in _numbers(node[key])), default=ZOO_HEIGHT)
    factor = size / min(largest, ZOO_HEIGHT)
    for node in steps:
        for key in SIZES:
            if key in node and node['type'] != 'RandomErasing':
                node[key] = _scaled(node[key], factor)


def _pipeline(dataset: Any) -> Any:
    """Return the first pipeline inside wrappers of datasets."""
    if dataset.get('pipeline'):
        return dataset['pipeline']
    inner = dataset.get('dataset') or dataset['datasets'][0]
    return _pipeline(inner)


def _coco(split: str, data_root: str, member: Member, pipeline: Any, images: int) -> dict[str, Any]:
    dataset = dict(
        type='CocoDataset', data_root=data_root, metainfo=dict(classes=tuple(CLASSES)),
        ann_file=os.path.relpath(annotation_file(data_root, split), data_root),
        data_prefix=dict(img=f'{split}/', seg=STUFF.format(split)), pipeline=pipeline,
        indices=images,
        return_classes=member.data == 'text', test_mode=split == VAL)
    if split == TRAIN:
        dataset['filter_cfg'] = dict(filter_empty_gt=True)
    if member.data == 'proposals':
        dataset['proposal_file'] = PROPOSALS.format(split)
    return dataset


def _use_data(cfg: Any, member: Member, data_root: str, ranks: int, iterations: int) -> None:
    images = BATCH * ranks * iterations // EPOCHS
    own = cfg.train_dataloader.dataset
    if own.type == 'MultiImageMixDataset':
        inner = _coco(TRAIN, data_root, member, _pipeline(own.dataset), images)
        train = dict(own, dataset=inner)
    else:
        train = _coco(TRAIN, data_root, member, _pipeline(own), images)
    loader = dict(num_workers=0, persistent_workers=False)
    cfg.train_dataloader = dict(
        loader, batch_size=BATCH, dataset=train,
        sampler=dict(type='DefaultSampler', shuffle=True))
    if own.type != 'MultiImageMixDataset':
        cfg.train_dataloader.batch_sampler = dict(type='AspectRatioBatchSampler')
    val = _coco(VAL, data_root, member, _pipeline(cfg.val_dataloader.dataset), VAL_IMAGES)
    cfg.val_dataloader = dict(
        loader, batch_size=1, dataset=val, sampler=dict(type='DefaultSampler', shuffle=False))
    cfg.val_evaluator = dict(
        type='CocoMetric', ann_file=annotation_file(data_root, VAL), metric=_metric(cfg))


def _metric(cfg: Any) -> Any:
    # 'proposal_fast' of RPN makes an array of lists of several lengths, which NumPy 2 refuses
    metrics = {one.replace('_fast', '') for node in nodes(cfg.val_evaluator)
               if node.get('type') == 'CocoMetric' for one in listed(node.get('metric', 'bbox'))}
    return sorted(metrics & {'bbox', 'segm', 'proposal'}) or ['bbox']


def _use_videos(cfg: Any, data_root: str) -> None:
    """Use the photographs as frames of videos, without validation."""
    own = cfg.train_dataloader
    own.update(num_workers=0, persistent_workers=False, batch_size=1)
    own.dataset = dict(
        type='YouTubeVISDataset', dataset_version='2019', data_root=data_root,
        metainfo=dict(classes=tuple(CLASSES)), ann_file=VIDEOS.format(TRAIN),
        data_prefix=dict(img_path=f'{TRAIN}/'), pipeline=_pipeline(own.dataset))


def write_extras(data_root: str) -> None:
    """Add proposals, maps of stuff and videos to a demonstration dataset, and a model for text."""
    if importlib.util.find_spec('transformers'):
        _write_language(os.path.join(data_root, LANGUAGE))
    for split in (TRAIN, VAL):
        with open(annotation_file(data_root, split), encoding='utf-8') as file:
            report = json.load(file)
        proposals = {}
        os.makedirs(os.path.join(data_root, STUFF.format(split)))
        for image in report['images']:
            boxes = np.array([one['bbox'] for one in report['annotations']
                              if one['image_id'] == image['id']], np.float32).reshape(-1, 4)
            boxes[:, 2:] += boxes[:, :2]
            _write_stuff(image, boxes, os.path.join(data_root, STUFF.format(split)))
            boxes = np.concatenate([boxes, boxes + 9, boxes * np.float32(0.9)])
            proposals[f'{split}/{image["file_name"]}'] = dict(
                bboxes=boxes, scores=np.linspace(0.9, 0.1, len(boxes), dtype=np.float32))
        with open(os.path.join(data_root, PROPOSALS.format(split)), 'wb') as out:
            pickle.dump(proposals, out)
        _write_videos(report, os.path.join(data_root, VIDEOS.format(split)))


def _write_language(folder: str) -> None:
    """A BERT of two layers with random weights, which knows the names of the classes."""
    from transformers import BertConfig, BertModel
    words = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', '.', '?', *CLASSES]
    BertModel(BertConfig(len(words), num_hidden_layers=2, intermediate_size=64)
              ).save_pretrained(folder)
    with open(os.path.join(folder, 'vocab.txt'), 'w', encoding='utf-8') as file:
        file.write('\n'.join(words))


def _write_stuff(image: dict[str, Any], boxes: np.ndarray, folder: str) -> None:
    """A map of classes: each box has another one, in front of the first."""
    pixels = np.zeros((image['height'], image['width']), np.uint8)
    for number, (left, top, right, bottom) in enumerate(boxes.astype(int)):
        pixels[top:bottom, left:right] = (number + 1) % len(CLASSES)
    cv2.imwrite(os.path.join(folder, os.path.splitext(image['file_name'])[0] + '.png'), pixels)


def _write_videos(report: dict[str, Any], path: str) -> None:
    """Write videos: photographs of the same size are the frames of a video."""
    sizes: dict[tuple, int] = {}
    frames: Counter = Counter()
    video_of, objects = {}, Counter()  # type: dict[int, int], Counter
    for image in report['images']:
        size = image['width'], image['height']
        video = video_of[image['id']] = sizes.setdefault(size, len(sizes) + 1)
        image.update(video_id=video, frame_id=frames[video])
        frames[video] += 1
    for one in report['annotations']:
        objects[one['image_id']] += 1
        one.update(instance_id=objects[one['image_id']], video_id=video_of[one['image_id']])
    report['videos'] = [dict(id=number, name=str(number)) for number in sizes.values()]
    with open(path, 'w', encoding='utf-8') as file:
        json.dump(report, file)


# ----------------------------------------------------------------------------- the training

def training(member: Member, data_root: str, ranks: int, width: str = 'full',
             iterations: int = ITERATIONS) -> Any:
    """Return the config: two epochs, with a validation and a checkpoint after each.

    Args:
        width: a key of WIDTHS.
        ranks: the dataset has images for as many.

    Raises:
        ValueError: the model has no ResNet that could be narrower.
    """
    cfg = load(member.config, member.size)
    WIDTHS[width](cfg.model)
    _shrink(cfg.model)
    _scale_pipelines(cfg, member.size)
    for node in nodes(cfg.model):
        for key, value in node.items():
            if value == cfg.get('lang_model_name', ()):
                node[key] = os.path.join(data_root, LANGUAGE)
    if member.data == 'semi':
        return _semi(data_root, iterations)
    by_epoch = member.data != 'video'
    if by_epoch:
        _use_data(cfg, member, data_root, ranks, iterations)
        cfg.train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=EPOCHS, val_interval=1)
        cfg.val_cfg = dict(type='ValLoop')
    else:
        _use_videos(cfg, data_root)
        cfg.train_cfg = dict(type='IterBasedTrainLoop', max_iters=iterations,
                             val_interval=100)
        cfg.val_dataloader = cfg.val_cfg = cfg.val_evaluator = None
    cfg.test_dataloader = cfg.test_cfg = cfg.test_evaluator = None
    _use_schedule(cfg)
    return _finished(cfg, iterations)


def _finished(cfg: Any, iterations: int) -> Any:
    cfg.load_from, cfg.resume, cfg.log_level = None, False, 'ERROR'
    cfg.default_hooks.checkpoint = dict(
        type='CheckpointHook', interval=iterations // EPOCHS, by_epoch=False, max_keep_ckpts=-1)
    cfg.default_scope = 'mmdet'
    cfg.custom_imports = dict(imports=['mmrepro'], allow_failed_imports=False)
    cfg.randomness = dict(seed=42, deterministic=True)
    return cfg


def _semi(data_root: str, iterations: int) -> Any:
    """Use labeled and unlabeled photographs, as the demonstration config has them."""
    cfg = demo_config('soft-teacher_faster-rcnn_r50', data_root)
    model = cfg.model.detector
    quarter(model)
    _shrink(cfg.model)
    loader = cfg.train_dataloader
    loader.update(batch_size=2)
    loader.sampler.update(batch_size=2, source_ratio=[1, 1])
    for dataset in loader.dataset.datasets:
        dataset['indices'] = 8
    for node in nodes([loader, cfg.val_dataloader]):
        for key in SIZES if 'type' in node else ():
            if key in node:
                node[key] = _scaled(node[key], 0.5)
    cfg.val_dataloader.batch_size = 1
    cfg.val_dataloader.dataset['indices'] = VAL_IMAGES
    cfg.train_cfg.update(max_iters=iterations, val_interval=iterations // EPOCHS)
    return _finished(cfg, iterations)


def _use_schedule(cfg: Any) -> None:
    """Set a learning rate that four steps from random weights survive; end augmentations."""
    wrapper = cfg.optim_wrapper
    if wrapper.get('type') == 'AmpOptimWrapper':  # of CUDA
        wrapper.type = 'OptimWrapper'
        for key in ('loss_scale', 'dtype'):
            wrapper.pop(key, None)
    cfg.param_scheduler = [dict(type='LinearLR', start_factor=0.05, by_epoch=False, begin=0,
                                end=20)]
    for hook in cfg.get('custom_hooks') or ():
        for key, value in (('num_last_epochs', 1), ('switch_epoch', 1)):
            if key in hook:
                hook[key] = value

