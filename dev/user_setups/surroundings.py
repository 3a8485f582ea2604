"""Files of the run, data that predictions change, and settings of the process."""
from __future__ import annotations

import builtins
import collections
import dataclasses
import io
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
import warnings
from multiprocessing import shared_memory
from pathlib import Path

import numpy as np
import torch
from faults.tiny import Tiny, TinyData, TinyMetric, TinyPreprocessor
from mmengine.hooks import Hook
from mmengine.logging import MessageHub
from mmengine.structures import BaseDataElement, InstanceData
from PIL import Image

from .averages import TEACHERS
from .loading import ORDER
from .programs import WORK_DIR, images
from .recipes import VALUES
from .samples import KEPT as LEFT_BY_SAMPLES
from .settings import PROCESS
from .setup import (
    dataset,
    hook,
    metric,
    model,
    preprocessor,
    sampler,
    setup,
    use_all,
)
from .steps import Extra
from .stores import STORES

IN_PLACE = ('workers', 'resumed at 3', 'resumed at 8', 'resumed at 12')

# ------------------------------------------------------------------------- files of the run


def beside_the_first(pattern):
    """Resume where the files of the run are."""
    def change(cfg):
        if cfg.get('resume'):
            os.makedirs(cfg.work_dir, exist_ok=True)
            for path in Path(cfg.first).glob(pattern):
                shutil.copy(path, cfg.work_dir)
    return change


@model
class LearnsFromTheLastEpoch(Extra):
    teacher = (None, )  # in a tuple: no submodule

    def extra(self, inputs, label, loss):
        teacher, = self.teacher
        if teacher is None:
            return 0.
        with torch.no_grad():
            target = teacher(inputs, label)
        return 5 * (self(inputs, label) - target).pow(2).mean()


class TeacherOfAFile(Hook):
    def file(self, epoch):
        return f'teacher_{epoch}.pth'

    def before_train_epoch(self, runner):
        path = Path(runner.work_dir, self.file(runner.epoch))
        if path.exists():
            teacher = Tiny(data_preprocessor=dict(type='TinyPreprocessor')).eval()
            content = torch.load(path, weights_only=False)
            teacher.load_state_dict(content.get('state_dict', content))
            runner.model.teacher = (teacher, )


@hook
class SavesATeacher(TeacherOfAFile):
    def after_train_epoch(self, runner):
        path = Path(runner.work_dir, self.file(runner.epoch + 1))
        torch.save(runner.model.state_dict(), path)


@setup(TEACHERS, variations=IN_PLACE, later=beside_the_first('teacher_*'))
def teacher_saved_by_torch(cfg):
    use_all(cfg, LearnsFromTheLastEpoch, SavesATeacher)


@hook
class ReadsItsCheckpoint(TeacherOfAFile):
    def file(self, epoch):
        return f'iter_{8 * epoch}.pth'


@setup(TEACHERS, variations=IN_PLACE, later=beside_the_first('iter_*.pth'))
def last_checkpoint_as_teacher(cfg):
    """Born-again networks: the last epoch teaches the next."""
    use_all(cfg, LearnsFromTheLastEpoch, ReadsItsCheckpoint)


@hook
class ListsHardImages(Hook):
    """Writes a list for each epoch; the first is kept for all that come."""

    def after_train_epoch(self, runner):
        path = Path(runner.work_dir, f'hard_{runner.epoch + 1}.json')
        path.write_text(json.dumps([runner.epoch, runner.epoch + 3]))

    def before_train_epoch(self, runner):
        lists = sorted(Path(runner.work_dir).glob('hard_*.json'))
        lists = [path for path in lists if int(path.stem[5:]) <= runner.epoch]
        numbers = [number for path in lists for number in json.loads(path.read_text())]
        for info in runner.train_dataloader.dataset.data_list:
            info['label'] = 2 if info['number'] in numbers else info['number'] % 3


@setup(WORK_DIR, variations=IN_PLACE, later=beside_the_first('hard_*'))
def lists_of_hard_images(cfg):
    use_all(cfg, ListsHardImages)


