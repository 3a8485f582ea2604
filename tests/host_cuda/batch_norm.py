"""The kernels of torch's SyncBatchNorm on CUDA, which the host lacks, by formulas."""
import torch

_library = torch.library.Library('aten', 'IMPL')


def _dims(x):
    return [dim for dim in range(x.dim()) if dim != 1]


def _shaped(channels, x):
    return channels.view(1, -1, *(1, ) * (x.dim() - 2))


def _stats(x, eps):
    return x.mean(_dims(x)), (x.var(_dims(x), correction=0) + eps).rsqrt()


def _gather_stats(x, means, invstds, running_mean, running_var, momentum, eps, counts):
    total, counts = counts.sum(), counts.view(-1, 1)
    mean = (means * counts).sum(0) / total
    var = ((invstds ** -2 - eps + (means - mean) ** 2) * counts).sum(0) / total
    if running_mean is not None:
        running_mean.lerp_(mean, momentum)
    if running_var is not None:
        running_var.lerp_(var * total / (total - 1), momentum)
    return mean, (var + eps).rsqrt()


def _elementwise(x, weight, bias, mean, invstd, eps):
    return (x - _shaped(mean, x)) * _shaped(invstd * weight, x) + _shaped(bias, x)


def _backward_sums(grad, x, mean, invstd, weight, *wanted):
    sum_dy = grad.sum(_dims(x))
    sum_dy_xmu = (grad * (x - _shaped(mean, x))).sum(_dims(x))
    return sum_dy, sum_dy_xmu, sum_dy_xmu * invstd, sum_dy.clone()


def _backward(grad, x, mean, invstd, weight, sum_dy, sum_dy_xmu, counts):
    total = counts.sum()
    centered = (x - _shaped(mean, x)) * _shaped(invstd ** 2 * sum_dy_xmu / total, x)
    return (grad - _shaped(sum_dy / total, x) - centered) * _shaped(invstd * weight, x)


for _name, _function in {
        'batch_norm_stats': _stats, 'batch_norm_gather_stats_with_counts': _gather_stats,
        'batch_norm_elemt': _elementwise, 'batch_norm_backward_reduce': _backward_sums,
        'batch_norm_backward_elemt': _backward}.items():
    _library.impl(_name, _function, 'CUDA')
