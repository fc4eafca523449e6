"""The Megatron-Core token dispatcher: the six stages of a MoE layer, in the order in which the host calls them.

Shapes: T tokens of this rank, H hidden, E experts, e local experts, K = moe_router_topk, R routed rows,
N received rows, P rows in expert order, EP and ETP the expert- and expert-tensor-parallel sizes.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

from megatron_ascend_moe import __version__, kernels
from megatron_ascend_moe.config import DispatchConfig, check_host, checked, pads_for_quantization
from megatron_ascend_moe.exchange.agreement import check_agreement
from megatron_ascend_moe.exchange.counts import CountsCollective, Splits, even_splits
from megatron_ascend_moe.exchange.expert_parallel import all_to_all
from megatron_ascend_moe.exchange.tensor_parallel import gather_parts, reduce_scatter_parts
from megatron_ascend_moe.kernels.reference import PADDED_BINS, PADDED_COUNTS
from megatron_ascend_moe.observe.metrics import LoadCounter
from megatron_ascend_moe.observe.ranges import StageTimes, in_stage_range
from megatron_ascend_moe.ops.combine import combine_rows
from megatron_ascend_moe.ops.permute import permute_rows
from megatron_ascend_moe.routing.plan import RoutePlan, plan_routes
from megatron_ascend_moe.routing.received_plan import plan_received_bins, plan_received_chunks
from megatron_ascend_moe.routing.route_adapter import check_overflow, compact_routes


@dataclass(frozen=True)
class Dispatch:
    """What one pass through the layer remembers between its stages: plans and sizes, nothing differentiable."""

    hidden_shape: torch.Size
    plan: RoutePlan  # rows of this rank's tokens
    counts: CountsCollective | None = None  # in flight until token_dispatch (padded, more than one rank)
    splits: Splits | None = None
    expert_plan: RoutePlan | None = None  # rows in expert order, as the experts receive them
    tokens_per_expert: Tensor | None = None  # (e) int64 on the CPU, sums to P


class AscendTokenDispatcher(MoETokenDispatcher):
    """Dispatch and combine for `MoELayer`, with the padded (dropless) or binned (capacity) layout.

    1. dispatch_preprocess: compact the routing map, plan, permute tokens into one row per route.
    2. token_dispatch: all-to-all over EP, all-gather over ETP: rows and probabilities.
    3. dispatch_postprocess: permute received rows into expert order, each segment aligned.
    4. combine_preprocess: undo 3: expert outputs back in the order received.
    5. token_combine: undo 2: reduce-scatter over ETP, all-to-all over EP.
    6. combine_postprocess: undo 1: sum each token's rows, add the shared experts.

    With one rank the permute of stage 1 goes straight to the experts' layout, and stages 2 to 5 pass through.
    Probabilities are fp32 here whatever the router's dtype, and are applied inside the experts. The dispatcher
    owns no parameter and no state_dict key.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: Any,
        pg_collection: Any = None,
        settings: DispatchConfig | None = None,
    ) -> None:
        """
        Args:
            num_local_experts, local_expert_indices, config, pg_collection: as Megatron's MoELayer passes them.
            settings: the plugin's resolved settings; by default `DispatchConfig()`.

        Raises:
            ValueError: a combination of settings that cannot work (see config.REFUSALS).
        """
        super().__init__(config=config, pg_collection=pg_collection)
        self.settings = settings or DispatchConfig()
        check_host(self.settings, config)
        self.num_local_experts = num_local_experts
        self.num_experts = config.num_moe_experts
        self.single_rank = self.ep_size * self.tp_size == 1
        self.layer_number: int | None = None  # set by the plugin when the host numbers its layers
        self.load = LoadCounter(self.num_experts)
        self.stage_times = StageTimes() if self.settings.stage_times else None
        self.pad_multiple = _pad_multiple(self.settings, config)
        self._dispatch: Dispatch | None = None
        self._kernels: kernels.KernelSet | None = None

    @in_stage_range
    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor):
        """(…, H), (T, E) bool, (T, E) -> rows (>= R, H) and their probabilities fp32, in expert order."""
        hidden_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        capacity = self._capacity(hidden_TH.shape[0])
        self._prepare(hidden_TH.device, capacity)
        with checked(self.settings.checked):
            probs_TK, plan = self._plan(probs, routing_map, capacity)
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)

        dispatch = Dispatch(hidden_states.shape, plan)
        if self.single_rank:
            dispatch = self._finish_single_rank(dispatch)
        elif capacity is None:
            counts = CountsCollective(plan.counts_and_overflow, self.tp_ep_group, self.config.moe_router_topk)
            dispatch = replace(dispatch, counts=counts)
        self._dispatch = dispatch
        return permute_rows(hidden_TH, dispatch.plan, probs_TK, kernel_set=self._kernels)

    @in_stage_range
    def token_dispatch(self, hidden_states: Tensor, probs: Tensor):
        """Rows and probabilities by destination -> (ETP * N, H) and (ETP * N), by source."""
        if self.shared_experts is not None and hasattr(self.shared_experts, "wait_current_stream"):
            self.shared_experts.wait_current_stream()
        if not self.single_rank:
            splits = self._splits()
            self._dispatch = replace(self._dispatch, splits=splits, counts=None)
            hidden_states = all_to_all(hidden_states, splits.receive, splits.send, self.ep_group)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(hidden_states)
        if not self.single_rank:
            probs = all_to_all(probs, splits.receive, splits.send, self.ep_group)
            hidden_states = gather_parts(hidden_states, splits.rows_per_tp_rank, self.tp_group)
            probs = gather_parts(probs, splits.rows_per_tp_rank, self.tp_group)
        return hidden_states, probs

    @in_stage_range
    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor):
        """Received rows -> rows (P, H) in expert order, tokens_per_expert (e), their probabilities (P)."""
        if not self.single_rank:
            self._dispatch = dispatch = self._plan_received(hidden_states.device)
            hidden_states, probs = permute_rows(
                hidden_states, dispatch.expert_plan, probs.unsqueeze(1), kernel_set=self._kernels
            )
        self._count(hidden_states)
        return hidden_states, self._dispatch.tokens_per_expert, probs

    @in_stage_range
    def combine_preprocess(self, hidden_states: Tensor):
        """Expert outputs (P, H) -> (ETP * N, H) in the order received."""
        if self.single_rank:
            return hidden_states
        return combine_rows(hidden_states, self._dispatch.expert_plan, kernel_set=self._kernels)

    @in_stage_range
    def token_combine(self, hidden_states: Tensor):
        """Rows by source -> (R, H) back on the ranks whose tokens they are."""
        if self.shared_experts is not None and hasattr(self.shared_experts, "wait_current_stream"):
            self.shared_experts.wait_current_stream()
        if not self.single_rank:
            splits = self._dispatch.splits
            hidden_states = reduce_scatter_parts(hidden_states, sum(splits.receive), self.tp_group)
            hidden_states = all_to_all(hidden_states, splits.send, splits.receive, self.ep_group)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(hidden_states)
            self.shared_experts.post_forward_comm()
        return hidden_states

    @in_stage_range
    def combine_postprocess(self, hidden_states: Tensor):
        """(R, H) -> the layer's output, of the shape that came in."""
        dispatch, self._dispatch = self._dispatch, None
        output = combine_rows(hidden_states, dispatch.plan, kernel_set=self._kernels)
        output = output.view(dispatch.hidden_shape)
        if self.shared_experts is not None:
            output = output + self.shared_experts.get_output()
        return output

    def _prepare(self, device: torch.device, capacity: int | None) -> None:
        """Before the first forward's collectives: choose the kernels, and agree on the settings with the group."""
        if self._kernels is None:
            self._kernels = kernels.select(self.settings.kernels, device)
            if not self.single_rank:
                check_agreement(self._must_agree(capacity), self.tp_ep_group)

    def _must_agree(self, capacity: int | None) -> dict[str, Any]:
        host = self.config
        return {
            **asdict(self.settings),
            "version": __version__,
            "capacity": capacity,  # binned splits are equal by this alone: it is where unequal tokens would show
            "kernels": self._kernels.name,
            "num_moe_experts": host.num_moe_experts,
            "moe_router_topk": host.moe_router_topk,
            "moe_expert_capacity_factor": host.moe_expert_capacity_factor,
            "moe_pad_expert_input_to_capacity": host.moe_pad_expert_input_to_capacity,
        }

    def _capacity(self, num_tokens: int) -> int | None:
        """Capacity per expert and source rank if this forward is binned, else None.

        The host's switch is read in every forward: set_decode_expert_padding rewrites it at run time.
        """
        host = self.config
        check_host(self.settings, host)
        if self.settings.layout == "padded" or (
            self.settings.layout == "auto" and not host.moe_pad_expert_input_to_capacity
        ):
            return None
        return moe_utils.get_capacity(
            num_tokens * host.moe_router_topk, self.num_experts, host.moe_expert_capacity_factor
        )

    def _plan(self, probs: Tensor, routing_map: Tensor, capacity: int | None):
        """(T, E) map and probabilities -> probs_TK and the plan of this rank's rows."""
        # Padding to capacity fills the map up with routes of probability 0, which add nothing anywhere.
        fillers = bool(self.config.moe_pad_expert_input_to_capacity)
        probs_TK, expert_ids_TK, counts_BE = compact_routes(
            probs, routing_map, self.config.moe_router_topk, fillers, self._kernels
        )
        # Alignment exists only in the layout that the experts see, never on the wire.
        pad_multiple = self.pad_multiple if self.single_rank else 1
        plan = plan_routes(expert_ids_TK, self.num_experts, pad_multiple, capacity, counts_BE, self._kernels)
        return probs_TK, plan

    def _finish_single_rank(self, dispatch: Dispatch) -> Dispatch:
        """One rank: this plan is the experts' plan. Padded layouts need their exact size from the device."""
        plan = dispatch.plan
        if plan.capacity is None:
            # NOTE: the dispatch's single device-to-host sync.
            meta = plan.meta.cpu()
            check_overflow(int(meta[-1]), self.config.moe_router_topk)
            vectors = meta[:-1].view(5, self.num_experts)
            tokens_per_expert = vectors[PADDED_COUNTS].long()
            plan = replace(plan, num_rows=int(vectors[PADDED_BINS, -1]))
        else:
            tokens_per_expert = torch.full((self.num_experts,), plan.capacity, dtype=torch.int64)
        return replace(dispatch, plan=plan, expert_plan=plan, tokens_per_expert=tokens_per_expert)

    def _splits(self) -> Splits:
        dispatch = self._dispatch
        if dispatch.counts is None:
            return even_splits(self.num_local_experts, dispatch.plan.capacity, self.ep_size, self.tp_size)
        return dispatch.counts.finish(
            self.ep_size, torch.distributed.get_rank(self.ep_group), self.tp_size, self.tp_rank
        )

    def _plan_received(self, device: torch.device) -> Dispatch:
        """Plan of the received rows in expert order."""
        dispatch, splits = self._dispatch, self._dispatch.splits
        if dispatch.plan.capacity is None:
            plan, padded_counts = plan_received_chunks(
                splits.received, splits.rows_per_tp_rank, self.pad_multiple, device
            )
            tokens_per_expert = torch.tensor(padded_counts, dtype=torch.int64)
        else:
            sources = self.ep_size * self.tp_size
            plan = plan_received_bins(sources, self.num_local_experts, dispatch.plan.capacity, device)
            tokens_per_expert = torch.full((self.num_local_experts,), plan.capacity, dtype=torch.int64)
        return replace(dispatch, expert_plan=plan, tokens_per_expert=tokens_per_expert)

    def _count(self, rows_PH: Tensor) -> None:
        """Add this forward to the layer's load, without a sync."""
        splits = self._dispatch.splits
        sent = 0 if splits is None else sum(splits.send) - splits.send[torch.distributed.get_rank(self.ep_group)]
        row_bytes = rows_PH.shape[1] * rows_PH.element_size()
        self.load.add(self._dispatch.plan.meta, rows_PH.shape[0], sent * (2 * row_bytes + 4))


def _pad_multiple(settings: DispatchConfig, host: Any) -> int:
    """M of the padded layout: the setting's, and also what the host's quantized GEMM needs where the host leaves
    that padding to the dispatcher."""
    if not pads_for_quantization(host):
        return settings.pad_multiple
    if hasattr(moe_utils, "get_align_size_for_quantization"):
        align = moe_utils.get_align_size_for_quantization(host)
    else:  # megatron-core before 0.16
        align = get_fp8_align_size(host.fp8_recipe)
    return math.lcm(settings.pad_multiple, align or 1)
