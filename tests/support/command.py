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


def exit_code(verb, *words):
    """Run a verb; its exit code, that of wrong usage included."""
    return exit_code_of(verb, None, *words)


def exit_code_of(name, main, *words):
    """Run the function of a command that is no verb, as :func:`exit_code` runs a verb."""
    try:
        return cli.run(name, list(map(str, words)), main)
    except SystemExit as ended:
        return ended.code
