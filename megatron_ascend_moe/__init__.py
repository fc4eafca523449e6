"""Mixture-of-Experts token dispatch for Megatron-Core on Ascend NPUs, CUDA GPUs and CPUs.

Importing this package imports neither triton, nor torch_npu, nor megatron; the public names below are
resolved on first use.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "install": "plugin",
    "uninstall": "plugin",
    "verify": "plugin",
    "AscendTokenDispatcher": "dispatcher",
    "DispatchConfig": "config",
    "checked": "config",
}
_SUBPACKAGES = ("routing", "ops", "kernels", "backend", "observe")

__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC, *_SUBPACKAGES])
