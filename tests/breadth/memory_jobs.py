"""Jobs of test_saved_memory.py: what autograd holds between a layer's forward and its backward."""

import gc
import weakref

import torch

from tests.gpt_moe import build_config, build_model, dispatcher, release


class _Kept:
    """A saved tensor, in a box whose life can be watched."""

    def __init__(self, tensor):
        self.tensor = tensor


def saved_bytes(layout, settings, config, hidden_size=32, tokens=64):
    """(bytes of distinct storages that one MoE layer's forward leaves saved, saved tensors, of them alive after its
    backward).

    Weights and the layer's input are not counted: they live anyway.
    """
    from megatron.core import parallel_state

    layout = {"tp": 1, "pp": 1, "ep": 1, "etp": 1} | layout
    config = build_config(layout, num_layers=1, hidden_size=hidden_size, **config)
    with dispatcher(settings):
        layer = build_model(config, layout).decoder.layers[0].mlp
        generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        x = torch.randn(tokens, 1, hidden_size, generator=generator).requires_grad_()
        outside = {t.untyped_storage().data_ptr() for t in (x, *layer.parameters())}
        boxes = []

        def pack(tensor):
            box = _Kept(tensor)
            boxes.append(weakref.ref(box))
            return box

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
            output = layer(x)[0]
        held = _distinct_bytes([box().tensor for box in boxes if box() is not None], outside)
        output.sum().backward()
        del output
        gc.collect()
        alive = sum(box() is not None for box in boxes)
        release(layer)
    parallel_state.destroy_model_parallel()
    return held, len(boxes), alive


def _distinct_bytes(tensors, outside):
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(size for pointer, size in storages.items() if pointer not in outside)
