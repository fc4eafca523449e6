"""Jobs of tests/test_dispatcher.py and tests/device_checks.py: the dispatcher around toy experts, in its six stages.

Tensors are made on the CPU and moved by `.cuda()`, which the CPU host makes do nothing.
"""

import dataclasses
import types

import torch
import torch.distributed as dist

from megatron_ascend_moe import DispatchConfig
from megatron_ascend_moe.dispatcher import AscendTokenDispatcher

EXPERTS, HIDDEN = 8, 16


def host_config(**overrides):
    """The settings of a TransformerConfig that the dispatcher reads."""
    settings = dict(
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_expert_capacity_factor=None,
        moe_pad_expert_input_to_capacity=False,
        moe_shared_expert_overlap=False,
    )
    return types.SimpleNamespace(**(settings | overrides))


def make_dispatcher(settings=None, ep=1, tp=1, **host):
    """A dispatcher on the groups of an EP x ETP layout of the whole world."""
    rank = dist.get_rank()
    ranks = torch.arange(ep * tp).view(ep, tp)
    expert_groups = [dist.new_group(ranks[:, t].tolist()) for t in range(tp)]
    tensor_groups = [dist.new_group(ranks[e].tolist()) for e in range(ep)]
    groups = types.SimpleNamespace(
        ep=expert_groups[rank % tp], expt_tp=tensor_groups[rank // tp], tp_ep=dist.new_group(ranks.flatten().tolist())
    )
    local = EXPERTS // ep
    first = (rank // tp) * local
    return AscendTokenDispatcher(
        local, list(range(first, first + local)), host_config(**host), groups, DispatchConfig(**(settings or {}))
    )


def expert_weights():
    return torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(5)).cuda()


def routes(tokens, seed, to=None, fewer=False):
    """(hidden, probs, map) of one rank's tokens: top-2 of random logits, of the experts `to` only where given."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, EXPERTS, generator=generator)
    if to is not None:
        logits[:, [e for e in range(EXPERTS) if e not in to]] = -1e9
    routed = torch.zeros(tokens, EXPERTS, dtype=torch.bool)
    if tokens:
        routed.scatter_(1, logits.topk(2).indices, True)
    if fewer:
        routed &= torch.rand(tokens, EXPERTS, generator=generator) < 0.6
    probs = logits.softmax(1) * routed
    return torch.randn(tokens, 1, HIDDEN, generator=generator).cuda(), probs.cuda(), routed.cuda()


def run_experts(rows, tokens_per_expert, probs, weights, split=1):
    """Every expert: probability times tanh(rows @ weight). `split` > 1: this rank's part of a sum over ETP ranks."""
    parts = torch.split(rows, tokens_per_expert.tolist())
    out = [torch.tanh(part @ weight) / split for part, weight in zip(parts, weights, strict=True)]
    return torch.cat(out) * probs.unsqueeze(1)


def reference(hidden, probs, routed, weights):
    """The layer by brute force, on one process, for any rows of routes."""
    flat = hidden.reshape(-1, HIDDEN)
    out = torch.zeros_like(flat)
    for expert in range(EXPERTS):
        token = routed[:, expert].nonzero().squeeze(1)
        out = out.index_add(0, token, torch.tanh(flat[token] @ weights[expert]) * probs[token, expert].unsqueeze(1))
    return out.view_as(hidden)


def layer(dispatcher, hidden, probs, routed, weights):
    """The six stages in the host's order."""
    split = dispatcher.tp_size
    rows, p = dispatcher.dispatch_preprocess(hidden, routed, probs)
    rows, p = dispatcher.token_dispatch(rows, p)
    rows, counts, p = dispatcher.dispatch_postprocess(rows, p)
    assert counts.dtype == torch.int64 and counts.device.type == "cpu"
    assert counts.numel() == dispatcher.num_local_experts and counts.sum() == rows.shape[0] == p.numel()
    y = run_experts(rows, counts, p, weights, split)
    return dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(y)))


