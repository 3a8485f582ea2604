_base_ = ['mmdet::yolox/yolox_s_8xb8-300e_coco.py', './_base_/reproducible.py']
