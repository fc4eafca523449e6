"""The plugin's settings, checked mode, and every pair of settings that is refused at start-up."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

LAYOUTS = ("auto", "padded", "binned")
EXCHANGES = ("per-route",)
KERNELS = ("auto", "triton", "torch")
CHECKED_VARIABLE = "MEGATRON_ASCEND_MOE_CHECKED"
OFF = ("", "0", "false", "off", "no")  # values, in any case, with which a switch in the environment is off


def _setting(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True)
class DispatchConfig:
    """Settings of the dispatcher. Each field is also a Megatron flag, `--moe-ascend-<field>`, and may be set
    as the attribute `moe_ascend_<field>` of a TransformerConfig.

    Raises:
        ValueError: a value outside its choices, or `pad_multiple` below 1.
    """

    layout: str = _setting(
        "auto",
        "row layout handed to the experts: padded (dropless), binned (fixed capacity), or auto: binned "
        "exactly when the host pads expert inputs to capacity",
        LAYOUTS,
    )
    pad_multiple: int = _setting(1, "rows to which each expert's segment is rounded up in the padded layout")
    exchange: str = _setting(
        "per-route", "what crosses the expert-parallel all-to-all: one row per route", EXCHANGES
    )
    kernels: str = _setting(
        "auto", "triton, torch (the plain twins), or auto: triton on an NPU or GPU, torch on a CPU", KERNELS
    )
    load_report: str = _setting(
        "", "JSON-lines file for each layer's tokens per expert on logging steps (empty: none)"
    )
    stage_times: bool = _setting(False, "time the six stages of every layer, reported with the loads on logging steps")
    checked: bool = _setting(False, "validate every routing map and plan; costs device syncs, for debugging")

    def __post_init__(self) -> None:
        for setting in fields(self):
            choices = setting.metadata["choices"]
            value = getattr(self, setting.name)
            if choices and value not in choices:
                raise ValueError(f"{setting.name}={value!r} is unknown: choose one of {', '.join(choices)}")
        if not isinstance(self.pad_multiple, int) or self.pad_multiple < 1:
            raise ValueError(f"pad_multiple={self.pad_multiple!r}: expected a whole number of rows, at least 1")


_checked: contextvars.ContextVar[bool] = contextvars.ContextVar("checked", default=False)


@contextlib.contextmanager
def checked(enabled: bool = True) -> Iterator[None]:
    """Validate inputs of every operation called inside the block (checked mode; costs device syncs)."""
    token = _checked.set(enabled or _checked.get())
    try:
        yield
    finally:
        _checked.reset(token)


def is_checked() -> bool:
    """Whether checked mode is on: by `checked()`, or by MEGATRON_ASCEND_MOE_CHECKED=1."""
    return _checked.get() or os.environ.get(CHECKED_VARIABLE, "0").lower() not in OFF


@dataclass(frozen=True)
class Refusal:
    """A pair of settings that cannot work together: when it applies, and what the user is told."""

    applies: Callable[[DispatchConfig, Any], bool]
    message: str


def _captured_parts(host: Any) -> set[str]:
    """Names of the parts of a layer that the host captures in graphs of their own; "layer" is all of it.

    The fields' names and the way of saying "all" have changed: an empty list, or "full".
    """
    if getattr(host, "cuda_graph_impl", "none") == "none":
        return set()
    scope = getattr(host, "cuda_graph_modules", None) or getattr(host, "cuda_graph_scope", None) or ()
    scope = scope.split(",") if isinstance(scope, str) else scope
    return {getattr(part, "name", part) for part in scope} - {"full"} or {"layer"}


def _captures_whole_dispatch(host: Any) -> bool:
    """Whether a graph is to hold a MoE layer's dispatch from end to end while it trains."""
    if getattr(host, "moe_pad_experts_for_cuda_graph_inference", False):
        return False  # captured while decoding only, which switches padding to capacity on
    return bool(_captured_parts(host) & {"layer", "full_iteration", "moe"})


def pads_for_quantization(host: Any) -> bool:
    """Whether the host leaves the padding that quantized GEMMs need to the dispatcher (the flag's name has changed)."""
    return bool(
        getattr(host, "moe_router_padding_for_quantization", False)
        or getattr(host, "moe_router_padding_for_fp8", False)
    )


# Checked when a dispatcher is built, before any collective; the README's support table repeats these lines.
REFUSALS = (
    Refusal(
        lambda ours, host: ours.layout == "binned" and host.moe_expert_capacity_factor is None,
        "layout='binned' needs a capacity, got moe_expert_capacity_factor=None: set "
        "--moe-expert-capacity-factor, or use layout='auto'",
    ),
    Refusal(
        lambda ours, host: ours.layout == "binned" and ours.pad_multiple != 1,
        "pad_multiple has no effect on layout='binned', got another than 1: leave it out, or use layout='padded'",
    ),
    Refusal(
        lambda ours, host: ours.layout == "padded" and host.moe_pad_expert_input_to_capacity,
        "layout='padded' cannot serve moe_pad_expert_input_to_capacity=True: use layout='auto' or drop that flag",
    ),
    Refusal(
        lambda ours, host: ours.stage_times and getattr(host, "cuda_graph_impl", "none") != "none",
        "stage_times=True cannot be captured in a graph, got cuda_graph_impl other than none: drop one of the two",
    ),
    Refusal(
        lambda ours, host: pads_for_quantization(host)
        and (ours.layout == "binned" or host.moe_pad_expert_input_to_capacity),
        "the binned layout cannot pad for quantized GEMMs, got moe_router_padding_for_quantization=True: drop that "
        "flag (the experts then pad for themselves), or use layout='auto' without moe_pad_expert_input_to_capacity",
    ),
    Refusal(
        lambda ours, host: "moe_preprocess" in _captured_parts(host),
        "graph capture of moe_preprocess is not supported, got it in the graph's scope: the plan would stay in the "
        "graph while the rest of the layer runs outside; take moe_preprocess out (with cuda_graph_impl=local also "
        "moe_router, which brings it)",
    ),
    Refusal(
        lambda ours, host: ours.layout != "binned"
        and not host.moe_pad_expert_input_to_capacity
        and _captures_whole_dispatch(host),
        "graph capture of a whole MoE layer needs static shapes, got the padded layout, whose rows depend on the "
        "data: set --moe-pad-expert-input-to-capacity, or name the parts to capture (attn, moe_router)",
    ),
)


def check_host(ours: DispatchConfig, host: Any) -> None:
    """Refuse combinations that cannot work.

    Args:
        ours: resolved plugin settings.
        host: the host's TransformerConfig.

    Raises:
        ValueError: the first row of REFUSALS that applies, saying what was got and how to mend it.
    """
    for refusal in REFUSALS:
        if refusal.applies(ours, host):
            raise ValueError(refusal.message)
