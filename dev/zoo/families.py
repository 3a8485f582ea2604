"""At least one config for every folder of MMDetection 3.3's zoo.

A folder has several where its configs build different detectors: together the rows reach every
class that any config of the zoo names in its model (a test looks), in its smallest form where a
folder offers sizes.
"""
from __future__ import annotations

from typing import NamedTuple

__all__ = ['FAMILIES', 'PACKAGES', 'Member', 'Package']


class Package(NamedTuple):
    """An optional package: its name for ``pip``, its module, and what needs it."""

    name: str
    module: str
    why: str


class Member(NamedTuple):
    """One config of the sweep.

    Attributes:
        config: path below the folder of configs.
        data: what it trains on: 'boxes' (images with boxes, masks and stuff), 'proposals',
            'text', 'semi' (labelled and unlabelled images), 'video', or '' for one that only
            tracks and has nothing to train.
        packages: names in PACKAGES that it cannot do without.
        annotations: the format of the dataset that it was written for.
        size: height and width of its images in pixels.
        broken: what its training or inference raises in MMDetection itself, whoever answers for
            the operators; '' for nothing.
    """

    config: str
    data: str = 'boxes'
    packages: tuple[str, ...] = ()
    annotations: str = 'COCO'
    size: int = 64
    broken: str = ''

    @property
    def family(self) -> str:
        return self.config.partition('/')[0]


PACKAGES = {package.name: package for package in (
    Package('albumentations', 'albumentations', 'the transform Albu'),
    Package('instaboostfast', 'instaboostfast', 'the transform InstaBoost'),
    Package('mmpretrain', 'mmpretrain', 'backbones of image classification'),
    Package('timm', 'timm', 'backbones of timm, through mmpretrain'),
    Package('scikit-learn', 'sklearn', 'the Gaussian mixture of PAA'),
    Package('transformers', 'transformers', 'the language model BERT'),
    Package('detectron2', 'detectron2', "the wrapper of Detectron2's models"),
    Package('panopticapi', 'panopticapi', 'the panoptic metric'),
    Package('lvis', 'lvis', 'the LVIS dataset and metric'),
    Package('torchvision', 'torchvision', "its RoIAlign, which the config asks for"),
    Package('cityscapesscripts', 'cityscapesscripts', 'the Cityscapes metric'),
    Package('trackeval', 'trackeval', 'the tracking metrics'),
)}


def _family(folder: str, *names: str, data: str = 'boxes', packages: tuple[str, ...] = (),
            annotations: str = 'COCO', size: int = 64, broken: str = '') -> tuple[Member, ...]:
    return tuple(Member(f'{folder}/{name}.py', data, packages, annotations, size, broken)
                 for name in names)


# mmcv's plain deformable convolution refuses a level smaller than its kernel: C5 needs 3 pixels.
_DCN = 96

# The config was written for MMDetection 2: RPN passes its heads no num_classes, and the stages have
# arguments that are gone.
_CASCADE_RPN = "CascadeRPNHead.__init__() missing 1 required positional argument: 'num_classes'"

# On a CPU, masks are pasted into what their boxes cover of the image. Boxes of untrained weights
# can all lie outside, which leaves a range that runs backwards.
_PASTE = 'upper bound and lower bound inconsistent with step sign'

