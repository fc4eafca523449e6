"""The dispatcher alone and a whole MoE layer, forward and backward, beside Megatron-Core's alltoall dispatcher.

One rank, Megatron's own SequentialMLP experts and router, equal weights. Calls are launched from the host as training
does, syncs included, and the two layers' outputs are compared before anything is timed.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megatron_ascend_moe.bench import timing
from megatron_ascend_moe.bench.shapes import Shape

TOLERANCE = 2e-2  # relative, of bf16 outputs; both dispatchers round each token's sum once


def measure(shape: Shape, dtype: torch.dtype, device: torch.device, kernels: str) -> list[dict]:
    """Lines of two cases: microseconds of ours and of stock, and the bytes that dispatch and combine keep for backward.

    Raises:
        ImportError: no megatron-core.
        RuntimeError: the layers' outputs differ; nothing is timed then.
        torch.OutOfMemoryError: the device does not hold the experts twice and their gradients.
    """
    importlib.import_module("megatron.core")
    plugin = importlib.import_module("megatron_ascend_moe.plugin")
    with _one_rank(device):
        try:  # both layers run with what the plugin provides where TransformerEngine is absent
            stock, ours = (_build_layer(shape, dtype, device, choice) for choice in (None, kernels))
            return _measure(_inputs(shape, dtype, device), device, stock, ours)
        finally:
            plugin.uninstall()


def _inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(shape.T, 1, shape.H, device=device, generator=generator).to(dtype) for _ in range(timing.INPUT_SETS)]


def _measure(x: list[Tensor], device: torch.device, stock: torch.nn.Module, ours: torch.nn.Module) -> list[dict]:
    for mine, theirs in zip(ours.parameters(), stock.parameters(), strict=True):
        mine.data = theirs.data
    with torch.no_grad():
        expected, got = stock(x[0])[0].float(), ours(x[0])[0].float()
    if (got - expected).norm() > TOLERANCE * expected.norm():
        raise RuntimeError("the layer's output differs from stock's; nothing was timed")
    lines = []
    for name, make in (("dispatcher", _dispatcher_call), ("MoE layer", _layer_call)):
        calls = [make(layer, x) for layer in (ours, stock)]
        own, others = timing.seconds_in_turn(calls, device)
        line = {"case": f"{name}, forward + backward", "us": own * 1e6, "stock_us": others * 1e6, "speedup": others / own}
        if name == "dispatcher":
            line["kept_bytes"], line["stock_kept_bytes"] = (_kept_bytes(call, x) for call in calls)
        lines.append(line)
    return lines


@contextlib.contextmanager
def _one_rank(device: torch.device) -> Iterator[None]:
    """Process groups of this one process, and Megatron's random state."""
    parallel_state = importlib.import_module("megatron.core.parallel_state")
    backend = {"cpu": "gloo", "npu": "hccl"}.get(device.type, "nccl")
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), world_size=1, rank=0)
    try:
        parallel_state.initialize_model_parallel()
        importlib.import_module("megatron.core.tensor_parallel").model_parallel_cuda_manual_seed(1)
        yield
    finally:  # left to the interpreter's exit, NCCL kept a process on an H200 from ending
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _build_layer(shape: Shape, dtype: torch.dtype, device: torch.device, kernels: str | None) -> torch.nn.Module:
    """The MoE layer of a GPT of one layer: stock where `kernels` is None, else with this dispatcher."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_ascend_moe import DispatchConfig, plugin

    config = TransformerConfig(
        num_layers=1,
        hidden_size=shape.H,
        num_attention_heads=1,
        kv_channels=8,
        ffn_hidden_size=shape.F,
        moe_ffn_hidden_size=shape.F,
        num_moe_experts=shape.E,
        moe_router_topk=shape.K,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        params_dtype=dtype,
        use_cpu_initialization=device.type == "cpu",
    )
    plugin.install(None if kernels is None else DispatchConfig(kernels=kernels))  # selects the dispatcher or not
    spec = get_gpt_layer_local_spec(num_experts=shape.E, moe_grouped_gemm=False)
    model = GPTModel(config, spec, vocab_size=8, max_sequence_length=8)
    return model.decoder.layers[0].mlp.to(device)


def _layer_call(layer: torch.nn.Module, x: list[Tensor]) -> Callable[[int], Tensor]:
    """Forward and backward of the whole layer; returns its output."""

    def call(i: int) -> Tensor:
        hidden = x[i % len(x)].detach().requires_grad_()
        output = layer(hidden)[0]
        torch.autograd.grad(output, [hidden, *layer.parameters()], x[(i + 1) % len(x)], allow_unused=True)
        return output

    return call


def _dispatcher_call(layer: torch.nn.Module, x: list[Tensor]) -> Callable[[int], Tensor]:
    """Forward and backward of the six stages, with experts that return what they receive."""
    dispatcher = layer.token_dispatcher
    with torch.no_grad():
        routes = [[t.detach() for t in layer.router(hidden)[:2]] for hidden in x]

    def call(i: int) -> Tensor:
        hidden = x[i % len(x)].detach().requires_grad_()
        probs, routing_map = routes[i % len(x)]
        probs = probs.detach().requires_grad_()
        rows, row_probs = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(hidden, routing_map, probs))
        rows, _, row_probs = dispatcher.dispatch_postprocess(rows, row_probs)
        output = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(rows)))
        gradients = [x[(i + 1) % len(x)], torch.ones_like(row_probs)]
        torch.autograd.grad([output, row_probs], [hidden, probs], gradients)
        return output

    return call


def _kept_bytes(call: Callable[[int], Tensor], x: list[Tensor]) -> int:
    """Bytes of the storages that autograd keeps between forward and backward, the call's inputs left out."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call(0)
    inputs = {t.data_ptr() for t in x}
    return sum(size for address, size in kept.items() if address not in inputs)
