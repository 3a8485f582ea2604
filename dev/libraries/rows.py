"""The stock configs: where each runs, what pip adds to that environment, and what is made smaller.

The libraries are older than today's torch: each runs in the environment of :mod:`dev.matrix` that
it still imports in, with the mmcv and MMDetection that it accepts on top.
"""
from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ['ROWS', 'LibraryRow']


class LibraryRow(NamedTuple):
    """A stock config.

    Attributes:
        module: package that ships the config.
        config: path below its folder of configs.
        environment: a row of :data:`dev.matrix.ROWS`.
        packages: what pip puts on top, without dependencies.
        data: a key of :data:`dev.libraries.data.DATASETS`.
        sizes: pixels in pipelines -> pixels here; images are small.
        options: further keys that change, mostly widths and depths.
        batch: samples of a batch.
        cached: its samples depend on a worker's cache without a patch: the patch is also taken out,
            and the check of samples has to find it; audit has to name it.
    """
    module: str
    config: str
    environment: str
    packages: str
    data: str
    sizes: dict[int, int] = {}
    options: dict[str, Any] = {}
    batch: int = 2
    cached: bool = False


_MMSEG = 'mmsegmentation==1.2.2 prettytable wcwidth ftfy regex'
_WEB = 'requests urllib3 idna charset-normalizer certifi'
_MMPRETRAIN = ('mmpretrain==1.2.0 torchvision==0.15.2 einops importlib_metadata<8.5 zipp '
               f'model-index markdown ordered-set mat4py {_WEB}')
_ALBUMENTATIONS = 'albumentations==1.3.1 qudida scikit-learn joblib threadpoolctl'
_MMPOSE = ('mmpose==1.3.2 torchvision==0.15.2 xtcocotools json_tricks munkres '
           f'{_ALBUMENTATIONS} {_WEB}')
_OLD = 'mmcv-lite==2.0.1 mmdet==3.1.0'
_MMYOLO = f'mmyolo==0.6.0 {_OLD} prettytable wcwidth'
_MMOCR = f'mmocr==1.0.1 {_OLD} torchvision==0.15.2 pyclipper rapidfuzz lmdb imgaug {_WEB}'

ROWS: dict[str, LibraryRow] = {
    'mmsegmentation PSPNet': LibraryRow(
        'mmseg', 'pspnet/pspnet_r18-d8_4xb2-80k_cityscapes-512x1024.py', 'locked', _MMSEG,
        'segmentation', {2048: 256, 1024: 128, 512: 64}),
    'mmpretrain ResNet': LibraryRow(
        'mmpretrain', 'resnet/resnet18_8xb32_in1k.py', 'oldest', _MMPRETRAIN, 'classes',
        {224: 64}, batch=4),
    'mmpretrain DeiT': LibraryRow(
        'mmpretrain', 'deit/deit-tiny_4xb256_in1k.py', 'oldest', _MMPRETRAIN, 'classes', batch=4),
    'mmpose heatmap': LibraryRow(
        'mmpose', 'body_2d_keypoint/topdown_heatmap/coco/td-hm_res50_8xb64-210e_coco-256x192.py',
        'oldest', _MMPOSE, 'keypoints'),
    'mmpose RTMPose': LibraryRow(
        'mmpose', 'body_2d_keypoint/rtmpose/coco/rtmpose-t_8xb256-420e_coco-256x192.py',
        'oldest', _MMPOSE, 'keypoints', batch=4),
    'mmaction2 TSN': LibraryRow(
        'mmaction', 'recognition/tsn/tsn_imagenet-pretrained-r50_8xb32-1x1x3-100e_'
        'kinetics400-rgb.py', 'locked', 'mmaction2==1.1.0 mmcv-lite==2.0.1 decord einops',
        'videos', {256: 80, 224: 64}),
    'mmyolo YOLOv5': LibraryRow(
        'mmyolo', 'yolov5/yolov5_n-v61_syncbn_fast_8xb16-300e_coco.py', 'oldest',
        f'{_ALBUMENTATIONS} {_MMYOLO}', 'boxes', {640: 128}),
    'mmyolo RTMDet': LibraryRow(
        'mmyolo', 'rtmdet/rtmdet_tiny_syncbn_fast_8xb32-300e_coco.py', 'locked', _MMYOLO,
        'boxes', {640: 128, 1280: 256}, batch=4, cached=True),
    'mmocr DBNet': LibraryRow(
        'mmocr', 'textdet/dbnet/dbnet_resnet18_fpnc_1200e_icdar2015.py', 'oldest', _MMOCR, 'text',
        {640: 128}),
}


def folder_name(packages: str) -> str:
    """Return the folder that rows with the same packages share."""
    return 'on-top-' + packages.split('==')[0].replace(' ', '-')


ALL: tuple[str, ...] = tuple(ROWS)
