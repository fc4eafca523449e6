"""Registration with Megatron-Core: the only file that touches Megatron's names.

`config.moe_token_dispatcher_type` stays "alltoall", which the host accepts everywhere; the name that MoELayer
looks up for it is bound to a factory, which builds this plugin's dispatcher for layers that select it and the
stock class for all others.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import logging
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from megatron.core.transformer.moe import moe_layer, moe_utils, token_dispatcher

from megatron_ascend_moe.config import DispatchConfig
from megatron_ascend_moe.dispatcher import AscendTokenDispatcher
from megatron_ascend_moe.host import norm, router_gemm
from megatron_ascend_moe.observe.step_report import with_loads

logger = logging.getLogger(__name__)

PREFIX = "moe_ascend_"  # of flags' destinations and of attributes on a TransformerConfig
SELECTED = PREFIX + "dispatcher"  # true where `--moe-token-dispatcher-type ascend` was given
_STOCK_NAME = "MoEAlltoAllTokenDispatcher"
_OTHER_NAMES = {"allgather": "MoEAllGatherTokenDispatcher", "flex": "MoEFlexTokenDispatcher"}
_INHERITED = object()  # the class had the name from a base class only


@dataclass
class _Installation:
    """What `install` changed, so that `uninstall` can put it back."""

    config: DispatchConfig | None
    saved: list[tuple[Any, str, Any]]  # owner, attribute, its value before
    logged: set[str]
    dispatchers: list[weakref.ref]  # of this process, in the order built
    withdraw: list[Callable[[], None]]  # undo what the host was provided with

    def replace(self, owner: Any, name: str, value: Any) -> None:
        self.saved.append((owner, name, owner.__dict__.get(name, _INHERITED)))
        setattr(owner, name, value)


_installation: _Installation | None = None


def install(config: DispatchConfig | None = None) -> None:
    """Teach Megatron-Core this dispatcher.

    Layers use it when their TransformerConfig has `moe_ascend_dispatcher = True`, when the flag
    `--moe-token-dispatcher-type ascend` was given, or, with `config`, always: until `uninstall()`. Settings are
    resolved field by field: attribute on the TransformerConfig, then Megatron's arguments, then `config`, then the
    defaults of DispatchConfig. Calling it again replaces `config`.

    Also provides what the host lacks without TransformerEngine (see host.router_gemm and host.norm).
    """
    global _installation
    if _installation is not None:
        _installation.config = config
        return
    _installation = _Installation(config, [], set(), [], [])
    _installation.replace(moe_layer, _STOCK_NAME, _build_dispatcher)
    for type_name, class_name in _OTHER_NAMES.items():
        _installation.replace(moe_layer, class_name, _unless_selected(type_name, class_name))
    _installation.replace(moe_layer.MoELayer, "set_layer_number", _numbering(moe_layer.MoELayer.set_layer_number))
    _report_loads()
    # what somebody else provided before stays after uninstall, too
    if router_gemm.provide_router_gemm_name():
        _installation.withdraw.append(router_gemm.withdraw_router_gemm_name)
    if norm.provide_safe_norm():
        _installation.withdraw.append(norm.withdraw_safe_norm)
    arguments = _import_or_none("megatron.training.arguments")
    if arguments is not None:
        _installation.replace(arguments, "add_megatron_arguments", _widen(arguments.add_megatron_arguments))


def uninstall() -> None:
    """Give Megatron its names back, identical (`is`) to before `install()`. Built layers keep their dispatcher."""
    global _installation
    if _installation is None:
        return
    for owner, name, value in reversed(_installation.saved):
        delattr(owner, name) if value is _INHERITED else setattr(owner, name, value)
    for withdraw in _installation.withdraw:
        withdraw()
    _installation = None


def verify(model: torch.nn.Module | Iterable[torch.nn.Module]) -> int:
    """Count the layers that this dispatcher serves, so that an ineffective install is loud.

    Args:
        model: a module, or the list of model chunks that Megatron builds.

    Returns:
        The number of MoE layers, all of which use AscendTokenDispatcher (0 for a stage without MoE layers).

    Raises:
        RuntimeError: a MoE layer uses another dispatcher.
    """
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    layers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, moe_layer.BaseMoELayer)]
    others = [m.token_dispatcher for m in layers if not isinstance(m.token_dispatcher, AscendTokenDispatcher)]
    if others:
        names = ", ".join(sorted({type(other).__name__ for other in others}))
        raise RuntimeError(
            f"{len(others)} of {len(layers)} MoE layers use {names}, expected "
            "AscendTokenDispatcher: call install() before the model is built and select it with "
            "--moe-token-dispatcher-type ascend, config.moe_ascend_dispatcher = True or install(DispatchConfig())"
        )
    return len(layers)


def resolve_settings(host: Any) -> tuple[DispatchConfig | None, dict[str, str]]:
    """Settings for a layer of this TransformerConfig.

    Returns:
        The frozen settings, or None where the layer does not select the dispatcher; and each field's origin.

    Raises:
        ValueError: a value outside its choices, an attribute `moe_ascend_…` that is no setting, or settings without
            the dispatcher selected.
    """
    _refuse_unknown(host)
    args = _megatron_args()
    installed = _installation.config if _installation is not None else None
    values, origins = {}, {}
    for setting in fields(DispatchConfig):
        name = PREFIX + setting.name
        for origin, source in (("TransformerConfig", host), ("arguments", args)):
            if getattr(source, name, None) is not None:
                values[setting.name], origins[setting.name] = getattr(source, name), origin
                break
        else:
            origins[setting.name] = "default" if installed is None else "install()"
            values[setting.name] = setting.default if installed is None else getattr(installed, setting.name)

    selected = getattr(host, SELECTED, None)
    if selected is None:
        selected = installed is not None or bool(getattr(args, SELECTED, False))
    if not selected:
        given = [name for name, origin in origins.items() if origin in ("TransformerConfig", "arguments")]
        if given:
            raise ValueError(
                f"settings {', '.join(PREFIX + name for name in given)} are given but the dispatcher is not "
                "selected: add --moe-token-dispatcher-type ascend, or drop them"
            )
        return None, origins
    return DispatchConfig(**values), origins


def _refuse_unknown(host: Any) -> None:
    known = {SELECTED, *(PREFIX + setting.name for setting in fields(DispatchConfig))}
    unknown = sorted(name for name in vars(host) if name.startswith(PREFIX) and name not in known)
    if unknown:
        raise ValueError(
            f"the TransformerConfig has {', '.join(unknown)}, which is no setting: expected one of "
            f"{', '.join(sorted(known))}"
        )


def _build_dispatcher(num_local_experts: int, local_expert_indices: list[int], config: Any, pg_collection: Any = None):
    """What MoELayer calls by the stock class's name; builds the selected dispatcher or the stock one."""
    settings, origins = resolve_settings(config)
    if settings is None:
        # resolved now, not at install time: others may have replaced it meanwhile
        stock = getattr(token_dispatcher, _STOCK_NAME)
        return stock(num_local_experts, local_expert_indices, config=config, pg_collection=pg_collection)
    _log_once(
        "dispatcher: ascend; "
        + ", ".join(f"{name}={getattr(settings, name)} ({origin})" for name, origin in origins.items())
    )
    if getattr(config, "moe_permute_fusion", False):
        _log_once("moe_permute_fusion has no effect: this dispatcher's permute is always fused")
    dispatcher = AscendTokenDispatcher(num_local_experts, local_expert_indices, config, pg_collection, settings)
    _installation.dispatchers.append(weakref.ref(dispatcher))
    return dispatcher


