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


TOP = 2.0  # times the mean, from where on all colours are the same
ROW_INCHES, COLUMN_INCHES = 0.14, 0.05  # of a large model's cells


def load_heat_map(layers: dict[int, LayerLoad]) -> Any:
    """A matplotlib figure: one row a layer, one column an expert, tokens over the layer's mean (1 = balanced). Experts
    without a token are black; the title names the most loaded one, whose colour may be that of many."""
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot: no global state, no window system

    numbers = sorted(layers)
    relative = []
    for number in numbers:
        counts = layers[number].tokens_per_expert
        mean = sum(counts) / len(counts)
        relative.append([count / mean if mean else 0.0 for count in counts])
    size = (min(14.0, 4 + len(relative[0]) * COLUMN_INCHES), 2 + len(numbers) * ROW_INCHES)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    colors = matplotlib.colormaps["coolwarm"].with_extremes(under="black")
    image = axes.imshow(relative, aspect="auto", vmin=1e-6, vmax=TOP, cmap=colors, interpolation="nearest")
    axes.set(xlabel="expert", ylabel="layer")
    axes.set_title(_summary(numbers, relative), fontsize="small", loc="left")
    axes.set_yticks(range(len(numbers)), [str(number) for number in numbers], fontsize="x-small")
    axes.xaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=axes, label="tokens / mean", extend="both", extendfrac=0.03, fraction=0.05, aspect=30)
    return figure


def _summary(numbers: list[int], relative: list[list[float]]) -> str:
    value, number, expert = max((v, n, e) for n, row in zip(numbers, relative, strict=True) for e, v in enumerate(row))
    dead = sum(v == 0 for row in relative for v in row)
    return f"most: {value:.2f} x mean (layer {number}, expert {expert})\nwithout tokens (black): {dead}"
