"""Jobs for the distributed pools: train a tiny GPT-MoE on Megatron-Core and report losses and gradients by name."""

import contextlib

import torch

VOCABULARY, SEQUENCE, BATCH = 128, 32, 2


def build_config(layout, **overrides):
    """The TransformerConfig of the tiny model. `layout`: dict of tp, pp, ep, etp."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings = dict(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        num_moe_experts=8,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-2,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        tensor_model_parallel_size=layout["tp"],
        pipeline_model_parallel_size=layout["pp"],
        expert_model_parallel_size=layout["ep"],
        expert_tensor_parallel_size=layout["etp"],
        sequence_parallel=layout["tp"] > 1,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        pipeline_dtype=torch.float32,
    )
    settings.update(overrides)
    if settings.pop("bf16", False):
        settings.update(bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16)
    return TransformerConfig(**settings)


@contextlib.contextmanager
def dispatcher(settings):
    """Install the plugin with `settings` (None: stock)."""
    from megatron_ascend_moe import DispatchConfig, plugin

    # the host's repairs (norm, te_general_gemm) belong to both sides of a comparison
    plugin.install(None if settings is None else DispatchConfig(**settings))
    try:
        yield
    finally:
        plugin.uninstall()


def build_model(config, layout, seed=1234):
    """A GPT with the local (TransformerEngine-free) layer spec, the same weights for the same seed and layout."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout["tp"],
        pipeline_model_parallel_size=layout["pp"],
        expert_model_parallel_size=layout["ep"],
        expert_tensor_parallel_size=layout["etp"],
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        normalization="LayerNorm",
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
    )
    if config.bf16:
        from megatron.core.transformer.module import Float16Module

        model = Float16Module(config, model)
    return model


def train(layout, settings, steps=20, config=None, check_gradients=False, change_loss=None):
    """Train; returns the losses of every step and the gradients of the first step by parameter name.

    Args:
        layout: dict of tp, pp, ep, etp.
        settings: DispatchConfig's fields for the plugin, or None for the stock dispatcher.
        config: overrides of the TransformerConfig.
        check_gradients: let Megatron's DistributedDataParallel raise on gradients that are not finite.
        change_loss: applied to this rank's loss.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    layout = {"tp": 1, "pp": 1, "ep": 1, "etp": 1} | layout
    params_dtype = torch.bfloat16 if (config or {}).get("bf16") else torch.float32
    config = build_config(layout, **(config or {}))
    with dispatcher(settings):
        model = build_model(config, layout)
        if settings is not None:
            from megatron_ascend_moe import plugin

            assert plugin.verify(model) == config.num_layers
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, check_for_nan_in_grad=check_gradients)
        model = DistributedDataParallel(config, ddp, model)
        optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=2e-3, bf16=config.bf16, params_dtype=params_dtype, clip_grad=1.0),
            [model],
        )
        generator = torch.Generator().manual_seed(7 + parallel_state.get_data_parallel_rank())
        mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1)
        positions = torch.arange(SEQUENCE).repeat(BATCH, 1)
        losses, gradients = [], {}
        for step in range(steps):
            tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
            model.zero_grad_buffer()
            optimizer.zero_grad()
            loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).float().mean()
            loss = loss if change_loss is None else change_loss(loss)
            loss.backward()
            finalize_model_grads([model])
            if step == 0:
                gradients = {name: p.main_grad.clone() for name, p in model.named_parameters()}
            optimizer.step()
            losses.append(loss.item())
    return {"losses": losses, "gradients": gradients}