_ONE_STAGE = (
    *_family('atss', 'atss_r50_fpn_1x_coco', 'atss_r18_fpn_8xb8-amp-lsj-200e_coco'),
    *_family('autoassign', 'autoassign_r50-caffe_fpn_1x_coco'),
    *_family('centernet', 'centernet_r18-dcnv2_8xb16-crop512-140e_coco',
             'centernet_r18_8xb16-crop512-140e_coco',
             'centernet-update_r18_fpn_8xb8-amp-lsj-200e_coco'),
    *_family('centripetalnet', 'centripetalnet_hourglass104_16xb6-crop511-210e-mstest_coco'),
    *_family('cornernet', 'cornernet_hourglass104_8xb6-210e-mstest_coco'),
    *_family('ddod', 'ddod_r50_fpn_1x_coco', size=384),  # and its P7
    *_family('dyhead', 'atss_r50-caffe_fpn_dyhead_1x_coco', 'atss_r50_fpn_dyhead_1x_coco'),
    *_family('efficientnet', 'retinanet_effb3_fpn_8xb4-crop896-1x_coco'),
    *_family('fcos', 'fcos_r50-caffe_fpn_gn-head_1x_coco',
             'fcos_r18_fpn_gn-head-center-normbbox-centeronreg-giou_8xb8-amp-lsj-200e_coco',
             'fcos_r50-dcn-caffe_fpn_gn-head-center-normbbox-centeronreg-giou_1x_coco'),
    *_family('foveabox', 'fovea_r50_fpn_4xb4-1x_coco', 'fovea_r50_fpn_gn-head-align_4xb4-2x_coco'),
    *_family('free_anchor', 'freeanchor_r50_fpn_1x_coco'),
    *_family('fsaf', 'fsaf_r50_fpn_1x_coco'),
    *_family('gfl', 'gfl_r50_fpn_1x_coco'),
    *_family('gfl', 'gfl_r101-dconv-c3-c5_fpn_ms-2x_coco', size=_DCN),
    *_family('ghm', 'retinanet_r50_fpn_ghm-1x_coco'),
    *_family('lad', 'lad_r101-paa-r50_fpn_2xb8_coco_1x', packages=('scikit-learn',)),
    *_family('ld', 'ld_r18-gflv1-r101_fpn_1x_coco'),
    *_family('nas_fcos', 'nas-fcos_r50-caffe_fpn_nashead-gn-head_4xb4-1x_coco',
             'nas-fcos_r50-caffe_fpn_fcoshead-gn-head_4xb4-1x_coco'),
    *_family('nas_fpn', 'retinanet_r50_nasfpn_crop640-50e_coco',
             'retinanet_r50_fpn_crop640-50e_coco'),
    *_family('paa', 'paa_r50_fpn_1x_coco', packages=('scikit-learn',)),
    *_family('pvt', 'retinanet_pvt-t_fpn_1x_coco', 'retinanet_pvtv2-b0_fpn_1x_coco'),
    *_family('reppoints', 'reppoints-moment_r50_fpn_1x_coco',
             'reppoints-minmax_r50_fpn-gn_head-gn_1x_coco',
             'reppoints-bbox_r50_fpn-gn_head-gn-grid_1x_coco'),
    *_family('reppoints', 'reppoints-moment_r101-dconv-c3-c5_fpn-gn_head-gn_2x_coco', size=_DCN),
    *_family('retinanet', 'retinanet_r18_fpn_1x_coco', 'retinanet_r50_fpn_amp-1x_coco',
             'retinanet_x101-32x4d_fpn_1x_coco'),
    # SSD has no padding in its last levels: they fit one size of images
    *_family('ssd', 'ssd300_coco', size=300),
    *_family('ssd', 'ssdlite_mobilenetv2-scratch_8xb24-600e_coco', size=320),
    *_family('tood', 'tood_r50_fpn_1x_coco', 'tood_r50_fpn_anchor-based_1x_coco',
             'tood_r101-dconv-c3-c5_fpn_ms-2x_coco'),
    *_family('vfnet', 'vfnet_r50_fpn_1x_coco', 'vfnet_r50-mdconv-c3-c5_fpn_ms-2x_coco',
             'vfnet_res2net-101_fpn_ms-2x_coco'),
    *_family('yolo', 'yolov3_mobilenetv2_8xb24-320-300e_coco', 'yolov3_d53_8xb8-320-273e_coco'),
    *_family('yolof', 'yolof_r50-c5_8xb8-1x_coco'),
    *_family('yolox', 'yolox_tiny_8xb8-300e_coco', 'yolox_nano_8xb8-300e_coco',
             'yolox_s_8xb8-300e_coco'),
    *_family('rtmdet', 'rtmdet_tiny_8xb32-300e_coco', 'rtmdet-ins_tiny_8xb32-300e_coco',
             'rtmdet_l_swin_b_4xb32-100e_coco'),
    *_family('rtmdet', 'rtmdet_l_convnext_b_4xb32-100e_coco', packages=('mmpretrain',)),
    *_family('rtmdet', 'classification/cspnext-tiny_8xb256-rsb-a1-600e_in1k', data='',
             packages=('mmpretrain',), annotations='ImageNet'),
)

