"""Digests of the inputs and outputs of every module, forward and backward.

A backward record is about the nodes of the autograd graph that the forward of the module has made:
'in' are the gradients of its outputs, 'out' those of its inputs; gradients of parameters are in
the line by name. Hooks on nodes leave the graph as it is. PyTorch's full backward hooks would add
nodes, refuse in-place operators after a module, and might change the order in which gradients are
summed.
"""
from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..objects.walks import tensors
from .digest import combine_digests, tensor_digest, to_hex
from .schema import MODULES

MAX_NODES = 200  # of the graph of a module; larger graphs, of containers, are not watched


@dataclass
class _Call:
    """A call of a module; digests are added when its tensors are known, None without tensors."""
    path: str
    phase: str
    number: int
    input: torch.Tensor | None = None
    output: torch.Tensor | None = None


class ModuleRecorder:
    """Watches a model; :meth:`start` and :meth:`stop` bound what is recorded."""

    def __init__(self, model: nn.Module) -> None:
        self.recording = False
        self._calls: list[_Call] = []
        self._counts: Counter[Any] = Counter()
        self._known: dict[int, tuple[Any, int, torch.Tensor]] = {}
        self._handles, self._watches = [], []
        for path, module in model.named_modules():
            watch = _Watch(self, path or '(model)', leaf=not any(True for _ in module.children()))
            self._watches.append(watch)
            self._handles += [module.register_forward_pre_hook(watch.before, with_kwargs=True),
                              module.register_forward_hook(watch.after, with_kwargs=True)]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def start(self) -> None:
        self.recording, self._calls, self._known = True, [], {}
        self._counts.clear()
        for watch in self._watches:
            watch.forget_open()

    def stop(self) -> dict[str, Any]:
        """Return the entries of the iteration's line."""
        calls, self._calls, self._known, self.recording = self._calls, [], {}, False
        texts = iter(to_hex([digest for call in calls for digest in (call.input, call.output)
                             if digest is not None]))
        return {MODULES: [[call.path, call.phase, call.number, *(
            None if digest is None else next(texts) for digest in (call.input, call.output))]
            for call in calls]}

    def add(self, path: str, phase: str) -> _Call:
        """Add a call in the order of execution."""
        self._calls.append(_Call(path, phase, self._counts[path, phase]))
        self._counts[path, phase] += 1
        return self._calls[-1]

    def digest(self, tensors: Sequence[torch.Tensor], reuse: bool) -> torch.Tensor | None:
        """Return the digest of all inputs or outputs of a call."""
        if not tensors:
            return None
        values = [self._digest(tensor, reuse) for tensor in tensors]
        if len({value.device for value in values}) > 1:
            values = [value.cpu() for value in values]
        return values[0] if len(values) == 1 else combine_digests(
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
        self._open: list[tuple[_Call, list[Any]]] = []

    def forget_open(self) -> None:
        """Let go of calls that have not returned: an error has ended them."""
        self._open.clear()

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._recorder.recording:
            return
        call = self._recorder.add(self._path, 'forward')
        inputs = tensors((args, kwargs))
        call.input = self._recorder.digest(inputs, reuse=True)
        # an in-place module replaces the node of its input
        self._open.append((call, [tensor.grad_fn for tensor in inputs]))

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
              output: Any) -> None:
        if not self._recorder.recording or not self._open:
            return
        call, sources = self._open.pop()
        outputs = tensors(output)
        call.output = self._recorder.digest(outputs, reuse=not self._leaf)
        if self._leaf:
            self._watch_backward([tensor.grad_fn for tensor in outputs], sources)

    def _watch_backward(self, entries: Sequence[Any], sources: Sequence[Any]) -> None:
        entries = [node for node in dict.fromkeys(entries) if node is not None]
        inputs = set(filter(None, sources))
        exits = _exits(entries, inputs)
        if exits is None:
            return
        shared: list[_Call] = []  # one for all nodes, added when the first of them runs
        for node in dict.fromkeys([*entries, *exits]):
            keep = [_leads_on(after, inputs) for after, _ in node.next_functions
                    ] if node in exits else []
            node.register_hook(partial(self._gradients, shared, node in entries, keep))

    def _gradients(self, shared: list[_Call], entry: bool, keep: Sequence[bool],
                   passed_on: tuple[Any, ...], received: tuple[Any, ...]) -> None:
        """Record the gradients that a node received, and those that it passes on."""
        recorder = self._recorder
        if not recorder.recording:
            return
        if not shared:
            shared.append(recorder.add(self._path, 'backward'))
        call, = shared
        if entry and call.input is None:
            call.input = recorder.digest(
                [gradient for gradient in received if gradient is not None], reuse=True)
        if any(keep) and call.output is None:
            # without those of parameters, which end in leaves of the graph
            call.output = recorder.digest(
                [gradient for gradient, kept in zip(passed_on, keep)
                 if kept and gradient is not None], reuse=False)


def _leads_on(node: Any, sources: set[Any]) -> bool:
    """Whether a gradient reaches another module, and does not end in a parameter of this one.

    The weight of a linear layer is behind a node that transposes it.
    """
    while node is not None and node not in sources and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return node is not None and (node in sources or bool(node.next_functions))


def _exits(entries: Sequence[Any], sources: set[Any]) -> list[Any] | None:
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
