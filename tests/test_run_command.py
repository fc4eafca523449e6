"""`torchrun … -m megatron_ascend_moe run --device cpu` through Megatron's whole training loop (megatron-core 0.19).

The script is examples/pretrain_gpt_moe.py on two gloo processes with expert parallelism; every run is a process
tree of its own.
"""

import contextlib
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

if importlib.util.find_spec("megatron.training") is None:
    pytest.skip("this megatron-core has no training loop: tested with 0.19.2", allow_module_level=True)

ROOT = Path(__file__).parent.parent
SCRIPT = str(ROOT / "examples" / "pretrain_gpt_moe.py")
RUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
RUN += ["-m", "megatron_ascend_moe", "run", "--device", "cpu", SCRIPT]
ITERATIONS, SAVE_INTERVAL = 12, 5
TOPK, TOKENS_A_STEP = 2, 4 * 32
FLAGS = f"""
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --swiglu
    --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4
    --train-iters {ITERATIONS} --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --num-workers 0
    --num-experts 8 --moe-router-topk {TOPK} --moe-aux-loss-coeff 1e-2 --expert-model-parallel-size 2
    --disable-bias-linear --transformer-impl local --use-cpu-initialization --distributed-backend gloo
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion
    --no-bias-dropout-fusion --no-persist-layer-norm --no-rope-fusion
    --log-interval 1 --eval-iters 0 --eval-interval 1000
""".split()
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "",
    "ASCEND_RT_VISIBLE_DEVICES": "",
}
LOSS_AND_NORM = re.compile(r"iteration +(\d+)/.*lm loss: (\S+) .*grad norm: (\S+) ")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> list[str]:
    """Flags that train on a text of a few thousand words."""
    folder = tmp_path_factory.mktemp("text")
    words = random.Random(0).choices("the expert takes every token that a router sends to it\n".split(" "), k=4000)
    (folder / "words.txt").write_text(" ".join(words), encoding="utf-8")
    return ["--text-path", str(folder / "words.txt"), "--text-cache", str(folder / "cache")]


@pytest.fixture(scope="module")
def uninterrupted(text, tmp_path_factory):
    """dispatcher -> (its run's output, its metrics file, its TensorBoard folder); each is run once."""
    runs = {}

    def run(dispatcher: str):
        if dispatcher not in runs:
            folder = tmp_path_factory.mktemp(dispatcher)
            own = ["--metrics-jsonl", str(folder / "steps.jsonl"), "--tensorboard-dir", str(folder / "tensorboard")]
            own += ["--moe-ascend-load-report", str(folder / "loads.jsonl")] if dispatcher == "ascend" else []
            runs[dispatcher] = _run(*text, *own, "--moe-token-dispatcher-type", dispatcher), folder
        return runs[dispatcher]

    return run


def _run(*flags: str) -> str:
    done = subprocess.run([*RUN, *FLAGS, *flags], env=ENVIRONMENT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def _steps(jsonl: Path) -> dict[int, dict]:
    """The last record of each iteration, without what is timed."""
    records = [json.loads(line) for line in jsonl.read_text().splitlines()]
    return {r["iteration"]: {k: v for k, v in r.items() if k not in ("ms", "tokens/s")} for r in records}


@pytest.mark.timeout(900)
def test_ascend_logs_the_numbers_of_alltoall(uninterrupted):
    stock, ascend = (LOSS_AND_NORM.findall(uninterrupted(name)[0]) for name in ("alltoall", "ascend"))
    assert len(stock) == ITERATIONS
    assert ascend == stock
    assert "dispatcher: ascend" in uninterrupted("ascend")[0]
    assert "dispatcher: ascend" not in uninterrupted("alltoall")[0]


def test_steps_are_recorded_as_json_lines_and_in_tensorboard(uninterrupted):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, folder = uninterrupted("ascend")
    steps = _steps(folder / "steps.jsonl")
    assert sorted(steps) == list(range(1, ITERATIONS + 1))
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    drawn = {event.step: event.value for event in events.Scalars("lm loss")}
    assert drawn == pytest.approx({i: step["lm loss"] for i, step in steps.items()}, rel=1e-6)
    assert steps[ITERATIONS]["lm loss"] < steps[1]["lm loss"]


@pytest.mark.timeout(900)
def test_expert_loads_are_recorded_as_json_lines_and_drawn_in_tensorboard(uninterrupted):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, folder = uninterrupted("ascend")
    loads = [json.loads(line) for line in (folder / "loads.jsonl").read_text().splitlines()]
    assert [(load["step"], load["layer"]) for load in loads] == [
        (i, n) for i in range(1, ITERATIONS + 1) for n in (1, 2)
    ]
    assert all(sum(load["tokens_per_expert"]) == TOKENS_A_STEP * TOPK for load in loads)
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"images": 0}).Reload()
    pictures = events.Images("moe_ascend/tokens_per_expert")
    assert [picture.step for picture in pictures] == list(range(1, ITERATIONS + 1))
    assert pictures[0].encoded_image_string.startswith(b"\x89PNG")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("dispatcher", ["alltoall", "ascend"])
