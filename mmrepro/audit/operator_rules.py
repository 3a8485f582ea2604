"""Operators of a model that have no deterministic path on a device and a release of torch.

A model's operators are found from its modules: a module of ``mmcv.ops`` stands for the compiled
operators of its file, and the source of every other class is searched for calls.
"""
from __future__ import annotations

import ast
import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..ops.aten.kernel_table import TABLE as NATIVE_TABLE
from ..ops.operator_table import TABLE
from .findings import Found
from .sources import SourceFile
from .subject import Subject

# beginnings of methods in which nothing is differentiated: inference, and targets
_INFERENCE = ('predict', '_predict', 'simple_test', 'aug_test', 'get_bboxes', '_get_bboxes',
              'get_results', 'get_seg_masks', '_bbox_post', 'show', 'init_weights', '_load_from',
              'resize_rel_pos', 'inference', '_do_paste', 'get_target', '_get_target')


class Native(NamedTuple):
    """What in a model leads to an operator of torch that may add in any order on CUDA."""
    operator: str  # of mmrepro.ops.aten.TABLE, which knows torch's releases and ours
    calls: tuple[str, ...]  # last part of the names that lead to it, as functions or methods
    modules: tuple[str, ...] = ()  # classes of torch.nn or mmcv.ops that lead to it
    only: str = ''  # condition on the call or module, a key of _CONDITIONS
    instead: str = ''  # what to use where we have no form either


# topk and sort are in every detector, and differ in ties only: `not-deterministic` speaks of them
NATIVE: tuple[Native, ...] = (
    Native('grid_sampler_2d_backward', ('grid_sample', 'point_sample'), ('SimpleRoIAlign', )),
    Native('_adaptive_avg_pool2d_backward', ('adaptive_avg_pool2d', ), ('AdaptiveAvgPool2d', ),
           'size'),
    Native('_adaptive_avg_pool3d_backward', ('adaptive_avg_pool3d', ), ('AdaptiveAvgPool3d', ),
           'size'),
    Native('adaptive_max_pool2d_backward', ('adaptive_max_pool2d', ), ('AdaptiveMaxPool2d', )),
    Native('adaptive_max_pool3d_backward', ('adaptive_max_pool3d', ), ('AdaptiveMaxPool3d', )),
    Native('avg_pool3d_backward', ('avg_pool3d', ), ('AvgPool3d', )),
    Native('upsample_bicubic2d_backward', ('interpolate', ), ('Upsample', ), 'bicubic'),
    Native('reflection_pad2d_backward', ('pad', ), ('ReflectionPad1d', 'ReflectionPad2d'),
           'reflect'),
    Native('max_unpool2d', ('max_unpool2d', ), ('MaxUnpool2d', )),
    Native('fractional_max_pool2d_backward', ('fractional_max_pool2d', ),
           ('FractionalMaxPool2d', )),
    Native('cumsum', ('cumsum', )),
    Native('kthvalue', ('kthvalue', )),
    Native('median.dim', ('median', ), only='dim'),
    Native('bincount', ('bincount', ), only='weights'),
    Native('put_', ('put_', ), only='accumulate'),
    Native('histc', ('histc', ), instead='torch.bincount of integers'),
    Native('_ctc_loss_backward', ('ctc_loss', ), ('CTCLoss', ), instead='ctc_loss on the CPU'),
    Native('_embedding_bag', (), ('EmbeddingBag', ), 'max', "mode='sum' or 'mean'"),
)


def _trouble(native: Native, subject: Subject) -> str:
    """Return what is wrong with the operator for this subject, or ''."""
    if not any(row.operator == native.operator
               and row.since <= subject.torch_version < row.until
               and row.torch in ('raises', 'silent')
               and not (row.target and subject.strict) for row in NATIVE_TABLE):
        return ''
    if subject.randomness.deterministic is True:
        instead = f'; instead: {native.instead}' if native.instead else ''
        return f'{native.operator} raises{instead}'
    return f'{native.operator} adds in the order in which threads arrive'


def _constant(node: ast.AST | None) -> Any:
    return node.value if isinstance(node, ast.Constant) else None


def _argument(call: ast.Call, name: str, position: int) -> ast.AST | None:
    for word in call.keywords:
        if word.arg == name:
            return word.value
    return call.args[position] if len(call.args) > position else None


def _size_of_call(call: ast.Call) -> bool:
    node = _argument(call, 'output_size', 1)
    values = node.elts if isinstance(node, (ast.Tuple, ast.List)) else [node]
    return not all(_constant(value) == 1 for value in values)


def _size_of_module(module: Any) -> bool:
    size = module.output_size
    return any(n != 1 for n in (size if isinstance(size, (tuple, list)) else (size, )))


