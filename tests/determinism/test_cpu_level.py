"""``numerics.cpu``: all libraries at one level of instructions, or results that are known."""
import pytest
import torch
from harness import fresh
from policy_state import nothing_leaks  # noqa: F401  a fixture

from mmrepro import determinism
from mmrepro.config import RandomnessConfig
from mmrepro.determinism import cpu_level
from mmrepro.distributed.agreement import start_fields
from mmrepro.errors import DeterminismError, RandomnessError
from mmrepro.facts import compatibility
from mmrepro.facts.collect import cpu_features
from mmrepro.ops.portable import known_answers
from mmrepro.run import lifecycle
from mmrepro.run.lifecycle import RunLifecycle
from mmrepro.verbs.golden import class_name

NEEDED = cpu_level.CPU_LEVELS['avx2']
needs_avx2 = pytest.mark.skipif('avx2' not in str(cpu_features()), reason='this CPU has no AVX2')
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


@needs_avx2
def test_a_fresh_process_computes_at_the_level():
    """Two of them; a third, without the variables, is refused."""
    needed = cpu_level.level_variables('avx2')
    results = []
    for variables in (needed, needed, dict.fromkeys(needed)):
        done = fresh('-c', PRINT, code=None, **variables)
        results.append(done.stdout or done.stderr.splitlines()[-1])
    assert results[0] == results[1] and len(results[0]) == 65
    assert 'mmrepro train' in results[2]


ENABLE = '''
import torch, sys
from mmrepro import determinism
from mmrepro.errors import DeterminismError
from mmrepro.ops import portable
from mmrepro.ops.portable import functions, products
for code in sys.argv[1:]:
    mode = True
    exec(code)
    try:
        determinism.enable(mode, cpu='portable', num_threads=1)
    except DeterminismError as error:
        sys.exit(str(error))
    assert portable.installed() and not torch.backends.cuda.flash_sdp_enabled()
    assert not torch.backends.mha.get_fastpath_enabled() and not determinism.drifted()
    determinism.disable()
    assert not portable.installed() and torch.backends.cuda.flash_sdp_enabled()
'''


def enable(*codes):
    """Return what a fresh process says that enables the policy after each of ``codes``."""
    needed = determinism.missing_at_start({}, num_threads=1, cpu='portable')
    done = fresh('-c', ENABLE, *codes, code=None, **needed)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ''


@needs_avx2
def test_this_cpu_gives_the_known_answers():
    """Whatever CPU this is, as long as it has AVX2."""
    assert enable('', 'mode = False', 'torch.set_default_dtype(torch.float64)') == ''


def test_a_function_that_is_left_to_mkl_is_noticed():
    said = enable('functions.exp = functions.log = lambda stock, x: stock(x)')
    assert "cpu='portable': on this CPU, or with this build of torch," in said
    assert '2 of 40 known results' in said and 'exp; log' in said


def test_a_release_without_known_answers_is_refused():
    with pytest.raises(DeterminismError, match='no results are known for torch 9.1.0; allowed are '
                                               "torch 2.13, or cpu='avx2'"):
        known_answers.answers('9.1.0')
    assert known_answers.answers('2.13.1+cpu').keys() == known_answers.compute().keys()


def test_the_inputs_of_known_answers_are_the_same_everywhere():
    """They come from integers: digests of results say nothing about those of inputs."""
    x = known_answers.numbers(2, 3)
    assert x.tolist() == [[0.3765869140625, -0.473052978515625, 0.676849365234375],
                          [-0.17279052734375, 0.97711181640625, 0.127471923828125]]
    assert known_answers.numbers(70000).abs().max() < 1


def test_a_portable_run_says_its_number_of_threads():
    with pytest.raises(RandomnessError, match="numerics.cpu='portable' needs num_threads"):
        RandomnessConfig(numerics=dict(cpu='portable'))
    config = RandomnessConfig(numerics=dict(cpu='portable', num_threads=2))
    assert config.flags == dict(mode=False, cpu='portable', num_threads=2, float32_precision=None)
    assert dict(config.promises())[
        'same bits on another GPU model, CPU type or version of torch'].startswith('on CPUs, for')


def test_compiled_models_are_not_portable():
    with pytest.raises(DeterminismError, match='compile: torch.compile makes kernels for the CPU'):
        determinism.check_compiled(torch.nn.Linear(1, 1), True, 'portable')


FACTS = {'randomness.numerics.cpu': 'portable', 'hardware.cpu': 'AMD EPYC', 'hardware.gpu': None,
         'hardware.cpu_features': 'avx2', 'version.torch': '2.13.0', 'library.libc': 'glibc 2.36'}


def test_a_resume_on_another_cpu_continues_and_goldens_are_common():
    other = {**FACTS, 'hardware.cpu': 'Intel Xeon', 'hardware.cpu_features': 'avx2 avx512f',
             'library.libc': 'glibc 2.39'}
    found = {row.name: row.severity for row in compatibility.differences(FACTS, other)}
    assert found == {'hardware.cpu': compatibility.HARMLESS, 'library.libc': compatibility.CHANGES,
                     'hardware.cpu_features': compatibility.HARMLESS}
    assert class_name(FACTS) == class_name(other) and class_name(FACTS).startswith('x86-64_torch-')
    del other['randomness.numerics.cpu']
    assert class_name({**FACTS, 'randomness.numerics.cpu': None}) != class_name(other)


@pytest.mark.parametrize('mode, on_unknown', [(True, True), ('warn', False)])
def test_operators_of_others_are_watched_in_a_portable_run(mode, on_unknown, monkeypatch):
    numerics = dict(cpu='portable', num_threads=1)
    guard = RunLifecycle(dict(randomness=dict(deterministic=mode, numerics=numerics))).hooks([])[0]
    assert guard._devices == ('cpu', ) and guard._error is on_unknown
    monkeypatch.setattr(lifecycle, 'get_device', lambda: 'cuda')
    for given in (numerics, {}):
        settings = dict(randomness=dict(deterministic=mode, numerics=given))
        assert RunLifecycle(settings).hooks([])[0]._devices == ('cuda', )


def test_ranks_may_be_on_machines_with_other_instruction_sets(monkeypatch):
    for cpu, listed in ((None, True), ('avx2', False), ('portable', False)):
        with monkeypatch.context() as patch:
            patch.setenv('NPY_DISABLE_CPU_FEATURES', 'AVX512F')
            fields = start_fields('', dict(numerics=dict(cpu=cpu)))
        assert fields['randomness.numerics.cpu'] == cpu
        assert ('env.NPY_DISABLE_CPU_FEATURES' in fields) is listed
