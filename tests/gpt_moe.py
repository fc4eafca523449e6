"""Jobs for the distributed pools: train a tiny GPT-MoE on Megatron-Core and report losses and gradients by name."""

import contextlib
import gc

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
    for flag, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if settings.get(flag):
            settings.update(params_dtype=dtype, pipeline_dtype=dtype)
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
    """A GPT with the local (TransformerEngine-free) layer specs, the same weights for the same seed and layout."""
    (model,) = build_chunks(config, layout, seed)
    return model


def build_chunks(config, layout, seed=1234):
    """This pipeline stage's chunks of that GPT: one, or as many as virtual stages."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.models.gpt.gpt_model import GPTModel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout["tp"],
        pipeline_model_parallel_size=layout["pp"],
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=layout["ep"],
        expert_tensor_parallel_size=layout["etp"],
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)
    if config.moe_layer_freq == 1:
        spec = specs.get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            normalization="LayerNorm",
        )
    else:
        spec = specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="LayerNorm")
    mtp = {}
    if config.mtp_num_layers:
        mtp["mtp_block_spec"] = specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    chunks = []
    for vp_stage in range(config.virtual_pipeline_model_parallel_size or 1):
        stage = {"ignore_virtual": False, "vp_stage": vp_stage}
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            position_embedding_type="rope",
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=parallel_state.is_pipeline_last_stage(**stage),
            vp_stage=vp_stage if config.virtual_pipeline_model_parallel_size else None,
            **mtp,
        ).cuda()  # does nothing on the CPU host
        if config.bf16 or config.fp16:
            from megatron.core.transformer.module import Float16Module

            model = Float16Module(config, model)
        chunks.append(model)
    return chunks


def build_optimizer(config, chunks, distributed_optimizer=False, check_gradients=False):
    """The model's chunks wrapped for data parallelism, and Adam over them."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    data_parallel = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        check_for_nan_in_grad=check_gradients,
        use_distributed_optimizer=distributed_optimizer,
    )
    chunks = [DistributedDataParallel(config, data_parallel, chunk) for chunk in chunks]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=2e-3,
            bf16=config.bf16,
            fp16=config.fp16,
            params_dtype=config.params_dtype,
            initial_loss_scale=2.0**10,
            clip_grad=1.0,
            use_distributed_optimizer=distributed_optimizer,
        ),
        chunks,
    )
    return chunks, optimizer


def as_batch(tokens, padded_tail=0):
    """forward's keyword arguments for tokens (BATCH, SEQUENCE + 1)."""
    positions = torch.arange(SEQUENCE).repeat(BATCH, 1)
    batch = {
        "input_ids": tokens[:, :-1],
        "position_ids": positions,
        "attention_mask": torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1),
        "labels": tokens[:, 1:],
    }
    if padded_tail:
        batch["padding_mask"] = positions >= SEQUENCE - padded_tail
    return batch


def batches(padded_tail=0):
    """Endless batches; data-parallel ranks see different ones, the others of a model the same."""
    from megatron.core import parallel_state

    generator = torch.Generator().manual_seed(7 + parallel_state.get_data_parallel_rank())
    while True:
        tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
        yield as_batch(tokens, padded_tail)


def training_step(config, chunks, optimizer, data, num_microbatches=1, change_loss=lambda loss: loss):
    """One step through Megatron's own schedule, with an iterator of batches for each chunk; returns the loss (None where
    this pipeline stage has none) and the gradients by name, before the optimizer's step."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()

    def forward_step(data_iterator, model, return_schedule_plan=False):
        def mean_loss(output):
            loss = change_loss(output.float().mean())
            reported = {"loss": loss.detach().clone()}  # the schedule divides the loss in place
            if config.calculate_per_token_loss:
                return loss * output.numel(), torch.tensor(output.numel()), reported
            return loss, reported

        batch = {name: tensor.cuda() for name, tensor in next(data_iterator).items()}
        if return_schedule_plan:  # the combined 1F1B schedule
            return model.build_schedule_plan(**batch), mean_loss
        return model(**batch), mean_loss

    reported = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data,
        model=chunks,
        num_microbatches=num_microbatches,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    gradients = {
        f"{name} of chunk {number}" if number else name: p.main_grad.clone()
        for number, chunk in enumerate(chunks)
        for name, p in chunk.named_parameters()
    }
    optimizer.step()
    return (sum(r["loss"].item() for r in reported) / len(reported) if reported else None), gradients


def release(model):
    """Let go of a model and, with it, of the process groups that it uses.

    The stock dispatcher keeps its last probabilities; their graph reaches the parameters, whose hooks reach the model:
    a cycle through C++ that Python's collector cannot see. A gloo group that stays polls a hundred times a second.
    """
    for module in model.modules():
        if hasattr(module, "token_dispatcher"):
            del module.token_dispatcher
    gc.collect()


def train(
    layout,
    settings,
    steps=20,
    config=None,
    distributed_optimizer=False,
    padded_tail=0,
    before_step=None,
    check_gradients=False,
    change_loss=lambda loss: loss,
    microbatches=None,
):
    """Train; returns the losses of every step (none on pipeline stages without a loss) and the gradients of the
    first step by parameter name.

    Args:
        layout: dict of tp, pp, ep, etp.
        settings: DispatchConfig's fields for the plugin, or None for the stock dispatcher.
        config: overrides of the TransformerConfig.
        padded_tail: tokens at the end of each sequence that the padding mask marks.
        before_step: called with (step, first chunk) before each step.
        check_gradients: let Megatron's DistributedDataParallel raise on gradients that are not finite.
        change_loss: applied to this rank's loss.
        microbatches: of a step; by default as many as there are pipeline stages.
    """
    layout = {"tp": 1, "pp": 1, "ep": 1, "etp": 1} | layout
    config = build_config(layout, **(config or {}))
    with dispatcher(settings):
        chunks = build_chunks(config, layout)
        if settings is not None:
            from megatron_ascend_moe import plugin

            assert plugin.verify(chunks) > 0
        chunks, optimizer = build_optimizer(config, chunks, distributed_optimizer, check_gradients)
        data = [batches(padded_tail) for _ in chunks]
        losses, gradients = [], {}
        for step in range(steps):
            if before_step is not None:
                before_step(step, chunks[0])
            loss, now = training_step(config, chunks, optimizer, data, microbatches or layout["pp"], change_loss)
            gradients = gradients or now
            if loss is not None:
                losses.append(loss)
    for chunk in chunks:
        release(chunk)
    return {"losses": losses, "gradients": gradients}
