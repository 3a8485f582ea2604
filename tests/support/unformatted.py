"""Configs whose text is not formatted: YAPF takes a second for that of a detector."""
from unittest import mock

from mmengine.config import Config


class _Unformatted(Config):
    """A config whose text, which is written at every start and checkpoint, stays as it is."""

    @property
    def pretty_text(self):
        with mock.patch('mmengine.config.config.FormatCode', lambda text, **style: (text, True)):
            return super().pretty_text


def unformatted(cfg):
    """Let a config, and copies of it, write their text as it is."""
    object.__setattr__(cfg, '__class__', _Unformatted)
    return cfg
