"""Numbers and images of a report in TensorBoard, Weights & Biases and so on.

MMEngine's visualizer knows the backends that a config asks for (``vis_backends``); a report goes
through it, so that it lands beside the training curves.
"""
from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from typing import Any

from .report import Report

# writes into the folder as well; its files would only repeat those of the report
LOCAL = 'LocalVisBackend'


def backends_of(cfg: Any) -> list[Mapping[str, Any]]:
    """Return the backends of a config's visualizer, except for the local backend."""
    visualizer = cfg.get('visualizer') or {}
    backends = visualizer.get('vis_backends') or cfg.get('vis_backends') or []
    return [backend for backend in ([backends] if isinstance(backends, Mapping) else backends)
            if str(getattr(backend['type'], '__name__', backend['type'])).rpartition('.')[2]
            != LOCAL]


def publish(cfg: Any, folder: str, name: str, report: Report) -> list[str]:
    """Send scalars and figures of a report to the config's backends; returns the names of those.

    Args:
        folder: where backends put their files.
        name: beginning of the names of the figures.
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
    for backend in built:
        for tag, value, step in report.scalars:
            backend.add_scalar(tag, value, step=step)
        for tag, data in report.images.items():
            pixels = np.asarray(Image.open(io.BytesIO(data)).convert('RGB'))
            backend.add_image(f'{name}/{tag}', pixels, step=0)
        backend.close()
    return [type(backend).__name__ for backend in built]
