"""What some settings need around a training, on both sides of the comparison: each yields `before_step` or None."""

import contextlib
import types
from unittest import mock

import torch


@contextlib.contextmanager
def replay_repeated_ids(config):
    """Before each step give every router ids to replay, of which one row in four names an expert twice."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    from tests.gpt_moe import BATCH, SEQUENCE

    RouterReplay.clear_global_router_replay_instances()

    def before_step(step, model):
        routers = RouterReplay.global_router_replay_instances
        generator = torch.Generator().manual_seed(1000 * torch.distributed.get_rank() + step)
        scores = torch.rand(len(routers), BATCH * SEQUENCE // config.tensor_model_parallel_size, 8, generator=generator)
        ids = scores.topk(config.moe_router_topk, dim=2).indices
        ids[:, ::4, 1] = ids[:, ::4, 0]
        RouterReplay.set_replay_data(list(ids))
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    yield before_step
    RouterReplay.clear_global_router_replay_instances()


@contextlib.contextmanager
def switching_decode_padding(config):
    """Switch the host's pad-to-capacity on before every odd step, off before every even one: with a capacity that
    drops on steps 4n + 1, that drops nothing on steps 4n + 3."""
    from megatron.core.inference import utils

    utils.moe_layer_cache = None

    def before_step(step, model):
        factor = {1: 0.75, 3: 4.0}.get(step % 4)
        utils.set_decode_expert_padding(model, set_to=factor is not None, capacity_factor=factor)

    yield before_step
    utils.moe_layer_cache = None


@contextlib.contextmanager
def random_logits_from_their_start(config):
    """Before 0.16 the generator of forced balancing's logits outlives a training."""
    from megatron.core.transformer.moe.moe_utils import RandomSTE

    RandomSTE.generator = None
    yield None


class _Linear(torch.nn.Linear):
    """TransformerEngine's linear as the latent projections call it: unsplit over tensor-parallel ranks."""

    def __init__(self, input_size, output_size, *, config, init_method, bias, **kwargs):
        super().__init__(input_size, output_size, bias=bias)
        init_method(self.weight)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, x):
        return super().forward(x), None


@contextlib.contextmanager
def latent_projection(config):
    """Let MoELayer build its latent projections without TransformerEngine."""
    from megatron.core.transformer.moe import moe_layer

    saved = {name: getattr(moe_layer, name, None) for name in ("HAVE_TE", "TELinear")}
    moe_layer.HAVE_TE, moe_layer.TELinear = True, _Linear
    yield None
    for name, value in saved.items():
        setattr(moe_layer, name, value)


@contextlib.contextmanager
def no_fp8(config):
    """Recompute that discards outputs enters TransformerEngine's fp8 contexts, by names unbound without it."""
    from megatron.core.tensor_parallel import random

    nothing = lambda **kwargs: contextlib.nullcontext()  # noqa: E731
    names = {
        "FP8GlobalStateManager": types.SimpleNamespace(is_fp8_enabled=lambda: False),
        "activation_recompute_forward": nothing,
        "fp8_autocast": nothing,
    }
    with contextlib.ExitStack() as stack:
        for name, value in names.items():
            stack.enter_context(mock.patch.object(random, name, value, create=True))
        yield None


@contextlib.contextmanager
def router_biases_of_zero(config):
    """Before 0.16 the router's bias starts with whatever its memory held."""

    def before_step(step, model):
        for name, parameter in model.named_parameters():
            if step == 0 and name.endswith("router.bias"):
                parameter.data.zero_()

    yield before_step
