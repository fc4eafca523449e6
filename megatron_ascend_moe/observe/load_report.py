"""Where loads go: one JSON line a layer, and TensorBoard scalars with a heat map of tokens by layer and expert."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from megatron_ascend_moe.observe.metrics import LayerLoad

SCALARS = ("max_vio", "overload", "dropped_share", "padding_share", "bytes_sent")


class LoadReport:
    """Writes the loads of one step.

    Args:
        jsonl_path: file to append to, `{"step": …, "layer": …, **LayerLoad}` a line; its folder is made.
        tensorboard_writer: a torch.utils.tensorboard.SummaryWriter.
    """

    def __init__(self, jsonl_path: str | None = None, tensorboard_writer: Any = None) -> None:
        self._jsonl_path, self._writer = jsonl_path, tensorboard_writer

    def write(self, step: int, layers: dict[int, LayerLoad]) -> None:
        """Write every layer's load, by layer number, at this step."""
        if self._jsonl_path is not None:
            path = Path(self._jsonl_path)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                for layer, load in layers.items():
                    file.write(json.dumps({"step": step, "layer": layer, **dataclasses.asdict(load)}) + "\n")
        if self._writer is not None:
            for layer, load in layers.items():
                for name in SCALARS:
                    self._writer.add_scalar(f"moe_ascend/{name}/layer_{layer}", getattr(load, name), step)
                for stage, milliseconds in load.stage_ms.items():
                    self._writer.add_scalar(f"moe_ascend/ms/{stage}/layer_{layer}", milliseconds, step)
            self._writer.add_figure("moe_ascend/tokens_per_expert", load_heat_map(layers), step)


def load_heat_map(layers: dict[int, LayerLoad]) -> Any:
    """A matplotlib figure: one row a layer, one column an expert, tokens over the layer's mean (1 = balanced)."""
    from matplotlib.figure import Figure  # not pyplot: no global state, no window system

    numbers = sorted(layers)
    relative = []
    for number in numbers:
        counts = layers[number].tokens_per_expert
        mean = sum(counts) / len(counts)
        relative.append([count / mean if mean else 0.0 for count in counts])
    figure = Figure(figsize=(min(12.0, 3 + len(relative[0]) / 12), 1.5 + len(numbers) / 4), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(relative, aspect="auto", vmin=0.0, vmax=2.0, cmap="coolwarm", interpolation="nearest")
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    axes.set_yticks(range(len(numbers)), [str(number) for number in numbers])
    figure.colorbar(image, ax=axes, label="tokens / mean")
    return figure
