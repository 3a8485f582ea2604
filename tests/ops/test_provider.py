import ast
import importlib
import inspect
import json
import os
import re
import sys
import textwrap
import types
from pathlib import Path

import mmcv._ext
import pytest
from harness import ROOT, python
from mmengine.utils import misc

from mmrepro import ops
from mmrepro.errors import OperatorProviderError
from mmrepro.ops import operator_table
from mmrepro.ops.provider import choice_of, compiled_kernels, takes_triton
from mmrepro.ops.triton import FUSED

LITE = not ops.is_compiled()

# Names and parameters of mmcv 2.1.0's binding; MMREPRO_WRITE_GOLDEN writes it again.
SIGNATURES = Path(__file__).parent / 'golden' / 'signatures.txt'
WRITE = os.environ.get('MMREPRO_WRITE_GOLDEN')


@pytest.fixture(autouse=True)
def installed():
    """Other tests of this process may have left mmcv as it came."""
    ops.install()
    importlib.import_module('mmcv._ext')


def test_mmengine_finds_the_operators_where_pkgutil_has_no_find_loader():
    """As on Python 3.14."""
    out = python('-c', textwrap.dedent('''
        import pkgutil
        vars(pkgutil).pop('find_loader', None)
        from mmrepro import ops
        ops.install()
        from mmengine.utils.dl_utils import mmcv_full_available
        print(mmcv_full_available(), hasattr(pkgutil, 'find_loader'))
        compiled = ops.provider() == 'compiled'
        ops.uninstall()
        print(mmcv_full_available() == compiled)
    '''))
    assert out == 'True False\nTrue\n'


def test_mmengine_looks_at_a_signature_once(monkeypatch):
    looked = []
    look = inspect.getfullargspec

    def counted(function):
        looked.append(function.__name__)
        return look(function)

    monkeypatch.setattr(inspect, 'getfullargspec', counted)
    ops.uninstall()
    ops.install()

    @misc.deprecated_api_warning({'old': 'new'})
    def same(new):
        return new

    assert [same(1), same(new=2), same(3)] == [1, 2, 3] and looked == ['same']
    with pytest.warns(DeprecationWarning, match='"old" is deprecated in `same`'):
        assert same(old=4) == 4
    monkeypatch.undo()
    ops.uninstall()
    assert misc.getfullargspec is inspect.getfullargspec


def test_every_name_that_mmcv_asks_for_has_one_row():
    import mmcv.ops
    asked = {}
    for path in Path(mmcv.ops.__file__).parent.glob('*.py'):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, 'attr', '') == 'load_ext':
                asked.update(dict.fromkeys(ast.literal_eval(node.args[1]), path.name))
    assert asked == {name: row.source for name, row in operator_table.TABLE.items()
                     if name in asked or name not in operator_table.OF_FORKS}
    assert len(operator_table.TABLE) == sum(map(len, operator_table._FAMILIES))


@pytest.mark.skipif(not LITE, reason='a compiled mmcv answers for itself')
def test_a_name_that_no_row_has_imports_and_raises_when_it_is_called():
    assert 'knn_forward' in dir(mmcv._ext)
    with pytest.raises(NotImplementedError, match="'a_name_of_a_fork'"):
        mmcv._ext.a_name_of_a_fork()
    assert not hasattr(mmcv._ext, '_private')


@pytest.mark.skipif(not LITE, reason='mmcv-lite only')
def test_compiled_operators_of_mmcv_lite_are_refused():
    ops.use('torch')  # a runner of another test may have asked for something else
    with pytest.raises(OperatorProviderError, match='mmcv-lite'):
        ops.use('compiled')
    ops.use('torch')
    assert ops.provider_of('roi_align_forward') == 'torch'
    assert ops.provider_of('knn_forward') == 'none'


def test_environment_report_of_mmcv_works():
    import mmcv.ops
    assert mmcv.ops.get_compiler_version()
    assert mmcv.ops.get_compiling_cuda_version()


def test_unknown_names_are_errors_that_list_what_is_allowed():
    with pytest.raises(OperatorProviderError, match='auto, torch, triton, compiled'):
        ops.use('cuda')
    with pytest.raises(KeyError, match='no_such_operator'):
        ops.provider_of('no_such_operator')


def test_uninstalling_leaves_no_trace():
    out = python('-c', textwrap.dedent('''
        import sys
        from mmrepro import ops
        ops.install()
        import mmcv.ops
        compiled = ops.provider() == 'compiled'
        ops.uninstall()
        ours = [f for f in sys.meta_path if 'mmrepro.ops' in type(f).__module__]
        print(not ours, compiled or 'mmcv._ext' not in sys.modules)
        try:
            import mmcv._ext
            print('compiled' if compiled else 'ours')
        except ModuleNotFoundError as error:
            print(error.name)
        ops.install()
        import mmcv._ext
        print(ops.provider() == ('compiled' if compiled else 'torch'))
    ''')).split()
    assert out[:2] == ['True', 'True']
    assert out[2] == ('mmcv._ext' if LITE else 'compiled')
    assert out[3] == 'True'


