"""Fixed inputs of the parts: a photograph, files in several formats, boxes and masks.

Files are encoded once, by the Python that runs ``dev.versions``; their SHA-256 is in the table.
"""
from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np

BOXES = ((20, 15, 120, 95), (60.5, 40.25, 200, 150), (5, 100, 45, 180), (150, 20, 260, 170),
         (90, 80, 97, 88), (0, 0, 270, 190))
LABELS = (0, 1, 2, 1, 0, 2)


def make(folder: Path) -> str:
    """Write the inputs into ``folder`` unless they are there; return their SHA-256."""
    path = folder / 'inputs.npz'
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        np.savez(content, **_arrays())
        path.write_bytes(content.getvalue())
    digest = hashlib.sha256()
    with np.load(path) as arrays:
        for name in sorted(arrays.files):
            digest.update(f'{name} {arrays[name].dtype} {arrays[name].shape} '.encode())
            digest.update(arrays[name].tobytes())
    return digest.hexdigest()


def _arrays() -> dict[str, np.ndarray]:
    import PIL.Image
    import skimage
    data = Path(skimage.__file__).parent / 'data'
    photo = PIL.Image.open(data / 'chelsea.png').convert('RGB').crop((80, 40, 351, 231))
    files = {'png': data / 'chelsea.png', 'jpeg': data / 'rocket.jpg'}
    arrays = {f'file_{name}': np.frombuffer(path.read_bytes(), np.uint8)
              for name, path in files.items()}
    rotated = PIL.Image.Exif()
    rotated[0x0112] = 6  # the orientation: turn by 90 degrees
    for name, image, settings in (
            ('jpeg_progressive', photo, dict(format='JPEG', progressive=True, quality=85)),
            ('jpeg_444', photo, dict(format='JPEG', subsampling=0, quality=95)),
            ('jpeg_gray', photo.convert('L'), dict(format='JPEG', quality=75)),
            ('jpeg_exif', photo, dict(format='JPEG', exif=rotated.tobytes())),
            ('jpeg_cmyk', photo.convert('CMYK'), dict(format='JPEG', quality=80)),
            ('png_palette', photo.quantize(64), dict(format='PNG')),
            ('png_alpha', photo.convert('RGBA'), dict(format='PNG')),
            ('webp', photo, dict(format='WEBP', quality=80)),
            ('bmp', photo, dict(format='BMP')),
            ('tiff', photo, dict(format='TIFF'))):
        content = io.BytesIO()
        image.save(content, **settings)
        arrays[f'file_{name}'] = np.frombuffer(content.getvalue(), np.uint8)
    arrays['image'] = np.asarray(photo)[..., ::-1].copy()
    y, x = np.mgrid[:arrays['image'].shape[0], :arrays['image'].shape[1]]
    arrays['label_map'] = ((x // 9 + 3 * (y // 7)) % 21).astype(np.uint8)
    arrays['masks'] = np.stack([
        ((x - (a + c) / 2) / (c - a) * 2)**2 + ((y - (b + d) / 2) / (d - b) * 2)**2 < 1
        for a, b, c, d in BOXES]).astype(np.uint8)
    return arrays


def polygons() -> list[list[np.ndarray]]:
    """Return one polygon for each box: eight vertices."""
    return [[np.array([a + .3 * (c - a), b, a + .7 * (c - a), b, c, b + .3 * (d - b), c,
                       b + .7 * (d - b), a + .7 * (c - a), d, a + .3 * (c - a), d, a,
                       b + .7 * (d - b), a, b + .3 * (d - b)], np.float64)]
            for a, b, c, d in BOXES]


def results(arrays: Any, dtype: str, polygon: bool = False, count: int = 6) -> dict[str, Any]:
    """Return what a pipeline has loaded: image, ``count`` boxes and masks, a map of labels."""
    import torch
    from mmdet.structures.bbox import HorizontalBoxes
    from mmdet.structures.mask import BitmapMasks, PolygonMasks
    image = arrays['image'].astype(dtype)
    height, width = image.shape[:2]
    masks = BitmapMasks(list(arrays['masks'][:count]), height, width)
    return dict(
        img=image, img_shape=(height, width), ori_shape=(height, width), img_id=0, img_path='a.png',
        gt_bboxes=HorizontalBoxes(torch.tensor(BOXES[:count], dtype=torch.float32)),
        gt_bboxes_labels=np.array(LABELS[:count], np.int64),
        gt_ignore_flags=np.zeros(count, bool),
        gt_masks=PolygonMasks(polygons()[:count], height, width) if polygon else masks,
        gt_seg_map=arrays['label_map'].copy())
