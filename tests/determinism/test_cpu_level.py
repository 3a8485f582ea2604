"""``cpu='avx2'``: all libraries at one level of instructions, from the start of the process."""
import pytest
from harness import fresh
from policy_state import nothing_leaks  # noqa: F401  a fixture

from mmrepro import determinism
from mmrepro.config import RandomnessConfig
from mmrepro.determinism import cpu_level
from mmrepro.errors import DeterminismError, RandomnessError

NEEDED = cpu_level.CPU_LEVELS['avx2']
# what libraries compute with AVX-512 in another order than with AVX2
PRINT = '''
import hashlib, numpy, torch
from mmrepro import determinism
determinism.enable(cpu='avx2')
random = torch.Generator().manual_seed(0)
a, b = torch.randn(37, 513, generator=random), torch.randn(513, 129, generator=random)
x, w = torch.randn(2, 16, 33, 31, generator=random), torch.randn(24, 16, 3, 3, generator=random)
parts = [a @ b, torch.conv2d(x, w), a.sum(1), a.softmax(1)]
parts += [torch.from_numpy(numpy.log1p(numpy.abs(b.numpy())))]
print(hashlib.sha256(b''.join(part.numpy().tobytes() for part in parts)).hexdigest())
'''


@pytest.fixture
def avx2(monkeypatch):
    """Return a process that was started with the variables, on a CPU with AVX2."""
    monkeypatch.setattr(cpu_level, 'cpu_instructions', lambda: 'AVX2')
    monkeypatch.setattr(cpu_level, 'numpy_features', lambda: ['AVX2'])


def test_the_config_and_the_policy_have_the_same_levels():
    for level in cpu_level.CPU_LEVELS:
        assert RandomnessConfig(numerics=dict(cpu=level, num_threads=1)).flags['cpu'] == level
    with pytest.raises(RandomnessError, match="randomness.numerics.cpu='avx512' is not allowed; "
                                              "allowed: None, 'avx2', 'portable'"):
        RandomnessConfig(numerics=dict(cpu='avx512'))


@pytest.mark.parametrize('mode', [True, False])
def test_a_process_without_the_variables_is_refused(mode, avx2):
    with pytest.raises(DeterminismError, match="needs ATEN_CPU_CAPABILITY='avx2' MKL_CBWR='AVX2,STR"
                                               ".*OPENBLAS_CORETYPE='Haswell', which count only "):
        determinism.enable(mode, cpu='avx2', env={})
    started = determinism.missing_at_start({}, mode=mode, cpu='avx2')
    assert NEEDED.items() <= started.items()
    assert determinism.missing_at_start(started, mode=mode, cpu='avx2') == {}
    determinism.enable(mode, cpu='avx2', env=started)
    determinism.disable()
    assert NEEDED.items() <= started.items(), 'the variables are the user\'s'


@pytest.mark.parametrize('name, value, env, message', [
    ('cpu_instructions', 'AVX2', dict(MKL_CBWR='COMPATIBLE'),
     "MKL_CBWR='COMPATIBLE' is set .*cpu='avx2'. Unset"),
    *(('cpu_instructions', level, {}, f'but torch uses {level}: this CPU has no AVX2, or')
      for level in ('AVX512', 'DEFAULT')),
    ('numpy_features', ['X86_V4'], dict(NPY_DISABLE_CPU_FEATURES='X86_V4'),
     'but NumPy uses X86_V4: NPY_DISABLE_CPU_FEATURES w')])
def test_a_process_at_another_level_is_refused(name, value, env, message, avx2, monkeypatch):
    monkeypatch.setattr(cpu_level, name, lambda: value)
    with pytest.raises(DeterminismError, match=message):
        determinism.enable(cpu='avx2', env={**NEEDED, **env})


@pytest.mark.parametrize('has, listed, needed', [
    (['X86_V3', 'X86_V4', 'AVX512_ICL'], '', 'X86_V4 AVX512_ICL'),
    (['AVX2', 'AVX512F', 'AVX512_SKX'], 'AVX512_SKX, AVX512_CNL', 'AVX512_SKX AVX512_CNL AVX512F'),
    (['X86_V3'], 'X86_V4', 'X86_V4')])
def test_numpy_does_without_what_this_cpu_has_above_the_level(has, listed, needed, monkeypatch):
    monkeypatch.setattr(cpu_level, 'numpy_features', lambda: has)
    found = cpu_level.level_variables('avx2', {'NPY_DISABLE_CPU_FEATURES': listed})
    assert found.get('NPY_DISABLE_CPU_FEATURES', listed) == needed
    assert cpu_level.level_variables(None) == {}


def test_nothing_is_needed_without_it(monkeypatch):
    monkeypatch.setattr(cpu_level, 'cpu_instructions', lambda: 'DEFAULT')
    determinism.enable(env={'MKL_CBWR': 'COMPATIBLE'})
    assert determinism.is_enabled() is True


def test_a_fresh_process_computes_at_the_level():
    """Two of them; a third, without the variables, is refused."""
    if 'avx2' not in open('/proc/cpuinfo').read():
        pytest.skip('this CPU has no AVX2')
    needed = cpu_level.level_variables('avx2')
    results = []
    for variables in (needed, needed, dict.fromkeys(needed)):
        done = fresh('-c', PRINT, code=None, **variables)
        results.append(done.stdout or done.stderr.splitlines()[-1])
    assert results[0] == results[1] and len(results[0]) == 65
    assert 'mmrepro train' in results[2]
