"""Random numbers, clocks, addresses and other chance in samples and in steps."""
from __future__ import annotations

import os
import random
import secrets
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import cv2
import numpy as np
import torch

from .samples import Brighter, Image
from .setup import model, setup, transform
from .steps import Extra

SAMPLES = 'numbers of a transform'
STEPS = 'numbers of a step'


@setup(SAMPLES)
@transform
class GlobalGenerators(Brighter):
    def value(self, img, results):
        return random.random() + np.random.rand() + float(torch.rand(()))


@setup(SAMPLES)
@transform
class SeededOfItsOwn(Brighter):
    def __init__(self):
        self.rng = np.random.default_rng(5)

    def value(self, img, results):
        return self.rng.normal()


@setup(SAMPLES)
@transform
class LegacyState(Brighter):
    def __init__(self):
        self.rng = np.random.RandomState(5)

    def value(self, img, results):
        return self.rng.randn()


@setup(SAMPLES)
@transform
class SeededByTheSample(Brighter):
    def value(self, img, results):
        return np.random.RandomState(results['number']).rand()


@setup(SAMPLES)
@transform
class ReseedsTheGlobalGenerator(Brighter):
    """Draws the same number for all images: the bits of a run are equal."""

    def value(self, img, results):
        np.random.seed(3)
        return np.random.rand()


@setup(SAMPLES)
@transform
class SeededByTheClock(Brighter):
    def value(self, img, results):
        return random.Random(int(time.time() * 1e6)).random()


@setup(SAMPLES)
@transform
class ReseedsFromTheClock(Brighter):
    def value(self, img, results):
        random.seed()
        return random.random()


@setup(SAMPLES)
@transform
class GeneratorWithoutASeed(Brighter):
    def __init__(self):
        self.rng = np.random.default_rng()

    def value(self, img, results):
        return self.rng.normal()


@setup(SAMPLES)
@transform
class SystemRandom(Brighter):
    def value(self, img, results):
        return random.SystemRandom().random()


@setup(SAMPLES)
@transform
class SecretToken(Brighter):
    def value(self, img, results):
        return secrets.randbelow(1000)


@setup(SAMPLES)
@transform
class UniqueIdentifier(Brighter):
    def value(self, img, results):
        return uuid.uuid4().int % 1009


@setup(SAMPLES)
@transform
class TimeOfDay(Brighter):
    def value(self, img, results):
        return datetime.now().microsecond / 1e6


@setup(SAMPLES)
@transform
class AddressOfAnObject(Brighter):
    def value(self, img, results):
        return id(object()) % 1009 + id(img) % 1013


@setup(SAMPLES)
@transform
class NumberOfTheProcess(Brighter):
    def value(self, img, results):
        return os.getpid() % 97


@setup(SAMPLES)
@transform
class NumberOfTheWorker(Brighter):
    def value(self, img, results):
        worker = torch.utils.data.get_worker_info()
        return 0 if worker is None else worker.id + 1


@setup(SAMPLES)
@transform
class SeedOfTheWorker(Brighter):
    def value(self, img, results):
        return torch.initial_seed() % 101


@setup(SAMPLES)
@transform
class NameOfATemporaryFile(Brighter):
    def value(self, img, results):
        with tempfile.NamedTemporaryFile() as file:
            return sum(map(ord, os.path.basename(file.name)))


@setup(SAMPLES)
@transform
class GeneratorOfOpenCV(Brighter):
    def value(self, img, results):
        noise = np.empty((1, 1), np.float32)
        cv2.randu(noise, 0, 1)
        return noise[0, 0]


@setup(SAMPLES)
@transform
class MemoryThatWasNotWritten(Brighter):
    def value(self, img, results):
        return np.nan_to_num(np.empty((3, 8, 8), np.float32), nan=1, posinf=2, neginf=3).clip(-9, 9)


