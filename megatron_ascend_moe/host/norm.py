"""A torch norm that is safe under sequence parallel, for hosts without TransformerEngine and Apex.

Megatron's MoE training with tensor parallelism requires sequence parallelism, and Megatron's torch norm
(`WrappedTorchNorm`, all there is without TransformerEngine and Apex) refuses it. The norm itself is right: it
acts on one token at a time. What is missing is the mark `sequence_parallel` on its parameters, by which
`finalize_model_grads` sums their gradients over the tensor-parallel ranks, each of which saw only its own
part of the sequence.

The replacement sits in the class (`WrappedTorchNorm.__new__`), not in the module's name: the layer specs bind
the class at import, and the class must stay the same object.
"""

import copy

_stock_new: staticmethod | None = None


def provide_safe_norm() -> bool:
    """Let `WrappedTorchNorm` serve `config.sequence_parallel`; without that flag it behaves as before.

    Returns whether this call changed it.

    Everything else that Megatron refuses there (persistent, zero-centered, memory-efficient) stays refused.
    Calling it twice is calling it once. Norms that were built before the call are not changed.
    """
    global _stock_new
    if _stock_new is not None:
        return False
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    _stock_new = WrappedTorchNorm.__dict__["__new__"]
    WrappedTorchNorm.__new__ = staticmethod(_new_safe_norm)
    return True


def withdraw_safe_norm() -> None:
    """Give `WrappedTorchNorm` its own `__new__` back (the identical object); nothing to do if it has it."""
    global _stock_new
    if _stock_new is None:
        return
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    WrappedTorchNorm.__new__ = _stock_new
    _stock_new = None


def _new_safe_norm(cls, config, *args, **kwargs):
    """Build the stock norm and mark its parameters: their gradients are to be summed over tensor parallel."""
    if not config.sequence_parallel:
        return _stock_new.__func__(cls, config, *args, **kwargs)
    unsplit = copy.copy(config)
    unsplit.sequence_parallel = False
    norm = _stock_new.__func__(cls, unsplit, *args, **kwargs)
    for parameter in norm.parameters():
        parameter.sequence_parallel = True
    return norm
