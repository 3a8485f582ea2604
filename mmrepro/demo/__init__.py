"""The demonstration: a dataset of real photographs, a classifier, shipped configs.

Modules that its trainings import are here as well.
"""
from __future__ import annotations

from typing import Any

from .. import ops
from ..activation import deactivate
from ..objects.digests import state_digest
from ..run.hooks.fingerprint import FingerprintHook
from .dataset import CLASSES, data_digest, demo_config, use_data, write_dataset


class DigestHook(FingerprintHook):
    """Fingerprints with the digest of the weights that a reader can compute from a checkpoint."""

    def extra(self, runner: Any) -> dict[str, Any]:
        return dict(weights=state_digest(runner.model.state_dict()))


def only_operators() -> None:
    """Leave this process to MMEngine's own runner; mmcv's operators are provided as before."""
    deactivate()
    ops.install()