def compare_with_reference(tokens, ep, tp=1, settings=None, to=None, fewer=False, host=None, step=True):
    """Forward, backward and an optimizer step against brute force; `tokens`: of each rank. Largest differences."""
    rank = dist.get_rank()
    dispatcher = make_dispatcher(settings, ep, tp, **(host or {}))
    hidden, probs, routed = routes(tokens[rank], 100 + rank, to, fewer)
    weights = expert_weights()
    mine = weights[dispatcher.num_local_experts * (rank // tp) :][: dispatcher.num_local_experts]
    mine = [w.clone().requires_grad_() for w in mine]
    inputs = [hidden.clone().requires_grad_(), probs.clone().requires_grad_()]
    out = layer(dispatcher, *inputs, routed, mine)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9 + rank)).cuda()
    out.backward(grad)
    if step:
        torch.optim.SGD(mine, lr=0.1).step()

    oracle_weights = [w.clone().requires_grad_() for w in weights]
    oracle_inputs = [hidden.clone().requires_grad_(), probs.clone().requires_grad_()]
    oracle = reference(*oracle_inputs, routed, oracle_weights)
    oracle.backward(grad)
    for weight in oracle_weights:  # an expert's gradient sums over all ranks' tokens
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        dist.all_reduce(weight.grad)
    first = dispatcher.num_local_experts * (rank // tp)
    pairs = {
        "out": (out, oracle),
        "hidden.grad": (inputs[0].grad, oracle_inputs[0].grad),
        "probs.grad": (inputs[1].grad, oracle_inputs[1].grad),
    }
    for i, weight in enumerate(mine):
        assert weight.grad is not None, "an expert without rows gets a zero gradient, not None"
        # every ETP rank computes all rows of the toy experts at 1 / ETP
        pairs[f"weight {first + i}.grad"] = (weight.grad * tp, oracle_weights[first + i].grad)
    return {name: (a - b).abs().max().item() if a.numel() else 0.0 for name, (a, b) in pairs.items()}


def unequal_bins(tokens, ep, tp, host):
    """What each rank says when ranks have different numbers of tokens, hence capacities, in the binned layout."""
    dispatcher = make_dispatcher({"layout": "binned"}, ep, tp, **host)
    try:
        layer(dispatcher, *routes(tokens[dist.get_rank()], 1), [torch.eye(HIDDEN)] * dispatcher.num_local_experts)
    except ValueError as error:
        return str(error)
    return None


def one_f_one_b(ep, settings=None, host=None):
    """Gradients of the plain layer, and of the combined schedule: stages detached from each other, and the storage
    of dispatch's, the experts' and combine's inputs freed as soon as the stage has run."""
    rank = dist.get_rank()
    dispatcher = make_dispatcher(settings, ep, **(host or {}))
    hidden, probs, routed = routes(24, 40 + rank)
    weights = expert_weights()[dispatcher.num_local_experts * rank :][: dispatcher.num_local_experts]
    grad = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(rank)).cuda()
    results = []
    for schedule in (_plain_schedule, _combined_schedule):
        leaves = [hidden.clone().requires_grad_(), probs.clone().requires_grad_()]
        leaves += [w.clone().requires_grad_() for w in weights]
        out = schedule(dispatcher, leaves[0], leaves[1], routed, leaves[2:], grad)
        results.append([out.detach().clone(), *(leaf.grad for leaf in leaves)])
    return [torch.equal(a, b) for a, b in zip(*results, strict=True)], [bool(g.any()) for g in results[0]]


def _plain_schedule(dispatcher, hidden, probs, routed, weights, grad):
    out = layer(dispatcher, hidden, probs, routed, weights)
    out.backward(grad)
    return out


def freed_by_the_experts(ep, settings=None, host=None):
    """Whether gradients are the plain layer's when the experts free their input's storage: offloading does it."""
    rank = dist.get_rank()
    dispatcher = make_dispatcher(settings, ep, **(host or {}))
    hidden, probs, routed = routes(24, 40 + rank)
    weights = list(expert_weights()[dispatcher.num_local_experts * rank :][: dispatcher.num_local_experts])
    gradients = []
    for free in (lambda tensors: None, _free):
        leaves = [hidden.clone().requires_grad_(), probs.clone().requires_grad_()]
        rows, p = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(leaves[0], routed, leaves[1]))
        rows, counts, p = dispatcher.dispatch_postprocess(rows, p)
        y = run_experts(rows.clone(), counts, p, weights)
        free([rows])
        out = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(y)))
        out.square().sum().backward()
        gradients.append([out.detach(), *(leaf.grad for leaf in leaves)])
    return [torch.equal(a, b) for a, b in zip(*gradients, strict=True)], [bool(g.any()) for g in gradients[0]]


def _detach(tensors):
    return [t.detach().requires_grad_() for t in tensors]


def _free(tensors):
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


def _combined_schedule(dispatcher, hidden, probs, routed, weights, grad):
    attention = dispatcher.dispatch_preprocess(hidden, routed, probs)
    into_dispatch = _detach(attention)
    dispatched = dispatcher.token_dispatch(*into_dispatch)
    _free(into_dispatch)

    into_experts = _detach(dispatched)
    rows, counts, p = dispatcher.dispatch_postprocess(*into_experts)
    expert_output = dispatcher.combine_preprocess(run_experts(rows, counts, p, weights))
    _free(into_experts)

    into_combine = _detach([expert_output])
    combined = dispatcher.token_combine(*into_combine)
    _free(into_combine)

    into_post = _detach([combined])
    out = dispatcher.combine_postprocess(*into_post)
    out.backward(grad)
    combined.backward(into_post[0].grad)
    expert_output.backward(into_combine[0].grad)
    torch.autograd.backward(dispatched, [t.grad for t in into_experts])
    torch.autograd.backward(attention, [t.grad for t in into_dispatch])
    return out


