"""Jobs of test_norm.py: one forward and backward of a small dense GPT, norm gradients by name."""

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ascend_moe.host.norm import provide_safe_norm, withdraw_safe_norm

VOCABULARY, SEQUENCE, BATCH = 64, 16, 2


def norm_gradients(tensor_parallel_size: int, normalization: str) -> dict[str, list[float]]:
    """Gradients of every norm's parameters after `finalize_model_grads`, with the safe norm provided."""
    provide_safe_norm()
    try:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel_size)
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
        torch.manual_seed(1234)
        config = _config(tensor_parallel_size, normalization)
        spec = get_gpt_layer_local_spec(normalization=normalization)
        model = GPTModel(
            config=config, transformer_layer_spec=spec, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE
        )
        model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
        tokens = torch.arange(SEQUENCE + 1).mul(7).remainder(VOCABULARY).repeat(BATCH, 1)
        mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1)
        positions = torch.arange(SEQUENCE).repeat(BATCH, 1)
        model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).float().mean().backward()
        finalize_model_grads([model])
        return {n: p.main_grad.tolist() for n, p in model.named_parameters() if "layernorm" in n}
    finally:
        withdraw_safe_norm()


def _config(tensor_parallel_size: int, normalization: str) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        normalization=normalization,
        tensor_model_parallel_size=tensor_parallel_size,
        sequence_parallel=tensor_parallel_size > 1,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
    )


def stock_refusal() -> str:
    """What Megatron says when sequence parallel meets its own norm."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    try:
        WrappedTorchNorm(_config(2, "RMSNorm"), 32)
    except AssertionError as refusal:
        return str(refusal)
    return ""


def provide_and_withdraw() -> dict[str, bool]:
    """Whether the class's own `__new__` is the identical object again, and whether twice is once."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    before = WrappedTorchNorm.__dict__["__new__"]
    provide_safe_norm()
    provide_safe_norm()
    replaced = WrappedTorchNorm.__dict__["__new__"] is not before
    unmarked = WrappedTorchNorm(_config(1, "RMSNorm"), 32)
    withdraw_safe_norm()
    withdraw_safe_norm()
    return {
        "replaced": replaced,
        "restored": WrappedTorchNorm.__dict__["__new__"] is before,
        "unmarked": not any(hasattr(p, "sequence_parallel") for p in unmarked.parameters()),
    }
