"""On steps that log, the layers' loads join Megatron's own MoE report, and go to JSON lines and TensorBoard."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_ascend_moe.observe.load_report import SCALARS, LoadReport
from megatron_ascend_moe.observe.metrics import LayerLoad, read_loads

TRACKER_PREFIX = "moe_ascend_"  # of the scalars in Megatron's tracker, log line and TensorBoard

Record = Callable[[dict[str, Any], str, torch.Tensor, int, int], None]  # call, name, value, layer, layers
Forget = Callable[[str], None]  # name


def with_loads(
    report: Callable,
    record: Record,
    forget: Forget,
    dispatchers: Callable[[], Sequence],
    log_interval: Callable[[], int],
) -> Callable:
    """Wrap the host's per-step report so that it carries these layers' loads on steps that log.

    Args:
        report: MoEMetricsTracker.report, or track_moe_metrics of cores before 0.17; called once a step.
        record: stores one layer's value in the host's tracker.
        forget: drops a name from the tracker of hosts that report every name on every step.
        dispatchers: this process's AscendTokenDispatchers, in the order built.
        log_interval: steps between logs. On the others nothing is read, so nothing waits for the device.
    """
    signature = inspect.signature(report)

    @functools.wraps(report)
    def reporting(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        call = bound.arguments
        if call["iteration"] % log_interval() != 0:
            return report(*bound.args, **bound.kwargs)
        _record_loads(call, record, list(dispatchers()))
        names = [TRACKER_PREFIX + name for name in SCALARS]
        if call["track_names"] is not None:
            call["track_names"] = [*call["track_names"], *names]
        result = report(*bound.args, **bound.kwargs)
        for name in names:
            forget(name)
            (call["total_loss_dict"] or {}).pop(name, None)  # averaged over steps there, but read on one
        return result

    return reporting


def _record_loads(call: dict[str, Any], record: Record, dispatchers: list) -> None:
    """Read the loads once and hand them to the tracker, the JSON lines and TensorBoard."""
    num_layers = call["num_layers"] + (call["mtp_num_layers"] or 0)
    device = torch.device(torch.cuda.current_device())
    for name in SCALARS:  # every pipeline rank must know every name: the host reduces over the stages
        record(call, TRACKER_PREFIX + name, torch.zeros((), device=device), 1, num_layers)
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    numbers = _layer_numbers(dispatchers, call["num_layers"])
    loads = dict(zip(numbers, read_loads(dispatchers, device, group), strict=True))
    for layer, load in loads.items():
        for name in SCALARS:
            # the host averages over microbatches; these are sums over them already
            value = torch.tensor(getattr(load, name) / call["loss_scale"], device=device)
            record(call, TRACKER_PREFIX + name, value, layer, num_layers)
    if loads:
        _write(call, loads, dispatchers[0].settings.load_report, group.rank() == 0)


def _layer_numbers(dispatchers: list, num_layers: int) -> list[int]:
    """Layer numbers from 1; multi-token-prediction layers, which start from 1 again, follow the decoder's."""
    numbers: list[int] = []
    for dispatcher in dispatchers:
        number = dispatcher.layer_number
        numbers.append(number + num_layers if number in numbers else number)
    return numbers


def _write(call: dict[str, Any], loads: dict[int, LayerLoad], path: str, first_rank: bool) -> None:
    if not first_rank:
        path = ""
    elif path and parallel_state.get_pipeline_model_parallel_world_size() > 1:
        path = f"{path}.stage{parallel_state.get_pipeline_model_parallel_rank()}"
    if path or call["writer"] is not None:
        LoadReport(jsonl_path=path or None, tensorboard_writer=call["writer"]).write(call["iteration"], loads)
