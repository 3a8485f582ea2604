"""Faults in the data pipeline, the data list and the sampler."""
import os
import random
import threading
import time

import numpy as np
from faults import tiny
from faults.fault import FROM, SEQUENTIAL, fault, planted, replaced
from mmengine.dataset import Compose
from torch.utils.data import BatchSampler

from mmrepro.data import sampling_orders


@planted(tiny.TinyJitter, 'transform', since=0, runs='AB', iteration=0, phase='data',
         operator='TinyJitter', kind='output', cause='entropy in a transform', mentions='urandom')
def numpys_default_rng_in_a_transform(original, self, results):
    results['img'] = results['img'] + np.random.default_rng().normal()
    return results


@fault(runs='AB', iteration=0, phase='data', operator='TinyFlip', kind='output',
       cause='generator of its own in a transform', mentions='rng')
def a_transform_with_a_generator_of_its_own(run):
    seed = dict(A=1, B=2)[run]  # from the operating system, in earnest

    @replaced(tiny.TinyFlip, 'transform', since=0)
    def own(original, self, results):
        if not hasattr(self, 'rng'):
            self.rng = np.random.default_rng(seed)
        results['img'] = results['img'] + self.rng.normal()
        return results


@planted(tiny.TinyFlip, 'transform', since=0, runs='AB', iteration=0, phase='data',
         operator='TinyFlip', kind='output', cause='entropy in a transform', mentions='urandom')
def system_random_in_a_transform(original, self, results):
    results['img'] = results['img'] * random.SystemRandom().random()
    return results


@planted(tiny.TinyJitter, 'transform', since=0, fast=True, runs='AB', iteration=0, phase='data',
         operator='TinyJitter', kind='output', cause='clock in a transform',
         mentions=('clock: time at', 'in a_generator_seeded_by_the_clock'))
def a_generator_seeded_by_the_clock(original, self, results):
    # its constructor reads entropy for any seed
    results['img'] = results['img'] + np.random.RandomState(
        int(time.time() * 1e6) % 2 ** 32).normal()
    return results


class Word(str):
    """A text whose hash follows from PYTHONHASHSEED as it is now: children of one process share
    the real one."""

    def __hash__(self):
        return sum(map(ord, self)) // (3 if os.environ.get('PYTHONHASHSEED') == '7' else 1)


@planted(tiny.TinyLoad, 'transform', since=0, runs='AB', env=dict(PYTHONHASHSEED='7'), iteration=0,
         phase='data', operator='TinyLoad', kind='output', cause='hash order in a transform')
def the_order_of_a_set(original, self, results):
    results = original(self, results)
    words = list({Word('car'), Word('dog'), Word('house'), Word('tree'), Word('zebra')})
    results['img'] = results['img'] + sum(i * len(word) for i, word in enumerate(words))
    return results


@planted(tiny.TinyData, 'load_data_list', since=0, fast=True, runs='AB',
         env=dict(PYTHONHASHSEED='7'), iteration=0, phase='data', operator='TinyData', kind='input',
         cause='hash order of the data list', mentions=('number', 'environment PYTHONHASHSEED'))
def a_data_list_in_the_order_of_a_set(original, self):
    entries = {Word(chr(97 + entry['number']) * 5): entry for entry in original(self)}
    return [entries[name] for name in set(entries)]


@planted(tiny.TinyJitter, 'transform', since=0, runs='AB', resume_at=FROM, phase='data',
         operator='TinyJitter', kind='output', cause='state of its own in a transform',
         mentions='self.seen: 5 /')
def a_transform_that_counts(original, self, results):
    self.seen = getattr(self, 'seen', -1) + 1
    noise = np.random.RandomState(5).normal() + random.Random(5).random()
    results['img'] = results['img'] * (noise - self.seen / 100)
    return original(self, results)


@fault(runs='AB', iteration=0, phase='data', operator='TinyLoad', kind='output',
       cause='directory listing in a transform', mentions='listdir')
def the_order_of_a_directory(run):
    listing = os.listdir

    @replaced(tiny.TinyLoad, 'transform', since=0)
    def unsorted(original, self, results):
        results = original(self, results)
        names = sorted(listing(os.path.dirname(tiny.__file__)), reverse=run == 'B')
        results['img'] = results['img'] + len(names[0])
        return results


