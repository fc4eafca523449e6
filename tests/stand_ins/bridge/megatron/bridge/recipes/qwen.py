"""The recipe's settings that concern a dispatcher, with Bridge's own values."""

from types import SimpleNamespace


def qwen3_30b_a3b_pretrain_config():
    model = SimpleNamespace(
        moe_token_dispatcher_type="flex",
        moe_flex_dispatcher_backend="hybridep",
        moe_permute_fusion=True,
        cuda_graph_impl="transformer_engine",
        cuda_graph_modules=["moe_router", "moe_preprocess"],
    )
    return SimpleNamespace(model=model)
