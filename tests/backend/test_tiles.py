"""The tile planner on every published model shape, dtype and SoC: arithmetic only, no device and no Triton."""

import pytest

from megatron_ascend_moe.backend.device import Target
from megatron_ascend_moe.backend.soc import SOCS, find_soc
from megatron_ascend_moe.backend.tiles import UB_BLOCK, RowBuffers, plan_rows, plan_tokens, ub_budget
from megatron_ascend_moe.kernels import tuning
from megatron_ascend_moe.kernels.position_tiles import position_tile
from megatron_ascend_moe.kernels.tuning import route_tile, row_tile

# model: (H, E, K) of its published configuration
MODELS = {
    "mixtral-8x7b": (4096, 8, 2),
    "mixtral-8x22b": (6144, 8, 2),
    "deepseek-v2-lite": (2048, 64, 6),
    "deepseek-v2": (5120, 160, 6),
    "deepseek-v3": (7168, 256, 8),
    "qwen3-30b-a3b": (2048, 128, 8),
    "qwen3-235b-a22b": (4096, 128, 8),
    "qwen3-coder-480b": (6144, 160, 8),
    "qwen3-next-80b-a3b": (2048, 512, 10),
    "glm-4.5": (5120, 160, 8),
    "glm-4.5-air": (4096, 128, 8),
    "kimi-k2": (7168, 384, 8),
    "gpt-oss-20b": (2880, 32, 4),
    "gpt-oss-120b": (2880, 128, 4),
}
# What the kernels keep live: a copy, a tile assembled from rows, a weighted sum in fp32, a dot product.
KINDS = {
    "row copy": (RowBuffers(rows=1, vector_bytes=256), 1),
    "tile assembled from rows": (RowBuffers(rows=1, tiles=1, constant_tiles=1, vector_bytes=256), 16),
    "weighted sum": (RowBuffers(rows=2, fp32_rows=2, vector_bytes=512), 1),
    "dot product": (RowBuffers(rows=2, fp32_rows=3, vector_bytes=512), 1),
}


@pytest.mark.parametrize("soc_name", SOCS)
@pytest.mark.parametrize("itemsize", [2, 4], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_every_model_fits(model, kind, itemsize, soc_name):
    hidden = MODELS[model][0]
    soc = find_soc(soc_name)
    buffers, max_sub_block = KINDS[kind]
    plan = plan_rows(hidden, itemsize, soc.ub_bytes, buffers, kernel=kind, max_sub_block=max_sub_block)

    assert plan.block_x * itemsize % UB_BLOCK == 0
    assert plan.block_x * plan.column_tiles >= hidden > plan.block_x * (plan.column_tiles - 1)
    assert 1 <= plan.sub_block <= max_sub_block
    moved = (buffers.rows + buffers.tiles * plan.sub_block) * plan.block_x * itemsize * 2
    kept = buffers.constant_tiles * plan.sub_block * plan.block_x * itemsize + buffers.fp32_rows * plan.block_x * 4
    live = moved + kept + buffers.vector_bytes * 2
    assert plan.ub_bytes == live <= ub_budget(soc.ub_bytes)


@pytest.mark.parametrize("soc_name", SOCS)
@pytest.mark.parametrize("model", MODELS)
def test_every_kernel_has_a_tile_for_every_model(model, soc_name):
    """The planners that the launchers ask, with what each kernel really keeps live: none refuses, in either dtype."""
    (hidden, experts, topk), soc = MODELS[model], find_soc(soc_name)
    target = Target("ascend", soc.vector_cores, soc.ub_bytes, True, True)
    for itemsize in (2, 4):
        tiles = [row_tile(kernel, target, hidden, topk, itemsize) for kernel in tuning._ROW_BUFFERS]
        for kernel in ("gather", "scaled_gather", "scatter", "scaled_scatter", "weight_gradient"):
            tiles.append(position_tile(kernel, target, hidden, itemsize))
        for tile in tiles:
            assert tile.columns >= 1 and tile.columns * itemsize % UB_BLOCK == 0
    for kernel in tuning._ROUTE_TILE_BYTES:
        tile = route_tile(target, experts, topk, kernel)
        assert tile.tokens >= 1 and tile.experts >= experts and tile.slots >= topk


@pytest.mark.parametrize("soc_name", SOCS)
def test_rows_are_whole_where_they_fit_and_split_only_where_not(soc_name):
    soc = find_soc(soc_name)
    whole = plan_rows(7168, 2, soc.ub_bytes, RowBuffers(rows=1), kernel="copy")
    assert (whole.block_x, whole.column_tiles) == (7168, 1)
    wide = 4 * soc.ub_bytes
    split = plan_rows(wide, 2, soc.ub_bytes, RowBuffers(rows=1), kernel="copy")
    assert split.column_tiles == -(-wide * 2 * 2 // ub_budget(soc.ub_bytes))


def test_figures_of_deepseek_v3_on_910b3():
    # 147,456 B to fill: a row of 7,168 bf16 takes 14,336 B, twice for double buffering.
    plan = plan_rows(
        7168, 2, find_soc("Ascend910B3").ub_bytes, RowBuffers(rows=1, tiles=1, vector_bytes=64), kernel="copy",
        max_sub_block=16,
    )
    assert (plan.block_x, plan.column_tiles, plan.sub_block) == (7168, 1, 4)
    assert (plan.ub_bytes, plan.ub_budget) == (5 * 2 * 14336 + 128, 147456)


def test_without_multibuffer_a_plan_takes_half():
    one = plan_rows(4096, 2, 196608, RowBuffers(rows=1, vector_bytes=32), kernel="copy", multibuffer=False)
    two = plan_rows(4096, 2, 196608, RowBuffers(rows=1, vector_bytes=32), kernel="copy")
    assert 2 * one.ub_bytes == two.ub_bytes


@pytest.mark.parametrize(("hidden", "itemsize", "block_x"), [(1, 2, 16), (7, 4, 8), (100, 2, 112), (2880, 2, 2880)])
def test_tiles_are_whole_blocks_of_32_bytes(hidden, itemsize, block_x):
    assert plan_rows(hidden, itemsize, 196608, RowBuffers(rows=1), kernel="copy").block_x == block_x


def test_what_cannot_fit_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"scatter: no tile fits .* 160000 B .* 128 B, of 147456 B \(75% of 196608 B\)"):
        plan_rows(64, 2, 196608, RowBuffers(rows=1, tiles=1, vector_bytes=80000), kernel="scatter")
    with pytest.raises(ValueError, match=r"count: one token does not fit .* 200000 B beside 64 B .* of 147456 B"):
        plan_tokens(200000, 64, 196608, kernel="count")
    with pytest.raises(ValueError, match="at least 1, got 0 and 1"):
        plan_rows(0, 2, 196608, RowBuffers(rows=1), kernel="copy")


@pytest.mark.parametrize("soc_name", SOCS)
@pytest.mark.parametrize("model", MODELS)
def test_token_blocks(model, soc_name):
    experts = MODELS[model][1]
    ub_bytes = find_soc(soc_name).ub_bytes
    tokens = plan_tokens(32 * experts, 12 * experts, ub_bytes, kernel="count")
    assert tokens & (tokens - 1) == 0
    assert 12 * experts + tokens * 32 * experts <= ub_budget(ub_bytes)
    assert tokens == 64 or 12 * experts + 2 * tokens * 32 * experts > ub_budget(ub_bytes)


def test_an_unknown_soc_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown SoC 'Ascend310': expected one of Ascend910B1, "):
        find_soc("Ascend310")
