"""The fixture ``same_bits`` for the tests of any project.

    def test_a_step(same_bits):
        same_bits(dict(losses=losses, weights=model.state_dict()))

pytest loads this module in every run, so it imports mmrepro only for a test that has the fixture:
importing mmrepro activates it.
"""
import pytest


def pytest_addoption(parser):
    parser.getgroup('mmrepro').addoption(
        '--mmrepro-update', action='store_true',
        help='keep the bits that same_bits is called with, instead of comparing them')


@pytest.fixture
def same_bits(request):
    """Compare nested values with the bits in ``same_bits/MODULE.json`` beside the test module."""
    from mmrepro.verbs.golden import KeptBits, NoBits
    config = request.config
    update = config.getoption('--mmrepro-update')
    if update and hasattr(config, 'workerinput'):
        raise pytest.UsageError('--mmrepro-update writes files, which several processes of '
                                'pytest-xdist would overwrite; run it with -n 0')
    path = request.path
    kept = KeptBits(path.parent / 'same_bits' / f'{path.stem}.json',
                    request.node.nodeid.partition('::')[2])

    def compare(value):
        __tracebackhide__ = True
        try:
            difference = kept.next(value, update)
        except NoBits as error:
            pytest.skip(str(error))
        if difference:
            pytest.fail(difference, pytrace=False)

    failed = request.session.testsfailed
    yield compare
    if request.session.testsfailed > failed:
        return  # bits of half a test are not kept
    if update:
        kept.write()
    elif difference := kept.missing():
        pytest.fail(difference, pytrace=False)
