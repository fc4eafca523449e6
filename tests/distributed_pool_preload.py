"""Imported once by the pools' fork server, and by each worker: the CPU host, then Megatron, on one thread."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["ASCEND_RT_VISIBLE_DEVICES"] = ""  # these are gloo's processes

import torch  # noqa: E402

from megatron_ascend_moe.host import cpu, router_gemm  # noqa: E402

torch.set_num_threads(1)
cpu.enable()

import megatron.core.models.gpt.gpt_layer_specs  # noqa: E402, F401
import megatron.core.models.gpt.gpt_model  # noqa: E402, F401
import megatron.core.optimizer  # noqa: E402, F401
import megatron.core.transformer.moe.moe_layer  # noqa: E402, F401

# stock 0.15.3 and 0.16.1 cannot route without it, and the stock dispatcher is what the tests compare with
router_gemm.provide_router_gemm_name()
