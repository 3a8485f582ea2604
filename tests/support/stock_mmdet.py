"""MMDetection with and without mmrepro's replacements."""
import pytest

from mmrepro import patches

__all__ = ['patched', 'stock']


@pytest.fixture
def stock():
    """Start and end with MMDetection as it is installed."""
    from mmengine.registry import init_default_scope
    init_default_scope('mmdet')  # a runner of another test may have left another scope
    patches.revert()
    yield
    patches.revert()


@pytest.fixture
def patched(stock):
    patches.apply()
