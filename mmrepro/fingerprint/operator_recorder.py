"""Record every operator of a piece of training: where it ran, on what bits, with what result.

A ``TorchDispatchMode`` sees each operator below autograd, with plain tensors. Autograd's
engine carries active modes into the threads that run a backward pass (``at::ThreadLocalState``: the
calling thread on a CPU, one thread for each device otherwise), so one recorder sees forward,
backward and optimizer in the order in which they ran. The call site (phase and module) is read off
the Python stack and the autograd node.
"""
from __future__ import annotations

import bisect
import functools
import os
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from mmengine.optim import OptimWrapper, OptimWrapperDict
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from ..objects.walks import tensors
from . import generator_states
from .digest import combined_hex, tensor_digest, to_hex
from .records import SEPARATOR, UNINITIALIZED, Frame, Phase, Record
from .schema import OPERATORS

# an absolute path, because the folder of a checkout may be called mmrepro as well
PACKAGE = os.path.dirname(os.path.dirname(__file__))
LOSS_FUNCTIONS = ('loss_by_feat', 'loss_and_target', 'parse_losses', 'loss_single')
OPTIMIZERS = (torch.optim.Optimizer, OptimWrapper, OptimWrapperDict)
ENGINE = '/torch/autograd/graph.py'  # starts the backward pass; its callers are not of interest
TENSOR = '/torch/_tensor.py'  # Tensor.backward makes the first gradient
# calls below these files are not part of the training
NOT_TRAINING = os.path.join(PACKAGE, 'run', 'hooks', '')
PREPROCESSOR = 'data_preprocessor'  # MMEngine's name for the module that moves and pads batches
STACK = 40  # number of frames kept
# frames between the training code and the recorder
SKIPPED = ('/torch/utils/_python_dispatch.py', '/torch/_ops.py', '/torch/_dynamo/',
           '/torch/_compile.py', os.path.join(PACKAGE, 'fingerprint', ''),
           os.path.join(PACKAGE, 'localise', ''), os.path.join(PACKAGE, 'selfcheck', ''))


class CallSite(NamedTuple):
    """Phase, path of the module or parameter, and the Python stack, innermost call first."""
    phase: Phase
    path: str
    stack: tuple[Frame, ...]


