_base_ = ['mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py', '../_base_/reproducible.py',
          './_data.py']

model = dict(
    backbone=dict(init_cfg=None),  # nothing is downloaded
    roi_head=dict(bbox_head=dict(num_classes=len(_base_.demo_classes))),
    # a quarter of the regions of COCO's larger images
    train_cfg=dict(rcnn=dict(sampler=dict(num=128))))

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='RandomResize', scale=_base_.demo_scale, ratio_range=(0.8, 1.2), keep_ratio=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackDetInputs'),
]
train_dataloader = dict(
    batch_size=2, num_workers=0, persistent_workers=False,
    dataset=dict(**_base_.demo_train, pipeline=train_pipeline))
val_dataloader = _base_.demo_val_loader
test_dataloader = val_dataloader
val_evaluator = _base_.demo_evaluator
test_evaluator = val_evaluator

train_cfg = dict(max_epochs=2)
# the schedule of COCO would spend the whole run warming up
param_scheduler = [dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=5)]
default_hooks = _base_.demo_hooks
