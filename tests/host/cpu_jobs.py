"""Jobs of test_cpu.py: what Megatron relies on and gloo alone does not give."""

import torch
import torch.distributed as dist


def uneven_all_gather() -> list[list[float]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = torch.full((rank + 1, 2), float(rank), device="cuda")
    parts = [torch.empty(r + 1, 2, device=torch.cuda.current_device()) for r in range(world)]
    dist.all_gather(parts, mine)
    return [part[:, 0].tolist() for part in parts]


def all_to_all_with_tensor_splits() -> list[float]:
    rank = dist.get_rank()
    received = torch.empty(2)
    ones = torch.ones(2, dtype=torch.int64)
    dist.all_to_all_single(received, torch.tensor([10.0 * rank, 10.0 * rank + 1]), ones, ones)
    return received.tolist()


def tracked_dropout_masks() -> list[bool]:
    """Megatron's random-state tracker: the same stream continues, another stream does not disturb it."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel()

    def draw(disturb: bool) -> list[torch.Tensor]:
        tensor_parallel.model_parallel_cuda_manual_seed(5)
        masks = []
        for _ in range(2):
            with tensor_parallel.get_cuda_rng_tracker().fork():
                masks.append(torch.rand(8))
            if disturb:
                torch.rand(3)
        return masks

    calm, disturbed = draw(False), draw(True)
    return [torch.equal(*calm), *[torch.equal(a, b) for a, b in zip(calm, disturbed, strict=True)]]