_TWO_STAGE = (
    *_family('albu_example', 'mask-rcnn_r50_fpn_albu-1x_coco', packages=('albumentations',)),
    *_family('carafe', 'faster-rcnn_r50_fpn-carafe_1x_coco', 'mask-rcnn_r50_fpn-carafe_1x_coco'),
    *_family('cascade_rcnn', 'cascade-rcnn_r18_fpn_8xb8-amp-lsj-200e_coco',
             'cascade-mask-rcnn_r50_fpn_1x_coco'),
    *_family('cascade_rpn', 'cascade-rpn_faster-rcnn_r50-caffe_fpn_1x_coco'),
    *_family('cascade_rpn', 'cascade-rpn_r50-caffe_fpn_1x_coco', broken=_CASCADE_RPN),
    *_family('cascade_rpn', 'cascade-rpn_fast-rcnn_r50-caffe_fpn_1x_coco', data='proposals'),
    *_family('convnext', 'mask-rcnn_convnext-t-p4-w7_fpn_amp-ms-crop-3x_coco',
             'cascade-mask-rcnn_convnext-t-p4-w7_fpn_4conv1fc-giou_amp-ms-crop-3x_coco',
             packages=('mmpretrain',)),
    *_family('dcn', 'faster-rcnn_r50-dconv-c3-c5_fpn_1x_coco', 'faster-rcnn_r50_fpn_dpool_1x_coco',
             'mask-rcnn_r50-dconv-c3-c5_fpn_1x_coco',
             'cascade-rcnn_r50-dconv-c3-c5_fpn_1x_coco',
             'faster-rcnn_x101-32x4d-dconv-c3-c5_fpn_1x_coco', size=_DCN),
    *_family('dcnv2', 'faster-rcnn_r50-mdconv-c3-c5_fpn_1x_coco',
             'faster-rcnn_r50-mdconv-group4-c3-c5_fpn_1x_coco',
             'faster-rcnn_r50_fpn_mdpool_1x_coco', 'mask-rcnn_r50-mdconv-c3-c5_fpn_1x_coco'),
    *_family('detectors', 'cascade-rcnn_r50-rfp_1x_coco', 'cascade-rcnn_r50-sac_1x_coco',
             'detectors_htc-r50_1x_coco', size=_DCN),
    *_family('double_heads', 'dh-faster-rcnn_r50_fpn_1x_coco'),
    *_family('dynamic_rcnn', 'dynamic-rcnn_r50_fpn_1x_coco'),
    *_family('empirical_attention', 'faster-rcnn_r50-attn0010_fpn_1x_coco'),
    *_family('empirical_attention', 'faster-rcnn_r50-attn1111-dcn_fpn_1x_coco', size=_DCN),
    *_family('fast_rcnn', 'fast-rcnn_r50_fpn_1x_coco', data='proposals'),
    *_family('faster_rcnn', 'faster-rcnn_r18_fpn_8xb8-amp-lsj-200e_coco',
             'faster-rcnn_r50_fpn_1x_coco', 'faster-rcnn_r50-caffe_c4-1x_coco',
             'faster-rcnn_r50-caffe-dc5_1x_coco', 'faster-rcnn_r50_fpn_fcos-rpn_1x_coco',
             'faster-rcnn_r50_fpn_ciou_1x_coco', 'faster-rcnn_r50_fpn_giou_1x_coco',
             'faster-rcnn_r50_fpn_iou_1x_coco', 'faster-rcnn_r50_fpn_ohem_1x_coco',
             'faster-rcnn_r50_fpn_bounded-iou_1x_coco', 'faster-rcnn_r50_fpn_soft-nms_1x_coco',
             'faster-rcnn_r50-tnr-pre_fpn_1x_coco'),
    *_family('fpg', 'faster-rcnn_r50_fpg_crop640-50e_coco', 'mask-rcnn_r50_fpg_crop640-50e_coco',
             'retinanet_r50_fpg_crop640_50e_coco'),
    *_family('gcnet', 'mask-rcnn_r50-gcb-r4-c3-c5_fpn_1x_coco',
             'mask-rcnn_r50-syncbn-gcb-r4-c3-c5_fpn_1x_coco'),
    *_family('gcnet', 'cascade-mask-rcnn_x101-32x4d-syncbn-dconv-c3-c5-r4-gcb-c3-c5_fpn_1x_coco',
             size=_DCN),
    *_family('gn', 'mask-rcnn_r50_fpn_gn-all_2x_coco'),
    *_family('gn+ws', 'faster-rcnn_r50_fpn_gn-ws-all_1x_coco',
             'faster-rcnn_x50-32x4d_fpn_gn-ws-all_1x_coco', 'mask-rcnn_r50_fpn_gn-ws-all_2x_coco'),
    *_family('grid_rcnn', 'grid-rcnn_r50_fpn_gn-head_1x_coco'),
    *_family('groie', 'faste-rcnn_r50_fpn_groie_1x_coco', 'grid-rcnn_r50_fpn_gn-head-groie_1x_coco',
             'mask-rcnn_r50_fpn_syncbn-r4-gcb-c3-c5-groie_1x_coco'),
    *_family('guided_anchoring', 'ga-faster-rcnn_r50_fpn_1x_coco', 'ga-retinanet_r50_fpn_1x_coco',
             'ga-rpn_r50_fpn_1x_coco'),
    *_family('guided_anchoring', 'ga-fast-rcnn_r50-caffe_fpn_1x_coco', data='proposals'),
    *_family('hrnet', 'faster-rcnn_hrnetv2p-w18-1x_coco', 'fcos_hrnetv2p-w18-gn-head_4xb4-1x_coco',
             'htc_hrnetv2p-w18_20e_coco'),
    *_family('legacy_1.x', 'cascade-mask-rcnn_r50_fpn_1x_coco_v1', 'retinanet_r50_fpn_1x_coco_v1'),
    *_family('legacy_1.x', 'ssd300_coco_v1', size=300),
    *_family('libra_rcnn', 'libra-faster-rcnn_r50_fpn_1x_coco', 'libra-retinanet_r50_fpn_1x_coco'),
    *_family('libra_rcnn', 'libra-fast-rcnn_r50_fpn_1x_coco', data='proposals'),
    *_family('misc', 'd2_mask-rcnn_r50-caffe_fpn_ms-90k_coco', packages=('detectron2',)),
    *_family('pafpn', 'faster-rcnn_r50_pafpn_1x_coco'),
    *_family('pisa', 'faster-rcnn_r50_fpn_pisa_1x_coco', 'mask-rcnn_r50_fpn_pisa_1x_coco',
             'retinanet-r50_fpn_pisa_1x_coco'),
    *_family('pisa', 'ssd300_pisa_coco', size=300),
    *_family('regnet', 'faster-rcnn_regnetx-400MF_fpn_ms-3x_coco',
             'mask-rcnn_regnetx-3.2GF-mdconv-c3-c5_fpn_1x_coco'),
    *_family('res2net', 'faster-rcnn_res2net-101_fpn_2x_coco'),
    *_family('resnest', 'faster-rcnn_s50_fpn_syncbn-backbone+head_ms-range-1x_coco',
             'cascade-mask-rcnn_s50_fpn_syncbn-backbone+head_ms-1x_coco'),
    *_family('resnet_strikes_back', 'faster-rcnn_r50-rsb-pre_fpn_1x_coco'),
    *_family('rpn', 'rpn_r50_fpn_1x_coco', 'rpn_r50-caffe-c4_1x_coco'),
    *_family('sabl', 'sabl-faster-rcnn_r50_fpn_1x_coco', 'sabl-cascade-rcnn_r50_fpn_1x_coco',
             'sabl-retinanet_r50_fpn_1x_coco', 'sabl-retinanet_r50-gn_fpn_1x_coco'),
    *_family('scratch', 'mask-rcnn_r50-scratch_fpn_gn-all_6x_coco'),
    *_family('selfsup_pretrain', 'mask-rcnn_r50-mocov2-pre_fpn_1x_coco'),
    *_family('sparse_rcnn', 'sparse-rcnn_r50_fpn_1x_coco'),
    *_family('strong_baselines',
             'mask-rcnn_r50_fpn_rpn-2conv_4conv1fc_syncbn-all_lsj-50e_coco',
             'mask-rcnn_r50-caffe_fpn_rpn-2conv_4conv1fc_syncbn-all_lsj-100e_coco'),
    *_family('simple_copy_paste',
             'mask-rcnn_r50_fpn_rpn-2conv_4conv1fc_syncbn-all_32xb2-ssj-scp-90k_coco'),
    *_family('soft_teacher', 'soft-teacher_faster-rcnn_r50-caffe_fpn_180k_semi-0.1-coco',
             data='semi'),
    *_family('swin', 'mask-rcnn_swin-t-p4-w7_fpn_1x_coco', 'retinanet_swin-t-p4-w7_fpn_1x_coco'),
    *_family('timm_example', 'retinanet_timm-tv-resnet50_fpn_1x_coco',
             'retinanet_timm-efficientnet-b1_fpn_1x_coco', packages=('mmpretrain', 'timm')),
    *_family('tridentnet', 'tridentnet_r50-caffe_1x_coco'),
)

