"""One rank of tests/test_faults.py: `python -m tests.fault_worker FAULT`, with torchrun's environment variables.

Rank 0 meets the fault in its second pass; every rank prints what its Python saw.
"""

import os
import signal
import sys
from datetime import timedelta

TIMEOUT_SECONDS = 8  # of the process group


def main(fault: str) -> None:
    from megatron_ascend_moe.host import cpu

    cpu.enable()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_SECONDS))
    try:
        if fault == "nan":
            _train_with_a_nan()
        else:
            _dispatch(fault)
        print("finished", flush=True)
    except Exception as error:
        print(f"raised {type(error).__name__}: {error}", flush=True)
        sys.exit(1)


def _dispatch(fault: str) -> None:
    import torch.distributed as dist

    from tests import dispatcher_jobs as jobs

    rank = dist.get_rank()
    dispatcher = jobs.make_dispatcher(ep=2)
    weights = jobs.expert_weights()[rank * 4 : rank * 4 + 4]
    for step in range(2):
        hidden, probs, routed = jobs.routes(9, rank + step)
        faulty = step == 1 and rank == 0
        rows, p = dispatcher.dispatch_preprocess(hidden, routed, probs)
        if faulty and fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        rows, p = dispatcher.token_dispatch(rows, p)
        rows, counts, p = dispatcher.dispatch_postprocess(rows, p)
        if faulty and fault == "raises":
            raise RuntimeError("an expert failed on this rank")
        y = jobs.run_experts(rows, counts, p, weights)
        dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(y)))


def _train_with_a_nan() -> None:
    import torch
    import torch.distributed as dist

    from tests import gpt_moe

    class FailingLoss(torch.autograd.Function):
        """Megatron's loss check stands in its training loop; what stands in core is the gradients' check."""

        @staticmethod
        def forward(ctx, loss):
            return loss * float("nan")

        @staticmethod
        def backward(ctx, grad):
            return grad * float("nan")

    poison = FailingLoss.apply if dist.get_rank() == 0 else None
    gpt_moe.train({"ep": 2}, {}, steps=2, check_gradients=True, change_loss=poison)


if __name__ == "__main__":
    main(sys.argv[1])