@pytest.mark.parametrize('target, error, message', [
    ('broken_operators:knn_forward', ModuleNotFoundError, 'no_such_module_at_all'),
    ('mmrepro.ops.no_such_file:knn_forward', ModuleNotFoundError, 'no_such_file'),
    ('mmrepro.ops.gather:knn_forward', AttributeError, 'knn_forward')])
def test_an_implementation_that_is_broken_or_missing_is_not_hidden(target, error, message, tmp_path,
                                                                   monkeypatch):
    (tmp_path / 'broken_operators.py').write_text('import no_such_module_at_all\n')
    monkeypatch.syspath_prepend(tmp_path)
    row = operator_table.TABLE['knn_forward']._replace(target=target)
    monkeypatch.setitem(operator_table.TABLE, 'knn_forward', row)
    with pytest.raises(error, match=message):
        operator_table.implementation('knn_forward')


class OnDevice:
    """What the choice looks at: an argument that is on CUDA."""
    is_cuda = True
    device = types.SimpleNamespace(type='cuda')


@pytest.fixture
def compiled_for_cuda(monkeypatch):
    """A module that stands for mmcv's, compiled with CUDA; its functions return their own name.

    Triton is there as well.
    """
    monkeypatch.setattr(ops.triton, 'default_requirement', lambda: '')
    module = types.ModuleType('mmcv._ext')
    for name in operator_table.TABLE:
        setattr(module, name, lambda *args, name=name: f'compiled {name}')
    module.get_compiling_cuda_version = lambda: '12.1'
    before = dict(vars(module))
    monkeypatch.setitem(sys.modules, 'mmcv._ext', module)
    yield module
    ops.uninstall()
    assert {**vars(module), 'get_compiling_cuda_version': None} == {
        **before, 'get_compiling_cuda_version': None}, 'not all was put back'


REASONED = 'nms', 'roi_align_backward', 'roi_pool_backward', 'softnms'


def test_auto_keeps_compiled_kernels_that_add_in_order_and_says_why(compiled_for_cuda):
    ops.use('auto')
    assert ops.provider() == 'auto'
    for name, row in operator_table.TABLE.items():
        on_cuda, on_cpu = ops.provider_of(name, 'cuda'), ops.provider_of(name, 'cpu')
        if not row.target or row.source == 'info.py':
            assert (on_cuda, on_cpu) == ('compiled', 'compiled')
        else:
            assert on_cpu == 'torch', name
            assert on_cuda == ('compiled' if row.compiled == 'ordered' else 'torch'), name
    assert compiled_for_cuda.roi_align_forward(OnDevice) == 'compiled roi_align_forward'
    assert compiled_for_cuda.knn_forward() == 'compiled knn_forward'
    reasons = {entry.operator: entry.reason for entry in ops.catalogue('cuda')}
    atomics, none = "mmcv's kernel adds with atomics", 'there is no kernel in Triton'
    assert {name: reasons[name] for name in REASONED} == dict(zip(REASONED, (
        "mmcv's kernel adds in a fixed order", f'{atomics}; no GPU has run its kernel in Triton',
        f'{atomics}; {none}', f'mmcv runs it on the CPU; {none}')))
    assert [entry for entry in ops.catalogue('cuda') if not entry.deterministic
            and operator_table.TABLE[entry.operator].target] == []


def test_auto_takes_a_kernel_in_triton_once_a_gpu_has_run_it(compiled_for_cuda, monkeypatch):
    monkeypatch.setattr(ops.triton, 'requirement', lambda: '')
    for seen, lacks, expected in (
            (True, '', 'triton'), (False, '', 'torch'), (True, 'no compiler', 'torch')):
        monkeypatch.setattr(ops.triton, 'SEEN_ON_GPU', frozenset(
            {'roi_align_backward', ops.triton.WRITES} if seen else ()))
        monkeypatch.setattr(ops.triton, 'default_requirement', lambda lacks=lacks: lacks)
        ops.use('auto')
        assert ops.provider_of('roi_align_backward', 'cuda') == expected
        assert ops.provider_of('ms_deform_attn_backward', 'cuda') == 'torch'
        assert takes_triton(ops.triton.WRITES) is (expected == 'triton')
    ops.use('triton')
    assert {ops.provider_of(name, 'cuda') for name in FUSED} == {'triton'}
    assert takes_triton(ops.triton.WRITES)
    ops.use('torch')
    assert not takes_triton(ops.triton.WRITES)


