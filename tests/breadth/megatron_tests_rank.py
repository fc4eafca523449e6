"""One rank of megatron_tests.py: pytest over Megatron-LM's tests behind the CPU host, with the plugin or without."""

import os
import sys
from pathlib import Path

import torch

from megatron_ascend_moe.host import cpu, router_gemm

torch.set_num_threads(1)
cpu.enable()
# the tests ask for GPUs: as many as there are ranks, and NCCL, for which gloo stands in
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: int(os.environ["WORLD_SIZE"])
stock_init = torch.distributed.init_process_group
torch.distributed.init_process_group = lambda backend=None, **kwargs: stock_init("gloo", **kwargs)

import pytest  # noqa: E402

router_gemm.provide_router_gemm_name()


class Record:
    """Writes one line a test: its outcome and its name."""

    def __init__(self):
        self.file = (Path(os.environ["MEGATRON_TESTS_RESULTS"]) / os.environ["RANK"]).open("w", buffering=1)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed" and report.when == "setup":
            self.file.write(f"{report.outcome} {report.nodeid}\n")


if os.environ["MEGATRON_TESTS_SIDE"] == "ours":
    from megatron_ascend_moe import DispatchConfig, install

    install(DispatchConfig())
sys.exit(pytest.main([*sys.argv[1:], "-q", "--noconftest", "-p", "no:cacheprovider", "-W", "ignore"], plugins=[Record()]))