class CallSites:
    """Finds the call site of the operator in dispatch.

    A backward operator belongs to the module whose forward made its autograd node. Nodes have
    increasing sequence numbers, so the first number of each call site identifies the rest.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = {id(module): name for name, module in model.named_modules()}
        named = [*model.named_parameters(), *model.named_buffers()]
        self._tensors = {id(tensor): name for name, tensor in named}
        self._alive = model, named  # ids are reused once their objects are gone
        self._numbers: list[int] = []  # sequence number of the first node of each owner
        # path and Python stack of the forward call
        self._owners: list[tuple[str, tuple[Frame, ...]]] = []
        self._next = torch.autograd._get_sequence_nr()
        self.hook = ''  # class and method of the running hook

    def label(self, tensor: torch.Tensor) -> str:
        """Return the name of a parameter or buffer; '' for other tensors."""
        return self._tensors.get(id(tensor), '')

    def current(self) -> CallSite | None:
        """Return the call site of the operator in dispatch; call it once for each, before it runs.

        None below the hooks of mmrepro: their digests of the state are not part of the training.
        """
        node = torch._C._current_autograd_node()
        site, in_module = self._from_stack(node is not None)
        if site is None:
            return None
        if node is not None:
            return site._replace(phase='backward') if in_module else self._of_node(node, site.stack)
        number = torch.autograd._get_sequence_nr()
        if number > self._next:
            self._numbers.append(self._next)
            self._owners.append((site.path, site.stack))
            self._next = number
        return site

    def _of_node(self, node: Any, stack: tuple[Any, ...]) -> CallSite:
        """Return the call site of a backward operator: module and Python stack of its forward."""
        variable = getattr(node, 'variable', None)
        if variable is not None:  # AccumulateGrad
            return CallSite('backward', self.label(variable), stack)
        index = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
        path, made_by = self._owners[index] if index >= 0 else ('', ())
        function = getattr(type(node), '_forward_cls', None)  # of a custom function
        module = sys.modules.get(function.__module__) if function else None
        file = getattr(module, '__file__', '') if function else 'torch'
        made = file, 0, f'{node.name()}, made by'
        return CallSite('backward', path, (*stack, made, *made_by))

    def _from_stack(self, in_backward: bool) -> tuple[CallSite | None, bool]:
        """Read the call site off the Python stack; also whether a module of the model is on it."""
        phase: Phase | None = None
        path: str | None = None
        stack: list[Frame] = []
        frame: Any = sys._getframe(1)
        while frame is not None and len(stack) < STACK:
            code = frame.f_code
            if in_backward and code.co_filename.endswith(ENGINE):
                break
            if NOT_TRAINING in code.co_filename:
                return None, False
            if not any(part in code.co_filename for part in SKIPPED):
                stack.append((code.co_filename, frame.f_lineno, code.co_name))
                if code.co_name == 'backward' and code.co_filename.endswith(TENSOR):
                    phase = phase or 'backward'
                if code.co_name in LOSS_FUNCTIONS:
                    phase = phase or 'loss'
                if code.co_argcount and code.co_varnames[0] == 'self':
                    phase, path = self._of_owner(frame.f_locals.get('self'), phase, path)
            frame = frame.f_back
        if path is not None and path.split('.')[0] == PREPROCESSOR:
            phase = phase or 'data'
        if self.hook and not in_backward:
            phase, path = 'hook', path or self.hook
        return CallSite(phase or 'forward', path or '', tuple(stack)), path is not None

    def _of_owner(self, owner: Any, phase: Phase | None,
                  path: str | None) -> tuple[Phase | None, str | None]:
        """Refine phase and path by the object whose method runs; the innermost object counts."""
        if id(owner) in self._modules and isinstance(owner, torch.nn.Module):
            if path is None:
                path = self._modules[id(owner)]
                if type(owner).__name__.endswith('Loss'):
                    phase = phase or 'loss'
        elif isinstance(owner, OPTIMIZERS):
            phase = phase or 'optimizer'
        return phase, path


def method_site(cls: type, *names: str) -> Frame:
    """Return file, line and name of the first of these methods that the nearest class has."""
    methods = ((getattr(vars(base)[name], 'func', vars(base)[name]), f'{cls.__name__}.{name}')
               for base in cls.__mro__ for name in names if name in vars(base))
    function, shown = next(methods, (None, cls.__name__))
    code = getattr(function, '__code__', None)
    return (code.co_filename, code.co_firstlineno, shown) if code else ('', 0, shown)


# operators that return uninitialized memory: no digest, and the memory is remembered
ALLOCATE = ('aten.empty', 'aten.new_empty', 'aten.empty_like', 'aten.empty_strided',
            'aten.new_empty_strided', 'aten.empty_permuted', 'aten.resize_')
# operators that write to all of their first argument without reading it
OVERWRITES = ('aten.fill_', 'aten.zero_', 'aten.copy_', 'aten.normal_', 'aten.uniform_',
              'aten.bernoulli_', 'aten.random_', 'aten.exponential_')
# arguments that are updated in training, although the schema does not say so
MUTATED = dict.fromkeys(('aten.native_batch_norm', 'aten.cudnn_batch_norm',
                         'aten.miopen_batch_norm'), ('running_mean', 'running_var'))
# aten.set_ is declared as a write and only re-points the storage of the tensor, as in
# copy.deepcopy of a tensor before the copy is filled
VIEWS = ('aten.set_', )
SILENT = ('profiler', )  # namespaces of operators that compute nothing
# types of arguments that count by their text; that of others may hold addresses
PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout,
         torch.memory_format)
# operators that return new memory, although their schema says a view
NEW = ('aten.lift_fresh', 'aten.lift')
ARGUMENT_TEXT = 400  # characters of the arguments that are not tensors, and a checksum of the rest


class _Operator(NamedTuple):
    """Properties of an operator, from its schema and the tables above."""
    name: str
    view: bool
    allocates: bool
    overwrites: bool
    written: tuple[str, ...]
    seeded: bool


@functools.cache
def _operator(func: Any) -> _Operator:
    schema, name = func._schema, str(func)
    writes = tuple(argument.name for argument in schema.arguments
                   if argument.alias_info is not None and argument.alias_info.is_write)
    aliases = any(result.alias_info is not None for result in schema.returns)
    packet = name.rsplit('.', 1)[0]
    writes = () if packet in VIEWS else writes + MUTATED.get(packet, ())
    return _Operator(name, aliases and not writes and packet not in NEW, packet in ALLOCATE,
                     packet in OVERWRITES, writes, torch.Tag.nondeterministic_seeded in func.tags)


class OperatorRecorder(TorchDispatchMode):
    """Records the operators of a model while it is active.

    The results of record number ``keep`` are copied into ``kept``.
    """

    def __init__(self, model: torch.nn.Module, keep: int | None = None) -> None:
        super().__init__()
        self._keep = keep
        self.kept: dict[str, list[torch.Tensor]] = {}
        self.sites = CallSites(model)
        self._raw: list[Record] = []
        self._digests: list[torch.Tensor] = []
        self._uninitialized = UninitializedMemory()
        self._watch = generator_states.Watch()
        # a CPU part and a device part of one backward pass may run at the same time
        self._lock = threading.Lock()

    def __enter__(self) -> OperatorRecorder:
        self._watch.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self._watch.__exit__(*args)

    def records(self) -> list[Record]:
        """Return all records so far, with one copy from the device for all digests."""
        texts = to_hex(self._digests)

        def text(numbers: tuple[int | None, ...]) -> tuple[str, ...]:
            return tuple('' if number is None else texts[number] for number in numbers)

        return [record._replace(inputs=text(record.inputs), outputs=text(record.outputs))
                for record in self._raw]

    def note(self, phase: Phase, path: str, name: str, named: Mapping[str, torch.Tensor],
             scalars: Sequence[str] = (), stack: tuple[Any, ...] = ()) -> None:
        """Add the record of a state at a boundary, with its tensors as the outputs."""
        with self._lock, _disable_current_modes():
            self._raw.append(Record(
                phase, path, name, outputs=tuple(map(self._digest, named.values())),
                arguments=SEPARATOR.join(scalars), labels=tuple(named),
                generators=generator_states.states(), stack=stack, calls=self._watch.take()))

    def explanation(self, owner: str, name: str, **fields: Any) -> None:
        """Add a record that may explain a difference and is not compared."""
        self._raw.append(Record('start', owner, name, **fields))

    @property
    def at_note(self) -> bool:
        """Whether the last record is a state."""
        return bool(self._raw) and self._raw[-1].is_state

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in SILENT:
            return func(*args, **kwargs)
        operator = _operator(func)
        with self._lock:
            site = self.sites.current()
            if site is None:
                return func(*args, **kwargs)
            states = generator_states.states()
            calls = self._watch.take()
            given, arguments = self._given(func, operator, args, kwargs)
            labels = [UNINITIALIZED if digest is None and tensor in self._uninitialized
                      else self.sites.label(tensor) for tensor, _, digest in given]
        # outside of the lock: an operator may wait for another thread
        result = func(*args, **kwargs)
        with self._lock:
            returned = [] if operator.view else tensors(result)
            changed = [tensor for tensor, name, _ in given if name in operator.written]
            overwritten = changed if operator.overwrites else [
                tensor for tensor, name, _ in given if name == 'out']
            outputs = self._returned(operator, returned, changed, overwritten)
            if len(self._raw) == self._keep:
                self.kept['outputs'] = [tensor.detach().to('cpu', copy=True)
                                        for tensor in [*returned, *changed]]
            if site.phase == 'optimizer' and not site.path:
                site = site._replace(path=next(filter(None, labels), ''))
            self._raw.append(Record(
                site.phase, site.path, operator.name,
                shapes=_shapes([tensor for tensor, _, _ in given], tensors(result)),
                arguments=arguments, inputs=tuple(digest for _, _, digest in given),
                outputs=outputs, labels=tuple(labels),
                generators=states, stack=site.stack, drew=operator.seeded, calls=calls))
        return result

    def _given(self, func: Any, operator: _Operator, args: tuple[Any, ...],
               kwargs: dict[str, Any]) -> tuple[list[tuple[torch.Tensor, str, int | None]], str]:
        """Return the tensors given, with argument name and digest; everything else as text."""
        names = [argument.name for argument in func._schema.arguments]
        given, text = [], []
        for name, value in [*zip(names, args), *kwargs.items()]:
            for leaf in tree_flatten(value)[0]:
                if isinstance(leaf, torch.Tensor):
                    only_written = name in operator.written and (
                        operator.overwrites or name == 'out')
                    unknown = only_written or operator.view or leaf in self._uninitialized
                    given.append((leaf, name, None if unknown else self._digest(leaf)))
                elif isinstance(leaf, torch.Generator):
                    text.append(f'{name}=generator {generator_states.of_torch(leaf)}')
                elif leaf is not None:
                    plain = isinstance(leaf, PLAIN)
                    text.append(f'{name}={leaf if plain else type(leaf).__name__}')
        arguments = SEPARATOR.join(text)
        if len(arguments) > ARGUMENT_TEXT:  # not hash(): it differs from process to process
            arguments = f'{arguments[:ARGUMENT_TEXT]}... {zlib.crc32(arguments.encode()):08x}'
        return given, arguments

    def _returned(self, operator: _Operator, returned: list[torch.Tensor],
                  changed: list[torch.Tensor],
                  overwritten: list[torch.Tensor]) -> tuple[int | None, ...]:
        if operator.allocates:
            for tensor in returned:
                self._uninitialized.allocated(tensor)
            return ()
        seen = {id(tensor) for tensor in changed}
        fresh = [tensor for tensor in returned if id(tensor) not in seen]
        for tensor in fresh:
            # the result may be in memory that was freed uninitialized
            self._uninitialized.result(tensor)
        for tensor in overwritten:
            self._uninitialized.overwritten(tensor)
        return tuple(None if tensor in self._uninitialized else self._digest(tensor)
                     for tensor in [*fresh, *changed])

    def _digest(self, tensor: torch.Tensor) -> int:
        self._digests.append(tensor_digest(tensor))
        return len(self._digests) - 1


def _shapes(given: list[torch.Tensor], returned: list[torch.Tensor]) -> str:
    def text(those: list[torch.Tensor]) -> str:
        return ' '.join(f'{str(t.dtype)[6:]}{list(t.shape)}'.replace(', ', ',') for t in those)

    return f'{text(given)} -> {text(returned)}' if returned else text(given)


class OperatorLines:
    """The operators of an iteration, for its line in the fingerprint file."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._recorder: Any = None  # OperatorRecorder during an iteration

    def start(self) -> None:
        # a new recorder: it knows parameters by their identity, which a hook may have changed
        self._recorder = OperatorRecorder(self._model)
        self._recorder.__enter__()

    def stop(self) -> dict[str, Any]:
        """Return the entries of the iteration's line."""
        recorder = self._recorder
        self.remove()
        return {OPERATORS: _entries(recorder.records())}

    def remove(self) -> None:
        if self._recorder is not None:
            self._recorder.__exit__(None, None, None)
            self._recorder = None


