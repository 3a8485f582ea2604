"""Put configs and tools where MIM and MMEngine look for them, and mmrepro.pth where Python does.

Metadata are in pyproject.toml, packages in setup.cfg.
"""
import os
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
# demo.sh, test.sh, docs.sh, the check of a GPU and what they share need a checkout; the command is
# `mmrepro demo` in an installed package
LEFT_OUT = ('__pycache__', '*.pyc', 'demo.sh', 'test.sh', 'test_hosts.sh', 'docs.sh',
            'gpu_check.py', 'gpu_report.sh', 'gpu_atomics.sh', 'build_mmcv.sh', 'environment.sh',
            'try_wheel.sh',
            # of docs: what messages name, and its links to other pages
            'images', 'results', '*.css')

# source -> targets inside the package
EXTRA = {
    # `mim train mmrepro ...` and MMEngine look under .mim
    'configs': ('.mim/configs', ),
    'tools': ('.mim/tools', ),
    'model-index.yml': ('.mim/model-index.yml', ),
    'docs': ('.mim/docs', ),
    # `with read_base(): from mmrepro.configs._base_.reproducible import *` reads this path; in a
    # checkout a one-line file stands there
    'configs/_base_': ('configs/_base_', ),
}


class BuildWithConfigs(build_py):
    """build_py that also ships what lies outside of the package."""

    def run(self):
        super().run()
        editable = getattr(self, 'editable_mode', False)
        package = HERE / 'mmrepro' if editable else Path(self.build_lib) / 'mmrepro'
        for source, targets in EXTRA.items():
            for target in targets:
                if not editable:
                    _copy(HERE / source, package / target)
                elif target.startswith('.mim/'):
                    _link(HERE / source, package / target)
        if not editable:
            # Python executes it when it starts
            Path(self.build_lib, 'mmrepro.pth').write_text('import _mmrepro_operators\n')


def _copy(source, target):
    _remove(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(*LEFT_OUT))
    else:
        shutil.copy(source, target)


def _link(source, target):
    """Link in an editable installation, so that an edited config takes effect."""
    _remove(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    (target.parent / '.gitignore').write_text('*\n')
    os.symlink(os.path.relpath(source, target.parent), target, source.is_dir())


def _remove(path):
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


setup(cmdclass={'build_py': BuildWithConfigs})