# -------------------------------------------------------------------------------------- data


@hook
class AsksForLabels(Hook):
    """Active learning: images that the model is least sure of take the place of others."""

    def after_train_epoch(self, runner):
        data = runner.train_dataloader.dataset
        with torch.no_grad():
            features = runner.model.backbone[0](torch.from_numpy(np.stack(images())))
            scores = runner.model.head.fc(features.mean((2, 3))).softmax(1)
        for number in scores.max(1).values.argsort()[:2].tolist():
            data.data_list[number] = dict(number=number + 16, label=number % 3)


@setup(LEFT_BY_SAMPLES)
def active_learning(cfg):
    use_all(cfg, AsksForLabels)


@dataclasses.dataclass
class Sample:
    __slots__ = ('image', 'label', 'weight')
    image: torch.Tensor
    label: torch.Tensor
    weight: float


@dataset
class SamplesOfAClass(TinyData):
    def prepare_data(self, idx):
        return Sample(*super().prepare_data(idx).values(), weight=float(np.random.rand()))


@preprocessor
class StacksSamples(TinyPreprocessor):
    def forward(self, data, training=False):
        return dict(inputs=torch.stack([sample.image * sample.weight for sample in data]),
                    label=torch.stack([sample.label for sample in data]))


@setup(VALUES)
def samples_of_a_class(cfg):
    use_all(cfg, SamplesOfAClass, StacksSamples)


Scale = collections.namedtuple('Scale', 'height width')


@setup(VALUES)
@dataset
class ValuesOfAllKinds(TinyData):
    """Beside what the model reads."""

    def prepare_data(self, idx):
        return dict(
            super().prepare_data(idx), scale=Scale(8, 8.), none=None, bits=b'x', large=1 << 80,
            names=np.array(['a', None], dtype=object), day=np.datetime64('2020-01-01'),
            masked=np.ma.masked_array([1, 2], [True, False]), ids={1, 2}, part=1j,
            record=np.zeros(2, [('x', 'f4'), ('name', 'U3')]), mask=Image.new('L', (2, 2), 1),
            boxes=torch.zeros(0, 4), half=torch.rand(2).half(), nothing=float('nan'), cls=Sample)


@dataset
class OwnElements(TinyData):
    def prepare_data(self, idx):
        sample = super().prepare_data(idx)
        element = BaseDataElement(metainfo=dict(path=Path(f'{idx}.png'), gain=np.random.rand()))
        element.boxes, element.label = InstanceData(boxes=torch.rand(3, 4)), sample['label']
        return dict(inputs=sample['inputs'], data_samples=element)


@preprocessor
class ReadsElements(TinyPreprocessor):
    def forward(self, data, training=False):
        elements = data['data_samples']
        return dict(label=torch.stack([element.label for element in elements]), inputs=torch.stack([
            image * element.gain + element.boxes.boxes.mean()
            for image, element in zip(data['inputs'], elements)]))


@setup(VALUES)
def elements_of_its_own(cfg):
    use_all(cfg, OwnElements, ReadsElements)


@model
class TimesPredictions(Tiny):
    def forward(self, inputs, label, mode='tensor'):
        begun = time.perf_counter()
        result = super().forward(inputs, label, mode)
        if mode != 'predict':
            return result
        return [dict(scores=scores, seconds=time.perf_counter() - begun) for scores in result]


@metric
class ReadsScores(TinyMetric):
    def process(self, data_batch, data_samples):
        super().process(data_batch, [sample['scores'] for sample in data_samples])


@setup(VALUES)
def times_in_predictions(cfg):
    use_all(cfg, TimesPredictions, ReadsScores)


@dataset
class Videos(TinyData):
    """Four videos of four frames; a frame comes with one beside it."""

    def __getitem__(self, idx):
        if not isinstance(idx, tuple):
            return super().__getitem__(idx)
        video, frame = idx
        beside = min(max(frame + np.random.randint(-1, 2), 0), 3)
        sample, other = (super(Videos, self).__getitem__(4 * video + number)
                         for number in (frame, beside))
        return dict(sample, inputs=sample['inputs'] + .5 * other['inputs'])


