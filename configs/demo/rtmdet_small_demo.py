"""A detector that learns the demonstration data in a minute of CPU time, for studies of seeds."""
_base_ = ['./rtmdet_tiny_demo.py']

size = (128, 128)
model = dict(
    backbone=dict(widen_factor=0.25),
    neck=dict(in_channels=[64, 128, 256], out_channels=64),
    bbox_head=dict(in_channels=64, feat_channels=64))

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='RandomResize', scale=size, ratio_range=(0.8, 1.25), keep_ratio=True),
    dict(type='RandomCrop', crop_size=size),
    dict(type='RandomFlip', prob=0.5),
    dict(type='Pad', size=size, pad_val=dict(img=(114, 114, 114))),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=size, keep_ratio=True),
    dict(type='Pad', size=size, pad_val=dict(img=(114, 114, 114))),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='PackDetInputs',
         meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor')),
]
train_dataloader = dict(batch_size=4, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(batch_size=8, dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader

train_cfg = dict(_delete_=True, type='IterBasedTrainLoop', max_iters=150, val_interval=150)
optim_wrapper = dict(optimizer=dict(lr=0.003))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=10),
    dict(type='CosineAnnealingLR', eta_min=0.0001, by_epoch=False, begin=10, end=150)]
custom_hooks = []
default_hooks = dict(logger=dict(interval=25), checkpoint=dict(by_epoch=False, interval=1000))