_MASKS = (
    *_family('boxinst', 'boxinst_r50_fpn_ms-90k_coco'),
    *_family('condinst', 'condinst_r50_fpn_ms-poly-90k_coco_instance'),
    *_family('htc', 'htc-without-semantic_r50_fpn_1x_coco', 'htc_r50_fpn_1x_coco'),
    *_family('instaboost', 'mask-rcnn_r50_fpn_instaboost-4x_coco', packages=('instaboostfast',)),
    *_family('mask_rcnn', 'mask-rcnn_r50_fpn_1x_coco', 'mask-rcnn_r50-caffe-c4_1x_coco',
             'mask-rcnn_r50-caffe_fpn_poly-1x_coco_v1'),
    *_family('ms_rcnn', 'ms-rcnn_r50_fpn_1x_coco'),
    *_family('point_rend', 'point-rend_r50-caffe_fpn_ms-1x_coco'),
    *_family('queryinst', 'queryinst_r50_fpn_1x_coco', broken=_PASTE),
    *_family('scnet', 'scnet_r50_fpn_1x_coco'),
    *_family('solo', 'solo_r18_fpn_8xb8-lsj-200e_coco', 'decoupled-solo_r50_fpn_1x_coco',
             'decoupled-solo-light_r50_fpn_3x_coco'),
    *_family('solov2', 'solov2_r50_fpn_1x_coco', 'solov2-light_r18_fpn_ms-3x_coco',
             'solov2-light_r50-dcn_fpn_ms-3x_coco'),
    *_family('yolact', 'yolact_r50_1xb8-55e_coco'),
    *_family('mask2former', 'mask2former_r50_8xb2-lsj-50e_coco',
             'mask2former_swin-t-p4-w7-224_8xb2-lsj-50e_coco'),
    *_family('mask2former', 'mask2former_r50_8xb2-lsj-50e_coco-panoptic',
             packages=('panopticapi',)),
    *_family('maskformer', 'maskformer_r50_ms-16xb1-75e_coco',
             'maskformer_swin-l-p4-w12_64xb1-ms-300e_coco', packages=('panopticapi',)),
    *_family('panoptic_fpn', 'panoptic-fpn_r50_fpn_1x_coco', packages=('panopticapi',)),
)