def _entries(records: Sequence[Record]) -> list[list[Any]]:
    """Return [phase, path, operator, call, in, out, shapes] of every operator, in order."""
    calls: Counter[Any] = Counter()
    entries = []
    for record in records:
        site = record.site
        entries.append([*site, calls[site], _combined(record.inputs, record.arguments),
                        _combined(record.outputs), record.shapes])
        calls[site] += 1
    return entries


def _combined(digests: Sequence[str], arguments: str = '') -> str | None:
    """Combine digests, and the text of other arguments; None without tensors."""
    if not digests:
        return None
    named: dict[str, int] = {f'{i} {"" if digest else "unwritten"}': int(digest or '0', 16)
                             for i, digest in enumerate(digests)}
    named[arguments] = 0
    return combined_hex(named)


class UninitializedMemory:
    """Storages allocated by ``torch.empty`` and the like, with the byte ranges written since.

    Writes that are not contiguous (an index, a column) are not followed: the memory stays
    uninitialized, and gets no digest.
    """

    def __init__(self) -> None:
        self._written: dict[int, list[tuple[int, int]]] = {}  # address -> merged byte ranges

    def allocated(self, tensor: torch.Tensor) -> None:
        """Note that an operator returned this tensor without writing it."""
        if tensor.numel():
            self._written[_address(tensor)] = []

    def result(self, tensor: torch.Tensor) -> None:
        """Note that this tensor is the result of an operator: all of its memory is written."""
        self._written.pop(_address(tensor), None)

    def overwritten(self, tensor: torch.Tensor) -> None:
        """Note that an operator wrote all elements of this tensor."""
        address = _address(tensor)
        if address not in self._written or not tensor.is_contiguous():
            return
        ranges = sorted([*self._written[address], _range_of(tensor)])
        merged = ranges[:1]
        for start, end in ranges[1:]:
            if start <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(end, merged[-1][1])
            else:
                merged.append((start, end))
        self._written[address] = merged
        if merged[0] == (0, tensor.untyped_storage().nbytes()):
            del self._written[address]

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Whether some elements of the tensor may be uninitialized."""
        if not self._written or _address(tensor) not in self._written:
            return False
        if not tensor.is_contiguous():
            return True
        start, end = _range_of(tensor)
        return not any(first <= start and end <= last
                       for first, last in self._written[_address(tensor)])


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _range_of(tensor: torch.Tensor) -> tuple[int, int]:
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    return start, start + tensor.numel() * size
