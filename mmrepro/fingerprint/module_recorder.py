"""Digests of the inputs and outputs of every module, forward and backward.

A backward record is about the nodes of the autograd graph that the forward of the module has made:
'in' are the gradients of its outputs, 'out' those of its inputs; gradients of parameters are in
the line by name. Hooks on nodes leave the graph as it is. PyTorch's full backward hooks would add
nodes, refuse in-place operators behind a module, and might change the order in which gradients are
summed.
"""
from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..nested import tensors
from .digest import combine_digests, tensor_digest, to_hex
from .schema import MODULES

MAX_NODES = 200  # of the graph of a module; larger graphs, of containers, are not watched


class ModuleRecorder:
    """Watches a model; :meth:`start` and :meth:`stop` bound what is recorded."""

    def __init__(self, model: nn.Module) -> None:
        self.recording = False
        # path, phase, number of the call, [digest of the inputs, digest of the outputs]
        self._records: list[list] = []
        self._calls: Counter = Counter()
        self._known: dict[int, tuple[Any, int, torch.Tensor]] = {}
        self._handles = []
        for path, module in model.named_modules():
            watch = _Watch(self, path or '(model)', leaf=not any(True for _ in module.children()))
            self._handles += [module.register_forward_pre_hook(watch.before, with_kwargs=True),
                              module.register_forward_hook(watch.after, with_kwargs=True)]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def start(self) -> None:
        self.recording, self._records, self._known = True, [], {}
        self._calls.clear()

    def stop(self) -> dict[str, Any]:
        """Return the entries of the iteration's line."""
        records, self._records, self._known, self.recording = self._records, [], {}, False
        texts = iter(to_hex([digest for *_, digests in records for digest in digests
                             if digest is not None]))
        return {MODULES: [[*head, *(None if digest is None else next(texts) for digest in digests)]
                          for *head, digests in records]}

    def record(self, path: str, phase: str) -> list:
        """Add a record in the order of execution; :meth:`put` fills in its digests."""
        self._calls[path, phase] += 1
        record = [path, phase, self._calls[path, phase] - 1, [None, None]]
        self._records.append(record)
        return record

    def put(self, record: list, end: int, tensors: Sequence[torch.Tensor], reuse: bool) -> None:
        """Digest the inputs (``end`` 0) or outputs (1) of a call."""
        if not tensors:
            return
        values = [self._digest(tensor, reuse) for tensor in tensors]
        if len({value.device for value in values}) > 1:
            values = [value.cpu() for value in values]
        record[3][end] = values[0] if len(values) == 1 else combine_digests(
            [str(i) for i in range(len(values))], torch.stack(values))

    def _digest(self, tensor: torch.Tensor, reuse: bool) -> torch.Tensor:
        known = self._known.get(id(tensor))
        if reuse and known and known[0]() is tensor and known[1] == tensor._version:
            return known[2]
        value = tensor_digest(tensor.detach())
        self._known[id(tensor)] = (weakref.ref(tensor), tensor._version, value)
        return value


class _Watch:
    """The hooks of one module.

    Most inputs, and the outputs of containers, are results of other modules: the digest is reused
    while the tensor and its version are the same. A write through ``.data`` between two modules
    does not change the version; it shows in the output of the next module.
    """

    def __init__(self, recorder: ModuleRecorder, path: str, leaf: bool) -> None:
        self._recorder, self._path, self._leaf = recorder, path, leaf
        self._open: list[tuple[list, list]] = []

    def before(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if not self._recorder.recording:
            return
        record = self._recorder.record(self._path, 'forward')
        inputs = tensors((args, kwargs))
        self._recorder.put(record, 0, inputs, True)
        # an in-place module replaces the node of its input
        self._open.append((record, [tensor.grad_fn for tensor in inputs]))

    def after(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if not self._recorder.recording or not self._open:
            return
        record, sources = self._open.pop()
        outputs = tensors(output)
        self._recorder.put(record, 1, outputs, not self._leaf)
        if self._leaf:
            self._watch_backward([tensor.grad_fn for tensor in outputs], sources)

    def _watch_backward(self, entries: Sequence[Any], sources: Sequence[Any]) -> None:
        entries = [node for node in dict.fromkeys(entries) if node is not None]
        inputs = set(filter(None, sources))
        exits = _exits(entries, inputs)
        if exits is None:
            return
        shared: dict[str, list] = {}
        for node in dict.fromkeys([*entries, *exits]):
            keep = [_leads_on(after, inputs) for after, _ in node.next_functions
                    ] if node in exits else []
            node.register_hook(partial(self._gradients, shared, node in entries, keep))

    def _gradients(self, shared: dict[str, list], entry: bool, keep: Sequence[bool],
                   passed_on: tuple, received: tuple) -> None:
        """Record the gradients that a node received, and those that it passes on."""
        recorder = self._recorder
        if not recorder.recording:
            return
        if 'record' not in shared:
            shared['record'] = recorder.record(self._path, 'backward')
        record = shared['record']
        if entry and record[3][0] is None:
            recorder.put(record, 0, [gradient for gradient in received if gradient is not None],
                         True)
        if any(keep) and record[3][1] is None:
            # without those of parameters, which end in leaves of the graph
            recorder.put(record, 1, [gradient for gradient, kept in zip(passed_on, keep)
                                     if kept and gradient is not None], False)


def _leads_on(node: Any, sources: set) -> bool:
    """Whether a gradient reaches another module, and does not end in a parameter of this one.

    The weight of a linear layer is behind a node that transposes it.
    """
    while node is not None and node not in sources and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return node is not None and (node in sources or bool(node.next_functions))


def _exits(entries: Sequence[Any], sources: set) -> list[Any] | None:
    """Return the nodes between ``sources`` and ``entries`` that pass gradients out of the part."""
    exits, waiting, seen = [], list(entries), set()
    while waiting:
        node = waiting.pop()
        if node in seen or node in sources:
            continue
        seen.add(node)
        if len(seen) > MAX_NODES:
            return None
        following = [after for after, _ in node.next_functions if after is not None]
        inner = [after for after in following if after not in sources and after.next_functions]
        if len(inner) < len(following):
            exits.append(node)
        waiting += inner
    return exits