# name -> (condition on a call, condition on a module)
_CONDITIONS: dict[str, tuple[Any, Any]] = {
    '': (lambda call: True, lambda module: True),
    'size': (_size_of_call, _size_of_module),
    'dim': (lambda call: bool(call.args or call.keywords), None),
    'weights': (lambda call: _argument(call, 'weights', 1) is not None, None),
    'accumulate': (lambda call: _argument(call, 'accumulate', 2) is not None, None),
    'max': (None, lambda module: module.mode == 'max'),
    **{mode: (lambda call, mode=mode: _constant(_argument(call, 'mode', 3)) == mode
              or _constant(_argument(call, 'mode', 2)) == mode,
              lambda module, mode=mode: getattr(module, 'mode', mode) == mode)
       for mode in ('bicubic', 'reflect')},
}


def native_operators(subject: Subject) -> Iterator[Found]:
    """Find operators of torch that the model reaches and that do not repeat on this device."""
    if subject.device == 'cpu' or subject.model is None:
        return
    rows = [(row, trouble) for row in NATIVE if (trouble := _trouble(row, subject))]
    for path, module in subject.model.named_modules():
        for row, trouble in rows:
            if type(module).__name__ in row.modules and _CONDITIONS[row.only][1](module):
                yield Found(f'model.{path}'.rstrip('.'), f'{type(module).__name__}: {trouble}')
    for cls, path in _classes_of(subject.model).items():
        yield from _in_class(cls, path, rows)


def _classes_of(model: Any) -> dict[type, str]:
    """Return the classes of all modules and their bases, each with the first module that has it."""
    classes: dict[type, str] = {}
    for path, module in model.named_modules():
        for cls in type(module).__mro__:
            if cls.__module__.partition('.')[0] not in ('torch', 'builtins', 'abc', 'mmengine'):
                classes.setdefault(cls, f'model.{path}'.rstrip('.'))
    return classes


_read = functools.cache(SourceFile.read)


def _in_class(cls: type, path: str, rows: list[tuple[Native, str]]) -> Iterator[Found]:
    source, tree = _source_of(cls)
    for method in tree.body:
        if not isinstance(method, ast.FunctionDef):
            continue
        inference = method.name.startswith(_INFERENCE)
        for call in ast.walk(method):
            if not isinstance(call, ast.Call):
                continue
            name = source.full_name(call.func).rpartition('.')[2]
            for row, trouble in rows:
                if name in row.calls and _CONDITIONS[row.only][0](call) \
                        and not source.ignored(call.lineno, 'torch-operator') \
                        and not (row.operator.endswith('backward')
                                 and (inference or source.without_gradient(call))):
                    yield Found(f'{source.path}:{call.lineno}',
                                f'{cls.__name__} ({path}) calls {name}: {trouble}')


def _source_of(cls: type) -> tuple[SourceFile, ast.Module | ast.ClassDef]:
    """Return the file of a class and its syntax tree, empty for a class that is made in C."""
    try:
        source = _read(inspect.getsourcefile(cls) or '')
    except TypeError:
        source = _read('')
    trees = (node for node in ast.walk(source.tree)
             if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
    return source, next(trees, ast.Module([], []))


def mmcv_operators(subject: Subject) -> Iterator[Found]:
    """Find operators of mmcv that the model reaches and that are missing or add with atomics."""
    if subject.model is None:
        return
    compiled = _has_extension()
    needed: dict[str, str] = {}  # file of mmcv.ops -> a module that needs it
    for cls, path in _classes_of(subject.model).items():
        for file in _files_of(cls):
            needed.setdefault(file, path)
    for source, path in sorted(needed.items()):
        rows = [row for row in TABLE.values() if row.source == source]
        lacking = [row.name for row in rows if not row.target]
        atomics = [row.name for row in rows if row.compiled == 'atomics']
        if lacking and not compiled:
            yield Found(path, f'mmcv.ops.{source[:-3]} ({", ".join(lacking)}) has no form in '
                        'PyTorch, and this mmcv has none compiled: it raises when it is called')
        elif atomics and compiled and subject.device != 'cpu' and not subject.strict:
            yield Found(path, f'mmcv.ops.{source[:-3]} ({", ".join(atomics)}) adds floats in the '
                        'order in which threads arrive')
        elif [name for name in lacking if name in atomics] and subject.device != 'cpu':
            yield Found(path, f'mmcv.ops.{source[:-3]} ({", ".join(lacking)}) has no form in '
                        'PyTorch; the compiled one adds floats in the order of threads')


def _has_extension() -> bool:
    """Whether mmcv came with compiled operators; those of mmrepro do not count."""
    package = importlib.util.find_spec('mmcv')
    return package is not None and importlib.machinery.PathFinder.find_spec(
        'mmcv._ext', package.submodule_search_locations) is not None


def _files_of(cls: type) -> set[str]:
    """Return the file of ``mmcv.ops`` that a class is from, or those that its own code uses."""
    if cls.__module__.startswith('mmcv.ops.'):
        return {cls.__module__.rpartition('.')[2] + '.py'}
    source, tree = _source_of(cls)
    if not source.imports('mmcv'):
        return set()
    names = {source.full_name(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    owners = [getattr(importlib.import_module('mmcv.ops'), name.split('.')[2], None)
              for name in names if name.startswith('mmcv.ops.')]
    return {f'{(getattr(owner, "__module__", "") or "").rpartition(".")[2]}.py'
            for owner in owners}