def test_a_killed_run_resumes_as_if_nothing_had_happened(dispatcher, uninterrupted, text, tmp_path):
    expected = _steps(uninterrupted(dispatcher)[1] / "steps.jsonl")
    checkpoints = ["--save", str(tmp_path), "--load", str(tmp_path), "--save-interval", str(SAVE_INTERVAL)]
    jsonl = tmp_path / "steps.jsonl"
    flags = [*text, *checkpoints, "--metrics-jsonl", str(jsonl), "--moe-token-dispatcher-type", dispatcher]
    killed_at = random.randint(SAVE_INTERVAL + 1, ITERATIONS - 1)
    _run_and_kill(flags, jsonl, killed_at)
    before = _steps(jsonl)
    assert killed_at <= max(before) < ITERATIONS, f"killed at {killed_at}, reached {max(before)}"
    output = _run(*flags)
    assert re.search(r"loaded checkpoint from .* at iteration [1-9]", output)
    assert {**before, **_steps(jsonl)} == expected, f"killed at step {killed_at}"


def _run_and_kill(flags: list[str], jsonl: Path, step: int) -> None:
    """Start the run, and kill every process of it (SIGKILL) once `step` has been recorded."""
    with _run_up_to(flags, jsonl, step) as (run, family):
        for process in [run, *family]:
            process.kill()


@contextlib.contextmanager
def _run_up_to(flags: list[str], jsonl: Path, step: int):
    """A run that has recorded `step`, as its torchrun (a Popen) and the processes below (psutil's)."""
    import psutil

    with subprocess.Popen(
        [*RUN, *FLAGS, *flags], env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as run:
        deadline = time.monotonic() + 240
        while not jsonl.exists() or len(jsonl.read_text().splitlines()) < step:
            assert run.poll() is None and time.monotonic() < deadline, f"step {step} was not reached"
            time.sleep(0.02)
        yield run, psutil.Process(run.pid).children(recursive=True)


@pytest.mark.timeout(400)
def test_a_rank_that_dies_takes_the_whole_run_with_it(text, tmp_path):
    import psutil

    jsonl = tmp_path / "steps.jsonl"
    flags = [*text, "--metrics-jsonl", str(jsonl), "--moe-token-dispatcher-type", "ascend", "--train-iters", "100000"]
    with _run_up_to(flags, jsonl, 3) as (run, family):
        (second,) = (process for process in family if process.environ().get("LOCAL_RANK") == "1")
        second.kill()
        assert run.wait(60) not in (0, None)
        assert not psutil.wait_procs(family, timeout=10)[1]


def test_an_unknown_dispatcher_is_refused_with_the_choices():
    command = [sys.executable, "-m", "megatron_ascend_moe", "run", "--device", "cpu", SCRIPT, *FLAGS]
    done = subprocess.run(
        [*command, "--moe-token-dispatcher-type", "nonsense"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 2
    assert re.search(r"invalid choice: 'nonsense' \(choose from .*alltoall.*ascend", done.stderr)
