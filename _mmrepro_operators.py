"""Provide ``mmcv._ext`` where mmcv has none, until a process imports mmrepro.

In an installation, ``mmrepro.pth`` imports this module when Python starts; it imports nothing. The
operators are imported as part of this module, because importing ``mmrepro`` would activate it.
"""
import sys

__path__ = [__file__.rpartition('_mmrepro_operators')[0] + 'mmrepro']


class Finder:
    """Finds ``mmcv._ext`` after all other finders, until ``mmrepro`` is imported and does it."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != 'mmcv._ext' or 'mmrepro' in sys.modules:
            return None
        from _mmrepro_operators.ops.provider import finder
        return finder.find_spec(name)


sys.meta_path.append(Finder)
