"""The detectors of dev/virtual_ranks_matrix.py: real ones, a quarter as wide and not as deep."""
from __future__ import annotations

import random
from typing import Any, Callable, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from demo_runs import small
from mmdet.models.detectors import RTMDet
from mmengine.registry import MODELS

from dev.detector_changes import accumulating

__all__ = ['CONFIGS', 'FOR_FAULTS', 'ITERATIONS', 'settings']

ITERATIONS = 4
NARROWER = 4
# what is divided by it
CHANNELS = ('in_channels', 'out_channels', 'feat_channels', 'embed_dims', 'feedforward_channels',
            'num_feats', 'fc_out_channels')


class Detector(NamedTuple):
    """A demo config, what is changed in it, and the batch of a rank."""
    config: str
    changes: tuple[Callable[[Any], None], ...] = ()
    batch: int = 1


def _narrow(cfg: Any) -> None:
    """A quarter of the channels, and statistics of BatchNorm that each rank has for itself."""
    model = cfg.model.get('detector', cfg.model)
    backbone = model.backbone
    if backbone.type == 'ResNet':
        backbone.update(depth=18, base_channels=64 // NARROWER, norm_eval=False)
        model.neck.in_channels = [64 << level for level in backbone.out_indices]
    else:
        backbone.widen_factor /= NARROWER
    if 'encoder' in model:
        model.bbox_head.embed_dims = 256  # the default
    _divide({key: value for key, value in model.items() if key != 'data_preprocessor'})


def _divide(node: Any) -> None:
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if key in CHANNELS:
            node[key] = [one // NARROWER for one in value] if isinstance(value, (list, tuple)) \
                else value // NARROWER
        elif isinstance(value, (dict, list)):
            _divide(value)


def _masks(cfg: Any) -> None:
    """Mask R-CNN: the two-stage detector with a branch for masks."""
    roi_head = cfg.model.roi_head
    cfg.model.type = 'MaskRCNN'
    roi_head.mask_roi_extractor = dict(
        roi_head.bbox_roi_extractor, roi_layer=dict(type='RoIAlign', output_size=14,
                                                    sampling_ratio=0))
    roi_head.mask_head = dict(
        type='FCNMaskHead', num_convs=1, conv_out_channels=32,
        in_channels=roi_head.bbox_roi_extractor.out_channels,
        num_classes=roi_head.bbox_head.num_classes,
        loss_mask=dict(type='CrossEntropyLoss', use_mask=True, loss_weight=1.0))
    cfg.model.train_cfg.rcnn.mask_size = 28
    cfg.model.test_cfg.rcnn.mask_thr_binary = 0.5
    for transform in cfg.train_dataloader.dataset.pipeline:
        if transform['type'] == 'LoadAnnotations':
            transform['with_mask'] = True


def _equalised(cfg: Any) -> None:
    """EQLv2 adds up what it collects over the ranks, in every forward pass."""
    head = cfg.model.roi_head.bbox_head
    head.loss_cls = dict(type='EQLV2Loss', num_classes=head.num_classes, use_distributed=True)


def _seesaw(cfg: Any) -> None:
    """SeesawLoss counts the samples of a rank in a buffer."""
    head = cfg.model.roi_head.bbox_head
    head.loss_cls = dict(type='SeesawLoss', p=0.8, q=2.0, num_classes=head.num_classes,
                         loss_weight=1.0)
    head.cls_predictor_cfg = dict(type='NormedLinear', tempearture=20)  # spelled so in MMDetection


def _synchronised(cfg: Any) -> None:
    """Every BatchNorm of the model is a SyncBN."""
    cfg.sync_bn = 'torch'


def _early_switch(cfg: Any) -> None:
    """The augmentations close in the second of the two epochs."""
    for hook in cfg.custom_hooks:
        if hook['type'] == 'YOLOXModeSwitchHook':
            hook['num_last_epochs'] = 1
        if hook['type'] == 'PipelineSwitchHook':
            hook['switch_epoch'] = 1


def _clipped(cfg: Any) -> None:
    """Accumulates over two iterations and clips the norm of the gradients."""
    accumulating(cfg)
    cfg.optim_wrapper.accumulative_counts = 2
    cfg.optim_wrapper.clip_grad = dict(max_norm=5., norm_type=2)


def _pairs(cfg: Any) -> None:
    """One image with labels and one without, in every batch."""
    cfg.train_dataloader.sampler.update(batch_size=2, source_ratio=[1, 1])


@MODELS.register_module(force=True)
class NoisyRTMDet(RTMDet):
    """In half precision; after ranks have met it uses a weight again, and all generators."""

    def loss(self, inputs: torch.Tensor, *args: Any) -> dict[str, Any]:
        with torch.autocast('cpu', torch.bfloat16):
            losses = super().loss(inputs, *args)
            dist.all_reduce(torch.ones(1))
            again = F.conv2d(inputs, self.backbone.stem[0].conv.weight).float().mean()
        noise = again + random.random() + np.random.rand() + torch.rand(())
        return {name: [one * noise for one in values] for name, values in losses.items()}


def _noisy(cfg: Any) -> None:
    cfg.model.type = 'NoisyRTMDet'


CONFIGS: dict[str, Detector] = {
    'Faster R-CNN': Detector('faster-rcnn_r50_fpn', batch=2),
    'Mask R-CNN': Detector('faster-rcnn_r50_fpn', (_masks, )),
    'RetinaNet, accumulation, clipping': Detector('retinanet_r50_fpn', (_clipped, ), 2),
    'YOLOX, SyncBN, EMA': Detector('yolox_s', (_early_switch, _synchronised)),
    'RTMDet, EMA': Detector('rtmdet_tiny', (_early_switch, )),
    'Deformable DETR': Detector('deformable-detr_r50'),
    'Soft Teacher': Detector('soft-teacher_faster-rcnn_r50', (_pairs, ), 2),
    'Faster R-CNN, EQLv2': Detector('faster-rcnn_r50_fpn', (_equalised, )),
    'Faster R-CNN, SeesawLoss': Detector('faster-rcnn_r50_fpn', (_seesaw, )),
}

# relies on all that faults break
FOR_FAULTS = {'RTMDet, SyncBN, autocast, noise': Detector('rtmdet_tiny', (_synchronised, _noisy))}


def settings(name: str, ranks: int, data_root: str) -> Any:
    """Return the config of a row: four iterations, whatever the number of ranks."""
    detector = FOR_FAULTS[name] if name in FOR_FAULTS else CONFIGS[name]
    cfg = small(detector.config, data_root)
    for change in (_narrow, *detector.changes):
        change(cfg)
    cfg.default_hooks.checkpoint = dict(type='CheckpointHook', interval=1, by_epoch=False,
                                        max_keep_ckpts=-1)
    loader = cfg.train_dataloader
    # three images for validation: the ranks do not divide them evenly
    cfg.val_dataloader.dataset['indices'] = 3
    cfg.val_dataloader.batch_size = 1
    # the dataset has 24 images
    batch = 1 if ranks == 8 and _by_epoch(cfg) else detector.batch
    loader.update(batch_size=batch, num_workers=0, persistent_workers=False)
    if _by_epoch(cfg):
        cfg.train_cfg.update(max_epochs=2, val_interval=2)
        dataset = loader.dataset
        dataset.get('dataset', dataset)['indices'] = batch * ranks * ITERATIONS // 2
    else:
        cfg.train_cfg.update(max_iters=ITERATIONS, val_interval=2)
        for dataset in loader.dataset.datasets:
            dataset['indices'] = 8
    return cfg


def _by_epoch(cfg: Any) -> bool:
    return bool(cfg.train_cfg.get('max_epochs'))
