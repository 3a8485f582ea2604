"""Numbers and pictures of a report in TensorBoard, Weights & Biases and so on.

MMEngine's visualiser knows the backends that a config asks for (``vis_backends``); a report goes
through it, so that it lands beside the training curves.
"""
from __future__ import annotations

import copy
import io
from typing import Any, Iterable, List, Mapping, Optional, Tuple

__all__ = ['backends_of', 'publish']

# writes files of its own into the folder, which hold nothing that the report has not written
LOCAL = 'LocalVisBackend'


def backends_of(cfg: Any) -> List[Mapping[str, Any]]:
    """The backends of a config's visualiser, without the local one."""
    visualizer = cfg.get('visualizer') or {}
    found = visualizer.get('vis_backends') or cfg.get('vis_backends') or []
    found = [found] if isinstance(found, Mapping) else found
    return [backend for backend in found
            if str(getattr(backend['type'], '__name__', backend['type'])).rpartition('.')[2]
            != LOCAL]


def publish(cfg: Any, folder: str, name: str,
            scalars: Iterable[Tuple[str, float, int]],
            pictures: Optional[Mapping[str, bytes]] = None) -> List[str]:
    """Send scalars and PNG pictures to the config's backends; returns the names of those.

    Args:
        cfg: the config; without backends beside the local one, nothing happens.
        folder: where backends put their files.
        name: of the visualiser, for backends that show it.
        scalars: ``(name, value, step)``.
        pictures: name -> PNG.
    """
    backends = backends_of(cfg)
    if not backends:
        return []
    import mmengine.visualization  # noqa: F401  registers the backends
    from mmengine.registry import VISBACKENDS
    built = []
    for backend in backends:
        settings = copy.deepcopy(dict(backend))
        settings.setdefault('save_dir', folder)
        built.append(VISBACKENDS.build(settings))
    scalars = list(scalars)
    for backend in built:
        for tag, value, step in scalars:
            backend.add_scalar(tag, value, step=step)
        for tag, data in (pictures or {}).items():
            backend.add_image(f'{name}/{tag}', _pixels(data), step=0)
        backend.close()
    return [type(backend).__name__ for backend in built]


def _pixels(data: bytes) -> Any:
    """RGB, uint8, height x width x 3."""
    import numpy as np
    from PIL import Image
    return np.asarray(Image.open(io.BytesIO(data)).convert('RGB'))
