"""What only devices can show, on two GPUs (or NPUs), printed as one JSON line a check:

    torchrun --nproc-per-node 2 tests/device_checks.py [--json FILE]

With one process the exchange is left out, and the results say so.

Training through the plugin equals stock over the device's own collectives; syncs as the device's runtime counts them;
memory against stock; graph capture of the binned layout; determinism; unequal and empty ranks. Exit code 1 if a check
fails. It needs megatron-core and writes nothing but FILE.
"""

import argparse
import json
import os
import sys
import warnings

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from tests import dispatcher_jobs as jobs  # noqa: E402

CAPACITY = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
NO_DROP = {"moe_expert_capacity_factor": 4.0}


def training_equals_stock() -> dict:
    """Losses of 10 steps and the first gradients, fp32, EP = processes; the stock's scatter_add sums in any order."""
    from megatron.core import parallel_state

    from megatron_ascend_moe.host import norm, router_gemm
    from tests import gpt_moe

    norm.provide_safe_norm()
    router_gemm.provide_router_gemm_name()
    found = {}
    for name, settings, config in [
        ("padded", {}, {}),
        ("padded, multiple 128", {"pad_multiple": 128}, {}),
        ("pad to capacity", {}, CAPACITY),
    ]:
        runs = []
        for choice in (None, settings):
            runs.append(gpt_moe.train({"ep": dist.get_world_size()}, choice, steps=10, config=config))
            parallel_state.destroy_model_parallel()
        stock, ours = runs
        losses = max(abs(a - b) / abs(a) for a, b in zip(stock["losses"], ours["losses"], strict=True))
        gradients = max(
            ((ours["gradients"][n] - g).abs().max() / g.abs().max().clamp(min=1e-12)).item()
            for n, g in stock["gradients"].items()
        )
        found[name] = {"loss difference": losses, "gradient difference": gradients}
    found["ok"] = all(v["loss difference"] < 1e-5 and v["gradient difference"] < 1e-4 for v in found.values())
    return found


def syncs() -> dict:
    """Waits for the device in a warmed-up forward and backward, by the runtime's own count."""
    found = {}
    for name, settings, host, most in [("padded", {}, {}, 1), ("binned", {"layout": "binned"}, NO_DROP, 0)]:
        dispatcher = jobs.make_dispatcher(settings, ep=dist.get_world_size(), **host)
        hidden, probs, routed = jobs.routes(64, dist.get_rank())
        weights = [torch.eye(jobs.HIDDEN).cuda()] * dispatcher.num_local_experts
        jobs.layer(dispatcher, hidden, probs, routed, weights)
        leaves = [t.clone().requires_grad_() for t in (hidden, probs)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if most == 0 else "warn")
            try:
                rows, p = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(leaves[0], routed, leaves[1]))
                rows, _, p = dispatcher.dispatch_postprocess(rows, p)
                out = dispatcher.combine_preprocess(rows * p.unsqueeze(1))
                out = dispatcher.combine_postprocess(dispatcher.token_combine(out))
                out.sum().backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        found[name] = sum("called a synchronizing" in str(w.message) for w in caught)
        found[name + " allowed"] = most
    found["ok"] = found["padded"] <= 1 and found["binned"] == 0
    return found


