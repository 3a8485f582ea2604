"""Where an operator runs: phase and module, read off the Python stack and the autograd node."""
from __future__ import annotations

import bisect
import os
import sys
from typing import Any, NamedTuple

import torch
from mmengine.optim import OptimWrapper, OptimWrapperDict

from .records import Frame, Phase

# an absolute path, because the folder of a checkout may be called mmrepro as well
PACKAGE = os.path.dirname(os.path.dirname(__file__))
LOSS_FUNCTIONS = ('loss_by_feat', 'loss_and_target', 'parse_losses', 'loss_single')
OPTIMIZERS = (torch.optim.Optimizer, OptimWrapper, OptimWrapperDict)
ENGINE = '/torch/autograd/graph.py'  # starts the backward pass; its callers are not of interest
TENSOR = '/torch/_tensor.py'  # Tensor.backward makes the first gradient
# calls below these files are not part of the training
NOT_TRAINING = os.path.join(PACKAGE, 'hooks', '')
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
        self._owners: list[tuple[str, tuple]] = []  # path and Python stack of the forward call
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

    def _of_node(self, node: Any, stack: tuple) -> CallSite:
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
