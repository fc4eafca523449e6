"""Every kernel through Ascend's own compiler: it fits, stays double-buffered, moves rows by DMA and no row too many.

No device runs here. Shapes cover each hidden size and dtype of the published models on Ascend910B3, and the widest
on the other generations; `python -m megatron_ascend_moe compile --all` takes all shapes on all SoCs.
"""

import contextlib
import dataclasses
import io
import itertools
from concurrent.futures import Future

import pytest

from megatron_ascend_moe.backend.soc import SOCS, find_soc
from megatron_ascend_moe.backend.tiles import ub_budget
from megatron_ascend_moe.toolchain import compile as compile_command
from megatron_ascend_moe.toolchain.compile import compile_shape
from megatron_ascend_moe.toolchain.model_shapes import MODEL_SHAPES

# hidden size -> the model shape of that size with the most experts
WIDEST = {}
for shape in sorted(set(MODEL_SHAPES.values())):
    WIDEST[shape[0]] = max(WIDEST.get(shape[0], shape), shape, key=lambda s: (s[1], s[2]))

OTHER_SOCS = ("Ascend910B1", "Ascend910_9382", "Ascend910_9362")
RUNS = {
    **{(hidden, dtype, "Ascend910B3"): ("Ascend910B3",) for hidden in WIDEST for dtype in ("bf16", "fp32")},
    (7168, "bf16", "other A2 and A3"): OTHER_SOCS,
    (7168, "bf16", "A5"): ("Ascend950PR_9589",),
}


@pytest.fixture(scope="module")
def runs(compile_pool):
    """All runs at once, so that the pool's processes share them."""
    return {
        key: compile_pool.submit(compile_shape, *WIDEST[key[0]], key[1], socs, run=socs[0] == "Ascend910B3")
        for key, socs in RUNS.items()
    }


@pytest.mark.parametrize("key", RUNS, ids=lambda key: "-".join(map(str, key)).replace(" ", "-"))
def test_every_kernel_obeys_the_rules(runs, key):
    reports = runs[key].result()
    assert {one.soc for one in reports} == set(RUNS[key])
    assert len({one.operation for one in reports}) == len(reports) / len(RUNS[key]) == 20
    assert {f"{one.soc} {one.operation}": one.problems for one in reports if one.problems} == {}
    for one in reports:
        assert 0 < one.ub_bytes <= one.ub_size == find_soc(one.soc).ub_bytes
        assert one.dmas > 0 and not one.multibuffer_dropped
        assert one.double_buffered is (True if one.floor_bytes else None)
        assert one.ub_reported == find_soc(one.soc).memory_report


@pytest.mark.parametrize("hidden", WIDEST)
def test_row_traffic_is_the_floor_exactly(runs, hidden):
    for dtype in ("bf16", "fp32"):
        moving = [one for one in runs[hidden, dtype, "Ascend910B3"].result() if one.floor_bytes]
        assert len(moving) == 15
        assert {one.operation: one.row_bytes for one in moving} == {one.operation: one.floor_bytes for one in moving}


@pytest.mark.parametrize("hidden", WIDEST)
def test_plans_keep_the_margin_for_older_compilers(runs, hidden):
    for dtype in ("bf16", "fp32"):
        for one in runs[hidden, dtype, "Ascend910B3"].result():
            assert one.ub_bytes <= ub_budget(one.ub_size), one.operation


SMALL = (64, 8, 2)


def _compile_again():
    """Reports of a small shape, then again with these as the earlier ones: marked, one IR and one SoC apart."""
    first = compile_shape(*SMALL, "fp16", ("Ascend910B3",), run=False)
    marked = [dataclasses.replace(one, vector_ops=-1) for one in first]
    marked[0] = dataclasses.replace(marked[0], ir="another")
    marked[1] = dataclasses.replace(marked[1], soc="Ascend910B4")
    earlier = {compile_command.key_of(one): one for one in marked}
    return first, compile_shape(*SMALL, "fp16", ("Ascend910B3",), run=False, earlier=earlier)


