"""One record a training step from Megatron's loop: a progress bar on a terminal, and a JSON-lines file.

Megatron's loop has no per-step hook; the one place that sees the reduced losses, the gradient norm and the step
number together is its own `training_log`, which is wrapped here. Its log lines and its TensorBoard go on as usual.
"""

import functools
import inspect
import json
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm


def watch_steps(args, jsonl: str | None) -> None:
    """Follow every step of the loop that is about to start, on the rank that knows the loss (the last one).

    args: Megatron's parsed arguments. jsonl: file to append one JSON object a step to, or None. A resumed run
    appends to the file of the run it continues; where an iteration appears twice the later line counts.
    """
    from megatron.training import training

    watcher = _StepWatcher(args, jsonl)
    stock_log = training.training_log
    signature = inspect.signature(stock_log)

    @functools.wraps(stock_log)
    def training_log(*positional, **named):
        given = signature.bind(*positional, **named).arguments
        watcher.step(given["iteration"], given["loss_dict"], given["grad_norm"], given["learning_rate"])
        return stock_log(*positional, **named)

    training.training_log = training_log


class _StepWatcher:
    """Times the steps and shows them."""

    def __init__(self, args, jsonl: str | None):
        self._args = args
        self._jsonl = jsonl
        self._seen = None  # the last iteration: Megatron logs the first one twice
        self._bar = None
        self._before = None  # the first step has no step before it to be timed from

    def step(self, iteration: int, losses: dict, grad_norm: float | None, learning_rate: float | None) -> None:
        if not losses or not _is_last_rank() or iteration == self._seen:
            return
        now = time.perf_counter()
        seconds = now - self._before if self._before else None
        self._before, self._seen = now, iteration
        tokens = self._args.global_batch_size * self._args.seq_length
        record = {
            "iteration": iteration,
            "consumed_samples": self._args.consumed_train_samples,
            **{name: float(loss) for name, loss in losses.items()},
            "grad norm": grad_norm,
            "learning rate": learning_rate,
            "ms": round(seconds * 1e3, 3) if seconds else None,
            "tokens/s": round(tokens / seconds, 1) if seconds else None,
        }
        if self._jsonl:
            Path(self._jsonl).parent.mkdir(parents=True, exist_ok=True)
            with open(self._jsonl, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        self._show(record)

    def _show(self, record: dict) -> None:
        """Advance the bar; where no terminal shows it, Megatron's own log lines are the progress."""
        if self._bar is None:
            self._bar = tqdm(
                total=self._args.train_iters,
                initial=record["iteration"] - 1,
                unit="it",
                disable=not sys.stderr.isatty(),
            )
        speed = f", {record['ms']:.0f} ms, {record['tokens/s']:.0f} tokens/s" if record["ms"] else ""
        self._bar.set_postfix_str(f"lm loss {record['lm loss']:.4f}{speed}")
        self._bar.update()
        if record["iteration"] >= self._args.train_iters:
            self._bar.close()


def _is_last_rank() -> bool:
    return torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
