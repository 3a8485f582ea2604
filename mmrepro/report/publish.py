"""Numbers and pictures of a report in TensorBoard, Weights & Biases and so on.

MMEngine's visualiser knows the backends that a config asks for (``vis_backends``); a report goes
through it, so that it lands beside the training curves.
"""
from __future__ import annotations

import copy
import io
import os
from collections.abc import Iterable, Mapping
from typing import Any

# writes files of its own into the folder, which hold nothing that the report has not written
LOCAL = 'LocalVisBackend'


def backends_of(cfg: Any) -> list[Mapping[str, Any]]:
    """The backends of a config's visualiser, without the local one."""
    visualizer = cfg.get('visualizer') or {}
    found = visualizer.get('vis_backends') or cfg.get('vis_backends') or []
    found = [found] if isinstance(found, Mapping) else found
    return [backend for backend in found
            if str(getattr(backend['type'], '__name__', backend['type'])).rpartition('.')[2]
            != LOCAL]


def write_files(folder: str, files: Mapping[str, bytes]) -> list[str]:
    """Write ``files`` (name -> content) into a folder, which is made; returns their paths."""
    os.makedirs(folder, exist_ok=True)
    for name, data in files.items():
        with open(os.path.join(folder, name), 'wb') as file:
            file.write(data)
    return [os.path.join(folder, name) for name in files]


def publish(cfg: Any, folder: str, name: str,
            scalars: Iterable[tuple[str, float, int]],
            pictures: Mapping[str, bytes] | None = None) -> list[str]:
    """Send scalars and PNG pictures to the config's backends; returns the names of those.

    Args:
        folder: where backends put their files.
        scalars: ``(name, value, step)``.
        pictures: name -> PNG.
    """
    backends = backends_of(cfg)
    if not backends:
        return []
    import mmengine.visualization  # noqa: F401  registers the backends
    import numpy as np
    from mmengine.registry import VISBACKENDS
    from PIL import Image
    built = [VISBACKENDS.build(copy.deepcopy({'save_dir': folder, **backend}))
             for backend in backends]
    scalars = list(scalars)
    for backend in built:
        for tag, value, step in scalars:
            backend.add_scalar(tag, value, step=step)
        for tag, data in (pictures or {}).items():
            pixels = np.asarray(Image.open(io.BytesIO(data)).convert('RGB'))
            backend.add_image(f'{name}/{tag}', pixels, step=0)
        backend.close()
    return [type(backend).__name__ for backend in built]
