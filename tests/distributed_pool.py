"""Pools of gloo processes that live as long as the test session: a distributed test costs a job, not a start.

A job is a module-level function named "package.module:function". Every rank of a pool calls it with the same
keyword arguments inside a process group of its own (made before the job, destroyed after it, with Megatron's
parallel state), and returns something picklable; `submit` gives the ranks' results in order.

    losses = distributed_pool(4).submit("tests.some_jobs:train", tensor_parallel=2, expert_parallel=2)

The CPU host is enabled in every worker, and Megatron is imported before the workers are forked, so a job may
initialise any layout that fits its world. A rank that raises, dies or hangs fails the job with that rank's
traceback, and the next job of that size gets a fresh pool.
"""

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
import traceback
from datetime import timedelta

import psutil

GRACE_SECONDS = 3.0  # how long the other ranks may take to say what they saw once one rank has failed


class JobFailed(AssertionError):
    """A rank of a distributed job raised, died or ran past its time; the message carries its traceback."""


class Pools:
    """One pool for each world size, started when first asked for."""

    def __init__(self):
        self._pools: dict[int, Pool] = {}

    def __call__(self, world_size: int) -> "Pool":
        pool = self._pools.get(world_size)
        if pool is None or not pool.healthy:
            pool = self._pools[world_size] = Pool(world_size)
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


class Pool:
    """`world_size` processes that wait for jobs."""

    def __init__(self, world_size: int):
        import torch.distributed as dist

        self.world_size = world_size
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.distributed_pool_preload"])
        self._processes, self._connections = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(theirs, rank, world_size, self._store.port, list(sys.path)), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        self.healthy = True

    def submit(self, job: str, *, timeout: float = 120.0, **kwargs) -> list:
        """Run `job` ("package.module:function") with `kwargs` on every rank; the ranks' results in order.

        JobFailed if a rank raises, dies, or has not returned after `timeout` seconds.
        """
        if not self.healthy:
            raise JobFailed(f"the pool of {self.world_size} was closed by a failure: ask for a new one")
        for connection in self._connections:
            connection.send((job, kwargs, timeout))
        replies = self._collect(timeout)
        failures = [rank for rank in range(self.world_size) if replies.get(rank, ("missing",))[0] != "returned"]
        if failures:
            self.close()
            raise JobFailed(_report(job, kwargs, failures, replies, timeout))
        return [replies[rank][1] for rank in range(self.world_size)]

    def _collect(self, timeout: float) -> dict[int, tuple]:
        """Replies by rank: until all are there, time is up, or the grace after a failure has passed."""
        replies: dict[int, tuple] = {}
        deadline = time.monotonic() + timeout
        while len(replies) < self.world_size:
            waiting = {self._connections[r]: r for r in range(self.world_size) if r not in replies}
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting[connection]
                replies[rank] = self._receive(rank)
                if replies[rank][0] != "returned":
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return replies

    def _receive(self, rank: int) -> tuple:
        try:
            return self._connections[rank].recv()
        except (EOFError, OSError):
            self._processes[rank].join(GRACE_SECONDS)
            return ("died", f"the process ended with exit code {self._processes[rank].exitcode}")

    def close(self) -> None:
        """End the pool's processes, by their ids, with what they started: Megatron's checkpoints keep writers alive."""
        self.healthy = False
        started = [child for process in self._processes for child in _descendants(process.pid)]
        for connection in self._connections:
            connection.close()
        for process in (*self._processes, *started):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for process in self._processes:
            process.join()


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _report(job: str, kwargs: dict, failures: list[int], replies: dict[int, tuple], timeout: float) -> str:
    lines = [f"{job} with {kwargs} failed on rank(s) {failures}"]
    for rank in failures:
        kind, text = replies.get(rank, ("missing", f"no reply (limit {timeout:.0f} s)"))
        lines.append(f"--- rank {rank} {kind}:\n{text}")
    return "\n".join(lines)


def _work(connection, rank: int, world_size: int, port: int, path: list[str]) -> None:
    """A worker's life: receive a job, run it in a fresh process group, send what came of it."""
    import torch.distributed as dist

    faulthandler.enable()
    sys.path[:] = path
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1",
        GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    importlib.import_module("tests.distributed_pool_preload")
    gc.freeze()  # what is imported stays: jobs collect often, and a walk over all of it takes half a second
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    number = 0
    while True:
        try:
            job, kwargs, timeout = connection.recv()
        except (EOFError, OSError):
            return
        number += 1
        try:
            with _process_group(dist.PrefixStore(f"job{number}", store), rank, world_size, timeout):
                module, function = job.split(":")
                reply = ("returned", getattr(importlib.import_module(module), function)(**kwargs))
        except BaseException:
            reply = ("raised", traceback.format_exc())
        connection.send(reply)


@contextlib.contextmanager
def _process_group(store, rank: int, world_size: int, timeout: float):
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_ascend_moe.host import router_gemm

    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout))
    # a job that uninstalled the plugin has withdrawn it, and the next may run the stock dispatcher
    router_gemm.provide_router_gemm_name()
    yield
    # only after a good end: a failed job closes the whole pool, and others may still sit in a collective
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    _forget_models()
    _free_groups()


def _forget_models() -> None:
    """Reset what Megatron keeps in a process about the models it has trained, sized and shaped by them."""
    from megatron.core.transformer.moe import moe_utils

    moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
    try:
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    except ImportError:  # megatron-core before 0.17
        moe_utils.get_moe_layer_wise_logging_tracker().clear()
    else:
        destroy_moe_metrics_tracker()


def _free_groups() -> None:
    """Let go of what still holds process groups: each polls on threads of its own until it is freed.

    Models hold them in reference cycles, and Megatron's caches on rotary embeddings hold the modules.
    """
    from megatron.core.models.common.embeddings import rotary_pos_embedding, yarn_rotary_pos_embedding

    for module in (rotary_pos_embedding, yarn_rotary_pos_embedding):
        for owner in vars(module).values():
            for method in vars(owner).values() if isinstance(owner, type) else ():
                if hasattr(method, "cache_clear"):
                    method.cache_clear()
    gc.collect()
