"""The command ``mmrepro`` in this process."""
import pytest

from mmrepro import cli, determinism, ops


@pytest.fixture
def provider_stays():
    """Check that what ran puts flags and the provider of operators back."""
    provider = ops.provider()
    yield
    determinism.disable()
    assert ops.provider() == provider


def exit_code(verb, *words, **more):
    """Run a verb; its exit code, that of wrong usage included."""
    try:
        return cli.run(verb, list(map(str, words)), **more)
    except SystemExit as ended:
        return ended.code
