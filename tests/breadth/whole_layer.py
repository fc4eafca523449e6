"""A whole layer against brute force: the dispatcher around small experts, on any layout, and a loop over tokens and
experts in one process that knows nothing of permutations."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

HIDDEN, FFN = 8, 12
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# of the largest value; 16-bit rows are rounded when they leave the experts, and again when they are summed
TOLERANCE = {"fp64": 2e-5, "fp32": 2e-5, "bf16": 2e-2, "fp16": 3e-3}


@dataclass(frozen=True)
class Case:
    """One layer: its layout and what its ranks are given. Every rank can make every rank's inputs from the seed."""

    layout: dict[str, int] = field(default_factory=dict)  # ep, etp
    tokens: int = 6  # of rank 0
    more_tokens: int = 0  # rank r has tokens + r * more_tokens
    experts: int = 4
    topk: int = 2
    density: float = 1.0  # share of the top-k slots that hold a route; rows hold 0..K routes
    zero_probs: float = 0.0  # share of the routes whose probability is exactly 0
    hot: float = 0.0  # share of the tokens that route to the first experts only
    capacity_factor: float | None = None
    pad_to_capacity: bool = False
    layout_name: str = "auto"
    pad_multiple: int = 1
    dtype: str = "fp32"
    probs_dtype: str = "fp32"
    fp8_recipe: str | None = None
    seed: int = 0

    def tokens_of(self, rank: int) -> int:
        return self.tokens + rank * self.more_tokens


@contextlib.contextmanager
def build_dispatcher(case: Case):
    """The plugin's dispatcher for this rank, in process groups of the case's layout."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from megatron_ascend_moe import AscendTokenDispatcher, DispatchConfig
    from tests.gpt_moe import build_config

    ep, etp = case.layout.get("ep", 1), case.layout.get("etp", 1)
    sizes = {"tp": 1, "pp": 1, "ep": ep, "etp": etp}
    config = build_config(
        sizes,
        num_moe_experts=case.experts,
        moe_router_topk=case.topk,
        moe_router_pre_softmax=True,
        moe_expert_capacity_factor=case.capacity_factor,
        moe_pad_expert_input_to_capacity=case.pad_to_capacity,
    )
    if case.fp8_recipe:  # set afterwards: the config itself asks for TransformerEngine
        config.fp8, config.fp8_recipe = "hybrid", case.fp8_recipe
        config.moe_router_padding_for_fp8 = config.moe_router_padding_for_quantization = True
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)
    groups = get_default_pg_collection()
    local = case.experts // ep
    first = dist.get_rank(groups.ep) * local
    settings = DispatchConfig(layout=case.layout_name, pad_multiple=case.pad_multiple)
    yield AscendTokenDispatcher(local, list(range(first, first + local)), config, groups, settings)
    parallel_state.destroy_model_parallel()


def make_inputs(case: Case, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """hidden (T, H), probabilities (T, E) and the map (T, E) of one rank: what a router would hand over."""
    generator = torch.Generator().manual_seed(1_000_003 * case.seed + rank)
    uniform = lambda *shape: torch.rand(*shape, generator=generator)  # noqa: E731
    T, E, K = case.tokens_of(rank), case.experts, case.topk
    scores = uniform(T, E)
    scores[uniform(T) < case.hot] += torch.linspace(2, 1, E)
    routed = torch.zeros(T, E, dtype=torch.bool).scatter(1, scores.topk(K, dim=1).indices, uniform(T, K) < case.density)
    probs = (0.1 + uniform(T, E)) * routed * (uniform(T, E) >= case.zero_probs)
    if case.capacity_factor is not None and T:
        probs, routed = _drop(case, probs, routed)
    hidden = torch.randn(T, HIDDEN, generator=generator)
    return hidden.to(DTYPES[case.dtype]), probs.to(DTYPES[case.probs_dtype]), routed


def _drop(case: Case, probs: Tensor, routed: Tensor) -> tuple[Tensor, Tensor]:
    """Megatron's own dropping, by position so that a probability of 0 keeps its route."""
    from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping

    return apply_router_token_dropping(probs, routed, case.topk, case.capacity_factor, "position", case.pad_to_capacity)


def make_experts(case: Case) -> tuple[Tensor, Tensor]:
    """Weights of all experts: (E, H, F) and (E, F, H)."""
    generator = torch.Generator().manual_seed(7 * case.seed + 1)
    first = torch.randn(case.experts, HIDDEN, FFN, generator=generator) / HIDDEN**0.5
    second = torch.randn(case.experts, FFN, HIDDEN, generator=generator) / FFN**0.5
    return first, second