def twenty_runs(ep, tp, settings=None, host=None):
    """Whether 20 runs, forward and backward, give the same bits."""
    rank = dist.get_rank()
    dispatcher = make_dispatcher(settings, ep, tp, **(host or {}))
    hidden, probs, routed = routes(33, rank)
    weights = expert_weights()[dispatcher.num_local_experts * (rank // tp) :][: dispatcher.num_local_experts]
    first, same = None, []
    for _ in range(20):
        leaves = [hidden.clone().requires_grad_(), probs.clone().requires_grad_()]
        out = layer(dispatcher, *leaves, routed, list(weights))
        out.square().sum().backward()
        result = [out.detach(), leaves[0].grad, leaves[1].grad]
        first = first or result
        same.append(all(torch.equal(a, b) for a, b in zip(first, result, strict=True)))
    return same


def recompute(ep, settings=None, host=None):
    """Under a checkpoint: whether the re-run's plan is the first's, whether the gradients are those of a plain run,
    and how many forwards the load counted."""
    from torch.utils.checkpoint import checkpoint

    rank = dist.get_rank()
    dispatcher = make_dispatcher(settings, ep, **(host or {}))
    hidden, probs, routed = routes(24, 40 + rank)
    weights = list(expert_weights()[dispatcher.num_local_experts * rank :][: dispatcher.num_local_experts])
    plans, gradients, counted = [], [], []
    original = dispatcher._plan
    dispatcher._plan = lambda *args: (plans.append(original(*args)), plans[-1])[1]
    for wrap in (lambda function, *args: function(*args), lambda *args: checkpoint(*args, use_reentrant=True)):
        leaves = [hidden.clone().requires_grad_(), probs.clone().requires_grad_()]
        out = wrap(lambda h, p: layer(dispatcher, h, p, routed, weights), *leaves)
        out.square().sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
        counted.append(int(dispatcher.load.take(hidden.device)[:EXPERTS].sum()))
    rows = [plan.row_of_slot_TK for _, plan in plans]
    return {
        "plans": len(rows),
        "same plan": all(torch.equal(rows[0], r) for r in rows),
        "same gradients": all(torch.equal(a, b) for a, b in zip(*gradients, strict=True)),
        "routes counted": counted,
    }


class OnDevice(torch.Tensor):
    """A CPU tensor that stands for one on a device: whatever would wait for that device is counted."""

    syncs: list[str] = []
    WAITS = (
        "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "nonzero", "masked_select",
    )  # fmt: skip

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        waits = function.__name__ in cls.WAITS or (function.__name__ == "to" and "cpu" in map(str, args[1:]))
        if waits:
            cls.syncs.append(function.__name__)
        result = super().__torch_function__(function, types, args, kwargs or {})
        return result.as_subclass(torch.Tensor) if waits and isinstance(result, torch.Tensor) else result


def _launches(kernel_set):
    """The kernels as launches: what they read on the device is no sync."""

    def plain(value):
        return value.as_subclass(torch.Tensor) if isinstance(value, OnDevice) else value

    def launch(kernel):
        def launched(*args, **kwargs):
            result = kernel(*map(plain, args), **{name: plain(value) for name, value in kwargs.items()})
            many = result if isinstance(result, tuple) else (result,)
            many = tuple(r if r is None else r.as_subclass(OnDevice) for r in many)
            return many if isinstance(result, tuple) else many[0]

        return launched

    fields = {f.name: getattr(kernel_set, f.name) for f in dataclasses.fields(kernel_set)}
    return dataclasses.replace(kernel_set, **{name: launch(f) for name, f in fields.items() if callable(f)})


def count_syncs(ep, tp, settings=None, host=None):
    """Names of the device waits of one dispatch and combine, forward and backward, after a first one has warmed up.
    The experts are identity: what they wait for is theirs."""
    dispatcher = make_dispatcher(settings, ep, tp, **(host or {}))
    rank = dist.get_rank()
    hidden, probs, routed = routes(16, rank)
    layer(dispatcher, hidden, probs, routed, [torch.eye(HIDDEN)] * dispatcher.num_local_experts)
    dispatcher._kernels = _launches(dispatcher._kernels)
    OnDevice.syncs.clear()
    leaves = [t.clone().as_subclass(OnDevice).requires_grad_() for t in (hidden, probs)]
    rows, p = dispatcher.dispatch_preprocess(leaves[0], routed.as_subclass(OnDevice), leaves[1])
    rows, p = dispatcher.token_dispatch(rows, p)
    rows, _, p = dispatcher.dispatch_postprocess(rows, p)
    out = dispatcher.combine_preprocess(rows * p.unsqueeze(1))
    out = dispatcher.combine_postprocess(dispatcher.token_combine(out))
    assert isinstance(out, OnDevice) and isinstance(rows, OnDevice)
    out.sum().backward()
    return list(OnDevice.syncs)
