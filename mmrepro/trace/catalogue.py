"""Likely causes of a difference and their cures: one row each, the first that fits counts."""
from __future__ import annotations

from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from .align import Difference
from .generators import FROM, NAMES
from .records import ATTRIBUTE, GARBAGE, GLOBAL, SEPARATOR, Record, useful_calls

__all__ = ['CATALOGUE', 'Case', 'Row', 'explain']

# operators whose CUDA kernels add up in the order in which threads arrive, unless told otherwise
ATOMIC = ('scatter', 'index_add', 'index_put', 'put_', 'upsample', 'grid_sampler', 'cumsum',
          'max_pool', 'avg_pool', 'bincount', 'embedding', 'kthvalue', 'histc', 'nll_loss2d',
          'ctc_loss', 'reflection_pad', 'replication_pad', 'roi_', 'deform')

UNTOLD = ('process id', 'resumed', 'validated')  # rows ask for them; they are no evidence


class Case:
    """A difference with all that was recorded around it.

    Attributes:
        found: the difference.
        a, b: its records; None where a side has none.
        record: one of them.
    """

    def __init__(self, found: Difference, stream_a: Sequence[Record],
                 stream_b: Sequence[Record]) -> None:
        self.found = found
        self.streams = stream_a, stream_b
        self.a = None if found.a is None else stream_a[found.a]
        self.b = None if found.b is None else stream_b[found.b]
        self.record: Record = self.b if self.a is None else self.a

    @property
    def kind(self) -> str:
        return self.found.kind

    @property
    def phase(self) -> str:
        return self.record.phase

    def any(self, attribute: str) -> List[str]:
        """Texts of one attribute of the records of both sides."""
        return [text for r in (self.a, self.b) if r is not None for text in getattr(r, attribute)]

    def calls(self, what: str) -> List[str]:
        """Calls of this kind that went right before, or, for a transform, in its course."""
        return [call for call in self.any('calls') if call.startswith(what)]

    def earlier_calls(self, what: str) -> List[str]:
        """Calls of this kind that the function made before which now passes the value on.

        Found by its file and name, among the records of the same module in the same phase.
        """
        found = []
        for stream, number in zip(self.streams, (self.found.a, self.found.b)):
            if number is None or not stream[number].stack:
                continue
            record, (file, _, function) = stream[number], useful_calls(stream[number].stack)[0]
            for earlier in stream[:number + 1]:
                if (earlier.phase, earlier.path) == (record.phase, record.path):
                    found += [call for call in earlier.calls if call.startswith(what) and any(
                        _is_in(place, file, function)
                        for place in call.split(': ', 1)[1].split(FROM))]
        return list(dict.fromkeys(found))

    def attributes(self) -> List[str]:
        """Differing settings and attributes: ``name: value of A / value of B``."""
        values = []
        for stream in self.streams:
            texts = [t for r in stream if r.name == 'attributes' for t in r.labels]
            values.append(dict(text.split('=', 1) for text in texts))
        a, b = values
        return [f'{name}: {a.get(name)} / {b.get(name)}' for name in {**a, **b}
                if a.get(name) != b.get(name) and name not in UNTOLD]

    def attribute(self, name: str) -> Tuple[Optional[str], Optional[str]]:
        """One value of both sides."""
        found: List[Optional[str]] = []
        for stream in self.streams:
            texts = [t for r in stream if r.name == 'attributes' for t in r.labels]
            found.append(dict(text.split('=', 1) for text in texts).get(name))
        return found[0], found[1]

    def differs(self, name: str) -> bool:
        a, b = self.attribute(name)
        return a != b

    def generators(self) -> List[str]:
        """Names of global generators whose state differs at this record."""
        if self.a is None or self.b is None:
            return []
        return [name for name, x, y in zip(NAMES, self.a.generators, self.b.generators) if x != y]

    def arguments(self) -> List[str]:
        """Differing arguments: ``name=value of A / value of B``."""
        if self.a is None or self.b is None:
            return []
        texts = [record.arguments.split(SEPARATOR) for record in (self.a, self.b)]
        if self.record.is_state:
            a, b = (dict(t.split('=', 1) for t in text if '=' in t) for text in texts)
            return [f'{name}={a.get(name)} / {b.get(name)}' for name in {**a, **b}
                    if a.get(name) != b.get(name)]
        return [f'{x} / {y.split("=", 1)[-1]}' for x, y in zip(*texts) if x != y]

    def state_names(self) -> List[str]:
        """Names of the tensors that differ, of a state."""
        return [name for name in self.found.which if isinstance(name, str)]

    def mover(self) -> Optional[Record]:
        """The record in whose course, or before which, a generator went another way."""
        moved = self.found.moved
        if moved is None:
            return None
        for stream, start, extra in ((self.streams[0], moved.a, self.found.extra_a),
                                     (self.streams[1], moved.b, self.found.extra_b)):
            drawing = [n for n in extra if n >= start and stream[n].drew]
            if drawing:
                return stream[drawing[0]]
        last, after = self.streams[0][moved.a], self.streams[0][moved.a + 1]
        # a transform is written down when it ends, with the states from before it began
        return last if last.phase == 'data' and last.name != 'batch' else after

    def labels(self) -> List[str]:
        """Names of the inputs that differ."""
        return [self.record.labels[i] for i in self.found.which
                if isinstance(i, int) and i < len(self.record.labels) and self.record.labels[i]]


