"""From YAML configs to a checked Megatron command: `python -m megatron_ascend_moe launch --help`.

- configs.py: read and merge YAML; overrides; the CPU-sized variant; flags as a list
- flags.py: every key against Megatron's own argument parser
- layout.py: divisibility of the parallel sizes
- shape.py: parameters, total and active, from the flags
- traffic.py: rows, padding and bytes of one dispatch
- command.py: the command line
"""

from megatron_ascend_moe.launch.command import main

__all__ = ["main"]
