"""Stock Megatron-Core on a machine without an accelerator: CPU tensors, gloo collectives.

Megatron-Core asks `torch.cuda` by name for devices, streams and random state, and relies on a few things
that NCCL does and gloo does not. `enable()` puts a CPU answer behind each of those names. It must run before
Megatron is imported, in a process of its own: `python -m megatron_ascend_moe run --device cpu`, the examples
and the tests do that; nothing else switches it on, and it refuses to where an NPU or a GPU is present.

Each group of replacements below says why it is there. None of them touches Megatron's own names, and none
changes arithmetic. What Megatron's whole training loop needs on top is in `cpu_training.py`.
"""

import contextlib
import functools
import glob
import logging
import os
import sys

import torch
import torch.distributed as dist

CPU = torch.device("cpu")
_enabled = False


def enable() -> None:
    """Make Megatron-Core run on CPU tensors and gloo in this process; calling it again does nothing.

    RuntimeError where an NPU or a GPU is present, or where Megatron-Core was imported before.
    """
    global _enabled
    if _enabled:
        return
    refuse_accelerator()
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "the CPU host was enabled after megatron.core had been imported, and Megatron binds names of "
            "torch.cuda at import: call megatron_ascend_moe.host.cpu.enable() first"
        )
    _enabled = True
    _replace_streams()
    _replace_random_state()
    _replace_placement()
    _replace_type_names()
    _replace_collectives()
    _run_eagerly()


def refuse_accelerator() -> None:
    """RuntimeError where this machine has an NPU or a GPU that torch could use."""
    found = _accelerator()
    if found:
        raise RuntimeError(
            f"the CPU host was asked for, but {found} is present; expected a machine without one: use "
            "--device npu or --device cuda, or hide the devices from this process (CUDA_VISIBLE_DEVICES='' or "
            "ASCEND_RT_VISIBLE_DEVICES='')"
        )


def _accelerator() -> str | None:
    if torch.cuda.is_available():
        return "a GPU (torch.cuda.is_available())"
    if hasattr(torch, "npu") and torch.npu.is_available():
        return "an NPU (torch.npu.is_available())"
    # without torch_npu torch knows of no NPU; the driver's device nodes do
    hidden = os.environ.get("ASCEND_RT_VISIBLE_DEVICES") == ""
    nodes = [] if hidden else sorted(glob.glob("/dev/davinci[0-9]*"))
    return f"an NPU ({nodes[0]})" if nodes else None


class _Event:
    """A point in a stream that has always been reached: CPU operations finish before they return."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self, stream=None):
        pass

    def wait(self, stream=None):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0


class _Stream:
    """The one order in which a CPU runs operations."""

    device = CPU
    cuda_stream = 0

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def record_event(self, event=None):
        return event or _Event()

    def synchronize(self):
        pass

    def query(self):
        return True


def _replace_streams() -> None:
    """Streams and events order work between streams; a CPU has one order, so they do nothing."""
    cuda, main = torch.cuda, _Stream()
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = lambda device=None: main
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.set_stream = lambda stream: None
    cuda.synchronize = lambda device=None: None
    cuda.empty_cache = lambda: None
    torch.Tensor.record_stream = lambda self, stream: None
    # ranges for a GPU's profiler: a torch without CUDA has the names, and raises
    cuda.nvtx.range_push = lambda message: None
    cuda.nvtx.range_pop = lambda: None


class _DefaultGenerators:
    """`torch.cuda.default_generators[current_device()]` in Megatron's random-state tracker."""

    def __getitem__(self, device):
        return torch.default_generator


def _replace_random_state() -> None:
    """Megatron's tracker swaps the CUDA generator's state around each layer; here it swaps the CPU's."""
    cuda = torch.cuda
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device="cuda": torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
    cuda.default_generators = _DefaultGenerators()
    # the tracker defers its generator calls until CUDA is initialised: here "now", and nothing to initialise
    cuda._lazy_call = lambda call, **kwargs: call()
    cuda._lazy_init = lambda: None
    # it also warns of CPU random numbers drawn under the CUDA state: here they are meant to be
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_is_not_about_cpu_state)


def _is_not_about_cpu_state(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed" not in record.getMessage()


_FACTORIES = (
    "arange as_tensor empty empty_like eye full full_like linspace ones ones_like rand randint randn tensor "
    "triu_indices zeros zeros_like"
).split()


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _replace_placement() -> None:
    """Megatron writes device='cuda' and .cuda() by name; both mean the CPU here."""
    torch.cuda.current_device = lambda: CPU
    torch.cuda.set_device = lambda device: None
    for name in _FACTORIES:
        setattr(torch, name, _placing_on_cpu(getattr(torch, name)))
    stock_to = torch.Tensor.to

    @functools.wraps(stock_to)
    def to(self, *args, **kwargs):
        if args and _is_cuda(args[0]):
            args = (CPU, *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return stock_to(self, *args, **kwargs)

    torch.Tensor.to = to
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self


def _placing_on_cpu(factory):
    @functools.wraps(factory)
    def place(*args, **kwargs):
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return place


def _replace_type_names() -> None:
    """Megatron's mixed-precision optimizers sort parameters by `param.type() == 'torch.cuda.…Tensor'`."""
    stock_type = torch.Tensor.type

    @functools.wraps(stock_type)
    def type_name(self, *args, **kwargs):
        found = stock_type(self, *args, **kwargs)
        if isinstance(found, str) and not found.startswith("torch.cuda."):
            return "torch.cuda." + found.removeprefix("torch.")
        return found

    torch.Tensor.type = type_name


def _replace_collectives() -> None:
    """Three differences between NCCL and gloo that stock Megatron-Core meets."""
    stock_gather, stock_exchange, stock_barrier = dist.all_gather, dist.all_to_all_single, dist.barrier

    @functools.wraps(stock_gather)
    def all_gather(tensor_list, tensor, group=None, async_op=False):
        """Uneven sizes (stock dispatcher, expert tensor parallelism): gloo needs equal ones, so pad."""
        if len({part.shape for part in tensor_list}) == 1:
            return stock_gather(tensor_list, tensor, group=group, async_op=async_op)
        rows = max(part.shape[0] for part in tensor_list)
        padded = tensor.new_zeros(rows, *tensor.shape[1:])
        padded[: tensor.shape[0]] = tensor
        parts = [torch.empty_like(padded) for _ in tensor_list]
        stock_gather(parts, padded, group=group)
        for part, received in zip(tensor_list, parts, strict=True):
            part.copy_(received[: part.shape[0]])
        return None

    @functools.wraps(stock_exchange)
    def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
        """Megatron turns split sizes into lists only when they are CUDA tensors; torch takes nothing else."""
        return stock_exchange(
            output,
            input,
            _sizes(output_split_sizes),
            _sizes(input_split_sizes),
            group=group,
            async_op=async_op,
        )

    @functools.wraps(stock_barrier)
    def barrier(group=None, async_op=False, device_ids=None, **kwargs):
        """gloo refuses `device_ids`."""
        return stock_barrier(group=group, async_op=async_op, **kwargs)

    dist.all_gather = dist.distributed_c10d.all_gather = all_gather
    dist.all_to_all_single, dist.barrier = all_to_all_single, barrier


def _sizes(splits) -> list[int] | None:
    return splits if splits is None else [int(size) for size in splits]


def _run_eagerly() -> None:
    """Settings that Megatron and torch read from the environment."""
    # Megatron's jit_fuser is torch.compile, which on a CPU needs a C++ compiler and is slower than eager
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # Megatron refuses tensor parallelism without it; it orders GPU kernels and means nothing here
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
