"""The likely causes of a difference and their fixes, in a table: the first row that fits counts.

The conditions of the rows are written in the properties of a :class:`Difference`.
"""
from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any, Callable, NamedTuple

from ..fingerprint import records
from ..fingerprint.divergence import differing_names
from ..fingerprint.generator_states import NAMES, is_in
from ..fingerprint.records import (
    AFTER_HOOK,
    ATTRIBUTE,
    GLOBAL,
    SEPARATOR,
    UNINITIALIZED,
    Frame,
    Phase,
    Record,
    useful_calls,
)
from ..util.text import page
from .alignment import StreamDifference

NO_EVIDENCE = ('resumed', 'validated')  # attributes that are not shown


class Difference:
    """A difference, with everything that was recorded around it."""

    def __init__(self, found: StreamDifference, stream_a: Sequence[Record],
                 stream_b: Sequence[Record]) -> None:
        self.found, self.kind = found, found.kind
        self.streams = stream_a, stream_b
        # its records in run A and run B; None where a run has none
        self.a: Any = None if found.a is None else stream_a[found.a]
        self.b: Any = None if found.b is None else stream_b[found.b]
        self.record: Record = next(record for record in (self.a, self.b) if record is not None)
        self.phase: Phase = self.record.phase
        self._attributes = [_named(text for record in stream
                                   if record.name == records.ATTRIBUTES and self._concerns(record)
                                   for text in record.labels) for stream in self.streams]
        self._own = [_named(record.own if record else ()) for record in (self.a, self.b)]

    def _concerns(self, owner: Record) -> bool:
        """Whether attributes and globals may reach this difference.

        Those of the process and of the model always, of optimizer and sampler where they differ,
        others where their file is on the stack.
        """
        kind = owner.path.partition(':')[0]
        return kind in ('', 'model') or kind == ('sampler' if self.in_order else self.phase) or (
            owner.stack[0][0] in {call[0] for call in self.record.stack})

    def named(self, name: str) -> list[Record]:
        """Return the records of both runs that have this name."""
        return [record for stream in self.streams for record in stream if record.name == name]

    @property
    def in_order(self) -> bool:
        """Whether the sampler returned another index."""
        return self.record.moment == 'begin'

    @property
    def origin(self) -> Frame | None:
        """The code that makes what differs; None for that of the record.

        A data list differs in the first transform that sees it, an order in the dataset.
        """
        if self.in_order:
            return next((record.stack[0] for record in self.named(records.SAMPLER)), None)
        begin = self.record.path.rpartition('/')[0] + '/begin'
        return next((record.stack[0] for stream in self.streams for record in stream
                     if self.in_data_list and record.path == begin), None)

    def while_building(self, source: str) -> list[str]:
        """Return calls of ``source`` by code of the user when the dataset was built."""
        return [call for record in self.named(records.DATASET) for call in record.calls
                if call.startswith(source)]

    @property
    def from_outside(self) -> bool:
        """Whether the difference is a value that no operator computed."""
        return self.kind in ('input', 'argument')

    @property
    def different_steps(self) -> bool:
        """Whether the runs executed different operators."""
        return self.kind in ('extra', 'missing', 'replaced')

    @property
    def in_transform(self) -> bool:
        return self.record.moment.isdecimal()

    @property
    def in_data_list(self) -> bool:
        """Whether the input of the first transform, an entry of the data list, differs."""
        return self.kind == 'input' and self.record.moment == '0'

    def calls(self, source: str) -> list[str]:
        """Return calls of ``source`` right before the record or, for a transform, during it."""
        return [call for record in (self.a, self.b) if record is not None
                for call in record.calls if call.startswith(source)]

    def calls_anywhere(self, source: str) -> list[str]:
        """Return calls of ``source`` at any time of the recording."""
        records = itertools.chain.from_iterable(self.streams)
        return list(dict.fromkeys(call for record in records for call in record.calls
                                  if call.startswith(source)))

    @property
    def reordered(self) -> bool:
        """Whether both runs use the same tensors here, in another order."""
        if self.kind != 'input':
            return False
        if sorted(self.a.inputs) == sorted(self.b.inputs):
            return True
        differing = [{record.inputs[i] for i in self.found.which} for record in (self.a, self.b)]
        # each run uses all of them one after the other, in the same line
        later = [{digest for other in stream[number:] if other.site == record.site
                  and useful_calls(other.stack)[:1] == useful_calls(record.stack)[:1]
                  for digest in other.inputs}
                 for stream, number, record in zip(
                     self.streams, (self.found.a, self.found.b), (self.a, self.b))]
        return differing[0] <= later[1] and differing[1] <= later[0]

    def earlier_calls(self, source: str) -> list[str]:
        """Return calls of ``source`` earlier in the function that passes the value on.

        The function is found by its file and name, among the records of the same module and phase.
        """
        calls = []
        for stream, number in zip(self.streams, (self.found.a, self.found.b)):
            record = stream[number]
            for file, _, function in useful_calls(record.stack)[:1]:
                calls += [call for earlier in stream[:number + 1]
                          if (earlier.phase, earlier.path) == (record.phase, record.path)
                          for call in earlier.calls
                          if call.startswith(source) and is_in(call, file, function)]
        return list(dict.fromkeys(calls))

    def differs(self, attribute: str) -> bool:
        a, b = self._attributes
        return a.get(attribute) != b.get(attribute)

    def attributes(self) -> list[str]:
        """Return differing settings and attributes: ``name: value in A / value in B``.

        Those of the module that the record belongs to come first.
        """
        rows = sorted(_differing(*self._attributes), key=lambda row: -len(
            os.path.commonprefix([row[0], self.record.path])))
        return [f'{name}: {a} / {b}' for name, a, b in rows
                if name not in NO_EVIDENCE]

    def module_generators(self) -> list[str]:
        """Return generators of the module itself that differ, as in :meth:`attributes`."""
        return [text for text in self.attributes()
                if text.startswith(f'{self.record.path}.') and ': generator ' in text]

    def transform_generators(self) -> list[str]:
        """Return generators of the transform whose states differ."""
        return [f'{name}: state {a} / {b}' for name, a, b in _differing(*self._own)
                if not name.startswith((ATTRIBUTE, GLOBAL))]

    def transform_values(self) -> list[str]:
        """Return plain values that the transform keeps and that differ."""
        return [f'{name}: {a} / {b}' for name, a, b in _differing(*self._own)
                if name.startswith((ATTRIBUTE, GLOBAL))]

    def generators(self) -> list[str]:
        """Return names of global generators whose state differs at this record."""
        if self.a is None or self.b is None:
            return []
        return [name for name, x, y in zip(NAMES, self.a.generators, self.b.generators) if x != y]

    def arguments(self) -> list[str]:
        """Return differing arguments: ``name=value in A / value in B``."""
        if self.a is None or self.b is None:
            return []
        a, b = (record.arguments.split(SEPARATOR) for record in (self.a, self.b))
        if self.record.is_state:
            return [f'{name}={x} / {y}' for name, x, y in _differing(_named(a), _named(b))]
        return [f'{x} / {y.split("=", 1)[-1]}' for x, y in zip(a, b) if x != y]

    def state_names(self) -> list[str]:
        """Return the names of the differing tensors of a state."""
        return [name for name in self.found.which if isinstance(name, str)]

    def labels(self) -> list[str]:
        """Return names of the inputs that differ."""
        return [self.record.labels[i] for i in self.found.which
                if isinstance(i, int) and i < len(self.record.labels) and self.record.labels[i]]

    def outside_sources(self) -> list[str]:
        """Return sources outside of torch that may have brought in a different value."""
        sources = [*self.arguments(), *(f'attribute {text}' for text in self.attributes()),
                   *self.calls('')]
        if self.generators():
            sources.append('global generators in different states: '
                         f'{", ".join(self.generators())}')
        return sources

    def mover(self) -> str:
        """Return the record that advanced a generator in one run only, or ''."""
        moved = self.found.moved
        if moved is None:
            return ''
        last, mover = self.streams[0][moved.a], self.streams[0][moved.a + 1]
        if last.phase == 'data' and last.name != 'batch':
            mover = last  # a transform is recorded when it ends, with the states before it began
        for stream, start, extra in ((self.streams[1], moved.b, self.found.extra_b),
                                     (self.streams[0], moved.a, self.found.extra_a)):
            mover = next((stream[n] for n in extra if n >= start and stream[n].drew), mover)
        return ' '.join(filter(None, mover.site))