@planted(tiny.TinyData, 'load_data_list', since=0, fast=True, iteration=0, phase='data',
         operator='TinyData', kind='input', cause='another entry in the data list',
         mentions='label')
def another_label_in_the_annotations(original, self):
    entries = original(self)
    for entry in entries[4:]:
        entry['label'] = (entry['label'] + 1) % 3
    return entries


@planted(tiny.TinyData, 'load_data_list', since=0, runs='AB', iteration=0, phase='data',
         operator='TinyData', kind='input', cause='entropy in the data list',
         mentions=('in TinyData.load_data_list', 'entropy of the operating system',
                   'in a_data_list_that_is_shuffled'))
def a_data_list_that_is_shuffled(original, self):
    entries = original(self)
    random.Random().shuffle(entries)
    return entries


@fault(fast=True, runs='AB', resume_at=5, iteration=5, phase='data', operator='RotatingSampler',
       kind='argument', cause='state lost at resume',
       mentions=('RotatingSampler.passes: 2 / 1', 'in RotatingSampler.__iter__'))
def a_sampler_that_counts_its_passes(run):
    from mmengine.registry import DATA_SAMPLERS

    class RotatingSampler:
        def __init__(self, dataset, shuffle, seed=None):
            self.size, self.passes = len(dataset), 0

        def __len__(self):
            return self.size

        def __iter__(self):
            self.passes += 1
            return iter([(self.passes + i) % self.size for i in range(self.size)])

    DATA_SAMPLERS.module_dict['DefaultSampler'] = RotatingSampler


@planted(tiny.TinyData, 'load_data_list', since=0, iteration=0, phase='data', operator='TinyData',
         kind='input', cause='another entry in the data list', mentions='number')
def a_data_list_in_another_order(original, self):
    return original(self)[::-1]


@planted(sampling_orders, '_permutation', since=0, iteration=0, phase='data',
         operator='DefaultSampler', kind='argument', cause='order of samples')
def another_order_of_samples(original, *args):
    return original(*args)[::-1]


@fault(iteration=0, phase='data', path='batch', cause='collating the batch')
def the_collation(run):
    from mmengine.registry import FUNCTIONS
    collate = FUNCTIONS.get('pseudo_collate')

    def swap(batch):
        found = collate(batch)
        found['label'] = found['label'][::-1]
        return found

    FUNCTIONS.module_dict['pseudo_collate'] = swap


@planted(tiny.TinyJitter, 'transform', since=0, iteration=0, phase='data', operator='TinyJitter',
         kind='output', cause='noise in a transform')
def noise_in_a_transform(original, self, results):
    results = original(self, results)
    results['img'] = results['img'] * 1.0001
    return results


@fault(runs='AB', iteration=0, phase='data', operator='TinyFlip', kind='output',
       cause='threads in a transform', mentions='in threaded')
def a_transform_that_starts_a_thread(run):
    @replaced(tiny.TinyFlip, 'transform', since=0)
    def threaded(original, self, results):
        results, found = original(self, results), []
        thread = threading.Thread(target=lambda: found.append(1. if run == 'A' else 2.))
        thread.start()
        thread.join()
        results['img'] = results['img'] * found[0]
        return results


@planted(tiny.TinyLoad, 'transform', since=2 * FROM, randomness=SEQUENTIAL, phase='data',
         operator='TinyJitter', kind='generator', cause='other draws before', mentions='TinyLoad')
def a_transform_that_draws_for_others(original, self, results):
    np.random.rand()
    return original(self, results)


@planted(Compose, '__call__', since=0, iteration=0, phase='data', operator='TinyJitter',
         kind='input', cause='data changed between transforms', mentions='img')
def a_pipeline_that_changes_data(original, self, data):
    for number, transform in enumerate(self.transforms):
        if number == 2:
            data['img'] = data['img'] * 1.5
        data = transform(data)
    return data


@planted(tiny.TinyData, 'load_data_list', since=0, runs='AB', iteration=0, phase='data',
         operator='TinyData', kind='input', cause='clock in the data list',
         mentions=('number', 'in a_data_list_by_the_clock'))
def a_data_list_by_the_clock(original, self):
    return [dict(entry, number=time.time_ns() % 1000003) for entry in original(self)]


@planted(BatchSampler, '__iter__', since=0, iteration=0, phase='data', path='batch',
         cause='other samples in the batch')
def batches_in_another_order(original, self):
    yield from list(original(self))[::-1]
