"""The demonstration dataset (`mmrepro demo --data-only`), small enough for a CPU.

Names only, none of which MMDetection's bases use; the configs beside it fill them in.
"""
demo_root = 'data/demo/'
demo_classes = ('person', 'cat', 'cup', 'motorcycle', 'rocket', 'coin')
demo_scale = (256, 192)  # width, height
demo_size = (192, 192)  # for the models that train on squares

demo_test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=demo_scale, keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='PackDetInputs',
         meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor')),
]
demo_square_test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=demo_size, keep_ratio=True),
    dict(type='Pad', size=demo_size, pad_val=dict(img=(114, 114, 114))),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='PackDetInputs',
         meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor')),
]

# what replaces COCO in a dataset, a data loader and a metric of MMDetection's bases
demo_train = dict(data_root=demo_root, metainfo=dict(classes=demo_classes))
demo_val_loader = dict(
    batch_size=2, num_workers=0, persistent_workers=False,
    dataset=dict(**demo_train, pipeline=demo_test_pipeline))
demo_square_val_loader = dict(
    batch_size=2, num_workers=0, persistent_workers=False,
    dataset=dict(**demo_train, pipeline=demo_square_test_pipeline))
demo_evaluator = dict(ann_file=demo_root + 'annotations/instances_val2017.json')
demo_hooks = dict(logger=dict(interval=1), checkpoint=dict(interval=1, max_keep_ckpts=2))
