"""examples/bridge_install.py with the real Megatron Bridge, on CPUs; by hand, because Bridge brings a gigabyte of others.

    pip install --no-deps --target bridge megatron-bridge==0.6.2 transformers==5.12.1 'huggingface-hub<2' tokenizers==0.22.2 \\
        safetensors regex omegaconf hydra-core antlr4-python3-runtime==4.9.3 einops rich six peft accelerate datasets \\
        mistral-common
    PYTHONPATH=bridge:. torchrun --nproc-per-node 2 -m tests.bridge_by_hand [stock]

(and what those need; with megatron-core 0.19.2). Bridge's recipe, configuration, callbacks and training loop are its own.
Replaced are: packages that need CUDA or are not used (empty modules), the model's size, and what Bridge would leave to
TransformerEngine. `stock` is the same run on Megatron's own dispatcher: both print the same losses and gradient norms.
"""

import importlib.abc
import importlib.machinery
import sys
import types

EMPTY = ("comet_ml", "diffusers", "fla", "flashinfer", "megatron.energon", "mlflow", "modelopt", "multistorageclient")
EMPTY += ("nemo_run", "nvdlfw_inspect", "nvidia_resiliency_ext", "open_clip", "qwen_vl_utils", "timm")
EMPTY += ("transformer_engine", "transformer_engine_torch", "wandb")
STEPS = 3


class _EmptyModule(types.ModuleType):
    """A module in which every name exists: a class of that name, or a module where the name is written like one."""

    __path__ = ()
    __version__ = "2.0.0"

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        if name.isalpha() and name.islower():
            return importlib.import_module(f"{self.__name__}.{name}")
        return type(name, (), {"__module__": self.__name__, "__init__": lambda self, *args, **named: None})

    def __call__(self, *arguments, **_):  # a decorator, with or without arguments, that is written like a module
        return arguments[0] if arguments else self


class _EmptyPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if any(name == empty or name.startswith(empty + ".") for empty in EMPTY):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _EmptyModule(spec.name)

    def exec_module(self, module):
        pass


def _prepare() -> None:
    from megatron_ascend_moe.host.cpu_training import enable_training_loop

    enable_training_loop()
    importlib.import_module("megatron.core.transformer.moe.moe_layer")  # sees that there is no TransformerEngine
    from megatron_ascend_moe.host.dataset_helpers import use_built_helpers

    use_built_helpers()
    sys.meta_path.append(_EmptyPackages())


def _tiny_model(cls, *_, **__):
    """In place of the configuration on the Hugging Face hub."""
    from transformers import Qwen3MoeConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "vocab_size": 256}
    architectures = ["Qwen3MoeForCausalLM"]
    return cls.from_hf_config(Qwen3MoeConfig(**sizes, num_experts_per_tok=2, architectures=architectures, dtype="float32"))


def _set(settings, **values) -> None:
    for name, value in values.items():
        setattr(settings, name, value)


def _on_cpus(config):
    """The recipe without what needs TransformerEngine or a GPU; its dispatcher and its graphs stay as they are."""
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    names = "moe_grouped_gemm cross_entropy_loss_fusion apply_rope_fusion moe_router_fusion bias_activation_fusion bf16 "
    names += "bias_dropout_fusion masked_softmax_fusion gradient_accumulation_fusion persist_layer_norm"
    _set(config.model, **dict.fromkeys(names.split(), False), transformer_impl="local", cross_entropy_fusion_impl="native")
    spec = get_gpt_layer_local_spec(num_experts=8, qk_layernorm=True, normalization="RMSNorm")
    _set(config.model, transformer_layer_spec=lambda *_, **__: spec, seq_length=32, expert_model_parallel_size=2)
    _set(config.model, **dict.fromkeys(("params_dtype", "pipeline_dtype", "autocast_dtype"), torch.float32))
    _set(config.model, use_te_rng_tracker=False)
    _set(config, mixed_precision=None, comm_overlap=None)
    _set(config.rng, te_rng_tracker=False)
    _set(config.dataset, seq_length=32, sequence_length=32, num_workers=0, persistent_workers=False, pin_memory=False)
    _set(config.optimizer, use_precision_aware_optimizer=False, bf16=False, params_dtype=torch.float32)
    _set(config.ddp, overlap_grad_reduce=False, overlap_param_gather=False)
    _set(config.tokenizer, tokenizer_type="NullTokenizer", tokenizer_model=None, vocab_size=255)
    _set(config.train, train_iters=STEPS, global_batch_size=4)
    _set(config.validation, eval_iters=0, eval_interval=1000)
    _set(config.scheduler, lr_warmup_iters=0, lr_decay_iters=STEPS)
    _set(config.checkpoint, save=None, load=None)
    _set(config.logger, tensorboard_dir=None, log_interval=1)
    config.dist.distributed_backend = "gloo"
    return config


def main(stock: bool) -> None:
    _prepare()
    from megatron.bridge import AutoBridge
    from megatron.bridge.recipes import qwen
    from megatron.bridge.training import gpt_step, pretrain, train

    AutoBridge.from_hf_pretrained = classmethod(_tiny_model)
    train.get_tensor_shapes_adjust_fn_for_distillation = lambda *_, **__: None  # modelopt's
    recipe = qwen.qwen3_30b_a3b_pretrain_config
    qwen.qwen3_30b_a3b_pretrain_config = lambda: _on_cpus(recipe())
    if stock:
        config = qwen.qwen3_30b_a3b_pretrain_config()
        _set(config.model, moe_token_dispatcher_type="alltoall", moe_permute_fusion=False, cuda_graph_impl="none")
        pretrain.pretrain(config, gpt_step.forward_step)
    else:
        from examples import bridge_install

        bridge_install.pretrain_with_bridge()


if __name__ == "__main__":
    main(stock="stock" in sys.argv[1:])