def _large_layer(make, T=4096, H=2048, E=64, K=8):
    """Peak and kept memory (bytes) of one dispatch and combine, identity experts, bf16."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    chosen = torch.rand(T, E, generator=generator).topk(K).indices
    routed = torch.zeros(T, E, dtype=torch.bool).scatter_(1, chosen, True).cuda()
    x = torch.randn(T, 1, H, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    probs = (torch.rand(T, E, device="cuda") * routed).requires_grad_()
    dispatcher = make(E, K)
    peaks = []
    for _ in range(2):  # the first warms up
        x.grad = probs.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        rows, p = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x, routed, probs))
        rows, _, p = dispatcher.dispatch_postprocess(rows, p)
        y = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(rows)))
        del rows
        kept = torch.cuda.memory_allocated() - before
        (y.sum() + p.sum()).backward()
        torch.cuda.synchronize()
        peaks = [torch.cuda.max_memory_allocated() - before, kept]
        del y, p
        x.grad = probs.grad = None
        peaks.append(torch.cuda.memory_allocated() - before)
    return peaks


def memory() -> dict:
    """`max_memory_allocated` of ours at multiple 1 against stock's, and what is left after backward."""
    import types

    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_ascend_moe import DispatchConfig
    from megatron_ascend_moe.dispatcher import AscendTokenDispatcher

    world = dist.group.WORLD
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    groups = types.SimpleNamespace(ep=world, expt_tp=alone, tp_ep=world)

    def maker(build):
        def make(E, K):
            config = TransformerConfig(
                num_layers=1, hidden_size=2048, num_attention_heads=8, num_moe_experts=E, moe_router_topk=K,
                expert_model_parallel_size=dist.get_world_size(), add_bias_linear=False, moe_token_dispatcher_type="alltoall",
            )  # fmt: skip
            local = E // dist.get_world_size()
            first = dist.get_rank() * local
            return build(local, list(range(first, first + local)), config=config, pg_collection=groups)

        return make

    stock = _large_layer(maker(MoEAlltoAllTokenDispatcher))
    ours = _large_layer(maker(lambda *a, **k: AscendTokenDispatcher(*a, **k, settings=DispatchConfig())))
    names = ("peak", "kept between forward and backward", "left after backward")
    return {
        "stock": dict(zip(names, stock, strict=True)),
        "ours": dict(zip(names, ours, strict=True)),
        "ok": ours[0] <= stock[0] and ours[1] <= stock[1] and ours[2] <= 4096,
    }


def graph_capture() -> dict:
    """One rank, binned: the whole dispatch and combine replayed from a graph on new data equals the eager run."""
    dispatcher = _single_rank_dispatcher()
    inputs = [t.clone() for t in jobs.routes(32, 1)]
    weights = jobs.expert_weights()

    def forward():
        rows, p = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(inputs[0], inputs[2], inputs[1]))
        rows, _, p = dispatcher.dispatch_postprocess(rows, p)
        y = torch.bmm(rows.view(jobs.EXPERTS, -1, jobs.HIDDEN), weights).tanh().view_as(rows) * p.unsqueeze(1)
        return dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(y)))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        forward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = forward()
    equal = []
    for seed in (2, 3, 4):
        for target, source in zip(inputs, jobs.routes(32, seed), strict=True):
            target.copy_(source)
        graph.replay()
        with torch.no_grad():
            equal.append(torch.equal(captured, forward()))
    return {"replays equal": equal, "ok": all(equal)}


def _single_rank_dispatcher():
    import types

    from megatron_ascend_moe import DispatchConfig
    from megatron_ascend_moe.dispatcher import AscendTokenDispatcher

    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    groups = types.SimpleNamespace(ep=alone, expt_tp=alone, tp_ep=alone)
    settings = DispatchConfig(layout="binned")
    return AscendTokenDispatcher(8, list(range(8)), jobs.host_config(**NO_DROP), groups, settings)


def determinism() -> dict:
    world = dist.get_world_size()
    same = [jobs.twenty_runs(ep=world, tp=1), jobs.twenty_runs(ep=world, tp=1, host=CAPACITY)]
    same.append(jobs.twenty_runs(ep=1, tp=world))
    return {"runs equal": [sum(s) for s in same], "ok": all(all(s) for s in same)}


def unequal_ranks() -> dict:
    found = {}
    world = dist.get_world_size()
    for tokens, to in [([9, 0], None), ([9, 7], [0, 1]), ([0, 0], None), ([130, 33], None)]:
        for ep, tp in {(world, 1), (1, world)}:
            layout = dict(ep=ep, tp=tp, settings={"pad_multiple": 16})
            differences = jobs.compare_with_reference(tokens, to=to, fewer=True, **layout)
            found[f"tokens {tokens}, experts {to}, EP {ep}, ETP {tp}"] = max(differences.values())
    found["ok"] = all(value < 1e-4 for value in found.values())
    return found


CHECKS = (unequal_ranks, syncs, determinism, graph_capture, memory, training_equals_stock)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write all results to FILE")
    arguments = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    results = {
        "device": torch.cuda.get_device_name(rank),
        "processes": dist.get_world_size(),
        "torch": torch.__version__,
    }
    for check in CHECKS:
        try:
            results[check.__name__] = check()
        except Exception as error:  # one broken check must not hide the others
            results[check.__name__] = {"ok": False, "error": f"{type(error).__name__}: {error}"[:2000]}
        if rank == 0:
            print(json.dumps({check.__name__: results[check.__name__]}), flush=True)
    if rank == 0 and arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)
    failed = [name for name, result in results.items() if isinstance(result, dict) and not result["ok"]]
    dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
