"""Jobs of tests/observe/test_metrics.py: loads counted by training, read through Megatron's report."""

import pathlib

import torch

from tests.gpt_moe import build_config, build_model

TOKENS = 64  # of one rank and forward: 2 sequences of 32


def _forward_backward(model, times, seed=0):
    generator = torch.Generator().manual_seed(seed + torch.distributed.get_rank())
    mask = torch.triu(torch.ones(1, 1, 32, 32, dtype=torch.bool), 1)
    positions = torch.arange(32).repeat(2, 1)
    for _ in range(times):
        tokens = torch.randint(0, 128, (2, 33), generator=generator)
        model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).float().mean().backward()


def _dispatchers(model):
    return [layer.mlp.token_dispatcher for layer in model.decoder.layers]


def loads(layout, settings, config, times=2, evaluate=False):
    """Loads of every layer after `times` forwards, and the routes that the router itself asked for."""
    from megatron.core import parallel_state

    from megatron_ascend_moe import DispatchConfig, plugin
    from megatron_ascend_moe.observe.metrics import read_loads

    layout = {"tp": 1, "pp": 1, "ep": 1, "etp": 1} | layout
    plugin.install(DispatchConfig(**settings))
    try:
        model = build_model(build_config(layout, **config), layout)
        asked = [torch.zeros(8, dtype=torch.int64) for _ in model.decoder.layers]
        for layer, total in zip(model.decoder.layers, asked, strict=True):
            router = layer.mlp.router

            def counting(*args, route=router.forward, total=total, **kwargs):
                probs, routed = route(*args, **kwargs)
                if torch.is_grad_enabled():
                    total.add_((routed & (probs != 0)).sum(0))
                return probs, routed

            router.forward = counting
        _forward_backward(model, times)
        if evaluate:
            with torch.no_grad():
                mask = torch.triu(torch.ones(1, 1, 32, 32, dtype=torch.bool), 1)
                model(torch.zeros(2, 32, dtype=torch.int64), torch.arange(32).repeat(2, 1), mask)
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        read = read_loads(_dispatchers(model), torch.device("cpu"), group)
        again = read_loads(_dispatchers(model), torch.device("cpu"), group)
        for total in asked:
            torch.distributed.all_reduce(total, group=group)
        return read, [total.tolist() for total in asked], again
    finally:
        plugin.uninstall()


def report(path, log_interval):
    """Two steps through Megatron's own MoE report: its scalars by step, and the JSON lines written."""
    import types

    from megatron_ascend_moe import DispatchConfig, plugin

    layout = {"tp": 1, "pp": 1, "ep": 2, "etp": 1}
    plugin.install(DispatchConfig(load_report=path, stage_times=True))
    plugin_args, plugin._megatron_args = plugin._megatron_args, lambda: types.SimpleNamespace(log_interval=log_interval)
    try:
        model = build_model(build_config(layout), layout)
        scalars = []
        for step in (1, 2):
            _forward_backward(model, times=2, seed=step)
            writer = _Writer()
            _report(writer, step)
            scalars.append(writer.scalars)
        lines = pathlib.Path(path).read_text().splitlines() if torch.distributed.get_rank() == 0 else None
        return [d.layer_number for d in _dispatchers(model)], scalars, lines
    finally:
        plugin._megatron_args = plugin_args
        plugin.uninstall()


def _report(writer, step):
    arguments = dict(loss_scale=0.5, iteration=step, writer=writer, num_layers=2, track_names=["load_balancing_loss"])
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:
        from megatron.core.transformer.moe import moe_utils

        moe_utils.track_moe_metrics(**arguments)
        return
    get_moe_metrics_tracker().report(**arguments)


class _Writer:
    """The part of TensorBoard's SummaryWriter that is used."""

    def __init__(self):
        self.scalars = {}

    def add_scalar(self, name, value, step):
        self.scalars[name] = float(value)

    def add_image(self, *args, **kwargs):
        pass

    def add_figure(self, *args, **kwargs):
        pass


def agreement(layout, differ):
    """What each rank's first forward says when the last rank's settings differ (or not) from the others'."""
    from megatron_ascend_moe import DispatchConfig, plugin

    layout = {"tp": 1, "pp": 1, "ep": 1, "etp": 1} | layout
    is_last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    plugin.install(DispatchConfig(pad_multiple=8 if differ and is_last else 1))
    gathers = []
    original = torch.distributed.all_gather_object
    torch.distributed.all_gather_object = lambda *args, **kwargs: (gathers.append(1), original(*args, **kwargs))[1]
    try:
        model = build_model(build_config(layout), layout)
        try:
            _forward_backward(model, times=2)
        except ValueError as error:
            return str(error), len(gathers)
        return None, len(gathers)
    finally:
        torch.distributed.all_gather_object = original
        plugin.uninstall()


def ranges_of_a_layer():
    """Names and device types of the profiler ranges that one layer's forward opens, in order."""
    from unittest import mock

    from megatron_ascend_moe.observe import ranges
    from tests import dispatcher_jobs as jobs

    opened = []
    stock = ranges.stage_range
    dispatcher = jobs.make_dispatcher()
    with mock.patch.object(ranges, "stage_range", lambda *call: (opened.append(call), stock(*call))[1]):
        jobs.layer(dispatcher, *jobs.routes(9, 1), list(jobs.expert_weights()))
    return [name for name, _ in opened], {device for _, device in opened}
