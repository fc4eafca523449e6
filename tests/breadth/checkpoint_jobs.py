"""Jobs of test_checkpoints.py: train, save through Megatron's distributed checkpointing, load, train on."""

from __future__ import annotations

import multiprocessing

import torch
import torch.distributed as dist

from tests import gpt_moe

MICROBATCHES = 4  # of a step, over all data-parallel ranks: the same data for every layout


def _start(layout, settings, seed):
    """Model, optimizer and data of a process."""
    from megatron.core import parallel_state

    layout = {"tp": 1, "pp": 1, "ep": 1, "etp": 1} | layout
    config = gpt_moe.build_config(layout, num_layers=1)
    (model,), optimizer = gpt_moe.build_optimizer(config, [gpt_moe.build_model(config, layout, seed)])
    own = MICROBATCHES // parallel_state.get_data_parallel_world_size()
    return config, model, optimizer, own


def _batch(step, own):
    """This rank's microbatches of a step."""
    from megatron.core import parallel_state

    first = step * MICROBATCHES + parallel_state.get_data_parallel_rank() * own
    for number in range(first, first + own):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, gpt_moe.VOCABULARY, (gpt_moe.BATCH, gpt_moe.SEQUENCE + 1), generator=generator)
        yield gpt_moe.as_batch(tokens)


def _train(config, model, optimizer, own, steps):
    """Mean losses of the steps over all ranks."""
    losses = []
    for step in steps:
        loss, _ = gpt_moe.training_step(config, [model], optimizer, [_batch(step, own)], own)
        loss = torch.tensor(loss)
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
    return losses


def _sharded(model, optimizer, is_loading):
    state = {"model": model.module.sharded_state_dict()}
    state["optimizer"] = optimizer.sharded_state_dict(state["model"], is_loading=is_loading)
    return state


def save(directory, layout, settings, before, after):
    """Train `before` steps, save, train `after` more; their losses, and the keys saved."""
    from megatron.core import dist_checkpointing

    # the checkpoint's writer starts processes, which the pool's workers, being daemons, may not
    multiprocessing.current_process()._config["daemon"] = False
    with gpt_moe.dispatcher(settings):
        config, model, optimizer, own = _start(layout, settings, seed=1234)
        _train(config, model, optimizer, own, range(before))
        state = _sharded(model, optimizer, is_loading=False)
        dist_checkpointing.save(state, directory)
        losses = _train(config, model, optimizer, own, range(before, before + after))
    gpt_moe.release(model)
    keys = sorted(dist_checkpointing.load_tensors_metadata(directory))
    return losses, keys


def load(directory, layout, settings, before, after):
    """Load into differently initialised weights and train `after` steps from step `before`."""
    from megatron.core import dist_checkpointing

    with gpt_moe.dispatcher(settings):
        config, model, optimizer, own = _start(layout, settings, seed=99)
        state = dist_checkpointing.load(_sharded(model, optimizer, is_loading=True), directory)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        losses = _train(config, model, optimizer, own, range(before, before + after))
    gpt_moe.release(model)
    return losses