def kernels_in_reports():
    """Return the kernels that a committed report of a GPU has with equal and right bits."""
    from dev.gpu_check.report import verdict
    found = set()
    for path in (ROOT / 'docs' / 'results').glob('*.json'):
        report = json.loads(path.read_text())
        machine = report.get('machine', {}) if isinstance(report, dict) else {}
        if machine.get('device') == 'cuda' and 'triton' in report:
            found |= {operator for row in report['triton'].values()
                      if verdict(row).startswith('equal') and not row.get('disagrees')
                      for operator in row['covers']}
    return found


def test_auto_takes_only_kernels_of_committed_reports():
    assert ops.triton.SEEN_ON_GPU <= kernels_in_reports() & {*FUSED, ops.triton.WRITES}


def test_what_only_a_fork_has_is_not_looked_for_in_another_mmcv(compiled_for_cuda, monkeypatch):
    """The fork's kernel runs, and counts as not deterministic, because its threads race."""
    ops.use('auto')
    entry, = (entry for entry in ops.catalogue('cuda') if entry.operator == 'line_nms_forward')
    assert (entry.provider, entry.deterministic) == ('compiled', False)
    with monkeypatch.context() as patch:
        patch.delattr(compiled_for_cuda, 'line_nms_forward')
        assert choice_of('line_nms_forward', 'cuda') == (
            'none', 'this mmcv does not have it; onedl-mmcv==2.3.6 has')


def test_auto_replaces_compiled_kernels_with_atomics_and_all_on_a_cpu(compiled_for_cuda,
                                                                      monkeypatch):
    monkeypatch.setattr(ops.triton, 'default_requirement', lambda: 'no triton here')
    for name in ('roi_align_forward', 'roi_align_backward'):
        monkeypatch.setattr(f'mmrepro.ops.mmcv.roi_align.{name}', lambda *args: args)
    ops.use('auto')
    cpu = types.SimpleNamespace(device=types.SimpleNamespace(type='cpu'))
    assert compiled_for_cuda.roi_align_backward(OnDevice) == (OnDevice, )
    assert compiled_for_cuda.roi_align_forward(OnDevice) == 'compiled roi_align_forward'
    assert compiled_for_cuda.roi_align_forward(cpu) == (cpu, )


@pytest.mark.parametrize('version, kernels', [
    ('not available', 'cpu'), ('rocm not available', 'cpu'), ('12.1', 'cuda')])
def test_a_build_without_cuda_provides_nothing_there(compiled_for_cuda, monkeypatch, version,
                                                     kernels):
    monkeypatch.setattr(ops.triton, 'default_requirement', lambda: 'no triton here')
    compiled_for_cuda.get_compiling_cuda_version = lambda: version
    assert compiled_kernels(compiled_for_cuda) == kernels
    ops.use('auto')
    expected = 'compiled' if kernels == 'cuda' else 'torch'
    assert ops.provider_of('roi_align_forward', 'cuda') == expected


def test_facts_name_the_operators_that_are_not_the_portable_ones(compiled_for_cuda, monkeypatch):
    from mmrepro.distributed.agreement import operator_fields, start_fields
    from mmrepro.facts.compatibility import CHANGES, differences
    monkeypatch.setattr(ops.triton, 'version', lambda: '3.3.1')
    monkeypatch.setattr(ops.triton, 'SEEN_ON_GPU', frozenset({'roi_align_backward'}))
    ops.use('auto')
    assert operator_fields() == {'operators': 'torch'}  # on a CPU: as with operators='torch'
    monkeypatch.setattr('torch.cuda.is_available', lambda: True)
    found = start_fields('', {})
    assert found['operators'] == 'torch' and found['operators.nms'] == 'compiled'
    assert found['operators.roi_align_backward'] == 'triton' and found['version.triton']
    assert 'CUDA 12.1' in found['version.mmcv_build']
    assert 'operators.roi_pool_backward' not in found
    older = {**found, 'version.triton': '3.0.0'}
    assert [(change.name, change.severity) for change in differences(found, older)] == [
        ('version.triton', CHANGES)]
    ops.use('torch')
    other = start_fields('', {})
    assert other['operators'] == 'torch' and not {'operators.nms', 'version.triton'} & {*other}
    changed = {one.name for one in differences(found, other) if one.severity == CHANGES}
    assert 'operators.nms' in changed and 'operators.roi_align_backward' in changed
    ops.use('compiled')
    assert operator_fields() == {'operators': 'compiled'}


