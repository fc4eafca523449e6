"""Jobs of test_distributed_pool.py."""

import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from megatron.core import parallel_state


def pid_and_sum(value: int) -> tuple[int, int]:
    total = torch.tensor([value * (dist.get_rank() + 1)])
    dist.all_reduce(total)
    return os.getpid(), int(total)


def layout(**sizes) -> tuple[int, int]:
    parallel_state.initialize_model_parallel(**sizes)
    expert = parallel_state.get_expert_model_parallel_world_size()
    return parallel_state.get_tensor_model_parallel_world_size(), expert


def fail_on(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        if how == "raise":
            raise ValueError(f"rank {rank} was told to fail")
        if how == "exit":
            os._exit(7)
        time.sleep(600)
    dist.barrier()


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def start_a_process() -> int:
    """A process that outlives its parent, as Megatron's checkpoint writers do."""
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid
