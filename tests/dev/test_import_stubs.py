"""The stubs that let the check run where MMDetection's compiled dependencies are missing."""
from harness import python


def test_mmdetection_imports_without_compiled_packages():
    """In a process that has only torch, numpy and OpenCV, as far as compiled code goes."""
    code = '''
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in ('pycocotools', 'scipy', 'shapely', 'matplotlib', 'PIL'):
            raise ModuleNotFoundError(name, name=name)
from dev import import_stubs
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in import_stubs.PACKAGES else real(name)
for name in list(sys.modules):
    assert name.partition('.')[0] not in import_stubs.PACKAGES
assert import_stubs.install() == import_stubs.PACKAGES
finder = sys.meta_path.pop()
sys.meta_path.insert(0, finder)
from mmrepro import ops
ops.install()
from mmdet.utils import register_all_modules
register_all_modules(init_default_scope=True)
import pycocotools.mask
print(pycocotools.mask.__spec__.origin)
'''
    assert python('-c', code).splitlines()[-1] == 'stub'
