_base_ = ['mmdet::retinanet/retinanet_r50_fpn_1x_coco.py', './_base_/reproducible.py']
