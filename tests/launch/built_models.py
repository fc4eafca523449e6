"""Run in a process of its own: parse every model configuration with Megatron's parser, build it at reduced layers
on the meta device with the plugin selected, and print one JSON object: name -> what happened."""

import json
import sys

import torch

with torch.device("meta"):  # torch collects the factories it redirects on first use: before the CPU host wraps them
    torch.empty(0)

from megatron_ascend_moe.host import cpu

cpu.enable()

import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.training import argument_utils  # noqa: E402
from megatron.training.models.gpt import default_layer_spec  # noqa: E402

from megatron_ascend_moe import DispatchConfig, plugin  # noqa: E402
from megatron_ascend_moe.launch import configs, flags, shape  # noqa: E402


def main(store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    parser = flags.megatron_parser()
    plugin.install(DispatchConfig())
    layouts = [_parse_layout(path, parser) for path in sorted((configs.CONFIG_DIR / "parallel").glob("*.yaml"))]
    names = sorted(path.stem for path in (configs.CONFIG_DIR / "models").glob("*.yaml"))
    stock = {name: _outcome(name, parser) for name in names}
    # MLA's projections and norms are Megatron's own; only its attention product, which has no parameters, is missing
    _let_local_attention_accept_mla()
    with_mla = {name: _outcome(name, parser) for name in names}
    print(json.dumps({"stock": stock, "with_mla": with_mla, "layouts": layouts}))


def _parse_layout(path, parser) -> str:
    """The layout's name, once Megatron's parser has taken it with the rest of a launch."""
    base = configs.read_config(configs.CONFIG_DIR / "training.yaml")
    flags.check_flags(configs.merge(base, configs.read_config(path)), parser)
    return path.stem


def _outcome(name: str, parser) -> dict:
    reduced = _reduced(name)
    args = flags.check_flags(reduced, parser)  # a flag that Megatron does not know ends the process
    args.bf16, args.params_dtype = False, torch.float32
    try:
        model = _build(args, shape.padded_vocabulary(reduced))
    except Exception as error:
        return {"missing": f"{type(error).__name__}: {error}"}
    return {
        "built": sum(p.numel() for p in model.parameters()),
        "counted": shape.count_parameters(reduced).total,
        "plugin_layers": plugin.verify(model),
    }


def _reduced(name: str) -> configs.Flags:
    """Three layers and few experts, everything else as configured."""
    config = configs.merge(
        configs.read_config(configs.CONFIG_DIR / "training.yaml"),
        configs.read_config(configs.find_config("models", name)),
        {"num-layers": 3, "num-experts": 8, "use-cpu-initialization": True},
    )
    if "moe-layer-freq" in config:
        config["moe-layer-freq"] = "([0]+[1]*2)"
    if "moe-router-num-groups" in config:
        config["moe-router-num-groups"], config["moe-router-group-topk"] = 2, 1
    config["moe-router-topk"] = 2
    return config


def _build(args, vocabulary: int) -> GPTModel:
    config = argument_utils.core_transformer_config_from_args(args)
    spec = default_layer_spec(argument_utils.gpt_config_from_args(args, config), None)
    with torch.device("meta"):
        return GPTModel(
            config,
            spec,
            vocab_size=vocabulary,
            max_sequence_length=args.max_position_embeddings,
            position_embedding_type=args.position_embedding_type,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
        )


def _let_local_attention_accept_mla() -> None:
    stock = DotProductAttention.__init__

    def init(self, *args, k_channels=None, v_channels=None, **kwargs):
        stock(self, *args, **kwargs)

    DotProductAttention.__init__ = init


if __name__ == "__main__":
    main(sys.argv[1])
