"""The operations run in the tier of the kernel tests, which is prepared once."""

from tests.kernels.conftest import _kernel_tier  # noqa: F401