def _is_in(place: str, file: str, function: str) -> bool:
    """Whether ``[name at ]file:line in function`` is in this function."""
    start, _, name = place.rpartition(' in ')
    return name == function and start.rpartition(':')[0].rpartition(' at ')[2] == file


class Row(NamedTuple):
    """A cause.

    Attributes:
        name: a word for tests and JSON.
        when: whether the row fits.
        cause: one sentence on why bits differ.
        cure: what to do.
        evidence: what in the records speaks for it.
    """
    name: str
    when: Callable[[Case], Any]
    cause: str
    cure: str
    evidence: Callable[[Case], List[str]] = lambda case: []


def _is_transform(case: Case) -> bool:
    return case.phase == 'data' and case.record.path.startswith('sample ') and (
        not case.record.path.endswith(('/begin', '/end')))


def _is_entry(case: Case) -> bool:
    """What the data list has at this index differs: the first transform is given it."""
    return case.phase == 'data' and case.kind == 'input' and case.record.path.endswith('/0')


def _hash_seeds(case: Case) -> List[str]:
    return [text for text in case.attributes() if 'HASHSEED' in text]


def _own(case: Case) -> List[str]:
    """Generators of a transform that differ, or that nobody can seed."""
    return [f'{name}: state {a} / {b}' for name, a, b in _owned(case)
            if not name.startswith((ATTRIBUTE, GLOBAL)) and (a != b or a == 'operating system')]


def _kept(case: Case) -> List[str]:
    """Plain values that a transform keeps and that differ."""
    return [f'{name}: {a} / {b}' for name, a, b in _owned(case)
            if name.startswith((ATTRIBUTE, GLOBAL)) and a != b]


def _owned(case: Case) -> Iterator[Tuple[str, Optional[str], Optional[str]]]:
    """Name, value of A, value of B."""
    a = dict(text.split('=', 1) for text in (case.a.own if case.a else ()))
    b = dict(text.split('=', 1) for text in (case.b.own if case.b else ()))
    return ((name, a.get(name), b.get(name)) for name in {**a, **b})


def _moved(case: Case) -> List[str]:
    mover = case.mover()
    if mover is None:
        return ['the generators parted before the first record of this iteration']
    where = ' '.join(filter(None, (mover.phase, mover.path, mover.name)))
    return [f'the generator parted in or right before: {where}']


def _outside(case: Case) -> List[str]:
    """Everything that may have brought another value in from outside of torch."""
    found = [*case.arguments(), *(f'attribute {text}' for text in case.attributes()),
             *case.any('calls')]
    if case.generators():
        found.append(f'global generators in another state: {", ".join(case.generators())}')
    return found


def _is_outside(case: Case) -> bool:
    return case.kind in ('input', 'argument')


