"""Read by every Python that starts with this folder on its path."""
import os

if os.environ.get('MMREPRO_HOST_CUDA'):
    import pretend  # noqa: F401
