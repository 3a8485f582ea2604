"""Serve programs that use MMEngine or mmcv and do not import mmrepro, where it is installed.

``mmrepro.pth`` imports this module when Python starts; it imports nothing. What it needs later is
imported as part of this module, because importing ``mmrepro`` would activate it.
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


class CheckpointFinder:
    """Lets torch load what MMEngine saves, from the import of ``mmengine`` on; finds nothing."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == 'mmengine' and 'mmrepro' not in sys.modules:
            from _mmrepro_operators.util.imports import after_import
            for module in ('torch', 'mmengine.logging'):
                after_import(module, _allow_checkpoints)


def _allow_checkpoints(module):
    if 'torch' in sys.modules and 'mmengine.logging' in sys.modules:
        from _mmrepro_operators.checkpoint import safe_loading
        safe_loading.allow()


sys.meta_path.insert(0, CheckpointFinder)
sys.meta_path.append(Finder)
