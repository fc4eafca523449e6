"""The dispatcher in a driver that builds its configuration in Python: Megatron Bridge, or your own loop.

    torchrun --nnodes 2 --nproc-per-node 8 … examples/bridge_install.py    # Megatron Bridge's Qwen3-30B-A3B recipe
    python examples/bridge_install.py --smoke                              # megatron-core alone, on a CPU, in seconds

(with this package installed, or the clone in PYTHONPATH). Both do the same three things: `install(DispatchConfig(...))`
before the model is built, then build it as always, then `verify(model)`, which raises where a MoE layer uses another
dispatcher. `uninstall()` gives Megatron its own names back. The Bridge part is for release 0.6 with TransformerEngine; its
recipe is for 16 GPUs, on mock data, and reads the model's configuration from the Hugging Face hub. It was never run on
GPUs: tests/bridge_by_hand.py ran it with the real Bridge 0.6.2 and a tiny model on CPUs, and the suite runs it with a
stand-in for Bridge.
"""

import argparse
import logging

import torch

import megatron_ascend_moe

SETTINGS = megatron_ascend_moe.DispatchConfig(layout="padded", pad_multiple=16)


def pretrain_with_bridge() -> None:
    """Megatron Bridge's own recipe and training loop, unchanged but for the dispatcher."""
    from megatron.bridge.recipes.qwen import qwen3_30b_a3b_pretrain_config
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    class Verify(Callback):
        def on_train_start(self, context) -> None:
            logging.info(
                "%d MoE layers of this rank use the Ascend dispatcher", megatron_ascend_moe.verify(context.model)
            )

    config = qwen3_30b_a3b_pretrain_config()
    config.model.moe_token_dispatcher_type = "alltoall"  # the dispatcher takes the place of this one; the recipe has flex
    config.model.moe_flex_dispatcher_backend = None
    config.model.moe_permute_fusion = False  # its permute is always fused
    config.model.cuda_graph_impl = "none"  # the recipe captures the dispatch, whose rows depend on the data when padded
    megatron_ascend_moe.install(SETTINGS)
    pretrain(config, forward_step, callbacks=[Verify()])


def train_with_megatron_core(steps: int = 3) -> list[float]:
    """A loop of one's own on megatron-core, on a CPU: the losses of a few steps on one batch."""
    from megatron_ascend_moe.host import cpu

    cpu.enable()  # before Megatron is imported; without it, this is the code for an NPU or a GPU
    megatron_ascend_moe.install(SETTINGS)
    model = build_model()
    logging.info("%d MoE layers use the Ascend dispatcher", megatron_ascend_moe.verify(model))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    tokens = torch.arange(64).view(2, 32) % 61
    positions = torch.arange(32).expand(2, 32)
    hidden = torch.triu(torch.ones(1, 1, 32, 32, dtype=torch.bool), 1)  # True where attention may not look
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(tokens, positions, hidden, labels=tokens.roll(-1, 1)).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    megatron_ascend_moe.uninstall()
    return losses


def build_model() -> torch.nn.Module:
    """A tiny GPT with Mixture-of-Experts layers, built as anyone builds one on megatron-core."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_moe_experts=8,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=False,
        use_cpu_initialization=True,
    )
    spec = get_gpt_layer_local_spec(num_experts=8)
    return GPTModel(config, spec, vocab_size=64, max_sequence_length=32, position_embedding_type="rope")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="megatron-core alone, on a CPU")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    if options.smoke:
        print("losses:", *(f"{loss:.4f}" for loss in train_with_megatron_core()))
    else:
        pretrain_with_bridge()


if __name__ == "__main__":
    main()
