"""The table of settings: what each one asks of Megatron, of the plugin, and what is to come out of it.

One row here is one row of README's support table. A row is trained twice, with the stock alltoall dispatcher and
with the plugin, on every layout it names, and both trainings must agree; or a check of its own takes that place
where the stock dispatcher cannot serve as the oracle (`check`, or `oracle` for another configuration of stock).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Processes -> layout. Every setting runs on one rank, on two, and on four, there with sequence and expert tensor
# parallelism where nothing speaks against it; what could change with more ranks runs on 8.
LADDER = {1: {}, 2: {"ep": 2}, 4: {"tp": 2, "ep": 2, "etp": 2}}
EXPERT_PARALLEL = LADDER | {4: {"ep": 4}}
WIDE = EXPERT_PARALLEL | {8: {"tp": 2, "ep": 4, "etp": 2}}
WIDEST = EXPERT_PARALLEL | {8: {"ep": 4}}  # the experts have two replicas
SEQUENCE_PARALLEL = {2: {"tp": 2}, 4: {"tp": 2, "ep": 2}}
EXPERT_TENSOR_PARALLEL = {2: {"tp": 2, "etp": 2}, 4: {"tp": 2, "ep": 2, "etp": 2}, 8: {"tp": 4, "ep": 2, "etp": 4}}
PIPELINE = {2: {"pp": 2}, 4: {"pp": 2, "ep": 2}, 8: {"tp": 2, "pp": 2, "ep": 4}}
OVERLAPPED = {2: {"ep": 2}, 4: {"tp": 2, "ep": 2, "etp": 2}, 8: {"tp": 2, "ep": 4, "etp": 2}}


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)  # overrides of the TransformerConfig (one layer), both sides
    ours: dict[str, Any] = field(default_factory=dict)  # DispatchConfig's fields
    train: dict[str, Any] = field(default_factory=dict)  # further arguments of gpt_moe.train
    around: str | None = None  # a context manager of breadth.surroundings that both trainings run in
    layouts: dict[int, dict[str, int]] = field(default_factory=lambda: LADDER)
    experts_per_rank: int | None = None  # num_moe_experts = EP x this, instead of 8
    oracle: dict[str, Any] | None = None  # overrides for the stock side only, where stock cannot run `config`
    check: str | None = None  # "module:function" run in place of the two trainings
    low_precision: bool = False  # compare at the rounding of 16-bit rows
    stock_refuses: dict[str, str] = field(default_factory=dict)  # version ("" = every) -> message it must give
    refused: str | None = None  # message with which the plugin must refuse at start-up
    note: str = ""  # shown under the table


def _shared(**more: Any) -> dict[str, Any]:
    return {"moe_shared_expert_intermediate_size": 48} | more


def _selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


_SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_dtype": "fp32"}
_BIAS = _SIGMOID | {"moe_router_enable_expert_bias": True}
_GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 4}
_DROP = {"moe_expert_capacity_factor": 0.75}
_PAD = {"moe_pad_expert_input_to_capacity": True}
_NO_DROP = {"moe_expert_capacity_factor": 4.0}  # 8 experts, top-2: capacity = tokens, nothing can be dropped
_FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_TWO_LAYERS = {"num_layers": 2}
_UNKNOWN_FIELD = "unexpected keyword argument"
_NEW_FIELD = {"0.15": _UNKNOWN_FIELD, "0.16": _UNKNOWN_FIELD}
_NO_FUSION = "fused permutation is not available|cannot import name 'fused_permute'"

ROUTING = [
    Setting("aux loss (default flags)", _TWO_LAYERS, layouts=WIDEST),
    Setting("sequence aux loss", {"moe_router_load_balancing_type": "seq_aux_loss"}),
    Setting("global aux loss", {"moe_router_load_balancing_type": "global_aux_loss"}),
    Setting(
        "aux and sequence aux loss, z-loss",
        {
            "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
            "moe_aux_loss_coeff": [1e-2, 1e-3],
            "moe_z_loss_coeff": 1e-3,
        },
    ),
    Setting("sigmoid scores, expert bias", _BIAS | {"moe_router_load_balancing_type": "none"}),
    Setting(
        "group-limited routing, sigmoid, expert bias",
        _BIAS | _GROUPS | {"moe_router_topk_scaling_factor": 2.5},
        layouts=WIDE,
    ),
    Setting(
        "device-limited routing",
        {"moe_router_topk_limited_devices": 1},
        layouts={2: {"ep": 2}, 4: {"tp": 2, "ep": 2, "etp": 2}},
    ),
    Setting(
        "square root of softplus scores",
        {"moe_router_score_function": "sqrtsoftplus", "moe_router_dtype": "fp32"},
        stock_refuses={"0.15": "Invalid score_function", "0.16": "Invalid score_function"},
    ),
    Setting(
        "quantile balancing",
        {"moe_router_load_balancing_type": "quantile_balancing", "moe_aux_loss_coeff": 0.0},
        note="before 0.19 Megatron takes the name and balances nothing",
    ),
    Setting("sinkhorn", {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0}),
    Setting("top-1, softmax before top-k", {"moe_router_topk": 1, "moe_router_pre_softmax": True}),
    Setting("top-k = experts", {"moe_router_topk": 8}),
    Setting(
        "forced load balancing", {"moe_router_force_load_balancing": True}, around="random_logits_from_their_start"
    ),
    Setting("forced bias of the logits", {"moe_router_force_biased": -1.0}, stock_refuses=_NEW_FIELD),
    Setting("fused router", {"moe_router_fusion": True}, stock_refuses={"": "fused_topk_with_score_function"}),
    Setting("fp64 router, input jitter", {"moe_router_dtype": "fp64", "moe_input_jitter_eps": 1e-2}),
    Setting(
        "probabilities applied on the experts' input",
        {"moe_apply_probs_on_input": True, "moe_router_topk": 1, "moe_router_pre_softmax": True},
    ),
    Setting(
        "router replay with repeated ids",
        {"moe_enable_routing_replay": True},
        around="replay_repeated_ids",
        oracle=_NO_DROP,
        stock_refuses={"0.15": _UNKNOWN_FIELD},
        note="stock 0.19.2 crashes; held to stock with a capacity that drops nothing",
    ),
    Setting(
        "router replay with ids of -1",
        check="tests.breadth.oracles:replay_of_missing_ids",
        note="stock cannot scatter an id of -1; held to the sum over the ids that are there",
    ),
    Setting(
        "padding mask",
        train={"padded_tail": 7},
        stock_refuses={"0.15": _UNKNOWN_FIELD},
    ),
]

LAYOUTS = [
    Setting("padded, multiple 1", ours={"layout": "padded"}),
    Setting("padded, multiple 8", ours={"layout": "padded", "pad_multiple": 8}),
    Setting("padded, multiple 128", ours={"pad_multiple": 128}),
    Setting("capacity, drop by probs", _DROP | {"moe_token_drop_policy": "probs"}, {"pad_multiple": 8}),
    Setting("capacity, drop by position", _DROP | {"moe_token_drop_policy": "position"}, {"pad_multiple": 8}),
    Setting("capacity, drop by probs, padded to capacity", _DROP | _PAD, layouts=WIDE),
    Setting("capacity, drop by position, padded to capacity", _DROP | _PAD | {"moe_token_drop_policy": "position"}),
    Setting("capacity that drops nothing, binned", _NO_DROP, {"layout": "binned"}, layouts=WIDE),
    Setting("capacity that drops, binned", _DROP, {"layout": "binned"}),
    Setting(
        "padded to a capacity above the local tokens",
        {"moe_expert_capacity_factor": 5.0} | _PAD,
        oracle=_NO_DROP | _PAD,
        stock_refuses={"0.15": "selected index k out of range"},
        note="stock's dispatcher crashes; held to stock at capacity = tokens. In 0.15 the host's router crashes before",
    ),
    Setting(
        "set_decode_expert_padding at run time",
        {"moe_router_load_balancing_type": "none"},
        {"pad_multiple": 8},
        around="switching_decode_padding",
    ),
    Setting(
        "moe_token_dispatcher_type=flex",
        {"moe_token_dispatcher_type": "flex"},
        refused="moe_token_dispatcher_type='flex' builds another one",
    ),
    Setting(
        "moe_token_dispatcher_type=allgather",
        {"moe_token_dispatcher_type": "allgather"},
        refused="moe_token_dispatcher_type='allgather' builds another one",
    ),
    Setting(
        "layout=binned without a capacity",
        ours={"layout": "binned"},
        refused="layout='binned' needs a capacity",
    ),
    Setting(
        "layout=padded, padded to capacity",
        _DROP | _PAD,
        {"layout": "padded"},
        refused="layout='padded' cannot serve moe_pad_expert_input_to_capacity",
    ),
    Setting(
        "capacity with sinkhorn",
        _DROP | {"moe_router_load_balancing_type": "sinkhorn"},
        stock_refuses={"": "moe_expert_capacity_factor only works with"},
    ),
    Setting(
        "padded to capacity without a capacity",
        _PAD,
        stock_refuses={"": "moe_expert_capacity_factor must be set"},
    ),
]

SHARED_EXPERTS = [
    Setting("shared experts", _shared(), {"pad_multiple": 8}),
    Setting(
        "shared experts with gate",
        _shared(moe_shared_expert_gate=True),
        {"pad_multiple": 8},
        stock_refuses={"0.15": _UNKNOWN_FIELD},
    ),
    Setting("shared experts, overlapped", _shared(moe_shared_expert_overlap=True), {"pad_multiple": 8}, layouts=WIDE),
    Setting(
        "shared experts with gate, overlapped",
        _shared(moe_shared_expert_gate=True, moe_shared_expert_overlap=True),
        stock_refuses={"0.15": _UNKNOWN_FIELD},
    ),
    Setting(
        "shared experts, overlapped, padded to capacity", _shared(moe_shared_expert_overlap=True) | _DROP | _PAD
    ),
]

RECOMPUTE = [
    Setting("selective recompute of moe", _selective("moe"), {"pad_multiple": 8}, layouts=WIDE),
    Setting("selective recompute of moe, padded to capacity", _selective("moe") | _DROP | _PAD),
    Setting("selective recompute of shared_experts", _shared() | _selective("shared_experts")),
    Setting(
        "selective recompute of shared_experts, overlapped",
        _shared(moe_shared_expert_overlap=True) | _selective("shared_experts"),
        stock_refuses={"": "shared_experts recompute cannot work with --moe-shared-expert-overlap"},
    ),
    Setting(
        "selective recompute of moe_act",
        _selective("moe_act"),
        stock_refuses={"": "moe_act in recompute_modules is only supported with moe_grouped_gemm"},
    ),
    Setting(
        "selective recompute of layernorm",
        _selective("layernorm"),
        {"pad_multiple": 8},
        around="no_fp8",
        note="frees the dispatcher's input; with a stand-in for TransformerEngine's fp8 contexts, on both sides",
    ),
    Setting(
        "full recompute",
        _FULL_RECOMPUTE | _TWO_LAYERS,
        {"pad_multiple": 8},
    ),
]

MODEL = [
    Setting("multi-token prediction", {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1}, {"pad_multiple": 8}),
    Setting(
        "interleaved dense and MoE layers", {"moe_layer_freq": [0, 1], "moe_ffn_hidden_size": 40} | _TWO_LAYERS
    ),
    Setting(
        "experts with biases",
        {"add_bias_linear": True},
        {"pad_multiple": 8},
        around="router_biases_of_zero",
        layouts={2: {"ep": 2}, 4: {"ep": 4}},
        note="without expert parallelism Megatron's local experts with biases crash, whatever the dispatcher",
    ),
    Setting("tokens in two chunks", {"mlp_chunks_for_training": 2}, {"pad_multiple": 8}, stock_refuses=_NEW_FIELD),
    Setting("loss per token", {"calculate_per_token_loss": True}, train={"microbatches": 2}),
    Setting("fused permutation", {"moe_permute_fusion": True}, stock_refuses={"": _NO_FUSION}),
    Setting(
        "latent MoE",
        {"moe_latent_size": 16},
        around="latent_projection",
        stock_refuses={"0.15": _UNKNOWN_FIELD},
        note="with a stand-in for TransformerEngine's linear, on both sides",
    ),
    Setting(
        "grouped-GEMM experts",
        {"moe_grouped_gemm": True},
        {"pad_multiple": 8},
        stock_refuses={"0.15": "grouped_gemm|Grouped GEMM", "0.16": "grouped_gemm|Grouped GEMM"},
        note="before 0.17 the host's experts need the CUDA package grouped_gemm; since, local layers run SequentialMLP",
    ),
]

PARALLELISM = [
    Setting("sequence parallel", ours={"pad_multiple": 8}, layouts=SEQUENCE_PARALLEL),
    Setting("sequence parallel, padded to capacity", _DROP | _PAD, layouts=SEQUENCE_PARALLEL),
    Setting(
        "sequence parallel, overlapped shared experts, sequence aux loss",
        _shared(moe_shared_expert_overlap=True) | {"moe_router_load_balancing_type": "seq_aux_loss"},
        {"pad_multiple": 8},
        layouts=SEQUENCE_PARALLEL,
    ),
    Setting("sequence parallel, full recompute", _FULL_RECOMPUTE, {"pad_multiple": 8}, layouts=SEQUENCE_PARALLEL),
    Setting("expert tensor parallel", ours={"pad_multiple": 8}, layouts=EXPERT_TENSOR_PARALLEL),
    Setting("expert tensor parallel, capacity without padding", _DROP, layouts=EXPERT_TENSOR_PARALLEL),
    Setting(
        "EP = experts (one local expert)",
        {"moe_router_topk": 2},
        {"pad_multiple": 8},
        layouts={2: {"ep": 2}, 4: {"ep": 4}, 8: {"ep": 8}},
        experts_per_rank=1,
    ),
    Setting(
        "EP = experts, padded to capacity",
        _DROP | _PAD,
        layouts={2: {"ep": 2}, 4: {"ep": 4}, 8: {"ep": 8}},
        experts_per_rank=1,
    ),
    Setting("pipeline parallel 2", _TWO_LAYERS, ours={"pad_multiple": 8}, layouts=PIPELINE),
    Setting(
        "pipeline parallel 2, two virtual stages each",
        {"num_layers": 4, "virtual_pipeline_model_parallel_size": 2},
        {"pad_multiple": 8},
        train={"microbatches": 4},
        layouts=PIPELINE,
    ),
    Setting(
        "expert-parallel communication overlapped (combined 1F1B), bf16",
        _TWO_LAYERS | {"overlap_moe_expert_parallel_comm": True, "bf16": True},
        {"pad_multiple": 8},
        train={"microbatches": 3},
        low_precision=True,
        layouts=OVERLAPPED,
    ),
    Setting(
        "combined 1F1B with one local expert, bf16",
        _TWO_LAYERS | {"overlap_moe_expert_parallel_comm": True, "bf16": True},
        {"pad_multiple": 8},
        train={"microbatches": 3},
        low_precision=True,
        layouts={4: {"ep": 4}, 8: {"ep": 8}},
        experts_per_rank=1,
        oracle={"overlap_moe_expert_parallel_comm": False},
        note="stock's dispatcher crashes: its experts' input is what the schedule has freed; held to stock without overlap",
    ),
    Setting("distributed optimizer", train={"distributed_optimizer": True}, layouts=WIDE),
]

PRECISION = [
    Setting("bf16", {"bf16": True}, {"pad_multiple": 8}, low_precision=True, layouts=WIDE),
    Setting("fp16", {"fp16": True}, {"pad_multiple": 8}, low_precision=True),
    Setting(
        "bf16, padded to capacity, distributed optimizer",
        {"bf16": True} | _DROP | _PAD,
        train={"distributed_optimizer": True},
        low_precision=True,
    ),
    Setting(
        "router padding for fp8",
        check="tests.breadth.oracles:padding_for_quantization",
        note="the padded layout's multiple is the least common one; fp8 itself needs TransformerEngine",
    ),
]

SETTINGS = [*ROUTING, *LAYOUTS, *SHARED_EXPERTS, *RECOMPUTE, *MODEL, *PARALLELISM, *PRECISION]
SECTIONS = {
    "Routing": ROUTING,
    "Layouts and capacity": LAYOUTS,
    "Shared experts": SHARED_EXPERTS,
    "Recompute": RECOMPUTE,
    "Model": MODEL,
    "Parallelism": PARALLELISM,
    "Precision": PRECISION,
}