CATALOGUE: Tuple[Row, ...] = (
    # --- the data pipeline -------------------------------------------------------------------
    Row('order of samples',
        lambda c: c.phase == 'data' and c.record.path.endswith('/begin'),
        'The sampler asked for another sample at this place of the order.',
        'Use a sampler that mmrepro keys by seed and epoch (worker_seed="sample"), and the same '
        'data set length, batch size and world size on both sides.',
        lambda c: c.arguments()),
    Row('entropy in a transform', lambda c: _is_transform(c) and c.calls('entropy'),
        'The transform asks the operating system for random numbers.',
        'Draw from Python\'s, NumPy\'s or torch\'s global generator, which mmrepro seeds for each '
        'sample; give default_rng(...) a number drawn from one of them.',
        lambda c: c.calls('entropy') + _own(c)),
    Row('generator of its own in a transform', lambda c: _is_transform(c) and _own(c),
        'The transform draws from a generator that nobody seeds for the sample.',
        'Draw from a global generator, or seed its own from one at the start of each call.', _own),
    Row('clock in a transform', lambda c: _is_transform(c) and c.calls('clock'),
        'The transform reads the clock.', 'Take the value from the sample or the settings.',
        lambda c: c.calls('clock')),
    Row('directory listing in a transform', lambda c: _is_transform(c) and c.calls('directory'),
        'The transform uses the order in which the file system lists a directory.',
        'Sort the names: sorted(os.listdir(folder)).', lambda c: c.calls('directory')),
    Row('other draws before', lambda c: c.kind == 'generator' and c.phase == 'data',
        'The transform draws from a generator that something moved before.',
        'See what moved it; with worker_seed="sample" each sample starts its own stream.', _moved),
    Row('hash order in a transform',
        lambda c: _is_transform(c) and c.kind == 'output' and c.differs(
            'environment PYTHONHASHSEED'),
        'The transform gives another result under another PYTHONHASHSEED: it uses the order of a '
        'set, or hash() of a text.',
        'Sort the set, use dict.fromkeys() to keep the order of insertion, or fix PYTHONHASHSEED.',
        lambda c: [*_hash_seeds(c), *_kept(c)]),
    Row('global generator in a transform',
        lambda c: _is_transform(c) and c.kind == 'output' and c.generators(),
        'The transform starts with global generators in another state.',
        'The streams of the two sides differ: compare randomness.seed and worker_seed, and what '
        'the data set draws before its pipeline.',
        lambda c: [f'in another state: {", ".join(c.generators())}']),
    Row('state of its own in a transform',
        lambda c: _is_transform(c) and c.kind == 'output' and _kept(c),
        'The transform keeps a value from one sample to the next. Every worker process has one of '
        'its own, and a resumed run begins anew.',
        'Let it follow from the sample alone, or from the iteration or epoch.', _kept),
    Row('noise in a transform', lambda c: _is_transform(c) and c.kind == 'output',
        'The transform gives another result for the same input, without having moved a global '
        'generator to another place.',
        'Look in its code for a library with generators of its own, for threads, for memory that '
        'is not written, and for state that it keeps from one sample to the next.'),
    Row('hash order of the data list',
        lambda c: _is_entry(c) and c.differs('environment PYTHONHASHSEED'),
        'The same index names another entry under another PYTHONHASHSEED: the data set is ordered '
        'by a set, or by hash() of a text.',
        'Sort the set, use dict.fromkeys() to keep the order of insertion, or fix PYTHONHASHSEED.',
        lambda c: [*_hash_seeds(c), f'differing entries: {", ".join(c.labels())}']),
    Row('another entry in the data list', _is_entry,
        'The same index names another entry: the data set has another content, or another order.',
        'Compare the annotation files (mmrepro compare shows their digests); sort directory '
        'listings and sets when the data list is made.',
        lambda c: [f'differing entries: {", ".join(c.labels())}', *c.any('calls')]),
    Row('data changed between transforms', lambda c: c.phase == 'data' and c.kind == 'input',
        'What the transform was given differs, and no recorded transform made it so.',
        'Look for state that is shared between samples: caches, lists that are changed in place.',
        lambda c: [f'differing: {", ".join(c.labels())}']),
    Row('other samples in the batch',
        lambda c: c.phase == 'data' and c.record.name == 'batch' and (
            c.found.extra_a or c.found.extra_b),
        'The sides put other samples into this batch, and those that both loaded are the same: '
        'the sampler groups by what the data list says, or a transform turned a sample down.',
        'Compare the annotation files and the order of the data list; sort sets and listings.',
        _hash_seeds),
    Row('collating the batch', lambda c: c.phase == 'data' and c.record.name == 'batch',
        'The samples agree as far as they were recorded, and the batch differs.',
        'Look at collate_fn, pin_memory, and hooks that change the batch.',
        lambda c: [f'differing: {", ".join(c.state_names() or map(str, c.found.which))}']),
    # --- states at boundaries ------------------------------------------------------------------
    Row('state lost at resume',
        lambda c: c.phase == 'start' and c.differs('resumed'),
        'The resumed run starts this iteration in another state: a checkpoint did not hold it.',
        'Keep it in a buffer (register_buffer) or register the attribute with '
        'mmrepro.state.adapters.register(Class, "attribute").',
        lambda c: [*c.state_names()[:8], *c.arguments()[:8]]),
    Row('state that a validation leaves',
        lambda c: c.phase == 'start' and c.differs('validated'),
        'After a validation the training goes on in another state.',
        'Look at what the model keeps in evaluation mode, and at hooks around the validation.',
        lambda c: [*c.state_names()[:8], *c.arguments()[:8]]),
    Row('clock in a hook',
        lambda c: c.record.name == 'state after the hook' and c.calls('clock'),
        'The hook read the clock, and what it left behind differs.',
        'Take the value from the iteration or the settings.',
        lambda c: [*c.calls('clock'), *c.arguments()[:8], *c.state_names()[:8]]),
    Row('entropy in a hook',
        lambda c: c.record.name == 'state after the hook' and c.calls('entropy'),
        'The hook drew from the operating system\'s entropy, and what it left behind differs.',
        'Seed the generator, or draw from a global one.',
        lambda c: [*c.calls('entropy'), *c.arguments()[:8], *c.state_names()[:8]]),
    Row('another setting',
        lambda c: c.record.is_state and c.kind == 'argument',
        'A number beside the weights differs: learning rate, momentum, scheduler or loss scale.',
        'Compare the settings of both sides, and what the hook that is named does.',
        lambda c: c.arguments()[:8]),
    Row('hook changes the state',
        lambda c: c.phase == 'hook' and c.record.name == 'state after the hook',
        'The hook changed weights, buffers, gradients or optimizer state, differently on the two '
        'sides.', 'Look at what this hook writes, and what decides about it.',
        lambda c: [*c.state_names()[:8], *c.calls('')]),
    Row('state changed outside of operators', lambda c: c.record.is_state,
        'Weights, buffers or optimizer state changed between two recorded moments, through no '
        'operator and no hook.',
        'Look for code that writes through NumPy or pointers, and for threads.',
        lambda c: c.state_names()[:8]),
    # --- operators -----------------------------------------------------------------------------
    Row('uninitialised memory',
        lambda c: c.kind == 'output' and GARBAGE in c.record.labels,
        'The operator reads memory that torch.empty or its like made and nothing has written.',
        'Use torch.zeros, or write all of it first; '
        'randomness.fill_uninitialized_memory=True makes such reads visible.'),
    Row('generator of its own',
        lambda c: c.kind == 'argument' and any('generator=generator' in text
                                               for text in c.arguments()),
        'The operator draws from a torch.Generator of its own, in another state on each side.',
        'Leave generator= out, or seed it from the global generator in every step.',
        lambda c: c.arguments()),
    Row('other draws before', lambda c: c.kind == 'generator',
        'The operator draws from a generator that something moved before.',
        'Let what moved it draw from a generator of its own, or seed the step '
        '(randomness.step_seed=True).', _moved),
    Row('state lost at resume',
        lambda c: _is_outside(c) and c.differs('resumed') and not (
            c.calls('entropy') or c.calls('clock')),
        'A value is another one in the run that was resumed: a checkpoint did not hold it.',
        'Keep it in a buffer (register_buffer) or register the attribute with '
        'mmrepro.state.adapters.register(Class, "attribute").', _outside),
    Row('state that a validation leaves',
        lambda c: _is_outside(c) and c.differs('validated') and not (
            c.calls('entropy') or c.calls('clock')),
        'A value is another one after a validation.',
        'Look at what the model keeps in evaluation mode, and at hooks around the validation.',
        _outside),
    Row('entropy', lambda c: _is_outside(c) and c.calls('entropy') or (
        _is_outside(c) and c.calls('a generator is seeded')),
        'A value came in that was drawn from the operating system\'s entropy.',
        'Seed the generator, or draw from a global one.', _outside),
    Row('clock', lambda c: _is_outside(c) and c.calls('clock'),
        'A value came in right after the clock was read.',
        'Take the value from the iteration or the settings.', _outside),
    Row('directory listing', lambda c: _is_outside(c) and c.calls('directory'),
        'A value came in right after a directory was listed, in the order of the file system.',
        'Sort the names.', _outside),
    Row('foreign generator',
        lambda c: _is_outside(c) and set(c.generators()) & {'numpy', 'python'},
        'A value came in from NumPy\'s or Python\'s generator, which is in another state.',
        'See what moved it.', _outside),
    Row('value in an attribute',
        lambda c: _is_outside(c) and [t for t in c.attributes() if not t.startswith(
            ('environment', 'threads', 'deterministic'))],
        'A number that an attribute of a module holds differs.',
        'Make it a function of the iteration, or keep it in checkpoints: register_buffer, or '
        'mmrepro.state.adapters.register.', _outside),
    Row('buffer or parameter changed outside of operators',
        lambda c: c.kind == 'input' and c.labels(),
        'A parameter or buffer differs, and no recorded operator wrote it.',
        'Look for writes through NumPy, .data_ptr() or another thread.',
        lambda c: c.labels()),
    Row('hash order',
        lambda c: _is_outside(c) and c.differs('environment PYTHONHASHSEED'),
        'A value came in from Python that is another one under another PYTHONHASHSEED: the order '
        'of a set, or hash() of a text.', 'Sort the set, or fix PYTHONHASHSEED.', _outside),
    Row('entropy', lambda c: _is_outside(c) and c.earlier_calls('entropy'),
        'The function that this value comes from had asked for the operating system\'s entropy.',
        'Seed the generator, or draw from a global one.',
        lambda c: [*_outside(c), *c.earlier_calls('entropy')]),
    Row('clock', lambda c: _is_outside(c) and c.earlier_calls('clock'),
        'The function that this value comes from had read the clock.',
        'Take the value from the iteration or the settings.',
        lambda c: [*_outside(c), *c.earlier_calls('clock')]),
    Row('number from Python', lambda c: c.kind == 'argument',
        'The operator was given another number by Python code.',
        'Follow the Python calls: which value does this line compute, and from what?', _outside),
    Row('value from outside', lambda c: c.kind == 'input',
        'A tensor came in that no recorded operator made: from NumPy, Python or a library.',
        'Follow the Python calls: where does this line take the tensor from?', _outside),
    Row('threads',
        lambda c: c.kind == 'output' and (c.differs('threads')),
        'The operator gives another result with another number of threads: they add up in '
        'another order.',
        'Set randomness.num_threads, or OMP_NUM_THREADS and MKL_NUM_THREADS, to the same number.',
        lambda c: [t for t in c.attributes() if 'hreads' in t or 'THREADS' in t]),
    Row('processor', lambda c: c.kind == 'output' and [
        t for t in c.attributes() if 'CAPABILITY' in t or 'CBWR' in t or 'ISA' in t],
        'The operator runs in another code path for another instruction set.',
        'Use the same machine type, or set ATEN_CPU_CAPABILITY and its like to the same value.',
        lambda c: c.attributes()),
    Row('order of additions on the device',
        lambda c: c.kind == 'output' and any(name in c.record.name for name in ATOMIC),
        'This kernel may add up in the order in which its threads arrive.',
        'randomness = dict(deterministic=True); see docs/causes.md.'),
    Row('extra operator', lambda c: c.kind in ('extra', 'missing', 'replaced'),
        'One side runs operators that the other does not: the Python code took another way.',
        'Look at the condition above this line; compare the code and the settings of both sides.',
        _outside),
    Row('operator', lambda c: True,
        'The operator gives another result for the same bits.',
        'A kernel without a fixed order of additions, a race, or a custom operator with a state: '
        'see docs/causes.md, and report it with these shapes.'),
)


def explain(case: Case) -> Tuple[Row, List[str]]:
    """The first row that fits, and the evidence for it."""
    row = next(row for row in CATALOGUE if row.when(case))
    return row, list(dict.fromkeys(row.evidence(case)))
