"""What each of the quickstart's processes does: train the same small GPT-MoE five times, dispatcher by dispatcher.

Plain megatron-core (0.15.3 to 0.19): a model, its optimizer and a loop, with `megatron_ascend_moe.install()` as
the way in. Started by quickstart.py.
"""

import argparse
import ctypes
import importlib
import importlib.metadata
import logging
import os
import signal
import statistics
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

# the screen is for the progress bar: Megatron's notices are about TransformerEngine and Apex, which a laptop lacks
warnings.filterwarnings("ignore")
logging.getLogger("megatron").setLevel(logging.ERROR)
logging.getLogger("megatron_ascend_moe").setLevel(logging.WARNING)

from megatron_ascend_moe.host import cpu, router_gemm  # noqa: E402

cpu.enable()  # before Megatron is imported

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from quickstart_report import Result, write_report  # noqa: E402
from tqdm import tqdm  # noqa: E402

import megatron_ascend_moe  # noqa: E402
from megatron_ascend_moe import DispatchConfig  # noqa: E402

VOCABULARY = 256  # bytes
SEQUENCE, BATCH = 64, 4  # of each process
EXPERTS, TOPK = 8, 2
SEED = 1234
WARM_UP = 5  # steps that the medians leave out
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Run:
    """One training run: the plugin's settings (None: Megatron's stock dispatcher) and the experts' capacity."""

    name: str
    settings: DispatchConfig | None
    capacity_factor: float | None = None
    pad_to_capacity: bool = False
    compared_with: str | None = None


ROOMY = EXPERTS / TOPK  # every token could go to one expert and none would be dropped
RUNS = (
    Run("stock alltoall", None),
    Run("ascend padded", DispatchConfig(layout="padded"), compared_with="stock alltoall"),
    Run("ascend binned", DispatchConfig(layout="binned"), ROOMY, compared_with="stock alltoall"),
    Run("stock, capacity 1.0", None, 1.0, True),
    Run("ascend binned, capacity 1.0", DispatchConfig(layout="binned"), 1.0, True, "stock, capacity 1.0"),
)


def main() -> None:
    arguments = _parse()
    _end_with(arguments.parent)
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{arguments.rendezvous}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    parallel_state.initialize_model_parallel(expert_model_parallel_size=world_size)
    text, source = _read_text(arguments.data)
    megatron_version = importlib.metadata.version("megatron-core")  # its own __version__ has the commit of this clone
    if rank == 0:
        print(
            f"megatron-core {megatron_version}, torch {torch.__version__}, Python {sys.version.split()[0]}, CPU\n"
            f"{len(text):,} bytes of {source}; {world_size} processes, {EXPERTS // world_size} of {EXPERTS} "
            f"experts each, top-{TOPK}; {len(RUNS)} runs of {arguments.steps} steps of "
            f"{world_size * BATCH * SEQUENCE} tokens",
            flush=True,
        )
    results = [_train(run, text, arguments.steps) for run in RUNS]
    if rank == 0:
        about = {"megatron-core": megatron_version, "torch": torch.__version__, "text": source, "processes": world_size}
        write_report(Path(arguments.out), results, {run.name: run.compared_with for run in RUNS}, about)
    dist.barrier()
    dist.destroy_process_group()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rendezvous", required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--data")
    return parser.parse_args()


def _end_with(parent: int) -> None:
    """Never outlive quickstart.py, not even where it is killed without a chance to say so."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the line above
            sys.exit("quickstart.py has ended")


def _read_text(data: str | None) -> tuple[torch.Tensor, str]:
    """The text as bytes, uint8 [N], and what to call it."""
    if data:
        raw, source = Path(data).read_bytes(), data
    else:
        topics = importlib.import_module("pydoc_data.topics").topics
        raw, source = "\n\n".join(topics.values()).encode("utf-8"), "Python's own documentation"
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8), source


def _train(run: Run, text: torch.Tensor, steps: int) -> Result:
    """Train from the same weights on the same batches as every other run; the loss is the mean of the ranks'."""
    if run.settings is not None:
        megatron_ascend_moe.install(run.settings)
    else:
        router_gemm.provide_router_gemm_name()  # `install` repairs this in the host; its own dispatcher needs it too
    try:
        model, optimizer = _build(run)
        if run.settings is not None:
            megatron_ascend_moe.verify(model)
        generator = torch.Generator().manual_seed(SEED + dist.get_rank())
        losses, milliseconds = [], []
        tokens = BATCH * SEQUENCE * dist.get_world_size()
        seldom = 0.1 if sys.stderr.isatty() else 10.0  # seconds between two lines of a log file
        shown = dist.get_rank() == 0
        with tqdm(total=steps, desc=f"{run.name:<27}", disable=not shown, mininterval=seldom) as bar:
            for _ in range(steps):
                before = time.perf_counter()
                losses.append(_step(model, optimizer, _sample(text, generator)))
                milliseconds.append((time.perf_counter() - before) * 1e3)
                speed = tokens / milliseconds[-1] * 1e3
                shown_speed = f"{milliseconds[-1]:.0f} ms, {speed:,.0f} tokens/s"
                bar.set_postfix_str(f"loss {losses[-1]:.4f}, {shown_speed}", refresh=False)
                bar.update()
    finally:
        if run.settings is not None:
            megatron_ascend_moe.uninstall()
    median = statistics.median(milliseconds[min(WARM_UP, steps - 1) :])
    settings = asdict(run.settings) if run.settings else {"dispatcher": "stock alltoall"}
    return Result(run.name, losses, median, tokens / median * 1e3, settings)


def _build(run: Run):
    """The model (the same weights for every run) in Megatron's data-parallel wrapper, and its optimizer."""
    tensor_parallel.model_parallel_cuda_manual_seed(SEED)
    torch.manual_seed(SEED)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=128,
        num_attention_heads=4,
        ffn_hidden_size=256,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-2,
        moe_token_dispatcher_type="alltoall",
        moe_expert_capacity_factor=run.capacity_factor,
        moe_pad_expert_input_to_capacity=run.pad_to_capacity,
        expert_model_parallel_size=dist.get_world_size(),
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(num_experts=EXPERTS, normalization="LayerNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
    )
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    return model, get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=1.0), [model])


def _sample(text: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """BATCH random windows of the text, int64 [BATCH, SEQUENCE + 1]."""
    starts = torch.randint(0, len(text) - SEQUENCE - 1, (BATCH, 1), generator=generator)
    return text[starts + torch.arange(SEQUENCE + 1)].long()


def _step(model, optimizer, window: torch.Tensor) -> float:
    """Forward, backward and update on one batch; the loss, averaged over the ranks."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    positions = torch.arange(SEQUENCE).repeat(BATCH, 1)
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1)
    loss = model(window[:, :-1], positions, mask, labels=window[:, 1:]).float().mean()
    loss.backward()
    finalize_model_grads([model])
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


if __name__ == "__main__":
    main()