def test_earlier_reports_are_taken_where_soc_shape_and_ir_are_the_same(compile_pool):
    first, again = compile_pool.submit(_compile_again).result()
    assert again[:2] == first[:2]
    assert again[2:] == [dataclasses.replace(one, vector_ops=-1) for one in first[2:]]


def test_earlier_reports_of_another_compiler_are_refused(compile_pool, monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    file = tmp_path / "earlier.json"
    for text, message in (
        ('{"compiler": "ascendnpu-ir 1.0.0", "columns": [], "shapes": []}', "was made by ascendnpu-ir 1.0.0, expected"),
        ('{"compiler": "ascendnpu-ir 1.2.0"}', "is no output of `compile --json` of this version"),
        ("[]", "is no output of `compile --json` of this version"),
        ("nothing", "is no output of `compile --json` of this version"),
    ):
        file.write_text(text)
        assert compile_command.main(["--all", "--reuse", str(file)]) == 2
        assert message in capsys.readouterr().err
    assert compile_command.main(["--all", "--reuse", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        compile_command.main(["--reuse", str(file)])
    assert "--reuse is for --all" in capsys.readouterr().err


def test_every_soc_and_shape_is_work_of_compile_all(monkeypatch):
    """Each with its own Unified Buffer's SoCs: nothing is compiled here."""
    work = []
    monkeypatch.setattr(compile_command, "_compile_shapes", lambda shapes, socs, earlier: work.append((shapes, socs)) or [])
    monkeypatch.setattr(compile_command, "ProcessPoolExecutor", _HereAndNow)
    assert compile_command.compile_all(SOCS, jobs=1) == []
    done = [(shape, soc) for shapes, socs in work for shape in shapes for soc in socs]
    assert sorted(done) == sorted(itertools.product(set(MODEL_SHAPES.values()), SOCS))


class _HereAndNow:
    """A pool that runs what it is given at once, in this process."""

    def __init__(self, *arguments, **options):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        pass

    def submit(self, function, *arguments):
        future = Future()
        future.set_result(function(*arguments))
        return future


def test_a_missing_compiler_is_named_with_the_command_that_gets_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("MEGATRON_ASCEND_MOE_BISHENGIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    pytest.importorskip("triton.backends.ascend")
    assert compile_command.main([]) == 2
    message = capsys.readouterr().err
    assert "no bishengir-compile (needed for Ascend910B3)" in message
    assert "pip install --no-deps ascendnpu-ir==1.2.0" in message


def test_a_missing_llvm_is_named_with_the_command_that_gets_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("MEGATRON_ASCEND_MOE_LLVM", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    pytest.importorskip("triton.backends.ascend")
    pytest.importorskip("ascendnpuir")
    assert compile_command.main([]) == 2
    assert "no mlir-opt of LLVM 19" in (message := capsys.readouterr().err)
    assert "apt-get install mlir-19-tools llvm-19" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--experts", "0"], "--experts 0: expected 1 to 4096"),
        (["--experts", "5000"], "--experts 5000: expected 1 to 4096"),
        (["--experts", "4", "--topk", "8"], "--topk 8: expected 1 to --experts 4"),
        (["--topk", "0"], "--topk 0: expected 1 to --experts 256"),
        (["--hidden", "8", "--topk", "8"], "--hidden 8: expected more than --topk 8"),
        (["--all", "--jobs", "0"], "--jobs 0: expected at least 1"),
        (["--all", "--experts", "8"], "--experts is for one shape, --all takes every one"),
    ],
)
def test_shapes_that_cannot_be_are_refused(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        compile_command.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def _compile_too_many_experts():
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        return compile_command.main(["--hidden", "64", "--experts", "4096"]), printed.getvalue()


def test_a_kernel_that_cannot_fit_is_named_with_its_numbers(compile_pool):
    code, printed = compile_pool.submit(_compile_too_many_experts).result()
    assert code == 1
    assert "compile: route_count: one token does not fit the Unified Buffer" in printed


def test_an_unknown_soc_lists_the_known_ones(capsys):
    with pytest.raises(SystemExit) as stop:
        compile_command.main(["--soc", "Ascend310"])
    assert stop.value.code == 2
    assert "Ascend910B3" in capsys.readouterr().err
