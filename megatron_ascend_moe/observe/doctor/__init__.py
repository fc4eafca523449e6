"""`python -m megatron_ascend_moe doctor [--json]`: is this machine ready to train, and if not, what to mend.

Each check is a function that returns findings (`finding.py`); the exit code is 1 if one of them is a failure.

- software.py: versions against the support table, which triton is imported
- ascend.py: torch_npu, CANN, SoC
- environment.py: network interfaces, timeouts, allocator and debugging variables, kernel cache
- trials.py: a golden example on every kernel backend, and a loopback all-to-all, each in processes of its own
"""

from megatron_ascend_moe.observe.doctor.command import main

__all__ = ["main"]
