"""Operators of a model that have no deterministic path on a device and a release of torch.

A model's operators are found from its modules: a module of ``mmcv.ops`` stands for the compiled
operators of its file, and the source of every other class is searched for calls.
"""
from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.util
import inspect
from typing import Any, Dict, Iterator, NamedTuple, Optional, Set, Tuple

from ..ops.table import TABLE
from .finding import CHANGES, MAY, Found
from .sources import Source
from .subject import Subject

__all__ = ['NATIVE', 'Native', 'mmcv_operators', 'native_operators']

# beginnings of methods in which nothing is differentiated: inference, and targets
_INFERENCE = ('predict', '_predict', 'simple_test', 'aug_test', 'get_bboxes', '_get_bboxes',
              'get_results', 'get_seg_masks', '_bbox_post', 'show', 'init_weights', '_load_from',
              'resize_rel_pos', 'inference', '_do_paste', 'get_target', '_get_target')


class Native(NamedTuple):
    """An operator of torch whose CUDA backward (or forward) adds in no fixed order.

    Attributes:
        calls: last part of the names that lead to it, as functions or methods.
        modules: classes of ``torch.nn`` that lead to it.
        until: ``(major, minor)`` of the first release with a deterministic form; None: none has.
        only: condition on the call or module, a key of ``_CONDITIONS``; '' without one.
        severity: see ``finding``.
        instead: what to use.
    """
    operator: str
    calls: Tuple[str, ...]
    modules: Tuple[str, ...]
    until: Optional[Tuple[int, int]]
    only: str
    severity: str
    instead: str


NATIVE: Tuple[Native, ...] = (
    Native('grid_sampler_2d backward', ('grid_sample', 'point_sample'), ('SimpleRoIAlign', ),
           None, '', CHANGES, 'reads by index, as in mmrepro.ops.gather'),
    Native('adaptive_avg_pool2d backward', ('adaptive_avg_pool2d', ), ('AdaptiveAvgPool2d', ),
           None, 'size', CHANGES, 'F.avg_pool2d with a fixed window, or output size 1'),
    Native('adaptive_max_pool2d backward', ('adaptive_max_pool2d', ), ('AdaptiveMaxPool2d', ),
           None, '', CHANGES, 'F.max_pool2d with a fixed window'),
    Native('bicubic interpolation backward', ('interpolate', ), ('Upsample', ),
           None, 'bicubic', CHANGES, "mode='bilinear' (torch >= 2.1) or mode='nearest'"),
    Native('bilinear interpolation backward', ('interpolate', ), ('Upsample', ),
           (2, 1), 'bilinear', CHANGES, "torch >= 2.1, or mode='nearest'"),
    Native('reflection_pad backward', ('pad', ), ('ReflectionPad1d', 'ReflectionPad2d'),
           None, 'reflect', CHANGES, "mode='constant', or 'replicate' with torch >= 2.1"),
    Native('replication_pad backward', ('pad', ), ('ReplicationPad1d', 'ReplicationPad2d'),
           (2, 1), 'replicate', CHANGES, "torch >= 2.1, or mode='constant'"),
    Native('cumsum', ('cumsum', ), (), (2, 6), '', MAY,
           'torch >= 2.6, or sums of integers only'),
    Native('kthvalue', ('kthvalue', ), (), None, '', MAY,
           'torch.sort(...) and an index: ties then keep their order'),
    Native('median with indices', ('median', ), (), None, 'dim', MAY,
           'torch.sort(...) and an index'),
    Native('histc', ('histc', ), (), None, '', MAY, 'torch.bincount of integers'),
    Native('bincount with weights', ('bincount', ), (), None, 'weights', CHANGES,
           'one-hot matrix product, or torch.segment_reduce of sorted values'),
    Native('put_ with accumulate', ('put_', ), (), None, 'accumulate', CHANGES,
           'index_add_ (torch >= 2.1)'),
    Native('max_unpool2d', ('max_unpool2d', ), ('MaxUnpool2d', ), None, '', CHANGES,
           'nearest interpolation'),
    Native('fractional_max_pool2d backward', ('fractional_max_pool2d', ),
           ('FractionalMaxPool2d', ), None, '', CHANGES, 'F.max_pool2d'),
    Native('avg_pool3d backward', ('avg_pool3d', ), ('AvgPool3d', ), None, '', CHANGES,
           'a convolution with constant weights'),
    Native('adaptive_avg_pool3d backward', ('adaptive_avg_pool3d', ), ('AdaptiveAvgPool3d', ),
           None, 'size', CHANGES, 'a mean over dimensions'),
    Native('ctc_loss backward', ('ctc_loss', ), ('CTCLoss', ), None, '', CHANGES,
           'ctc_loss on the CPU'),
    Native('EmbeddingBag(mode=max) backward', (), ('EmbeddingBag', ), None, 'max', CHANGES,
           "mode='sum' or 'mean'"),
)


# ---------------------------------------------------------------------------- conditions


def _constant(node: Optional[ast.AST]) -> Any:
    return node.value if isinstance(node, ast.Constant) else None


