_base_ = ['mmdet::deformable_detr/deformable-detr_r50_16xb2-50e_coco.py',
          '../_base_/reproducible.py', './_data.py']

# two layers of six and 50 queries of 300: every operator of the full model, in a third of the time
model = dict(
    num_queries=50,
    backbone=dict(init_cfg=None),  # nothing is downloaded
    encoder=dict(num_layers=2),
    decoder=dict(num_layers=2),
    bbox_head=dict(num_classes=len(_base_.demo_classes)),
    test_cfg=dict(max_per_img=20))

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='RandomChoice', transforms=[
        [dict(type='RandomChoiceResize', scales=[(160, 256), (192, 256), (224, 256)],
              keep_ratio=True)],
        [
            dict(type='RandomChoiceResize', scales=[(200, 400), (240, 400)], keep_ratio=True),
            dict(type='RandomCrop', crop_type='absolute_range', crop_size=(128, 192),
                 allow_negative_crop=True),
            dict(type='RandomChoiceResize', scales=[(160, 256), (192, 256)], keep_ratio=True),
        ],
    ]),
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
param_scheduler = [dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=5)]
default_hooks = _base_.demo_hooks
