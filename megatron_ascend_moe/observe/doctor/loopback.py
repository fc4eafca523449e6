"""One of the two processes of the loopback trial: `python -m … RANK PORT`."""

import datetime
import sys

import torch
import torch.distributed as dist


def run(rank: int, port: int) -> None:
    """Send rank + 1 rows to each process and check what arrives.

    Raises:
        RuntimeError: other rows than were sent.
    """
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=2, rank=rank, timeout=limit)
    sent = torch.full((2 * (rank + 1), 3), float(rank))
    received = torch.empty(3, 3)
    dist.all_to_all_single(received, sent, output_split_sizes=[1, 2], input_split_sizes=[rank + 1] * 2)
    if received[:, 0].tolist() != [0.0, 1.0, 1.0]:
        raise RuntimeError(f"rows of ranks {received[:, 0].tolist()} arrived, expected [0.0, 1.0, 1.0]")
    dist.destroy_process_group()


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]))
