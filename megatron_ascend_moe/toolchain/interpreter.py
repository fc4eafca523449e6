"""Triton's NumPy interpreter (TRITON_INTERPRET=1) with bounds checks and with Ascend's extension operations.

Stock, it reads and writes whatever address a kernel computes, and Triton-Ascend's has none of insert_slice,
extract_slice and get_element. Here an access outside the tensors of the launch, or outside a tile, raises
IndexError (wrapped by Triton in its InterpreterError) instead of corrupting memory.
"""

import functools

import numpy as np

from megatron_ascend_moe.toolchain import interpreter_fixes

_spans = np.zeros((0, 2), dtype=np.uint64)  # [start, stop) addresses of the current launch's tensors, merged, sorted


@functools.cache
def register() -> None:
    """Teach the interpreter of this process the checks and, under Triton-Ascend, the extension operations."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    interpreter_fixes.register()
    GridExecutor._init_args_hst = _remember_tensors(GridExecutor._init_args_hst)
    InterpreterBuilder.create_masked_load = _check_load(InterpreterBuilder.create_masked_load)
    InterpreterBuilder.create_masked_store = _check_store(InterpreterBuilder.create_masked_store)
    try:
        from triton.triton_patch.language import semantic
    except ImportError:
        _extend_upstream()
        return
    semantic.insert_slice = _insert_slice
    semantic.extract_slice = _extract_slice
    semantic.get_element = _get_element
    semantic.gather = _gather  # Triton-Ascend's refuses int32, which kernels in their CUDA form gather
    semantic.compile_hint = _ignore_hint


def _extend_upstream() -> None:
    """Give upstream Triton's language the operations, so that kernels in the Ascend form are interpreted there too."""
    import triton.language as tl

    tl.get_element = functools.partial(_get_element, builder=None)
    tl.insert_slice = functools.partial(_insert_slice, builder=None)
    tl.extract_slice = functools.partial(_extract_slice, builder=None)


def _remember_tensors(original):
    @functools.wraps(original)
    def init_args(self, args, kwargs):
        global _spans
        args_host, kwargs_host = original(self, args, kwargs)
        _spans = _merged_spans([v for v in (*args_host, *kwargs_host.values()) if hasattr(v, "data_ptr")])
        return args_host, kwargs_host

    return init_args


def _merged_spans(tensors) -> np.ndarray:
    """Address ranges of the tensors; overlapping ones (views of one storage) become one."""
    spans: list[list[int]] = []
    for tensor in sorted((t for t in tensors if t.numel()), key=lambda t: t.data_ptr()):
        last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start, stop = tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
        if spans and start <= spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], stop)
        else:
            spans.append([start, stop])
    return np.array(spans, dtype=np.uint64).reshape(-1, 2)


def _check_load(original):
    @functools.wraps(original)
    def create_masked_load(self, ptrs, mask, *rest):
        _check_addresses("load", ptrs, mask)
        return original(self, ptrs, mask, *rest)

    return create_masked_load


def _check_store(original):
    @functools.wraps(original)
    def create_masked_store(self, ptrs, value, mask, *rest):
        _check_addresses("store", ptrs, mask)
        return original(self, ptrs, value, mask, *rest)

    return create_masked_store


def _check_addresses(kind: str, ptrs, mask) -> None:
    """Every address that the mask lets through must lie in a tensor of the launch."""
    let_through = np.broadcast_to(mask.data, ptrs.data.shape).astype(bool)  # a splat of a bool holds int8
    addresses = ptrs.data[let_through].astype(np.uint64)
    if not addresses.size:
        return
    if not len(_spans):
        raise IndexError(f"{kind} of {addresses.size} elements, but every tensor of the launch is empty")
    span = np.searchsorted(_spans[:, 0], addresses, side="right").astype(np.int64) - 1
    outside = (span < 0) | (addresses >= _spans[np.maximum(span, 0), 1])
    if outside.any():
        first = addresses[outside][0]
        gap = int(first) - int(_spans[max(int(span[outside][0]), 0), 1])
        raise IndexError(
            f"{kind} outside the tensors of the launch: {int(outside.sum())} of {addresses.size} elements, the first "
            f"{gap} bytes past the end of the nearest tensor below it"
        )


def _ignore_hint(*args, **kwargs) -> None:
    """Hints to the compiler (compile_hint, multibuffer) do not change numbers."""


def _integer(value) -> int:
    """A Python integer out of a scalar tensor, a constexpr or an integer."""
    if hasattr(value, "handle"):
        return int(np.asarray(value.handle.data).reshape(-1)[0])
    return int(getattr(value, "value", value))


def _window(shape, offsets, sizes, strides) -> tuple[slice, ...]:
    """NumPy slices of a strided window, checked against the shape it is cut from."""
    window = []
    for length, offset, size, stride in zip(shape, offsets, sizes, strides, strict=True):
        start, count, step = _integer(offset), _integer(size), _integer(stride)
        stop = start + (count - 1) * step + 1
        if start < 0 or stop > length:
            raise IndexError(f"window [{start}, {stop}) leaves a dimension of {length} elements")
        window.append(slice(start, stop, step))
    return tuple(window)


def _tensor(data: np.ndarray, scalar_type, result_type):
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    return tl.tensor(TensorHandle(data, scalar_type), result_type)


def _insert_slice(ful, sub, offsets, sizes, strides, builder):
    data = ful.handle.data.copy()
    data[_window(data.shape, offsets, sizes, strides)] = sub.handle.data
    return _tensor(data, ful.handle.dtype, ful.type)


def _extract_slice(ful, offsets, sizes, strides, builder):
    import triton.language as tl

    data = ful.handle.data
    cut = data[_window(data.shape, offsets, sizes, strides)].copy()
    return _tensor(cut, ful.handle.dtype, tl.block_type(ful.type.scalar, list(cut.shape)))


def _gather(src, index, axis, builder):
    import triton.language as tl

    data = np.take_along_axis(src.handle.data, index.handle.data, _integer(axis))
    return _tensor(data, src.handle.dtype, tl.block_type(src.type.scalar, list(data.shape)))


def _get_element(src, indice, builder):
    data = src.handle.data
    index = tuple(_integer(position) for position in indice)
    for position, length in zip(index, data.shape, strict=True):
        if not 0 <= position < length:
            raise IndexError(f"element {index} of a tensor of shape {data.shape}")
    return _tensor(np.array([data[index]], dtype=data.dtype), src.handle.dtype, src.type.scalar)
