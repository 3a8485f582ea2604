"""Configs whose text is not formatted.

YAPF takes a second for the text of a detector's config; MMEngine refuses one that holds objects.
"""
from unittest import mock

from mmengine.config import Config


class Unformatted(Config):
    """A config whose text, which is written at every start and checkpoint, stays as it is."""

    @property
    def pretty_text(self):
        with mock.patch('mmengine.config.config.FormatCode', lambda text, **style: (text, True)):
            return super().pretty_text


def unformatted(cfg):
    """Let a config, and copies of it, write their text as it is."""
    object.__setattr__(cfg, '__class__', Unformatted)
    return cfg


def formatted(cfg):
    """Let a config write its text as MMEngine does."""
    object.__setattr__(cfg, '__class__', Config)
    return cfg
