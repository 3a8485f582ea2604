import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import mmcv._ext
import pytest

from mmrepro import ops
from mmrepro.ops import operator_table
from mmrepro.ops.provider import MARK
from mmrepro.ops.triton import FUSED

LITE = hasattr(mmcv._ext, MARK)

# Names and parameters of mmcv 2.1.0's binding; MMREPRO_WRITE_GOLDEN writes it again.
SIGNATURES = Path(__file__).parent / 'golden' / 'signatures.txt'
WRITE = os.environ.get('MMREPRO_WRITE_GOLDEN')


@pytest.fixture(autouse=True)
def installed():
    """Other tests of this process may have left mmcv as it came."""
    ops.install()
    importlib.import_module('mmcv._ext')


def run(code):
    """Run code in a fresh interpreter; what it prints."""
    done = subprocess.run([sys.executable, '-c', textwrap.dedent(code)], capture_output=True,
                          text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_installing_imports_neither_torch_nor_mmcv():
    out = run('''
        import importlib.util, sys
        # The package itself may import more; the provider and the table may not.
        import types
        spec = importlib.util.find_spec('mmrepro')
        package = types.ModuleType('mmrepro'); package.__path__ = spec.submodule_search_locations
        sys.modules['mmrepro'] = package
        import mmrepro.ops as ops
        ops.install(); ops.install()
        print(sum(type(f).__name__ == '_Finder' for f in sys.meta_path),
              'torch' in sys.modules, 'mmcv' in sys.modules)
    ''')
    assert out == '1 False False'


def test_every_name_that_mmcv_asks_for_has_one_row():
    import mmcv.ops
    asked = {}
    for path in Path(mmcv.ops.__file__).parent.glob('*.py'):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, 'attr', '') == 'load_ext':
                asked.update(dict.fromkeys(ast.literal_eval(node.args[1]), path.name))
    assert asked == {name: row.source for name, row in operator_table.TABLE.items()}


@pytest.mark.skipif(not LITE, reason='a compiled mmcv answers for itself')
def test_an_operator_without_implementation_imports_and_says_what_to_install():
    assert 'knn_forward' in dir(mmcv._ext)
    with pytest.raises(NotImplementedError, match="'knn_forward'.*knn.py.*compiled mmcv"):
        mmcv._ext.knn_forward(1, k=2)
    with pytest.raises(NotImplementedError, match="'a_name_of_a_fork'"):
        mmcv._ext.a_name_of_a_fork()
    assert not hasattr(mmcv._ext, '_private')


@pytest.mark.skipif(not LITE, reason='mmcv-lite only')
def test_compiled_operators_of_mmcv_lite_are_refused():
    assert ops.provider() == 'torch'
    with pytest.raises(RuntimeError, match='mmcv-lite'):
        ops.use('compiled')
    ops.use('torch')
    assert ops.provider_of('roi_align_forward') == 'torch'
    assert ops.provider_of('knn_forward') == 'none'


def test_environment_report_of_mmcv_works():
    import mmcv.ops
    assert mmcv.ops.get_compiler_version()
    assert mmcv.ops.get_compiling_cuda_version()


def test_unknown_names_are_errors_that_list_what_is_allowed():
    with pytest.raises(ValueError, match='torch, triton, compiled'):
        ops.use('cuda')
    with pytest.raises(KeyError, match='no_such_operator'):
        ops.provider_of('no_such_operator')


def test_uninstalling_leaves_no_trace():
    out = run('''
        import sys
        from mmrepro import ops
        ops.install()
        import mmcv.ops
        compiled = ops.provider() == 'compiled'
        ops.uninstall()
        assert not ops.installed()
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
    ''').split()
    assert out[:2] == ['True', 'True']
    assert out[2] == ('mmcv._ext' if LITE else 'compiled')
    assert out[3] == 'True'


def test_a_broken_implementation_is_not_hidden(monkeypatch, tmp_path):
    (tmp_path / 'broken_operators.py').write_text('import no_such_module_at_all\n')
    monkeypatch.syspath_prepend(tmp_path)
    row = operator_table.TABLE['knn_forward']._replace(target='broken_operators:knn_forward')
    monkeypatch.setitem(operator_table.TABLE, 'knn_forward', row)
    with pytest.raises(ModuleNotFoundError, match='no_such_module_at_all'):
        operator_table.implementation('knn_forward')


def test_a_row_whose_module_or_function_is_missing_is_not_implemented(monkeypatch):
    for target in ('mmrepro.ops.no_such_file:knn_forward', 'mmrepro.ops.gather:knn_forward', ''):
        row = operator_table.TABLE['knn_forward']._replace(target=target)
        monkeypatch.setitem(operator_table.TABLE, 'knn_forward', row)
        assert operator_table.implementation('knn_forward') is None


def test_two_rows_for_one_name_are_refused(monkeypatch):
    families = operator_table.FAMILIES
    monkeypatch.setattr(operator_table, 'FAMILIES', (*families, families[0]))
    with pytest.raises(ValueError, match='two rows'):
        operator_table._rows()


def test_catalogue_has_a_line_per_operator_and_knows_the_device():
    entries = {entry.operator: entry for entry in ops.catalogue('cpu')}
    assert list(entries) == list(operator_table.TABLE)
    with ops.using('torch'):
        ours = {entry.operator: entry for entry in ops.catalogue('cuda')}
        assert ours['roi_align_backward'].provider == 'torch'
        assert ours['roi_align_backward'].deterministic
        assert 'sorted' in ours['roi_align_backward'].why
        assert not ours['knn_forward'].deterministic or not LITE


@pytest.mark.compiled
def test_compiled_operators_are_replaced_one_by_one_and_put_back(compiled):
    names = [name for name in operator_table.TABLE]
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
    assert all(entry.deterministic for entry in ops.catalogue('cpu'))


def parameters(name, documentation):
    """The parameters that pybind lists for a function (the first of its overloads)."""
    listed = re.search(rf'\b{name}\((.*?)\) ->', documentation).group(1)
    return re.findall(r'(\w+):', listed)


# mmcv's binding names the first three in the wrong order; it calls them by position, as we do.
MISNAMED = {'roi_align_rotated_backward'}


@pytest.mark.compiled
def test_stored_signatures_are_those_of_compiled_mmcv(compiled):
    found = []
    with compiled():
        for name in operator_table.TABLE:
            names = parameters(name, getattr(mmcv._ext, name).__doc__)
            found.append(' '.join([name, *names]))
    if WRITE:
        SIGNATURES.write_text('\n'.join(found) + '\n')
    assert SIGNATURES.read_text().splitlines() == found


def test_our_functions_take_the_arguments_of_mmcv():
    lines = [line.split() for line in SIGNATURES.read_text().splitlines()]
    stored = {name: names for name, *names in lines}
    assert set(stored) == set(operator_table.TABLE)
    for name in operator_table.TABLE:
        ours = operator_table.implementation(name)
        if ours is None or name in MISNAMED:
            continue
        assert list(inspect.signature(ours).parameters) == stored[name], name


def test_kernels_take_the_arguments_of_the_form_that_they_stand_for():
    assert set(FUSED) <= set(operator_table.TABLE)
    for name, module in FUSED.items():
        source = Path(operator_table.__file__).parent / 'triton' / f'{module}.py'
        functions = {node.name: node for node in ast.parse(source.read_text()).body
                     if isinstance(node, ast.FunctionDef)}
        names = [argument.arg for argument in functions[name].args.args]
        assert names == list(inspect.signature(operator_table.implementation(name)).parameters)
