"""What Triton's NumPy interpreter gets wrong or does slowly, mended in this process.

- It truncates fp32 to bf16, its round-to-nearest carries wrongly out of a full mantissa, and bf16 subnormals change
  value on the way to fp32. Torch converts instead: to nearest, ties to even, as hardware does.
- NumPy widens int32 sums and cumulative sums to int64, and a store then writes eight bytes an element, past the end
  of the tensor. Values are narrowed to their declared type before they are stored.
- It patches the language's modules again at each call of an inner function, which takes milliseconds; once a
  launch is enough.
"""

import functools

import numpy as np
import torch


@functools.cache
def register() -> None:
    """Apply all of them to this process's interpreter."""
    from triton.runtime import interpreter

    interpreter._convert_float = _rounded(interpreter._convert_float)
    interpreter.InterpreterBuilder.create_masked_store = _narrowed(interpreter.InterpreterBuilder.create_masked_store)
    interpreter.GridExecutor.__call__ = _forget_patches(interpreter.GridExecutor.__call__)
    interpreter.InterpretedFunction.__call__ = _call_inner


def _narrowed(original):
    @functools.wraps(original)
    def create_masked_store(self, ptrs, value, *rest):
        from triton.runtime import interpreter

        declared = interpreter._get_np_dtype(value.dtype)
        if value.data.dtype != declared:
            value = interpreter.TensorHandle(value.data.astype(declared), value.dtype)
        return original(self, ptrs, value, *rest)

    return create_masked_store


_patched: set[tuple[bool, bool]] = set()  # which of (language, language.core) the current launch has patched


def _forget_patches(original):
    @functools.wraps(original)
    def call(self, *args, **kwargs):
        _patched.clear()
        return original(self, *args, **kwargs)

    return call


def _call_inner(function, *args, **kwargs):
    from triton.runtime import interpreter

    modules = _language_modules(function.fn)
    if modules not in _patched:
        interpreter._patch_lang(function.fn)
        _patched.add(modules)
    return function.rewrite()(*args, **kwargs)


@functools.cache
def _language_modules(fn) -> tuple[bool, bool]:
    """Whether triton.language and triton.language.core are among the function's globals."""
    import triton.language as tl

    values = list(fn.__globals__.values())
    return any(value is tl for value in values), any(value is tl.core for value in values)


def _rounded(original):
    """`original` for conversions that torch does not serve: fp8, and rounding modes asked for by name."""

    @functools.wraps(original)
    def convert_float(values, source_type, result_type, rounding_mode):
        from triton.runtime import interpreter

        types = _TORCH_TYPES.get(source_type.name), _TORCH_TYPES.get(result_type.name)
        if None in types or rounding_mode not in (None, interpreter._ir.ROUNDING_MODE.RTNE):
            return original(values, source_type, result_type, rounding_mode)
        bits = np.ascontiguousarray(values)
        if types[0] == torch.bfloat16:
            bits = bits.view(np.int16)
        converted = torch.from_numpy(bits.copy()).view(types[0]).to(types[1])
        result_bits = f"uint{result_type.primitive_bitwidth}"
        return converted.view(_SIGNED_BITS[result_type.primitive_bitwidth]).numpy().view(result_bits)

    return convert_float


_TORCH_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
_SIGNED_BITS = {16: torch.int16, 32: torch.int32, 64: torch.int64}
