_base_ = [
    'mmdet::deformable_detr/deformable-detr_r50_16xb2-50e_coco.py', './_base_/reproducible.py'
]
