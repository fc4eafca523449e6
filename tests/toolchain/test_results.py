"""The results checked in: of every model, SoC and dtype, without a fault, and of the kernels as they are."""

import json

import pytest

from megatron_ascend_moe.backend.soc import SOCS
from megatron_ascend_moe.toolchain.compile import fingerprints
from megatron_ascend_moe.toolchain.model_shapes import MODEL_SHAPES
from megatron_ascend_moe.toolchain.results import FOLDER, from_json, to_json

OPERATIONS = 20
DTYPES = ("bf16", "fp32")
COMMAND = "python -m megatron_ascend_moe compile --all --json"
AGAIN = f"{COMMAND} --reuse OLD > NEW"  # what compiles no more than has changed
FILE = FOLDER / "ascendnpu-ir-1.2.0.json"
ONE_OF_EACH_UB = ("Ascend910B3", "Ascend950PR_9589")  # tiles, hence the IR, depend on the Unified Buffer's size alone


@pytest.fixture(scope="module")
def reports():
    return from_json(FILE.read_text())


def test_the_file_says_what_made_it():
    head = json.loads(FILE.read_text())
    assert head["command"].startswith(COMMAND) and "--soc" not in head["command"]
    assert head["compiler"] == "ascendnpu-ir 1.2.0"
    assert head["front end"] == "triton-ascend 3.2.0" and head["note"].startswith("No device ran")


def test_every_model_soc_and_dtype_is_there(reports):
    seen = {}
    for one in reports:
        seen.setdefault(((one.hidden, one.experts, one.topk), one.dtype, one.soc), []).append(one.operation)
    assert set(seen) == {(shape, dtype, soc) for shape in MODEL_SHAPES.values() for dtype in DTYPES for soc in SOCS}
    assert {(len(operations), len(set(operations))) for operations in seen.values()} == {(OPERATIONS, OPERATIONS)}


def test_no_kernel_has_a_fault(reports):
    for one in reports:
        assert not one.problems, f"{one.soc} {one.operation}: {one.problems}"
        assert 0 < one.ub_bytes <= one.ub_size == SOCS[one.soc].ub_bytes
        assert one.ub_reported == SOCS[one.soc].memory_report
        assert one.row_bytes == one.floor_bytes and one.dmas > 0 and not one.multibuffer_dropped
        assert one.double_buffered is (True if one.floor_bytes else None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", sorted(set(MODEL_SHAPES.values())), ids=str)
def test_the_file_is_of_these_kernels(compile_pool, reports, shape, dtype):
    """By the IR that Triton-Ascend makes of them now; a change to another device's branch leaves it as it is."""
    now = {soc: compile_pool.submit(fingerprints, *shape, dtype, soc) for soc in ONE_OF_EACH_UB}
    for soc, found in now.items():
        then = {
            one.operation: one.ir
            for one in reports
            if (one.hidden, one.experts, one.topk, one.dtype, one.soc) == (*shape, dtype, soc)
        }
        changed = [name for name, ir in found.result().items() if then.get(name) != ir]
        assert not changed, f"{FILE.name} is stale, {changed} changed: make it anew, `{AGAIN}`"


@pytest.mark.usefixtures("compile_pool")  # whose versions are in the text
def test_reports_survive_json(reports):
    some = [one for one in reports if one.hidden == 2880 and one.soc in ONE_OF_EACH_UB]
    assert sorted(from_json(to_json(some, [])), key=str) == sorted(some, key=str)
