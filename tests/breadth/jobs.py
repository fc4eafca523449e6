"""The job of one cell of the table: a setting on a layout, in a pool of processes."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import inspect
import re
from typing import Any

import torch

from tests.breadth import surroundings
from tests.breadth.settings import Setting

STEPS = 20
# Relative to a gradient's largest value. 16-bit rows: the two dispatchers round sums at different places, and what
# one rounding moves in step 1 the optimizer carries on.
TOLERANCE = {False: {"losses": 1e-5, "gradients": 1e-5}, True: {"losses": 1e-2, "gradients": 4e-2}}


def run_cell(setting: Setting, layout: dict[str, int], steps: int = STEPS) -> tuple[str, str]:
    """(outcome, detail) of one setting on one layout; outcome is parity, stock refuses, refused or failed.

    A refusal counts only if no step succeeds, and only with the message that the table expects; every other end of
    a training is a failure, raised as it came.
    """
    if setting.check:
        module, function = setting.check.split(":")
        getattr(importlib.import_module(module), function)(layout)
        return "parity", ""
    expected_refusal = _by_version(setting.stock_refuses)
    if expected_refusal:
        return _refusal(setting, layout, None, expected_refusal, "stock refuses")
    if setting.refused:
        return _refusal(setting, layout, setting.ours, setting.refused, "refused")
    stock = _train(setting, layout, None, steps, setting.oracle)
    return _compare(stock, _train(setting, layout, setting.ours, steps), TOLERANCE[setting.low_precision], steps)


def _by_version(messages: dict[str, str]) -> str | None:
    import megatron.core

    return next((text for start, text in messages.items() if megatron.core.__version__.startswith(start)), None)


def _config(setting: Setting, layout: dict[str, int]) -> dict[str, Any]:
    config = {"num_layers": 1} | setting.config
    if setting.experts_per_rank:
        config["num_moe_experts"] = setting.experts_per_rank * layout.get("ep", 1)
    return config


def _train(
    setting: Setting, layout: dict[str, int], ours: dict[str, Any] | None, steps: int, overrides: Any = None
) -> dict:
    from megatron.core import parallel_state

    from tests import gpt_moe

    config = _config(setting, layout) | (overrides or {})
    enter = getattr(surroundings, setting.around) if setting.around else lambda config: contextlib.nullcontext()
    full_layout = {"tp": 1, "pp": 1, "ep": 1, "etp": 1} | layout
    torch.manual_seed(4321)  # forced balancing and jitter draw from the ambient state
    with enter(gpt_moe.build_config(full_layout, **config)) as before_step:
        result = gpt_moe.train(layout, ours, steps=steps, config=config, before_step=before_step, **setting.train)
    parallel_state.destroy_model_parallel()
    _forget_metrics()
    gc.collect()  # of process groups, whose threads poll
    return result


def _forget_metrics() -> None:
    """Megatron's tracker of auxiliary losses is sized by the first model that a process builds."""
    try:
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    except ImportError:  # megatron-core before 0.17
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        get_moe_layer_wise_logging_tracker().clear()
    else:
        destroy_moe_metrics_tracker()


def _refusal(setting: Setting, layout: dict[str, int], ours: Any, expected: str, outcome: str) -> tuple[str, str]:
    try:
        _train(setting, layout, ours, steps=1)
    except Exception as error:
        if re.search(expected, str(error)):
            return outcome, str(error).split("\n")[0]
        raise
    return "failed", f"expected a refusal with {expected!r}, but it trained"


def _compare(stock: dict, ours: dict, tolerance: dict[str, float], steps: int) -> tuple[str, str]:
    """Losses of all steps and gradients of the first by name."""
    if len(stock["losses"]) not in (0, steps) or not all(map(_finite, stock["losses"])):
        return "failed", f"the oracle reports losses {stock['losses']}"
    pairs = list(zip(stock["losses"], ours["losses"], strict=True))
    loss_error = max((abs(a - b) / abs(a) for a, b in pairs), default=0.0)
    if stock["gradients"].keys() != ours["gradients"].keys():
        return "failed", "parameters differ"
    if sum(bool(g.any()) for g in stock["gradients"].values()) < 8:
        return "failed", "fewer than eight gradients hold anything: nothing was compared"
    errors = {
        name: ((ours["gradients"][name] - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()
        for name, expected in stock["gradients"].items()
    }
    worst = max(errors, key=errors.get)
    detail = f"losses {loss_error:.1e}, gradients {errors[worst]:.1e} ({worst})"
    good = loss_error <= tolerance["losses"] and errors[worst] <= tolerance["gradients"]
    return ("parity" if good else "failed"), detail


def _finite(value: float) -> bool:
    return value == value and abs(value) != float("inf")


def config_fields() -> tuple[list[str], list[str]]:
    """Names of the fields of this version's TransformerConfig, and of those that the stock dispatcher's code reads."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher, MoETokenDispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

    source = inspect.getsource(MoETokenDispatcher) + inspect.getsource(MoEAlltoAllTokenDispatcher)
    known = [field.name for field in dataclasses.fields(TransformerConfig)]
    return known, sorted(set(re.findall(r"config\.(\w+)", source)) & set(known))
