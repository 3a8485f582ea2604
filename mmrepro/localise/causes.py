"""Likely causes of a difference and their cures: one row each, the first that fits counts."""
from __future__ import annotations

from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Tuple

from ..fingerprint.records import ATTRIBUTE, GLOBAL, UNINITIALIZED
from .divergence import Case

__all__ = ['CATALOGUE', 'Row', 'explain']

# operators whose CUDA kernels add up in the order in which threads arrive, unless told otherwise
ATOMIC = ('convolution_backward', 'scatter', 'index_add', 'index_put', 'put_', 'upsample',
          'grid_sampler', 'cumsum', 'max_pool', 'avg_pool', 'bincount', 'embedding', 'kthvalue',
          'histc', 'nll_loss2d', 'ctc_loss', 'reflection_pad', 'replication_pad', 'roi_', 'deform')


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


def _is_another_way(case: Case) -> bool:
    return case.kind in ('extra', 'missing', 'replaced')


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
        'mmrepro.checkpoint.adapters.register(Class, "attribute").',
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
        lambda c: c.kind == 'output' and UNINITIALIZED in c.record.labels,
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
        'mmrepro.checkpoint.adapters.register(Class, "attribute").', _outside),
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
    Row('generator of its own',
        lambda c: (_is_outside(c) or _is_another_way(c)) and c.own_generators(),
        'The module holds a generator that nobody seeds, in another state on each side.',
        'Draw from a global generator, or seed its own from one in every step.',
        lambda c: [*c.own_generators(), *_outside(c)]),
    Row('value in an attribute',
        lambda c: _is_outside(c) and [t for t in c.attributes() if not t.startswith(
            ('environment', 'threads', 'deterministic'))],
        'A number that an attribute of a module holds differs.',
        'Make it a function of the iteration, or keep it in checkpoints: register_buffer, or '
        'mmrepro.checkpoint.adapters.register.', _outside),
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
    Row('extra operator', _is_another_way,
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
