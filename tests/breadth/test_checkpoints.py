"""Checkpoints know nothing of the dispatcher: save with it, load without it, and the reverse, across EP sizes."""

import pytest

JOBS = "tests.breadth.checkpoint_jobs"
BEFORE, AFTER = 3, 4
OURS = {"pad_multiple": 8}


@pytest.mark.parametrize(
    ("saved_with", "loaded_with"),
    [(OURS, None), (None, OURS), (OURS, OURS)],
    ids=["plugin to stock", "stock to plugin", "plugin to plugin"],
)
@pytest.mark.parametrize("ep", [2, 4])
def test_losses_continue(distributed_pool, tmp_path, saved_with, loaded_with, ep):
    """Saved with EP 2 on 2 processes; loaded with EP 2 on 2, or EP 4 on 4."""
    steps = {"directory": str(tmp_path), "before": BEFORE, "after": AFTER}
    saved = distributed_pool(2).submit(f"{JOBS}:save", layout={"ep": 2}, settings=saved_with, **steps)
    loaded = distributed_pool(ep).submit(f"{JOBS}:load", layout={"ep": ep}, settings=loaded_with, **steps)
    (expected, _), *_ = saved
    assert len(expected) == AFTER and len(set(expected)) == AFTER
    for losses in loaded:
        assert losses == pytest.approx(expected, rel=1e-5)


def test_no_keys_of_ours(distributed_pool, tmp_path):
    keys = []
    for name, settings in (("stock", None), ("ours", OURS)):
        directory = tmp_path / name
        directory.mkdir()
        job = {"directory": str(directory), "before": 1, "after": 1, "layout": {"ep": 2}, "settings": settings}
        keys.append(distributed_pool(2).submit(f"{JOBS}:save", **job)[0][1])
    assert keys[0] == keys[1] and any("experts" in key for key in keys[0])
    assert not any("dispatcher" in key for key in keys[1])

