"""The digits as COCO-format data, 96 x 96 pixels."""
digits_root = 'data/digits/'
digits_classes = tuple(str(digit) for digit in range(10))
digits_size = (96, 96)
digits_set = dict(data_root=digits_root, metainfo=dict(classes=digits_classes))
digits_test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=digits_size, keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='PackDetInputs',
         meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor')),
]
digits_val_loader = dict(
    batch_size=10, num_workers=0, persistent_workers=False,
    dataset=dict(**digits_set, pipeline=digits_test_pipeline))
digits_evaluator = dict(ann_file=digits_root + 'annotations/instances_val2017.json')
