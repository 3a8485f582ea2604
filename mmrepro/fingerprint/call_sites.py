"""Where an operator runs: phase and module, read off the Python stack and the autograd node."""
from __future__ import annotations

import bisect
import os
import sys
from typing import Any, NamedTuple

import torch
from mmengine.optim import OptimWrapper, OptimWrapperDict

# by its path, because the folder of a checkout may have the same name
PACKAGE = os.path.dirname(os.path.dirname(__file__))
LOSS_FUNCTIONS = ('loss_by_feat', 'loss_and_target', 'parse_losses', 'loss_single')
OPTIMIZERS = (torch.optim.Optimizer, OptimWrapper, OptimWrapperDict)
ENGINE = '/torch/autograd/graph.py'  # starts the backward pass; its callers are not the cause
TENSOR = '/torch/_tensor.py'  # Tensor.backward makes the first gradient
# what runs below a method of these is not part of the training
OWN = os.path.join(PACKAGE, 'hooks', '')
PREPROCESSOR = 'data_preprocessor'  # MMEngine's name for the module that moves and pads batches
STACK = 40  # frames kept
# frames between the training code and the recorder
SKIPPED = ('/torch/utils/_python_dispatch.py', '/torch/_ops.py', '/torch/_dynamo/',
           '/torch/_compile.py', os.path.join(PACKAGE, 'fingerprint', ''),
           os.path.join(PACKAGE, 'localise', ''), os.path.join(PACKAGE, 'step_check', ''))


class CallSite(NamedTuple):
    """Phase, path of the module or parameter, and the Python calls, innermost first."""
    phase: str
    path: str
    stack: tuple[tuple[str, int, str], ...]


class CallSites:
    """Answers where the operator that is being dispatched comes from.

    A backward operator belongs to the module whose forward made its autograd node: nodes carry a
    sequence number that counts up, so it is enough to remember who ran when the number moved.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = {id(module): name for name, module in model.named_modules()}
        named = [*model.named_parameters(), *model.named_buffers()]
        self._tensors = {id(tensor): name for name, tensor in named}
        self._alive = model, named  # an id belongs to whoever comes next when its object is gone
        self._numbers: list[int] = []  # of the first node that belongs to ...
        self._owners: list[tuple[str, tuple]] = []  # ... this path, made by these Python calls
        self._next = torch.autograd._get_sequence_nr()
        self.hook = ''  # class and method of the hook that runs

    def label(self, tensor: torch.Tensor) -> str:
        """Name of a parameter or buffer, of a gradient, or ''."""
        return self._tensors.get(id(tensor), '')

    def current(self) -> CallSite | None:
        """The call site of the operator in dispatch; ask once for each, before it runs.

        None for what mmrepro's own hooks compute: digests of the state, which are no training.
        """
        node = torch._C._current_autograd_node()
        site, found = self._from_stack(node is not None)
        if site is None:
            return None
        if node is not None:
            return site._replace(phase='backward') if found else self._of_node(node, site.stack)
        number = torch.autograd._get_sequence_nr()
        if number > self._next:
            self._numbers.append(self._next)
            self._owners.append((site.path, site.stack))
            self._next = number
        return site

    def _of_node(self, node: Any, stack: tuple) -> CallSite:
        """Of an operator of the backward pass: the module and the Python calls of the forward."""
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
        """The call site by the Python calls, and whether a module of the model is among them."""
        phase, path, stack = '', None, []
        frame = sys._getframe(1)
        while frame is not None and len(stack) < STACK:
            code = frame.f_code
            if in_backward and code.co_filename.endswith(ENGINE):
                break
            if OWN in code.co_filename:
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

    def _of_owner(self, owner: Any, phase: str, path: str | None) -> tuple[str, str | None]:
        """Phase and path with what the object tells whose method runs; the innermost counts."""
        if id(owner) in self._modules and isinstance(owner, torch.nn.Module):
            if path is None:
                path = self._modules[id(owner)]
                if type(owner).__name__.endswith('Loss'):
                    phase = phase or 'loss'
        elif isinstance(owner, OPTIMIZERS):
            phase = phase or 'optimizer'
        return phase, path
