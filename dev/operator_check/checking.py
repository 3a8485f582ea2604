"""Check one case: agreement with a reference, the same bits on every run, and cost."""
from __future__ import annotations

import hashlib
import time
from typing import Any

import torch
from torch import Tensor

from dev.gpu_check.checking import error_line
from dev.gpu_check.timing import timed
from mmrepro import determinism, ops

from .disturbance import Disturbance, fewer_multiprocessors
from .operator_cases import Inputs, OperatorCall, OperatorCase, tensors_of

__all__ = ['DEFAULTS', 'LIMIT', 'check', 'once']

# Largest relative error (of a tensor, in the 2-norm) that counts as agreement: float32 sums of
# thousands of terms are below 1e-5, a wrong formula is far above.
LIMIT = 1e-3

# What times are compared with: another provider, or the same without the flags.
DEFAULTS = {'compiled': 'compiled mmcv', 'torch': 'PyTorch form', 'flags': 'torch'}


def once(call: OperatorCall, upstream: list[Tensor] | None = None) -> dict[str, Tensor]:
    """Run a forward and, if there are leaves, a backward; return every tensor by name.

    ``upstream`` are the gradients of the outputs; an empty list is filled with those drawn.
    """
    upstream = [] if upstream is None else upstream
    result = call.run(**call.leaves, **call.fixed)
    outputs = tensors_of(result)
    named = {f'output {i}' if len(outputs) > 1 else 'output': t.detach()
             for i, t in enumerate(outputs)}
    steep = [tensor for tensor in outputs if tensor.requires_grad]
    if call.leaves and steep:
        if not upstream:
            random = torch.Generator().manual_seed(0)
            # drawn on the CPU, so the same on all devices; ones would hide the order of sums
            upstream += [torch.randn(t.shape, generator=random).to(t) for t in steep]
        grads = torch.autograd.grad(steep, list(call.leaves.values()), upstream,
                                    allow_unused=True)
        named.update((f'gradient of {name}', grad)
                     for name, grad in zip(call.leaves, grads) if grad is not None)
    return named


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _unequal(first: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [name for name, tensor in first.items()
            if tensor.shape != other[name].shape
            or not torch.equal(_bits(tensor), _bits(other[name]))]


def _error(found: Tensor, expected: Tensor) -> float:
    """Relative error in the 2-norm; equality for integers; 1.0 for another shape."""
    found, expected = found.cpu(), expected.cpu()
    if found.shape != expected.shape:
        return 1.
    if not expected.is_floating_point():
        return float((found != expected).float().mean()) if expected.numel() else 0.
    found, expected = found.double(), expected.double()
    both = found.isfinite() & expected.isfinite()
    if not torch.equal(found.isfinite(), expected.isfinite()):
        return 1.
    off = (found - expected)[both].norm()
    size = expected[both].norm()
    return float(off / size) if size else float(off)


def _digest(named: dict[str, Tensor]) -> str:
    """Return a digest of all tensors, to compare with other processes and machines."""
    total = hashlib.sha256()
    for name, tensor in named.items():
        total.update(f'{name} {tensor.dtype} {tuple(tensor.shape)}'.encode())
        total.update(_bits(tensor).cpu().numpy().tobytes())
    return total.hexdigest()[:32]


def _repeat(call: OperatorCall, device: str, times: int, seconds: float) -> dict[str, Any]:
    """Run a call again and again, and compare the bits.

    Returns:
        times: runs; differs: names that ever differed; ms: the median; digest of the first run. On
        a GPU whose multiprocessors can be taken, fewer_multiprocessors: whether runs on half of
        them were equal too. No promise depends on it: kernels may be chosen by their number.
    """
    upstream: list[Tensor] = []
    first = once(call, upstream)
    differed: dict[str, None] = {}
    on_fewer: list[bool] = []
    disturbance = Disturbance(device)
    durations, begin, repetition = [], time.perf_counter(), 1
    while repetition < times and (repetition < 3 or time.perf_counter() - begin < seconds):
        with disturbance.around(repetition):
            other, took = timed(lambda: once(call, upstream), device)
        durations.append(took)
        disturbance.expect(took)
        unequal = _unequal(first, other)
        if disturbance.takes_multiprocessors(repetition):
            on_fewer.append(not unequal)
        else:
            differed.update(dict.fromkeys(unequal))
        repetition += 1
    # only undisturbed repetitions are timed
    calm = sorted(durations[1::2] or durations)
    return dict(times=repetition, differs=list(differed), digest=_digest(first),
                ms=calm[len(calm) // 2] if calm else float('nan'),
                **(dict(fewer_multiprocessors=all(on_fewer)) if on_fewer else {}))


def check(case: OperatorCase, device: str, small: bool, times: int = 50, seconds: float = 2.,
          provider: str = 'torch', against: str | None = None) -> dict[str, Any]:
    """Return one row of the report.

    Args:
        case: what to run.
        device: 'cuda' or 'cpu'.
        small: use small inputs for repetition and time too.
        times: repetitions; fewer if they take longer than ``seconds``.
        provider: of mmcv's operators, in deterministic mode.
        against: what to compare times with, a key of :data:`DEFAULTS`, or None.
    """
    row: dict[str, Any] = dict(covers=list(case.covers))
    reference = case.make(Inputs(True))
    little = reference.to(device)
    if case.expect == 'raises':
        return _refusal(row, little, device)
    reference = reference.to('cpu', torch.float64 if reference.double else None)
    if case.reference is not None:
        reference = reference._replace(run=case.reference)
    with determinism.deterministic(False), ops.using('torch'):
        expected = once(reference)
    with determinism.deterministic(), ops.using(provider):
        found = once(little)
        errors = {name: _error(found[name], tensor) for name, tensor in expected.items()}
        row['error'] = max(errors.values(), default=0.)
        row['agrees'] = row['error'] <= LIMIT
        if not row['agrees']:
            row['disagrees'] = [name for name, error in errors.items() if error > LIMIT]
        call = little if small else case.make(Inputs(False)).to(device)
        row.update(_repeat(call, device, times, seconds))
        if device == 'cuda':
            row['green_contexts'] = fewer_multiprocessors()[1] or 'yes'
        row['equal'] = not row['differs']
    if against:
        row['default'] = DEFAULTS[against]
        try:
            operators = ops.provider() if against == 'flags' else against
            with determinism.deterministic(False), ops.using(operators):
                plain = _repeat(call, device, 10, seconds / 2)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            row['default_error'] = error_line(error)
        else:
            row['default_ms'], row['default_equal'] = plain['ms'], not plain['differs']
            row['ratio'] = row['ms'] / row['default_ms']
    return row


def _refusal(row: dict[str, Any], call: OperatorCall, device: str) -> dict[str, Any]:
    """Check that torch raises and names the operator. On a CPU it does not have to."""
    row['refused'] = False
    try:
        with determinism.deterministic():
            once(call)
    except RuntimeError as error:
        if 'deterministic' not in str(error):
            raise
        row['refused'], row['message'] = True, error_line(error)
    row['equal'] = row['refused'] or device == 'cpu'
    return row