@setup(SAMPLES)
@transform
class PoolOfThreads(Brighter):
    """Four threads draw from one generator, in any order."""

    def value(self, img, results):
        def draw(channel):
            time.sleep(0)
            return np.random.rand()

        with ThreadPoolExecutor(4) as pool:
            drawn = list(pool.map(draw, range(3)))
        return np.array(drawn, np.float32)[:, None, None]


@setup(SAMPLES)
@transform
class OrderOfASet(Brighter):
    """Of objects: it follows their addresses."""

    def value(self, img, results):
        marks = {Image(number) for number in range(6)}
        return sum(mark.img * place for place, mark in enumerate(marks))


@setup(SAMPLES)
@transform
class SeedsTorchAnew(Brighter):
    def value(self, img, results):
        torch.seed()
        return float(torch.rand(()))


# ---------------------------------------------------------------------------------- steps


@setup(STEPS)
@model
class GlobalGeneratorsInTheLoss(Extra):
    def extra(self, inputs, label, loss):
        return random.random() + np.random.rand() + torch.rand(())


@setup(STEPS)
@model
class SeedsItsOwnGenerator(Extra):
    """Every step makes a generator, always with the same seed."""

    def extra(self, inputs, label, loss):
        return torch.rand((), generator=torch.Generator().manual_seed(5))


@setup(STEPS)
@model
class ClockInTheLoss(Extra):
    def extra(self, inputs, label, loss):
        return time.time() % 1


@setup(STEPS)
@model
class GeneratorFromEntropy(Extra):
    def extra(self, inputs, label, loss):
        return np.random.default_rng().random()


@setup(STEPS)
@model
class UniqueName(Extra):
    def extra(self, inputs, label, loss):
        return uuid.uuid4().int % 97


@setup(STEPS)
@model
class Entropy(Extra):
    def extra(self, inputs, label, loss):
        return os.urandom(1)[0]


@setup(STEPS)
@model
class AddressOfATensor(Extra):
    def extra(self, inputs, label, loss):
        return (inputs.data_ptr() >> 6) % 1009


@setup(STEPS)
@model
class SetOfModules(Extra):
    def extra(self, inputs, label, loss):
        parts = {object() for _ in range(5)}
        return sum(hash(part) % 7 * place for place, part in enumerate(parts))


@setup(STEPS)
@model
class NumberOfTheProcessInAStep(Extra):
    """Two steps of one process agree."""

    def extra(self, inputs, label, loss):
        return os.getpid() % 97


@setup(STEPS)
@model
class ClockOnce(Extra):
    """Draws a constant from the clock when it is built."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.phase = time.time() % 1

    def extra(self, inputs, label, loss):
        return self.phase


@setup(STEPS)
@model
class WeightsFromEntropy(Extra):
    """Initializes a weight with numbers that no seed reaches."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with torch.no_grad():
            self.head.fc.weight.add_(float(np.random.default_rng().normal()))

    def extra(self, inputs, label, loss):
        return 1.


@setup(STEPS)
@model
class ThreadsThatDraw(Extra):
    """The thread that begins first gets the first number."""

    def extra(self, inputs, label, loss):
        def draw(place):
            time.sleep(0)
            return torch.rand(())

        with ThreadPoolExecutor(8) as pool:
            drawn = list(pool.map(draw, range(64)))
        return sum(place * number for place, number in enumerate(drawn))


@setup(STEPS)
@model
class ReseedsItself(Extra):
    """Seeds torch in every step: dropout has the same mask every time, in every run."""

    def extra(self, inputs, label, loss):
        torch.manual_seed(0)
        return torch.rand(())


@setup(STEPS)
@model
class ReseedsFromTheClockInAStep(Extra):
    def extra(self, inputs, label, loss):
        torch.manual_seed(time.time_ns() % (1 << 30))
        return torch.rand(())


@setup(STEPS)
@model
class MemoryNotWritten(Extra):
    def extra(self, inputs, label, loss):
        return torch.empty(64).nan_to_num(1, 1, 1).clamp(-1, 1).sum()
