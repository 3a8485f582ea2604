"""What tests of operators compare."""
import torch


def with_gradients(out, leaves):
    """Return the result of a function of ``leaves``, and its gradients for them."""
    upstream = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]
