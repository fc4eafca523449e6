"""The name `te_general_gemm`, which Megatron-Core 0.13 to 0.16.1 reads but binds only with TransformerEngine.

`moe_utils` imports it beside other TransformerEngine names and forgets it in the `except ImportError`; the
router's first forward then dies with a NameError. Later versions bind it to None, which is what the router
tests for, and so do these two functions.
"""

_NAME = "te_general_gemm"
_provided = False


def provide_router_gemm_name() -> bool:
    """Bind `moe_utils.te_general_gemm = None` where the name is missing; whether this call did so."""
    global _provided
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, _NAME):
        setattr(moe_utils, _NAME, None)
        _provided = True
        return True
    return False


def withdraw_router_gemm_name() -> None:
    """Remove the name again if `provide_router_gemm_name` put it there."""
    global _provided
    if _provided:
        from megatron.core.transformer.moe import moe_utils

        delattr(moe_utils, _NAME)
        _provided = False
