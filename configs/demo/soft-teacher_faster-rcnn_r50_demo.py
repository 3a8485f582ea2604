_base_ = ['mmdet::soft_teacher/soft-teacher_faster-rcnn_r50-caffe_fpn_180k_semi-0.1-coco.py',
          '../_base_/reproducible.py', './_data.py']

scale = _base_.demo_scale
scales = [(scale[0] // 2, scale[1] // 2), scale]
meta_keys = ('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor', 'flip',
             'flip_direction', 'homography_matrix')
branches = ['sup', 'unsup_teacher', 'unsup_student']

# Caffe's weights expect pixels of this scale; weights from the generator would overflow
preprocessor = dict(std=[57.0, 57.0, 57.0])
model = dict(
    data_preprocessor=dict(data_preprocessor=preprocessor),
    detector=dict(
        data_preprocessor=preprocessor,
        backbone=dict(init_cfg=None),  # nothing is downloaded
        roi_head=dict(bbox_head=dict(num_classes=len(_base_.demo_classes))),
        train_cfg=dict(rcnn=dict(sampler=dict(num=128)))),
    # weights from the generator score low; the branch without labels must have work all the same
    semi_train_cfg=dict(pseudo_label_initial_score_thr=0.01, rpn_pseudo_thr=0.01,
                        cls_pseudo_thr=0.01, reg_pseudo_thr=100.0, jitter_times=2))

labeled_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='RandomResize', scale=scales, keep_ratio=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='RandAugment', aug_space=_base_.color_space, aug_num=1),
    dict(type='FilterAnnotations', min_gt_bbox_wh=(1e-2, 1e-2)),
    dict(type='MultiBranch', branch_field=branches, sup=dict(type='PackDetInputs')),
]
weak_pipeline = [
    dict(type='RandomResize', scale=scales, keep_ratio=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackDetInputs', meta_keys=meta_keys),
]
strong_pipeline = [
    dict(type='RandomResize', scale=scales, keep_ratio=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='RandomOrder', transforms=[
        dict(type='RandAugment', aug_space=_base_.color_space, aug_num=1),
        dict(type='RandAugment', aug_space=_base_.geometric, aug_num=1),
    ]),
    dict(type='RandomErasing', n_patches=(1, 5), ratio=(0, 0.2)),
    dict(type='FilterAnnotations', min_gt_bbox_wh=(1e-2, 1e-2)),
    dict(type='PackDetInputs', meta_keys=meta_keys),
]
unlabeled_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadEmptyAnnotations'),
    dict(type='MultiBranch', branch_field=branches, unsup_teacher=weak_pipeline,
         unsup_student=strong_pipeline),
]
labeled = dict(type='CocoDataset', **_base_.demo_train,
               ann_file='annotations/instances_train2017.json',
               data_prefix=dict(img='train2017/'), pipeline=labeled_pipeline)
# the same photographs, without their labels
unlabeled = dict(type='CocoDataset', **_base_.demo_train,
                 ann_file='annotations/instances_train2017.json',
                 data_prefix=dict(img='train2017/'), pipeline=unlabeled_pipeline)
train_dataloader = dict(
    batch_size=3, num_workers=0, persistent_workers=False,
    sampler=dict(batch_size=3, source_ratio=[1, 2]),
    dataset=dict(datasets=[labeled, unlabeled]))
val_dataloader = _base_.demo_val_loader
test_dataloader = val_dataloader
val_evaluator = _base_.demo_evaluator
test_evaluator = val_evaluator

train_cfg = dict(max_iters=12, val_interval=6)
param_scheduler = [dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=5)]
default_hooks = dict(logger=dict(interval=1),
                     checkpoint=dict(interval=6, by_epoch=False, max_keep_ckpts=2))
