"""What `megatron.training` (the whole training loop) needs on the CPU host beyond `cpu.py`.

The loop asserts that CUDA is available, sizes its process groups by the number of devices, reads device
properties and memory statistics for its log, pins the data loader's batches and asks for NCCL. As in `cpu.py`,
only names of torch are replaced.
"""

import collections
import functools
import os
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.utils.data

from megatron_ascend_moe.host import cpu

# An answer for "which GPU generation?": 9.0 passes Megatron's checks of a minimum, and turns nothing on by itself
CAPABILITY = (9, 0)
PROPERTIES = SimpleNamespace(
    name="cpu", total_memory=0, multi_processor_count=1, major=CAPABILITY[0], minor=CAPABILITY[1]
)


def enable_training_loop() -> None:
    """`cpu.enable()`, and the rest of what Megatron's training loop asks a GPU for.

    RuntimeError as `cpu.enable()`.
    """
    if torch.cuda.is_available is _is_available:
        return
    cpu.enable()
    _replace_device_queries()
    _replace_memory_queries()
    _replace_data_loader()
    _replace_backend()


def _is_available() -> bool:
    """True to Megatron, which asserts it; the truth to torch (optimizers, data loader) and everybody else."""
    return sys._getframe(1).f_globals.get("__name__", "").startswith("megatron.")


def _replace_device_queries() -> None:
    """The loop asserts a device, and builds its process groups only where it counts at least one."""
    cuda = torch.cuda
    cuda.is_available = _is_available
    cuda.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cuda.get_device_capability = lambda device=None: CAPABILITY
    cuda.get_device_properties = lambda device=None: PROPERTIES
    cuda.get_device_name = lambda device=None: PROPERTIES.name


def _replace_memory_queries() -> None:
    """The loop logs device memory; there is none, so all of it reads 0."""
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(torch.cuda, name, lambda device=None: 0)
    torch.cuda.memory_stats = lambda device=None: collections.Counter()
    torch.cuda.reset_peak_memory_stats = lambda device=None: None


def _replace_data_loader() -> None:
    """Pinned host memory cannot be had without a device. And a loader that starts draws a seed from torch's
    default generator, which here is the one that dropout uses: give it one of its own, or a resumed run, which
    starts its loader after the checkpoint's random state is loaded, draws other masks than the run it continues.
    """
    stock_init = torch.utils.data.DataLoader.__init__

    @functools.wraps(stock_init)
    def init(self, *args, **kwargs):
        kwargs["pin_memory"] = False
        kwargs["generator"] = kwargs.get("generator") or torch.Generator()
        stock_init(self, *args, **kwargs)

    torch.utils.data.DataLoader.__init__ = init


def _replace_backend() -> None:
    """Every process group is gloo's, whatever `--distributed-backend` says; gloo binds no device."""
    stock_init, stock_new_group = dist.init_process_group, dist.new_group

    @functools.wraps(stock_init)
    def init_process_group(backend=None, *args, device_id=None, **kwargs):
        return stock_init("gloo", *args, **kwargs)

    @functools.wraps(stock_new_group)
    def new_group(ranks=None, timeout=None, backend=None, *args, **kwargs):
        kwargs.pop("device_id", None)
        return stock_new_group(ranks, timeout, "gloo", *args, **kwargs)

    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group
    dist.new_group = dist.distributed_c10d.new_group = new_group
