"""The packages whose versions are measured, and what lies beside each of them."""
from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Package(NamedTuple):
    """A package, the versions to measure, and packages that are installed beside all of them.

    Every version of a package is measured beside the same others, so that two digests of a row
    differ by this package alone.
    """
    distribution: str  # its name for pip
    module: str
    versions: tuple[str, ...]  # oldest first: the last builds of each release
    beside: tuple[str, ...] = ()  # 'distribution==version'
    pinned: Mapping[str, tuple[str, ...]] = {}  # what only one version needs: version -> likewise
    large: bool = False  # installed with its dependencies, gigabytes; removed when it is measured
    by_maker: bool = False  # kernels depend on the maker of the CPU, at all levels of instructions

    def requirements(self, version: str) -> tuple[str, ...]:
        """Return what is installed for a version, the package itself first."""
        name, _, number = version.rpartition('==')
        if '+cu' in number:  # PyPI names builds for CUDA by the release alone
            return f'{self.distribution}==={number.partition("+")[0]}', *self.beside
        return f'{name or self.distribution}=={number}', *self.beside, *self.pinned.get(version, ())


def _versions(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FASTER = 'faster-coco-eval'
# albumentations pins albucore, and its fork goes on counting where albumentations ended
_X = 'albumentationsx=='
_OLD, _NEW = ('stringzilla==4.6.3', 'simsimd==6.5.16'), ('stringzilla==5.3.2', 'numkong==7.8.6')
_ALBUCORE: dict[str, tuple[str, ...]] = {
    **{version: ('albucore==0.0.23', *_OLD) for version in ('2.0.1', '2.0.2', '2.0.4')},
    **{version: ('albucore==0.0.24', *_OLD) for version in ('2.0.6', '2.0.8')},
    f'{_X}2.0.9': ('albucore==0.0.33', *_OLD), f'{_X}2.0.20': ('albucore==0.0.41', *_OLD),
    f'{_X}2.1.3': ('albucore==0.1.5', *_NEW), f'{_X}2.2.6': ('albucore==0.1.6', *_NEW),
    f'{_X}2.3.10': ('albucore==0.2.12', *_NEW), f'{_X}2.4.13': ('albucore==0.2.20', *_NEW),
    f'{_X}2.5.1': ('albucore==0.2.21', *_NEW),
}

# Wheels for CPython 3.11 on x86-64: OpenCV has none before 4.5.5, and wheels before 4.10 need
# NumPy 1, with which all run. A build number is part of OpenCV's version here, as 4.10 and 4.13
# have two.
PACKAGES = {
    'cv2': Package(
        'opencv-python-headless', 'cv2',
        _versions('4.5.5.64 4.6.0.66 4.7.0.72 4.8.0.76 4.8.1.78 4.9.0.80 4.10.0.82 4.10.0.84 '
                  '4.11.0.86 4.12.0.88 4.13.0.90 4.13.0.92 4.14.0.94 5.0.0.93'),
        ('numpy==1.26.4', )),
    'numpy': Package(
        'numpy', 'numpy',
        _versions('1.24.4 1.25.2 1.26.4 2.0.2 2.1.3 2.2.6 2.3.5 2.4.6'),
        # MMDetection imports Matplotlib, and SciPy, whose newest releases refuse old NumPy
        ('opencv-python-headless==5.0.0.93', 'matplotlib==3.9.4', 'contourpy==1.3.1',
         'scipy==1.13.1')),
    'PIL': Package(
        'Pillow', 'PIL',
        _versions('9.2.0 9.3.0 9.4.0 9.5.0 10.0.1 10.1.0 10.2.0 10.3.0 10.4.0 11.0.0 11.1.0 11.2.1 '
                  '11.3.0 12.0.0 12.1.1 12.2.0 12.3.0 13.0.0')),
    'scipy': Package(
        'scipy', 'scipy',
        _versions('1.9.3 1.10.1 1.11.4 1.12.0 1.13.1 1.14.1 1.15.3 1.16.3 1.17.1'),
        ('numpy==1.26.4', )),
    'scikit-learn': Package(
        'scikit-learn', 'sklearn',
        _versions('1.2.2 1.3.2 1.4.2 1.5.2 1.6.1 1.7.2 1.8.0 1.9.1'),
        ('numpy==1.26.4', 'scipy==1.11.4', 'joblib==1.4.2', 'threadpoolctl==3.5.0',
         'narwhals==2.0.0')),
    'pycocotools': Package(
        'pycocotools', 'pycocotools',
        # the last ones stand in for pycocotools, as they do from 1.6 on
        ('2.0.7', '2.0.8', '2.0.10', '2.0.11', *(
            f'{FASTER}=={version}' for version in _versions('1.6.4 1.6.8 1.7.2 1.8.0'))),
        ('numpy==1.26.4', )),
    'shapely': Package(
        'shapely', 'shapely', _versions('1.8.5.post1 2.0.7 2.1.2 2.2.0'), ('numpy==1.26.4', )),
    'lvis': Package('lvis', 'lvis', _versions('0.5 0.5.1 0.5.2 0.5.3'), ('numpy==1.26.4', )),
    'cityscapesscripts': Package(
        'cityscapesscripts', 'cityscapesscripts',
        _versions('1.5.0 2.0.1 2.1.7 2.2.0 2.2.1 2.2.2 2.2.3 2.2.4 2.3.0'),
        ('numpy==1.26.4', 'appdirs==1.4.4', 'pyquaternion==0.9.9', 'coloredlogs==15.0.1',
         'humanfriendly==10.0')),
    'albumentations': Package(
        'albumentations', 'albumentations',
        ('1.3.0', '1.3.1', '1.4.0', '1.4.2', '1.4.3', '1.4.4', '1.4.6', '1.4.7', *_ALBUCORE),
        ('numpy==2.2.6', 'scikit-learn==1.7.2', 'joblib==1.4.2', 'threadpoolctl==3.5.0',
         'qudida==0.0.4', 'pydantic==2.12.5', 'pydantic-core==2.41.5', 'annotated-types==0.7.0',
         'typing-inspection==0.4.2', 'eval-type-backport==0.2.2'), _ALBUCORE),
    'timm': Package(
        'timm', 'timm', _versions('0.6.13 0.9.16 1.0.7 1.0.15 1.0.31'),
        ('torchvision==0.28.0', 'safetensors==0.5.3', 'huggingface-hub==0.34.4')),
    'torch': Package(
        'torch', 'torch',
        _versions('2.0.1+cu117 2.2.2+cu121 2.4.1+cu121 2.6.0+cu124 2.8.0+cu128 2.10.0+cu128 '
                  '2.13.0+cpu 2.13.0+cu130 2.14.1+cu130 2.15.0+cu132'),
        ('numpy==1.26.4', ), large=True, by_maker=True),
}