_QUERIES = (
    *_family('conditional_detr', 'conditional-detr_r50_8xb2-50e_coco'),
    *_family('dab_detr', 'dab-detr_r50_8xb2-50e_coco'),
    *_family('ddq', 'ddq-detr-4scale_r50_8xb2-12e_coco'),
    *_family('deformable_detr', 'deformable-detr_r50_16xb2-50e_coco',
             'deformable-detr-refine_r50_16xb2-50e_coco',
             'deformable-detr-refine-twostage_r50_16xb2-50e_coco'),
    *_family('detr', 'detr_r18_8xb2-500e_coco', 'detr_r50_8xb2-150e_coco'),
    *_family('dino', 'dino-4scale_r50_8xb2-12e_coco',
             'dino-4scale_r50_improved_8xb2-12e_coco'),
    *_family('glip', 'glip_atss_swin-t_a_fpn_dyhead_16xb2_ms-2x_funtune_coco',
             'glip_atss_swin-t_fpn_dyhead_16xb2_ms-2x_funtune_coco', data='text',
             packages=('transformers',)),
    *_family('grounding_dino', 'grounding_dino_r50_scratch_8xb2_1x_coco',
             'grounding_dino_swin-t_finetune_16xb2_1x_coco', data='text',
             packages=('transformers',)),
    *_family('mm_grounding_dino', 'coco/grounding_dino_swin-t_finetune_16xb4_1x_coco',
             data='text', packages=('transformers',)),
)

