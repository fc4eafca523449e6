"""Settings must be equal on all ranks that exchange rows: compared once per group, in its first forward."""

import weakref
from typing import Any

import torch.distributed as dist

_agreed: weakref.WeakSet = weakref.WeakSet()


def check_agreement(settings: dict[str, Any], group: dist.ProcessGroup) -> None:
    """Compare `settings` over `group` with one small collective; a group is compared once.

    Args:
        settings: names and values that must be equal everywhere; values must pickle.
        group: the EP x ETP group.

    Raises:
        ValueError: on every rank of the group, naming each setting that differs and its values by rank.
    """
    if group in _agreed:
        return
    everyone: list[dict[str, Any]] = [{}] * group.size()
    dist.all_gather_object(everyone, settings, group=group)
    differing = [
        f"{name} is " + ", ".join(f"{rank[name]!r} on rank {i}" for i, rank in enumerate(everyone))
        for name in settings
        if len({repr(rank[name]) for rank in everyone}) > 1
    ]
    if differing:
        raise ValueError(
            f"settings differ within an expert-parallel group: {'; '.join(differing)}: "
            "start every rank with the same flags and the same version"
        )
    _agreed.add(group)
