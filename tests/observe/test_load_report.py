"""Loads written as JSON lines and to a real TensorBoard event file, heat map included."""

import json

import pytest

from megatron_ascend_moe.observe.load_report import LoadReport, load_heat_map
from megatron_ascend_moe.observe.metrics import LayerLoad

LAYERS = {
    layer: LayerLoad([layer * (expert % 3) for expert in range(32)], 1.0, 1.2, 0.0, 0.1, 4096) for layer in (2, 1, 3)
}


def test_json_lines(tmp_path):
    path = tmp_path / "new" / "loads.jsonl"
    LoadReport(jsonl_path=str(path)).write(10, LAYERS)
    LoadReport(jsonl_path=str(path)).write(20, LAYERS)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["layer"]) for line in lines] == [(s, layer) for s in (10, 20) for layer in (2, 1, 3)]
    assert lines[0]["tokens_per_expert"] == LAYERS[2].tokens_per_expert and lines[0]["bytes_sent"] == 4096


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        LoadReport(tensorboard_writer=writer).write(10, LAYERS)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Scalars("moe_ascend/overload/layer_1")[0].value == pytest.approx(1.2)
    (image,) = events.Images("moe_ascend/tokens_per_expert")
    assert image.step == 10 and image.width > 200 and image.encoded_image_string.startswith(b"\x89PNG")


def test_heat_map_is_relative_to_each_layers_mean():
    axes = load_heat_map(LAYERS).axes[0]
    values = axes.images[0].get_array()
    assert values.shape == (3, 32) and values.mean(axis=1).tolist() == pytest.approx([1.0, 1.0, 1.0])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1", "2", "3"]


def test_heat_map_shows_dead_experts_and_names_the_most_loaded_one():
    loads = {1: LayerLoad([0, 1, 1, 2], 1.0, 1.0, 0.0, 0.0, 0), 2: LayerLoad([0, 0, 9, 3], 2.0, 1.0, 0.0, 0.0, 0)}
    axes = load_heat_map(loads).axes[0]
    assert axes.get_title("left") == "most: 3.00 x mean (layer 2, expert 2)\nwithout tokens (black): 3"
    image = axes.images[0]
    colors = image.to_rgba(image.get_array())
    assert (colors[0, 0] == (0, 0, 0, 1)).all() and (colors[1, 1] == (0, 0, 0, 1)).all()
    assert (colors[0, 1] != (0, 0, 0, 1)).any()


def test_heat_map_of_a_step_without_tokens():
    axes = load_heat_map({1: LayerLoad([0, 0], 0.0, 0.0, 0.0, 0.0, 0)}).axes[0]
    assert axes.get_title("left").endswith("without tokens (black): 2")