def _named(texts: Iterable[str]) -> dict[str, str]:
    return dict(text.split('=', 1) for text in texts if '=' in text)


def _differing(a: dict[str, str], b: dict[str, str]) -> list[tuple[Any, ...]]:
    """Return name, value in A and value in B of what differs."""
    return [(name, a.get(name), b.get(name)) for name in differing_names(a, b)]


# operators whose CUDA kernels add with atomics unless deterministic algorithms are on
ATOMIC = ('convolution_backward', 'scatter', 'index_add', 'index_put', 'put_', 'upsample',
          'grid_sampler', 'cumsum', 'max_pool', 'avg_pool', 'bincount', 'embedding', 'kthvalue',
          'histc', 'nll_loss2d', 'ctc_loss', 'reflection_pad', 'replication_pad', 'roi_', 'deform')
HASHSEED = 'environment PYTHONHASHSEED'
PROCESSOR = tuple(f'environment {name}' for name in (
    'ATEN_CPU_CAPABILITY', 'MKL_CBWR', 'MKL_ENABLE_INSTRUCTIONS', 'ONEDNN_MAX_CPU_ISA'))
OUTSIDE = Difference.outside_sources
_CAUSES = page('reference/causes.md')
STATE_SHOWN = 8  # names of tensors, and numbers, of a state

