"""Megatron's training loop builds its dataset index helper with `make`; a wheel brings it built, without a Makefile.

Run from a wheel the loop would stop there ("Failed to compile the C++ dataset helper functions").
"""

import importlib.util
import os


def use_built_helpers() -> None:
    """Skip the build where megatron-core's directory holds the built helper and nothing to build it with."""
    from megatron.core.datasets import utils

    makefile = os.path.join(os.path.dirname(utils.__file__), "Makefile")
    if not os.path.exists(makefile) and importlib.util.find_spec("megatron.core.datasets.helpers_cpp"):
        utils.compile_helpers = lambda: None
