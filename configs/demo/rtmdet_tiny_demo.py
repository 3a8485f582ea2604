_base_ = ['mmdet::rtmdet/rtmdet_tiny_8xb32-300e_coco.py', '../_base_/reproducible.py', './_data.py']

size = _base_.demo_size

# MMDetection trains it with SyncBN over 8 ranks; statistics of each rank suit a demonstration
norm_cfg = dict(type='BN')
model = dict(
    use_syncbn=False,  # the detector converts itself where there are several ranks
    backbone=dict(norm_cfg=norm_cfg, init_cfg=None),  # nothing is downloaded
    neck=dict(norm_cfg=norm_cfg),
    bbox_head=dict(norm_cfg=norm_cfg, num_classes=len(_base_.demo_classes)))

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='CachedMosaic', img_scale=size, pad_val=114.0, max_cached_images=20,
         random_pop=False),
    dict(type='RandomResize', scale=(size[0] * 2, size[1] * 2), ratio_range=(0.5, 2.0),
         keep_ratio=True),
    dict(type='RandomCrop', crop_size=size),
    dict(type='YOLOXHSVRandomAug'),
    dict(type='RandomFlip', prob=0.5),
    dict(type='Pad', size=size, pad_val=dict(img=(114, 114, 114))),
    dict(type='CachedMixUp', img_scale=size, ratio_range=(1.0, 1.0), max_cached_images=10,
         random_pop=False, pad_val=(114, 114, 114), prob=0.5),
    dict(type='PackDetInputs'),
]
train_pipeline_stage2 = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='RandomResize', scale=size, ratio_range=(0.5, 2.0), keep_ratio=True),
    dict(type='RandomCrop', crop_size=size),
    dict(type='YOLOXHSVRandomAug'),
    dict(type='RandomFlip', prob=0.5),
    dict(type='Pad', size=size, pad_val=dict(img=(114, 114, 114))),
    dict(type='PackDetInputs'),
]
train_dataloader = dict(
    batch_size=4, num_workers=0, persistent_workers=False,
    dataset=dict(**_base_.demo_train, pipeline=train_pipeline))
val_dataloader = _base_.demo_square_val_loader
test_dataloader = val_dataloader
val_evaluator = _base_.demo_evaluator
test_evaluator = val_evaluator

train_cfg = dict(max_epochs=2, val_interval=1, dynamic_intervals=None)
param_scheduler = [dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=5)]
default_hooks = _base_.demo_hooks
custom_hooks = [
    dict(type='EMAHook', ema_type='ExpMomentumEMA', momentum=0.0002, update_buffers=True,
         priority=49),
    # closes Mosaic and MixUp for the second epoch
    dict(type='PipelineSwitchHook', switch_epoch=1, switch_pipeline=train_pipeline_stage2),
]