FIX_ENTROPY = 'Seed the generator, or draw from a global one.'
FIX_CLOCK = 'Compute the value from the iteration or the settings.'
FIX_HASH_ORDER = ('Sort the set, use dict.fromkeys() to keep the order of insertion, or set '
                  'PYTHONHASHSEED.')
FIX_LOST_STATE = ('Keep it in a buffer (register_buffer) or register the attribute with '
                  'mmrepro.keep_attributes(Class, "attribute").')
FIX_VALIDATION = ('Check what the model stores in evaluation mode, and the hooks that run around '
                  'the validation.')


class Cause(NamedTuple):
    """A likely cause."""
    name: str  # shown, and used by programs
    when: Callable[[Difference], Any]  # whether the row fits
    why: str  # one sentence on why the bits differ
    fix: str  # what to do
    evidence: Callable[[Difference], list[str]] = lambda c: []  # records that support it


def _hash_seeds(c: Difference) -> list[str]:
    return [text for text in c.attributes() if 'HASHSEED' in text]


def _differing_labels(c: Difference) -> list[str]:
    return [f'differing: {", ".join(c.labels())}']


def _state(c: Difference) -> list[str]:
    return [*c.state_names()[:STATE_SHOWN], *c.arguments()[:STATE_SHOWN]]


def _moved(c: Difference) -> list[str]:
    mover = c.mover()
    return [f'the generator states diverge in or right before: {mover}' if mover else
            'the generator states differ before the first record of this iteration']