# Detectors of other datasets: their annotations differ, their models do not.
_OTHER_DATA = (
    *_family('cityscapes', 'faster-rcnn_r50_fpn_1x_cityscapes'),
    *_family('cityscapes', 'mask-rcnn_r50_fpn_1x_cityscapes', packages=('cityscapesscripts',)),
    *_family('deepfashion', 'mask-rcnn_r50_fpn_15e_deepfashion'),
    *_family('lvis', 'mask-rcnn_r50_fpn_sample1e-3_ms-1x_lvis-v1', packages=('lvis',)),
    *_family('seesaw_loss', 'mask-rcnn_r50_fpn_seesaw-loss_random-ms-2x_lvis-v1',
             'mask-rcnn_r50_fpn_seesaw-loss-normed-mask_random-ms-2x_lvis-v1',
             'cascade-mask-rcnn_r101_fpn_seesaw-loss_random-ms-2x_lvis-v1', packages=('lvis',)),
    *_family('objects365', 'faster-rcnn_r50-syncbn_fpn_1350k_objects365v1',
             'retinanet_r50_fpn_1x_objects365v1'),
    *_family('v3det', 'faster_rcnn_r50_fpn_8x4_sample1e-3_mstrain_v3det_2x',
             'fcos_r50_fpn_8x4_sample1e-3_mstrain_v3det_2x',
             'dino-4scale_r50_8xb2_sample1e-3_v3det_36e'),
    *_family('crowddet', 'crowddet-rcnn_r50_fpn_8xb2-30e_crowdhuman',
             'crowddet-rcnn_refine_r50_fpn_8xb2-30e_crowdhuman', annotations='CrowdHuman',
             packages=('torchvision',)),
    *_family('openimages', 'faster-rcnn_r50_fpn_32xb2-1x_openimages', annotations='OpenImages'),
    *_family('pascal_voc', 'faster-rcnn_r50_fpn_1x_voc0712', annotations='Pascal VOC'),
    *_family('wider_face', 'retinanet_r50_fpn_1x_widerface', annotations='WIDER Face'),
    *_family('mask2former_vis', 'mask2former_r50_8xb2-8e_youtubevis2019', data='video',
             annotations='YouTube-VIS'),
    *_family('masktrack_rcnn', 'masktrack-rcnn_mask-rcnn_r50_fpn_8xb1-12e_youtubevis2019',
             data='video', annotations='YouTube-VIS'),
    *_family('qdtrack', 'qdtrack_faster-rcnn_r50_fpn_4e_base', data='video', annotations='MOT'),
    *_family('bytetrack', 'yolox_x_8xb4-amp-80e_crowdhuman-mot17halftrain_test-mot17halfval',
             annotations='MOT'),
    *_family('sort', 'faster-rcnn_r50_fpn_8xb2-4e_mot17halftrain_test-mot17halfval',
             annotations='MOT'),
    *_family('strongsort', 'yolox_x_8xb4-80e_crowdhuman-mot17halftrain_test-mot17halfval',
             annotations='MOT'),
    *_family('bytetrack', 'bytetrack_yolox_x_8xb4-80e_crowdhuman-mot17halftrain_test-mot17halfval',
             data='', annotations='MOT'),
    *_family('strongsort',
             'strongsort_yolox_x_8xb4-80e_crowdhuman-mot17halftrain_test-mot17halfval',
             data='', annotations='MOT'),
    *_family('ocsort', 'ocsort_yolox_x_8xb4-amp-80e_crowdhuman-mot17halftrain_test-mot17halfval',
             data='', annotations='MOT'),
    *_family('deepsort', 'deepsort_faster-rcnn_r50_fpn_8xb2-4e_mot17halftrain_test-mot17halfval',
             data='', annotations='MOT'),
    *_family('reid', 'reid_r50_8xb32-6e_mot17train80_test-mot17val20', data='',
             packages=('mmpretrain',), annotations='MOT'),
)

FAMILIES: tuple[Member, ...] = (*_ONE_STAGE, *_TWO_STAGE, *_MASKS, *_QUERIES, *_OTHER_DATA)
