"""Jobs of tests/test_plugin.py: registration seen from inside Megatron."""

import torch

from tests.gpt_moe import build_config, build_model

LAYOUT = {"tp": 1, "pp": 1, "ep": 1, "etp": 1}


def names():
    """The names that install touches, wherever they live."""
    from megatron.core.transformer.moe import moe_layer, moe_utils, token_dispatcher
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    found = {
        "moe_layer.MoEAlltoAllTokenDispatcher": moe_layer.MoEAlltoAllTokenDispatcher,
        "token_dispatcher.MoEAlltoAllTokenDispatcher": token_dispatcher.MoEAlltoAllTokenDispatcher,
        "moe_layer.MoEFlexTokenDispatcher": moe_layer.MoEFlexTokenDispatcher,
        "moe_layer.MoEAllGatherTokenDispatcher": moe_layer.MoEAllGatherTokenDispatcher,
        "moe_utils.te_general_gemm": getattr(moe_utils, "te_general_gemm", "missing"),
        "WrappedTorchNorm.__new__": WrappedTorchNorm.__dict__["__new__"],
    }
    try:
        from megatron.training import arguments
    except ImportError:
        return found
    return found | {"arguments.add_megatron_arguments": arguments.add_megatron_arguments}


def changed_names():
    """Names that differ after install, and after uninstall."""
    from megatron_ascend_moe import DispatchConfig, plugin

    before = names()
    plugin.install(DispatchConfig())
    plugin.install(DispatchConfig(pad_multiple=8))  # twice: uninstall must still reach the originals
    during = names()
    plugin.uninstall()
    plugin.uninstall()
    after = names()
    changed = lambda now: sorted(n for n in before if now[n] is not before[n])  # noqa: E731
    return changed(during), changed(after)


def dispatcher_class(installed, attribute=None, dispatcher_type="alltoall"):
    """Class name of a layer's dispatcher under install(None) or install(DispatchConfig()), and what verify says."""
    from megatron_ascend_moe import DispatchConfig, plugin

    plugin.install(DispatchConfig() if installed else None)
    try:
        config = build_config(LAYOUT, moe_token_dispatcher_type=dispatcher_type)
        if attribute is not None:
            config.moe_ascend_dispatcher = attribute
        model = build_model(config, LAYOUT)
        dispatcher = model.decoder.layers[0].mlp.token_dispatcher
        try:
            verified = plugin.verify(model)
        except RuntimeError as error:
            verified = str(error)
        return type(dispatcher).__name__, verified, type(dispatcher).__module__
    finally:
        plugin.uninstall()


def resolved(host=None, args=None, installed=None):
    """Settings and origins, resolved from attributes, arguments and install()."""
    import types

    from megatron_ascend_moe import DispatchConfig, plugin

    plugin.install(None if installed is None else DispatchConfig(**installed))
    original = plugin._megatron_args
    plugin._megatron_args = lambda: None if args is None else types.SimpleNamespace(**args)
    try:
        settings, origins = plugin.resolve_settings(types.SimpleNamespace(**(host or {})))
        return settings, origins
    finally:
        plugin._megatron_args = original
        plugin.uninstall()


def refusal(settings, config):
    """What building a model with these settings says."""
    from megatron_ascend_moe import DispatchConfig, plugin

    plugin.install(DispatchConfig(**settings))
    try:
        build_model(build_config(LAYOUT, **config), LAYOUT)
    except ValueError as error:
        return str(error)
    finally:
        plugin.uninstall()
    return None


def state_dict_keys():
    """Keys of a model built without the plugin, with it installed, and with it selected."""
    from megatron.core import parallel_state

    from megatron_ascend_moe import DispatchConfig, plugin

    keys = []
    for enter in (lambda: None, plugin.install, lambda: plugin.install(DispatchConfig())):
        enter()
        keys.append(sorted(build_model(build_config(LAYOUT), LAYOUT).state_dict()))
        plugin.uninstall()
        parallel_state.destroy_model_parallel()
    return keys


def wrong_width(ep, settings, config=None):
    """What a layer says, or its loads when they are read, whose router gives rank 0 three routes where top-2 is
    configured."""
    from megatron_ascend_moe import DispatchConfig, plugin
    from megatron_ascend_moe.observe.metrics import read_loads

    layout = LAYOUT | {"ep": ep}
    plugin.install(DispatchConfig(**settings))
    try:
        layer = build_model(build_config(layout, **(config or {})), layout).decoder.layers[0].mlp
        routed = torch.zeros(16, 8, dtype=torch.bool)
        routed[:, :2] = True
        routed[3, 2] = torch.distributed.get_rank() == 0
        layer.router.forward = lambda *args, **kwargs: (torch.rand(16, 8), routed)
        try:
            layer(torch.randn(16, 1, 32))
        except ValueError as error:
            return "forward", str(error)
        try:
            read_loads([layer.token_dispatcher], torch.device("cpu"), torch.distributed.group.WORLD)
        except ValueError as error:
            return "loads", str(error)
    finally:
        plugin.uninstall()
    return None