@sampler
class FramesOfVideos(torch.utils.data.Sampler):
    """Its items are pairs, as those of TrackImgSampler."""

    def __init__(self, dataset, **kwargs):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = np.random.default_rng(self.epoch).permutation(16)
        return iter([(int(number) // 4, int(number) % 4) for number in order])

    def __len__(self):
        return 16


@setup(ORDER)
def frames_of_videos(cfg):
    use_all(cfg, Videos, FramesOfVideos)


def brightened(image):
    return image * np.float32(np.random.uniform(.5, 1.5))


@setup(LEFT_BY_SAMPLES)
@dataset
class AugmentsInAPool(TinyData):
    """Processes of its own, which each draw from the generator that they were forked with."""
    pool = None

    def prepare_data(self, idx):
        self.pool = self.pool or multiprocessing.get_context('fork').Pool(2)
        image, = self.pool.map(brightened, [images()[idx]])
        sample = super().prepare_data(idx)
        return dict(sample, inputs=sample['inputs'] + torch.from_numpy(image))


@setup(STORES)
@dataset
class ImagesInSharedMemory(TinyData):
    memory = None

    def full_init(self):
        super().full_init()
        if self.memory is None:
            content = np.stack(images())
            self.memory = shared_memory.SharedMemory(create=True, size=content.nbytes)
            self.shared = np.ndarray(content.shape, content.dtype, buffer=self.memory.buf)
            self.shared[:] = content

    def prepare_data(self, idx):
        sample = super().prepare_data(idx)
        return dict(sample, inputs=sample['inputs'] + torch.from_numpy(self.shared[idx].copy()))


@hook
class NotesLosses(Hook):
    """In MessageHub, which checkpoints hold."""

    def after_train_epoch(self, runner):
        with torch.no_grad():
            features = runner.model.backbone[0](torch.from_numpy(np.stack(images())))
            scores = runner.model.head.fc(features.mean((2, 3))).logsumexp(1)
        runner.message_hub.update_info('difficulty', scores.tolist())


@sampler
class HardFirst(torch.utils.data.Sampler):
    def __init__(self, dataset, **kwargs):
        self.size = len(dataset)

    def __iter__(self):
        hub = MessageHub.get_current_instance()
        scores = hub.runtime_info.get('difficulty', [0.] * self.size)
        return iter(sorted(range(self.size), key=lambda number: -scores[number]))

    def __len__(self):
        return self.size


@setup(ORDER)
def hard_images_first(cfg):
    use_all(cfg, NotesLosses, HardFirst)


# ------------------------------------------------------------------------------- the process


@setup(PROCESS)
@hook
class IgnoresItsChildren(Hook):
    """So that none becomes a zombie."""

    def before_run(self, runner):
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)


@setup(PROCESS)
@hook
class RaisesWarnings(Hook):
    def before_run(self, runner):
        warnings.simplefilter('error')


@setup(PROCESS)
@hook
class KeepsTheOutput(Hook):
    """Text goes to an object that is no file, as trackers and notebooks have it."""

    def before_run(self, runner):
        self.before = sys.stdout, sys.stderr
        sys.stdout = sys.stderr = io.StringIO()

    def after_run(self, runner):
        sys.stdout, sys.stderr = self.before


@setup(PROCESS)
@hook
class OpensFilesOfClouds(Hook):
    def before_run(self, runner):
        original = builtins.open

        def opens(file, *args, **kwargs):
            return original(file, *args, **kwargs)
        builtins.open = opens


@setup(PROCESS)
@hook
class CleansTheEnvironment(Hook):
    def before_train(self, runner):
        for name in [*os.environ]:
            if name.startswith(('MM', 'OMP', 'PYTHON', 'TORCH')):
                del os.environ[name]