def _argument(call: ast.Call, name: str, position: int) -> Optional[ast.AST]:
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
_CONDITIONS = {
    '': (lambda call: True, lambda module: True),
    'size': (_size_of_call, _size_of_module),
    'dim': (lambda call: bool(call.args or call.keywords), None),
    'weights': (lambda call: _argument(call, 'weights', 1) is not None, None),
    'accumulate': (lambda call: _argument(call, 'accumulate', 2) is not None, None),
    'max': (None, lambda module: module.mode == 'max'),
    **{mode: (lambda call, mode=mode: _constant(_argument(call, 'mode', 3)) == mode
              or _constant(_argument(call, 'mode', 2)) == mode,
              lambda module, mode=mode: getattr(module, 'mode', mode) == mode)
       for mode in ('bicubic', 'bilinear', 'reflect', 'replicate')},
}

# ---------------------------------------------------------------------------- operators of torch


def native_operators(subject: Subject) -> Iterator[Found]:
    """Operators of torch that the model reaches, and that do not repeat on this device."""
    if subject.device == 'cpu' or subject.model is None:
        return
    rows = [row for row in NATIVE if row.until is None or subject.torch_version < row.until]
    for path, module in subject.model.named_modules():
        for row in rows:
            if type(module).__name__ in row.modules and _CONDITIONS[row.only][1](module):
                yield Found(f'model.{path}'.rstrip('.'),
                            f'{type(module).__name__}: {row.operator}; instead: {row.instead}',
                            row.severity)
    for cls, path in _classes(subject.model).items():
        yield from _in_class(cls, path, rows)


def _classes(model: Any) -> Dict[type, str]:
    """Classes of the modules, and those that they inherit from, with a first module of each."""
    found: Dict[type, str] = {}
    for path, module in model.named_modules():
        for cls in type(module).__mro__:
            if cls.__module__.partition('.')[0] not in ('torch', 'builtins', 'abc', 'mmengine'):
                found.setdefault(cls, f'model.{path}'.rstrip('.'))
    return found


_sources: Dict[str, Source] = {}


def _in_class(cls: type, path: str, rows: Any) -> Iterator[Found]:
    source, tree = _source_of(cls)
    if tree is None:
        return
    for method in tree.body:
        if not isinstance(method, ast.FunctionDef):
            continue
        inference = method.name.startswith(_INFERENCE)
        for call in ast.walk(method):
            if not isinstance(call, ast.Call):
                continue
            name = source.full_name(call.func).rpartition('.')[2]
            for row in rows:
                if name in row.calls and _CONDITIONS[row.only][0](call) \
                        and not source.ignored(call.lineno, 'torch-operator') \
                        and not (row.operator.endswith('backward')
                                 and (inference or source.without_gradient(call))):
                    yield Found(
                        f'{source.path}:{call.lineno}',
                        f'{cls.__name__} ({path}) calls {name}: {row.operator}; '
                        f'instead: {row.instead}', row.severity)


def _source_of(cls: type) -> Tuple[Optional[Source], Optional[ast.ClassDef]]:
    try:
        file = inspect.getsourcefile(cls)
    except TypeError:  # made in C
        file = None
    if file is None:
        return None, None
    source = _sources.setdefault(file, Source.read(file))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
            return source, node
    return source, None


# ---------------------------------------------------------------------------- operators of mmcv


def mmcv_operators(subject: Subject) -> Iterator[Found]:
    """Operators of mmcv that the model reaches, and that are missing or add with atomics."""
    if subject.model is None:
        return
    compiled = importlib.util.find_spec('mmcv') is not None and _has_extension()
    for source, path in sorted(_mmcv_sources(subject.model).items()):
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
    """Whether mmcv came with compiled operators; ours do not count."""
    import mmcv
    finder = importlib.machinery.PathFinder
    return finder.find_spec('mmcv._ext', mmcv.__path__) is not None


def _mmcv_sources(model: Any) -> Dict[str, str]:
    """``{'roi_align.py': a module that needs it}``."""
    found: Dict[str, str] = {}
    for path, module in model.named_modules():
        place = f'model.{path}'.rstrip('.')
        for file in _files_of(type(module)):
            found.setdefault(file, place)
    return found


_files: Dict[type, Set[str]] = {}


def _files_of(cls: type) -> Set[str]:
    if cls not in _files:
        files = set()
        for base in cls.__mro__:
            if base.__module__.startswith('mmcv.ops.'):
                files.add(base.__module__.rpartition('.')[2] + '.py')
            elif base.__module__.partition('.')[0] not in ('torch', 'builtins', 'mmengine'):
                files |= _imported_operators(base)
        _files[cls] = files
    return _files[cls]


def _imported_operators(cls: type) -> Set[str]:
    """Files of the functions of ``mmcv.ops`` that the class's own code names."""
    source, tree = _source_of(cls)
    if tree is None or not source.imports('mmcv'):
        return set()
    names = {source.full_name(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    files = set()
    for name in names:
        if name.startswith('mmcv.ops.'):
            owner = getattr(importlib.import_module('mmcv.ops'), name.split('.')[2], None)
            module = getattr(owner, '__module__', '') or ''
            files.add(module.rpartition('.')[2] + '.py')
    return files