def test_the_guard_trusts_a_forward_whose_backward_was_replaced(compiled_for_cuda):
    from mmrepro.ops.guard import OperatorGuard
    for wanted, trusted in (('compiled', False), ('auto', True)):
        ops.use(wanted)
        allowed = OperatorGuard()._allowed
        assert ('mmcv._ext.roi_align_forward' in allowed) is trusted
        assert 'mmcv._ext.nms' in allowed and 'mmcv._ext.carafe_forward' in allowed
        for missing in ('gather_points', 'riroi_align_rotated', 'carafe_naive'):
            assert f'mmcv._ext.{missing}_forward' not in allowed


def test_one_line_says_that_kernels_cannot_run(monkeypatch, caplog):
    monkeypatch.setattr('torch.cuda.is_available', lambda: True)
    monkeypatch.setattr(ops.triton, 'default_requirement', lambda: 'no triton in this test')
    ops.use('torch')
    with caplog.at_level('WARNING', 'mmrepro'), ops.using('auto'):
        assert not caplog.records, 'no kernel is chosen, so none is missed'
    monkeypatch.setattr(ops.triton, 'SEEN_ON_GPU', frozenset({'nms'}))
    with ops.using('torch'), caplog.at_level('WARNING', 'mmrepro'):
        ops.use('auto')
        ops.use('auto')
    assert [record.message for record in caplog.records] == [
        "operators='auto': PyTorch forms instead of kernels in Triton: no triton in this test"]


@pytest.mark.compiled
def test_compiled_operators_are_replaced_one_by_one_and_put_back(compiled):
    names = [name for name in operator_table.TABLE if name not in operator_table.OF_FORKS]
    before = {name: getattr(mmcv._ext, name) for name in names}
    assert ops.provider() == 'compiled'
    with pytest.raises(KeyError, match='on purpose'), ops.using('torch'):
        assert ops.provider() == 'torch'
        assert mmcv._ext.roi_align_forward.__module__ == 'mmrepro.ops.mmcv.roi_align'
        assert ops.provider_of('roi_align_forward') == 'torch'
        # What we do not have stays compiled.
        assert ops.provider_of('knn_forward') == 'compiled'
        assert mmcv._ext.get_compiler_version is before['get_compiler_version']
        with ops.using('compiled'):
            assert ops.provider_of('roi_align_forward') == 'compiled'
        assert ops.provider_of('roi_align_forward') == 'torch'
        raise KeyError('on purpose')
    assert ops.provider() == 'compiled'
    assert {name: getattr(mmcv._ext, name) for name in names} == before
    entries = {entry.operator: entry for entry in ops.catalogue('cuda')}
    assert not entries['roi_align_backward'].deterministic
    assert entries['roi_align_forward'].deterministic
    assert all(entry.deterministic for entry in ops.catalogue('cpu')
               if entry.operator not in operator_table.OF_FORKS)


def parameters(name, documentation):
    listed = re.search(rf'\b{name}\((.*?)\) ->', documentation).group(1)
    return re.findall(r'(\w+):', listed)


@pytest.mark.compiled
def test_stored_signatures_are_those_of_compiled_mmcv(compiled):
    found = []
    with compiled():
        for name in operator_table.TABLE:
            if name in operator_table.OF_FORKS:
                continue
            names = parameters(name, getattr(mmcv._ext, name).__doc__)
            found.append(' '.join([name, *names]))
    if WRITE:
        SIGNATURES.write_text('\n'.join(found) + '\n')
    assert sorted(SIGNATURES.read_text().splitlines()) == sorted(found)


# mmcv's binding names the first three arguments of these in another order than they have.
MISNAMED = {'roi_align_rotated_backward'}


def test_our_functions_take_the_arguments_of_mmcv():
    lines = [line.split() for line in SIGNATURES.read_text().splitlines()]
    stored = {name: names for name, *names in lines}
    assert set(stored) == set(operator_table.TABLE) - set(operator_table.OF_FORKS)
    for name in operator_table.TABLE:
        ours = operator_table.implementation(name)
        assert ours is None or name in MISNAMED or list(
            inspect.signature(ours).parameters) == stored[name], name


def test_kernels_take_the_arguments_of_the_form_that_they_stand_for():
    assert set(FUSED) <= set(operator_table.TABLE)
    for name, module in FUSED.items():
        source = Path(operator_table.__file__).parent / 'triton' / f'{module}.py'
        functions = {node.name: node for node in ast.parse(source.read_text()).body
                     if isinstance(node, ast.FunctionDef)}
        names = [argument.arg for argument in functions[name].args.args]
        assert names == list(inspect.signature(operator_table.implementation(name)).parameters)
