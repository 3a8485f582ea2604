"""The likely causes of a difference and their fixes, in a table: the first row that fits counts.

The conditions of the rows are written in the properties of a
:class:`~mmrepro.localise.alignment.Difference`.
"""
from __future__ import annotations

from typing import Any, Callable, NamedTuple

from ..fingerprint.records import AFTER_HOOK, UNINITIALIZED
from ..util.text import page
from .alignment import Difference

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