def _unless_selected(type_name: str, class_name: str) -> Callable:
    """What MoELayer calls by the name of another dispatcher's class: that class, or an error for layers that select
    this dispatcher, which would silently not serve them."""

    def build(*args, config: Any, **kwargs):
        if resolve_settings(config)[0] is not None:
            raise ValueError(
                f"the dispatcher is selected, but moe_token_dispatcher_type={type_name!r} builds another one: set "
                "moe_token_dispatcher_type='alltoall', or config.moe_ascend_dispatcher = False for these layers"
            )
        return getattr(token_dispatcher, class_name)(*args, config=config, **kwargs)

    return build


def _numbering(set_layer_number: Any) -> Any:
    """MoELayer.set_layer_number that tells the dispatcher, too: its metrics are by layer."""

    @functools.wraps(set_layer_number)
    def numbering(self, layer_number: int) -> None:
        set_layer_number(self, layer_number)
        if isinstance(self.token_dispatcher, AscendTokenDispatcher):
            self.token_dispatcher.layer_number = layer_number

    return numbering


def _report_loads() -> None:
    """Let the host's per-step MoE report carry the layers' loads."""
    dispatchers = lambda: [d for d in (ref() for ref in _installation.dispatchers) if d is not None]  # noqa: E731
    log_interval = lambda: getattr(_megatron_args(), "log_interval", 1)  # noqa: E731
    moe_logging = _import_or_none("megatron.core.transformer.moe.moe_logging")
    if moe_logging is not None:
        tracker = moe_logging.MoEMetricsTracker
        record = lambda call, *values: call["self"].record(*values)  # noqa: E731
        reporting = with_loads(tracker.report, record, lambda name: None, dispatchers, log_interval)
        _installation.replace(tracker, "report", reporting)
        return
    record = lambda call, *values: moe_utils.save_to_aux_losses_tracker(*values)  # noqa: E731
    forget = lambda name: moe_utils.get_moe_layer_wise_logging_tracker().pop(name, None)  # noqa: E731
    reporting = with_loads(moe_utils.track_moe_metrics, record, forget, dispatchers, log_interval)
    for owner in (moe_utils, _import_or_none("megatron.training.training")):
        if hasattr(owner, "track_moe_metrics"):
            _installation.replace(owner, "track_moe_metrics", reporting)


