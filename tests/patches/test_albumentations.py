"""Albumentations pipelines, with the real package where it is installed and with a fake."""
import importlib.util
import random
import sys
from types import ModuleType

import numpy as np
import pytest
from stock_mmdet import stock  # noqa: F401  a fixture

from mmrepro import patches

pytestmark = pytest.mark.usefixtures('stock')


class OwnGenerators:
    """A pipeline as albumentations has had since 1.4.21: generators of its own."""

    def __init__(self, seed=None):
        self.seed = seed
        self.set_random_state(np.random.default_rng(seed), random.Random(seed))

    def set_random_state(self, random_generator, py_random):
        self.random_generator, self.py_random = random_generator, py_random

    def __call__(self, **data):
        return self.random_generator.random(), self.py_random.random()


class GlobalGenerators:
    """A pipeline as albumentations had before 1.4.21: Python's global generator."""

    def __call__(self, **data):
        return random.random()


@pytest.fixture
def fake(monkeypatch):
    """Install a fake pipeline class where MMDetection would have imported the real one."""
    import mmdet.datasets.transforms  # noqa: F401  the real one comes first, if there is one

    def install(cls):
        pipeline = type('Compose', (cls, ), {'__call__': cls.__call__})
        module = ModuleType('albumentations.core.composition')
        module.Compose = pipeline
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return pipeline

    return install


def draw(pipeline, seed):
    random.seed(seed)
    np.random.seed(seed)
    return pipeline(image=None)


def test_own_generators_follow_the_sample(fake):
    cls = fake(OwnGenerators)
    pipeline = cls()
    assert draw(pipeline, 1) != draw(pipeline, 1)
    patches.apply()
    first = draw(pipeline, 1)
    assert pipeline(image=None) != first, 'a second call in one sample draws anew'
    assert draw(pipeline, 2) != first and first[0] != first[1]
    assert draw(pipeline, 1) == first == draw(cls(), 1), 'also a pipeline of another process'


@pytest.mark.parametrize('cls, arguments', [(OwnGenerators, (3, )), (GlobalGenerators, ())])
def test_a_seed_of_the_user_is_kept_and_old_versions_are_left_alone(fake, cls, arguments):
    pipeline = fake(cls)(*arguments)
    expected = draw(cls(*arguments), 1)
    patches.apply()
    assert draw(pipeline, 1) == expected


@pytest.mark.skipif(importlib.util.find_spec('albumentations') is None,
                    reason='albumentations is an optional package')
def test_the_installed_package_follows_the_sample():
    import albumentations
    from mmdet.datasets.transforms import Albu
    own = hasattr(albumentations.Compose, 'set_random_state')
    transform = Albu([
        dict(type='HorizontalFlip', p=0.5),
        dict(type='RandomBrightnessContrast', p=0.5),
        dict(type='OneOf', p=0.9, transforms=[dict(type='Blur', p=1.), dict(type='CLAHE', p=1.)]),
    ])
    image = np.random.RandomState(0).randint(0, 255, (32, 32, 3), np.uint8)

    def outcomes(seeds):
        out = []
        for seed in seeds:
            random.seed(seed)
            np.random.seed(seed)
            out.append(np.ascontiguousarray(transform(dict(img=image.copy()))['img']).tobytes())
        return out

    assert (len(set(outcomes([4] * 6))) > 1) == own
    patches.apply()
    assert len(set(outcomes([4] * 6))) == 1
    assert len(set(outcomes(range(12)))) > 6
    assert outcomes([1, 2, 3]) == outcomes([3, 2, 1])[::-1]
