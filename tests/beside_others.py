"""A process of tests/test_beside_others.py: one MoE layer through the plugin, forward and backward, beside the
stand-in that its argument names (or `none`)."""

import json
import os
import sys


def main(stand_in: str) -> None:
    if stand_in != "none":
        sys.path.insert(0, os.path.join(os.path.dirname(__file__), "stand_ins", stand_in))
    if stand_in == "npu":
        import torch_npu.contrib.transfer_to_npu  # noqa: F401
    from megatron_ascend_moe.host import cpu

    cpu.enable()
    import torch
    import torch.distributed as dist
    import torch.utils._triton

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("nccl" if stand_in == "npu" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    from megatron.core.transformer.moe import moe_layer

    from megatron_ascend_moe import kernels, plugin
    from tests import gpt_moe

    layout = {"tp": 1, "pp": 1, "ep": 1, "etp": 1}
    with gpt_moe.dispatcher({"pad_multiple": 8}):
        model = gpt_moe.build_model(gpt_moe.build_config(layout), layout)
        served = plugin.verify(model)
        hidden = torch.randn(32, 2, 32, generator=torch.Generator().manual_seed(1))
        layer = model.decoder.layers[0].mlp
        loss = layer(hidden)[0].square().sum()
        loss.backward()
    gradients = [p.grad.norm().item() for _, p in sorted(layer.named_parameters())]
    found = {
        "layers served": served,
        "loss": loss.item(),
        "gradients": gradients,
        "transformer_engine": bool(moe_layer.HAVE_TE),
        "has_triton": torch.utils._triton.has_triton(),
        "kernels on an NPU": kernels.select("auto", "npu").name if stand_in == "npu" else None,
        "kernels on a CPU": kernels.select("auto", "cpu").name,
        "is_cuda is an alias": isinstance(torch.Tensor.is_cuda, property),
    }
    print("FOUND " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
