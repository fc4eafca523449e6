"""The parallel layout: group sizes, and whether they divide what they must."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ascend_moe.launch.shape import integer, moe_ffn_hidden


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel groups; `dp` replicates the dense part, `edp` the experts."""

    nodes: int
    ranks_per_node: int
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int

    @property
    def world(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> int:
        return self.world // (self.etp * self.ep * self.pp)


def read_layout(flags: Mapping[str, Any]) -> Layout:
    """The layout that the flags describe, checked.

    Raises:
        ValueError: one line for each size that does not divide what it must.
    """
    torchrun = flags.get("torchrun", {})
    tp = integer(flags, "tensor-model-parallel-size", 1)
    layout = Layout(
        nodes=integer(torchrun, "nnodes", 1),
        ranks_per_node=integer(torchrun, "nproc-per-node", 1),
        tp=tp,
        pp=integer(flags, "pipeline-model-parallel-size", 1),
        cp=integer(flags, "context-parallel-size", 1),
        ep=integer(flags, "expert-model-parallel-size", 1),
        etp=integer(flags, "expert-tensor-parallel-size", tp),
    )
    sizes = (layout.nodes, layout.ranks_per_node, layout.tp, layout.pp, layout.cp, layout.ep, layout.etp)
    if min(sizes) < 1:
        raise ValueError(f"every parallel size must be at least 1, got {layout}")
    problems = [*_world(layout), *_experts(flags, layout), *_dense(flags, layout), *_batch(flags, layout)]
    problems += list(_pipeline(flags, layout.pp))
    if problems:
        raise ValueError("\n".join(problems))
    return layout


def _world(at: Layout) -> Iterator[str]:
    if at.world % (at.tp * at.pp * at.cp):
        yield (
            f"{at.world} ranks are not divisible by TP {at.tp} x PP {at.pp} x CP {at.cp} = "
            f"{at.tp * at.pp * at.cp}: change nnodes, nproc-per-node or the sizes"
        )
    if at.world % (at.etp * at.ep * at.pp):
        yield (
            f"{at.world} ranks are not divisible by ETP {at.etp} x EP {at.ep} x PP {at.pp} = "
            f"{at.etp * at.ep * at.pp}: change nnodes, nproc-per-node or the sizes"
        )


def _experts(flags: Mapping[str, Any], at: Layout) -> Iterator[str]:
    if flags.get("num-experts") is None:
        return
    experts, topk = integer(flags, "num-experts"), integer(flags, "moe-router-topk", 2)
    groups, group_topk = integer(flags, "moe-router-num-groups", 1), integer(flags, "moe-router-group-topk", 1)
    if experts % at.ep:
        yield f"num-experts {experts} is not divisible by expert-model-parallel-size {at.ep}"
    if topk > experts:
        yield f"moe-router-topk {topk} is more than num-experts {experts}"
    if experts % groups:
        yield f"num-experts {experts} is not divisible by moe-router-num-groups {groups}"
    if group_topk > groups:
        yield f"moe-router-group-topk {group_topk} is more than moe-router-num-groups {groups}"
    if moe_ffn_hidden(flags) % at.etp:
        yield f"expert FFN width {moe_ffn_hidden(flags)} is not divisible by expert-tensor-parallel-size {at.etp}"
    if at.tp > 1 and not flags.get("sequence-parallel"):
        yield f"MoE training with tensor-model-parallel-size {at.tp} needs `sequence-parallel: true`"


def _dense(flags: Mapping[str, Any], at: Layout) -> Iterator[str]:
    heads = integer(flags, "num-attention-heads")
    if heads % at.tp:
        yield f"num-attention-heads {heads} is not divisible by tensor-model-parallel-size {at.tp}"
    if flags.get("group-query-attention"):
        groups = integer(flags, "num-query-groups", 1)
        if groups % at.tp and at.tp % groups:
            yield f"num-query-groups {groups} and tensor-model-parallel-size {at.tp}: neither divides the other"
    width = integer(flags, "ffn-hidden-size", 0)
    if width % at.tp:
        yield f"ffn-hidden-size {width} is not divisible by tensor-model-parallel-size {at.tp}"


def _batch(flags: Mapping[str, Any], at: Layout) -> Iterator[str]:
    sequence, micro = integer(flags, "seq-length"), integer(flags, "micro-batch-size")
    batch = integer(flags, "global-batch-size", micro * at.dp)
    if at.dp and batch % (micro * at.dp):
        yield f"global-batch-size {batch} is not divisible by micro-batch-size {micro} x data-parallel size {at.dp}"
    parts = (at.tp if flags.get("sequence-parallel") else 1) * (2 * at.cp if at.cp > 1 else 1)
    if sequence % parts:
        yield f"seq-length {sequence} is not divisible by {parts} (TP with sequence parallelism x 2 CP)"


def _pipeline(flags: Mapping[str, Any], pp: int) -> Iterator[str]:
    if flags.get("pipeline-model-parallel-layout") is not None or pp == 1:
        return  # an explicit layout is Megatron's to check
    layers = integer(flags, "num-layers")
    first = integer(flags, "decoder-first-pipeline-num-layers", 0)
    last = integer(flags, "decoder-last-pipeline-num-layers", 0)
    middle = pp - bool(first) - bool(last)
    rest = layers - first - last
    if rest < 0 or (middle == 0 and rest) or (middle and rest % middle):
        per_stage = -(-layers // pp)
        yield (
            f"num-layers {layers} does not divide into pipeline-model-parallel-size {pp} (first stage "
            f"{first or 'even'}, last {last or 'even'}): set `decoder-last-pipeline-num-layers: "
            f"{layers - per_stage * (pp - 1)}`"
        )
        return
    virtual = integer(flags, "num-layers-per-virtual-pipeline-stage", 0)
    if virtual and middle and (rest // middle) % virtual:
        yield (
            f"{rest // middle} layers per pipeline stage are not divisible by "
            f"num-layers-per-virtual-pipeline-stage {virtual}"
        )
