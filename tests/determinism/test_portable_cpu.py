"""A CPU trains with ``cpu='portable'`` only if it gives the answers that are known."""
import pytest
import torch
from harness import fresh
from policy_state import nothing_leaks  # noqa: F401  a fixture

from mmrepro import determinism
from mmrepro.config import RandomnessConfig
from mmrepro.distributed.agreement import start_fields
from mmrepro.errors import DeterminismError, RandomnessError
from mmrepro.facts import compatibility
from mmrepro.lifecycle import RunLifecycle
from mmrepro.ops.portable import known_answers
from mmrepro.verify.golden import class_name

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
NEEDED = determinism.missing_at_start({}, num_threads=1, cpu='portable')


def enable(*codes):
    """Return what a fresh process says that enables the policy after each of ``codes``."""
    done = fresh('-c', ENABLE, *codes, code=None, **NEEDED)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ''


def test_this_cpu_gives_them():
    """Whatever CPU this is, as long as it has AVX2."""
    if 'avx2' not in open('/proc/cpuinfo').read():
        pytest.skip('this CPU has no AVX2')
    assert enable('', 'mode = False', 'torch.set_default_dtype(torch.float64)') == ''


def test_a_function_that_is_left_to_mkl_is_noticed():
    said = enable('functions.exp = functions.log = lambda stock, x: stock(x)')
    assert "cpu='portable': this CPU, or this build of torch, computes" in said
    assert '2 of 38 known results' in said and 'exp; log' in said


def test_a_release_without_known_answers_is_refused():
    with pytest.raises(DeterminismError, match='no results are known for torch 9.1.0; allowed are '
                                               "torch 2.13, or cpu='avx2'"):
        known_answers.answers('9.1.0')
    assert known_answers.answers('2.13.1+cpu').keys() == known_answers.compute().keys()


def test_the_inputs_are_the_same_everywhere():
    """They come from integers: digests of results say nothing about those of inputs."""
    x = known_answers.numbers(2, 3)
    assert x.tolist() == [[0.3765869140625, -0.473052978515625, 0.676849365234375],
                          [-0.17279052734375, 0.97711181640625, 0.127471923828125]]
    assert known_answers.numbers(70000).abs().max() < 1


def test_the_number_of_threads_has_to_be_said():
    with pytest.raises(RandomnessError, match="numerics.cpu='portable' needs num_threads"):
        RandomnessConfig(numerics=dict(cpu='portable'))
    config = RandomnessConfig(numerics=dict(cpu='portable', num_threads=2))
    assert config.flags == dict(mode=False, cpu='portable', num_threads=2, float32_precision=None)
    assert dict(config.promises())[
        'same bits on another GPU model, CPU type or version of torch'].startswith('on CPUs, for')


def test_compiled_models_are_refused():
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
def test_operators_of_others_are_watched(mode, on_unknown):
    numerics = dict(cpu='portable', num_threads=1)
    guard = RunLifecycle(dict(randomness=dict(deterministic=mode, numerics=numerics))).hooks([])[0]
    assert guard._devices == ('cpu', ) and guard._error is on_unknown
    assert RunLifecycle(dict(randomness=dict(deterministic=mode))).hooks([])[0]._devices == (
        'cuda', )


def test_ranks_may_be_on_machines_with_other_instruction_sets(monkeypatch):
    for cpu, listed in ((None, True), ('avx2', False), ('portable', False)):
        with monkeypatch.context() as patch:
            patch.setenv('NPY_DISABLE_CPU_FEATURES', 'AVX512F')
            fields = start_fields('', dict(numerics=dict(cpu=cpu)))
        assert fields['randomness.numerics.cpu'] == cpu
        assert ('env.NPY_DISABLE_CPU_FEATURES' in fields) is listed
