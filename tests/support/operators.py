"""What tests of operators draw, train and compare."""
import torch


def with_gradients(out, leaves, upstream=None):
    """Return the result of a function of ``leaves``, and its gradients for them."""
    if upstream is None:
        upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype).view_as(out))]


def draw(*shape, seed=0, dtype=torch.float32):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random, dtype=torch.float64).mul(2).add(1).to(dtype)


def batch_norm(channels):
    """Return a layer that has been trained; two of them have the same numbers."""
    layer = torch.nn.BatchNorm2d(channels)
    with torch.no_grad():
        for seed, tensor in enumerate((layer.weight, layer.bias, layer.running_mean), 1):
            tensor.copy_(draw(channels, seed=seed))
        layer.running_var.copy_(draw(channels, seed=4).abs())
    return layer


def trained(layer, x, upstream, call=torch.nn.Module.__call__):
    """Return what a step of a batch norm computes: output, gradients, statistics."""
    x = x.clone().requires_grad_()
    out = call(layer, x)
    out.backward(upstream)
    return [t.detach() for t in (out, x.grad, layer.weight.grad, layer.bias.grad,
                                 layer.running_mean, layer.running_var)]