def _widen(add_megatron_arguments: Any) -> Any:
    """Megatron's parser with `ascend` among the dispatchers and a flag for every DispatchConfig field."""

    @functools.wraps(add_megatron_arguments)
    def widened(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = add_megatron_arguments(parser)
        for action in parser._actions:
            if "--moe-token-dispatcher-type" in action.option_strings:
                action.choices = [*action.choices, "ascend"]
                action.__class__ = _SelectDispatcher
        parser.set_defaults(**{SELECTED: False})
        group = parser.add_argument_group("megatron_ascend_moe")
        for setting in fields(DispatchConfig):
            flag = "--" + (PREFIX + setting.name).replace("_", "-")
            if isinstance(setting.default, bool):
                kind = {"action": argparse.BooleanOptionalAction}
            else:
                kind = {"type": type(setting.default), "choices": setting.metadata["choices"]}
            text = f"{setting.metadata['help']} (default: {setting.default})"
            group.add_argument(flag, dest=PREFIX + setting.name, default=None, help=text, **kind)
        return parser

    return widened


class _SelectDispatcher(argparse.Action):
    """`ascend` is stored as `alltoall`, which the host knows, and the plugin's own switch is set."""

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, SELECTED, values == "ascend")
        setattr(namespace, self.dest, "alltoall" if values == "ascend" else values)


def _megatron_args() -> Any:
    """Megatron's parsed arguments, or None where no training loop has parsed any."""
    global_vars = sys.modules.get("megatron.training.global_vars")
    return getattr(global_vars, "_GLOBAL_ARGS", None)


def _import_or_none(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:  # megatron-core wheels before 0.17 carry no training loop
        return None


def _log_once(message: str) -> None:
    if message in _installation.logged:
        return
    _installation.logged.add(message)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        logger.info(message)