CAUSES: tuple[Cause, ...] = (
    # --- the data pipeline -------------------------------------------------------------------
    Cause('state lost at resume',
          lambda c: (c.in_order or c.phase == 'hook') and c.differs('resumed') and c.attributes()
          and not (c.calls('entropy') or c.calls('clock')),
          'The sampler or hook keeps a value that the resumed run has lost.',
          'Compute it from the seed and the epoch (set_epoch) or the iteration (runner.iter); an '
          'attribute of either can be kept: mmrepro.keep_attributes(Class, "name").',
          lambda c: [*c.attributes(), *_state(c)]),
    Cause('order of samples', lambda c: c.in_order,
          'The sampler returned a different index at this position.',
          'Use a sampler that mmrepro keys by seed and epoch (worker_seed="sample"), and the same '
          'dataset length, batch size and world size in both runs.',
          lambda c: [*c.arguments(), *c.attributes()]),
    Cause('entropy in a transform', lambda c: c.in_transform and c.calls('entropy'),
          'The transform asks the operating system for random numbers.',
          'Draw from the global generator of Python, NumPy or torch, which mmrepro seeds for each '
          'sample; seed default_rng(...) with a number drawn from one of them.',
          lambda c: c.calls('entropy') + c.transform_generators()),
    Cause('generator of its own in a transform',
          lambda c: c.in_transform and c.transform_generators(),
          'The transform draws from a generator of its own, which is not seeded per sample.',
          'Draw from a global generator, or seed its own from one at the start of each call.',
          lambda c: c.transform_generators()),
    Cause('clock in a transform', lambda c: c.in_transform and c.calls('clock'),
          'The transform reads the clock.', 'Compute the value from the sample or the settings.',
          lambda c: c.calls('clock')),
    Cause('directory listing in a transform', lambda c: c.in_transform and c.calls('directory'),
          'The transform depends on the order in which the file system lists a directory.',
          'Sort the names: sorted(os.listdir(folder)).', lambda c: c.calls('directory')),
    Cause('other draws before', lambda c: c.kind == 'generator' and c.phase == 'data',
          'The transform draws from a generator that other code has advanced in one run only.',
          'Check the code named as evidence; with worker_seed="sample" each sample starts its own '
          'stream.', _moved),
    Cause('hash order in a transform',
          lambda c: c.in_transform and c.kind == 'output' and c.differs(HASHSEED),
          'The result of the transform depends on PYTHONHASHSEED: it uses the order of a set, or '
          'hash() of a string.', FIX_HASH_ORDER,
          lambda c: [*_hash_seeds(c), *c.transform_values()]),
    Cause('state of its own in a transform',
          lambda c: c.in_transform and c.kind == 'output' and c.transform_values(),
          'The transform keeps a value from one sample to the next. Every worker process has its '
          'own copy, and a resumed run starts over.',
          'Compute the value from the sample alone, or from the iteration or epoch.',
          lambda c: c.transform_values()),
    Cause('threads in a transform', lambda c: c.in_transform and c.calls('thread'),
          'The transform starts threads, and the operating system decides which comes first.',
          'Collect the results in the order in which the work was given out (map() of an executor '
          'does), and let no thread draw random numbers.', lambda c: c.calls('thread')),
    Cause('noise in a transform', lambda c: c.in_transform and c.kind == 'output',
          'The transform returns a different result for the same input and the same state of the '
          'global generators.',
          'Look for a library with its own generators, threads, memory that is read before it is '
          'written, and state kept from one sample to the next.'),
    Cause('hash order of the data list', lambda c: c.in_data_list and c.differs(HASHSEED),
          'The entry at this index depends on PYTHONHASHSEED: the dataset is ordered by a set, or '
          'by hash() of a string.', FIX_HASH_ORDER,
          lambda c: [*_hash_seeds(c), *_differing_labels(c)]),
    Cause('entropy in the data list',
          lambda c: c.in_data_list and c.while_building('entropy'),
          'The dataset drew from the entropy of the operating system when it built its list.',
          FIX_ENTROPY, lambda c: [*c.while_building('entropy'), *_differing_labels(c)]),
    Cause('clock in the data list', lambda c: c.in_data_list and c.while_building('clock'),
          'The dataset read the clock when it built its list.', FIX_CLOCK,
          lambda c: [*c.while_building('clock'), *_differing_labels(c)]),
    Cause('another entry in the data list', lambda c: c.in_data_list,
          'The dataset has a different entry at this index: its content or its order differs.',
          'Compare the annotation files (mmrepro compare shows their digests); sort directory '
          'listings and sets when building the data list.',
          lambda c: [*_differing_labels(c), *c.while_building('')]),
    Cause('data changed between transforms', lambda c: c.phase == 'data' and c.kind == 'input',
          'The input of the transform differs, and no recorded transform changed it.',
          'Look for state shared between samples: caches, and lists that are changed in place.',
          _differing_labels),
    Cause('other samples in the batch',
          lambda c: c.phase == 'data' and c.record.name == 'batch' and (
              c.found.extra_a or c.found.extra_b),
          'The batch contains different samples, and the samples that both runs loaded are the '
          'same: the sampler groups by the data list, or a transform rejected a sample.',
          'Compare the annotation files and the order of the data list; sort sets and directory '
          'listings.', _hash_seeds),
    Cause('collating the batch', lambda c: c.phase == 'data' and c.record.name == 'batch',
          'The recorded samples agree, and the batch differs.',
          'Check collate_fn, pin_memory, and hooks that change the batch.',
          lambda c: [f'differing: {", ".join(c.state_names() or map(str, c.found.which))}']),
    # --- states at boundaries ------------------------------------------------------------------
    Cause('state lost at resume', lambda c: c.phase == 'start' and c.differs('resumed'),
          'The resumed run starts this iteration in a different state, which the checkpoint did '
          'not contain.', FIX_LOST_STATE, _state),
    Cause('state that a validation leaves', lambda c: c.phase == 'start' and c.differs('validated'),
          'Training continues in a different state after the validation.', FIX_VALIDATION, _state),
    Cause('clock in a hook', lambda c: c.record.name == AFTER_HOOK and c.calls('clock'),
          'The hook read the clock, and the state it left differs.', FIX_CLOCK,
          lambda c: [*c.calls('clock'), *_state(c)]),
    Cause('entropy in a hook', lambda c: c.record.name == AFTER_HOOK and c.calls('entropy'),
          'The hook drew from the entropy of the operating system, and the state it left differs.',
          FIX_ENTROPY, lambda c: [*c.calls('entropy'), *_state(c)]),
    Cause('another setting', lambda c: c.record.is_state and c.kind == 'argument',
          'A number next to the weights differs: learning rate, momentum, scheduler or loss scale.',
          'Compare the settings of the two runs, and check the hook that is named.',
          lambda c: c.arguments()[:STATE_SHOWN]),
    Cause('hook changes the state', lambda c: c.phase == 'hook' and c.record.name == AFTER_HOOK,
          'The hook changed weights, buffers, gradients or optimizer state, differently in the '
          'two runs.', 'Check what this hook writes, and on what condition.',
          lambda c: [*c.state_names()[:STATE_SHOWN], *c.calls('')]),
    Cause('state changed outside of operators', lambda c: c.record.is_state,
          'Weights, buffers or optimizer state changed between two recorded moments, through no '
          'operator and no hook.',
          'Look for code that writes through NumPy or pointers, and for threads.',
          lambda c: [*c.state_names()[:STATE_SHOWN], *c.calls_anywhere('thread')]),
    # --- operators -----------------------------------------------------------------------------
    Cause('uninitialized memory', lambda c: c.kind == 'output' and UNINITIALIZED in c.record.labels,
          'The operator reads memory that torch.empty or a similar function allocated and nothing '
          'has written.',
          'Use torch.zeros, or write all of it first; '
          'torch.utils.deterministic.fill_uninitialized_memory = True makes such reads visible.'),
    Cause('generator of its own',
          lambda c: c.kind == 'argument' and any('generator=generator' in text
                                                 for text in c.arguments()),
          'The operator draws from its own torch.Generator, whose state differs between the runs.',
          'Leave generator= out, or seed it from the global generator in every step.',
          lambda c: c.arguments()),
    Cause('other draws before', lambda c: c.kind == 'generator',
          'The operator draws from a generator that other code has advanced in one run only.',
          'Let that code use a generator of its own, or let mmrepro seed the step (no '
          "worker_seed='mmengine').", _moved),
    Cause('state lost at resume',
          lambda c: (c.from_outside or c.different_steps and c.attributes()) and c.differs(
              'resumed') and not (c.calls('entropy') or c.calls('clock')),
          'A value differs in the run that was resumed: the checkpoint did not contain it.',
          FIX_LOST_STATE, OUTSIDE),
    Cause('state that a validation leaves',
          lambda c: c.from_outside and c.differs('validated') and not (
              c.calls('entropy') or c.calls('clock')),
          'A value differs after a validation.', FIX_VALIDATION, OUTSIDE),
    Cause('same tensors in another order', lambda c: c.reordered,
          'Both runs give the operator the same tensors, one after the other, in another order: '
          'they come from a set, whose order follows memory addresses.',
          'Keep them in a list, or in a dict, which keep the order of insertion.'),
    Cause('entropy', lambda c: c.from_outside and c.calls('entropy'),
          'The value was drawn from the entropy of the operating system.', FIX_ENTROPY, OUTSIDE),
    Cause('clock', lambda c: c.from_outside and c.calls('clock'),
          'The value came in right after the clock was read.', FIX_CLOCK, OUTSIDE),
    Cause('directory listing', lambda c: c.from_outside and c.calls('directory'),
          'The value came in right after a directory was listed, in the order of the file system.',
          'Sort the names.', OUTSIDE),
    Cause('foreign generator',
          lambda c: c.from_outside and set(c.generators()) & {'numpy', 'python'},
          'The value comes from the generator of NumPy or Python, whose state differs.',
          'Find the code that advanced it in one run only.', OUTSIDE),
    Cause('generator of its own',
          lambda c: (c.from_outside or c.different_steps) and c.module_generators(),
          'The module holds a generator that is not seeded; its state differs between the runs.',
          'Draw from a global generator, or seed its own from one in every step.',
          lambda c: [*c.module_generators(), *c.outside_sources()]),
    Cause('value in an attribute',
          lambda c: c.from_outside and [text for text in c.attributes() if not text.startswith(
              ('environment', 'threads', 'deterministic'))],
          'A number in an attribute of a module differs.',
          'Compute it from the iteration, or keep it in checkpoints: register_buffer, or '
          'mmrepro.keep_attributes.', OUTSIDE),
    Cause('buffer or parameter changed outside of operators',
          lambda c: c.kind == 'input' and c.labels(),
          'A parameter or buffer differs, and no recorded operator wrote it.',
          'Look for writes through NumPy, .data_ptr() or another thread.',
          lambda c: [*c.labels(), *c.calls_anywhere('thread')]),
    Cause('hash order', lambda c: c.from_outside and c.differs(HASHSEED),
          'The value comes from Python code and depends on PYTHONHASHSEED: the order of a set, or '
          'hash() of a string.', 'Sort the set, or set PYTHONHASHSEED.', OUTSIDE),
    Cause('entropy', lambda c: c.from_outside and c.earlier_calls('entropy'),
          'The function that passes the value on had drawn from the entropy of the operating '
          'system.', FIX_ENTROPY, lambda c: [*c.outside_sources(), *c.earlier_calls('entropy')]),
    Cause('clock', lambda c: c.from_outside and c.earlier_calls('clock'),
          'The function that passes the value on had read the clock.', FIX_CLOCK,
          lambda c: [*c.outside_sources(), *c.earlier_calls('clock')]),
    Cause('threads', lambda c: c.from_outside and (c.calls('thread') or c.earlier_calls('thread')),
          'The value comes from code that starts threads, and the operating system decides which '
          'comes first.',
          'Wait for all of them, and combine their results in the order in which they started.',
          lambda c: [*c.outside_sources(), *c.earlier_calls('thread')]),
    Cause('number from Python', lambda c: c.kind == 'argument',
          'Python code passed a different number to the operator.',
          'Follow the Python calls: which value does this line compute, and from what?', OUTSIDE),
    Cause('value from outside', lambda c: c.kind == 'input',
          'The tensor was not computed by a recorded operator: it comes from NumPy, Python or a '
          'library.', 'Follow the Python calls: where does this line take the tensor from?',
          OUTSIDE),
    Cause('threads', lambda c: c.kind == 'output' and c.differs('threads'),
          'The result of the operator depends on the number of threads, which changes the order '
          'of additions.',
          'Set randomness.numerics.num_threads, or OMP_NUM_THREADS and MKL_NUM_THREADS, to the '
          'same number.',
          lambda c: [text for text in c.attributes() if 'hreads' in text or 'THREADS' in text]),
    Cause('processor',
          lambda c: c.kind == 'output' and any(map(c.differs, PROCESSOR)),
          'The operator uses a different code path for a different instruction set.',
          'Use the same machine type, or set ATEN_CPU_CAPABILITY and similar variables to the '
          'same value.', Difference.attributes),
    Cause('order of additions on the device',
          lambda c: c.kind == 'output' and any(name in c.record.name for name in ATOMIC),
          'This kernel may add up in the order in which its threads arrive.',
          f'randomness = dict(deterministic=True); see {_CAUSES}.'),
    Cause('extra operator', lambda c: c.different_steps,
          'One run executes operators that the other does not: the Python code took a different '
          'branch.',
          'Check the condition above this line; compare the code and the settings of both runs.',
          OUTSIDE),
    Cause('operator', lambda c: True,
          'The operator returns a different result for the same bits.',
          'Possible reasons: a kernel without a fixed order of additions, a race, or a custom '
          f'operator with state. See {_CAUSES}, and report it with these shapes.',
          lambda c: [*c.calls('clock'), *c.calls_anywhere('thread')]),
)


def find_cause(context: Difference) -> tuple[Cause, list[str]]:
    """Return the first row that fits, and its evidence."""
    cause = next(cause for cause in CAUSES if cause.when(context))
    return cause, list(dict.fromkeys(cause.evidence(context)))