def expert(x: Tensor, prob: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """(n, H), (n) -> (n, H): the probability is applied on the activation, as Megatron's experts do."""
    activation = torch.tanh(x.float() @ first) * prob.float().unsqueeze(-1)
    return (activation @ second).to(x.dtype)


def brute_force(case: Case, world: int) -> list[dict[str, Tensor]]:
    """Outputs and gradients of every rank: loops over tokens and experts in fp32."""
    weights = [w.requires_grad_() for w in make_experts(case)]
    ranks = []
    for rank in range(world):
        hidden, probs, routed = make_inputs(case, rank)
        hidden, probs = hidden.float().requires_grad_(), probs.float().requires_grad_()
        rows = []
        for t in range(case.tokens_of(rank)):
            row = torch.zeros(HIDDEN)
            for e in range(case.experts):
                if routed[t, e]:
                    row = row + expert(hidden[t : t + 1], probs[t, e : e + 1], weights[0][e], weights[1][e])[0]
            rows.append(row)
        output = torch.stack(rows) if rows else hidden * 0
        output = output + 0 * hidden.sum()  # also where nothing is routed there is a graph
        ranks.append({"hidden": hidden, "probs": probs, "output": output, "weights": weights})
    sum((r["output"] * output_gradient(case, i)).sum() for i, r in enumerate(ranks)).backward()
    for leaf in (leaf for r in ranks for leaf in (r["hidden"], r["probs"], *weights)):
        leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad  # nothing was routed
    return ranks


def output_gradient(case: Case, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(31 * case.seed + rank)
    return torch.randn(case.tokens_of(rank), HIDDEN, generator=generator).to(DTYPES[case.dtype]).float()


def run_layer(dispatcher, case: Case) -> dict[str, Any]:
    """This rank's forward and backward through the six stages."""
    hidden, probs, routed = make_inputs(case, dist.get_rank())
    hidden.requires_grad_(), probs.requires_grad_()
    given = [t.detach().clone() for t in (hidden, probs, routed)]
    width = FFN // dispatcher.tp_size
    part = slice(dispatcher.tp_rank * width, (dispatcher.tp_rank + 1) * width)
    first_local = dist.get_rank(dispatcher.ep_group) * dispatcher.num_local_experts
    local = slice(first_local, first_local + dispatcher.num_local_experts)
    first, second = (w[local] for w in make_experts(case))
    first, second = first[:, :, part].clone().requires_grad_(), second[:, part].clone().requires_grad_()

    x, p = dispatcher.dispatch_preprocess(hidden, routed, probs)
    rows, tokens_per_expert, p = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(x, p))
    assert tokens_per_expert.dtype == torch.int64 and tokens_per_expert.device.type == "cpu"
    counts = tokens_per_expert.tolist()
    assert sum(counts) == rows.shape[0] == p.shape[0], (counts, rows.shape, p.shape)
    outputs = [
        expert(x_e, p_e, first[e], second[e])
        for e, (x_e, p_e) in enumerate(zip(rows.split(counts), p.split(counts), strict=True))
    ]
    output = dispatcher.combine_preprocess(torch.cat(outputs))
    output = dispatcher.combine_postprocess(dispatcher.token_combine(output))
    output.backward(output_gradient(case, dist.get_rank()).to(output.dtype))
    assert all(torch.equal(a, b) for a, b in zip(given, (hidden, probs, routed), strict=True)), "an input was mutated"
    return {
        "output": output, "hidden": hidden, "probs": probs, "routed": routed, "local": local, "part": part,
        "first": first, "second": second, "counts": counts,
    }  # fmt: skip


def assert_matches_brute_force(case: Case) -> list[int]:
    """Compare this rank's output and gradients; returns the rows its experts were given."""
    from megatron.core import parallel_state

    expected = brute_force(case, dist.get_world_size())[dist.get_rank()]
    with build_dispatcher(case) as dispatcher:
        got = run_layer(dispatcher, case)
        # data-parallel replicas of the experts each saw only some of the tokens
        for weight in (got["first"], got["second"]):
            assert weight.grad is not None, "an expert without tokens needs a zero gradient"
            dist.all_reduce(weight.grad, group=parallel_state.get_expert_data_parallel_group())
    tolerance = TOLERANCE[case.dtype]
    assert got["output"].dtype == DTYPES[case.dtype] and got["probs"].grad.dtype == DTYPES[case.probs_dtype]
    _close("output", got["output"], expected["output"], tolerance)
    _close("gradient of the tokens", got["hidden"].grad, expected["hidden"].grad, tolerance)
    # a filler's probability has a gradient in stock, which the router multiplies by 0; here it has none
    probs_tolerance = max(tolerance, TOLERANCE[case.probs_dtype])
    live = got["routed"] & (expected["probs"] != 0) if case.pad_to_capacity else got["routed"]
    _close("gradient of the probabilities", got["probs"].grad, expected["probs"].grad * live, probs_tolerance)
    first, second = (w.grad for w in expected["weights"])
    _close("gradient of the first weights", got["first"].grad, first[got["local"]][:, :, got["part"]], tolerance)
    _close("gradient of the second weights", got["second"].grad, second[got["local"]][:, got["part"]], tolerance)
    return got["counts"]


def _close(what: str, got: Tensor, expected: Tensor, tolerance: float) -> None:
    assert got.shape == expected.shape, (what, got.shape, expected.shape)
    if not got.numel():
        return
    error = (got.float() - expected).abs().max().item()
    # every value is a sum of products of order 1, and where they cancel their rounding stays
    scale = max(expected.abs().max().item(), 0.05)
    assert error <= tolerance * scale, f"{what}: off by {error:.3g} where values reach {scale:.3g}"
