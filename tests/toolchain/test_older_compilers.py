"""The largest shapes with the compilers of CANN 8.5 and 9.0, which plan memory less tightly and never retry.

They are the wheels of ascendnpu-ir 1.0.0 and 1.1.0, installed beside the environment, one folder a version:
`pip install --no-deps --target DIR/1.0.0 ascendnpu-ir==1.0.0`, and DIR in MEGATRON_ASCEND_MOE_TEST_COMPILERS.
"""

import os
from pathlib import Path

import pytest

from megatron_ascend_moe.toolchain.compile import compile_shape
from megatron_ascend_moe.toolchain.locate import BISHENGIR_VARIABLE, bishengir_version
from tests.requirements import missing, triton_ascend

SOC = "Ascend910B3"
KIMI_K2 = (7168, 384, 8)
QWEN3_NEXT = (2048, 512, 10)


def _compile(folder, shape, dtype):
    os.environ[BISHENGIR_VARIABLE] = folder
    try:
        return bishengir_version(), compile_shape(*shape, dtype, (SOC,), run=False)
    finally:
        del os.environ[BISHENGIR_VARIABLE]


@pytest.mark.parametrize(("shape", "dtype"), [(KIMI_K2, "fp32"), (KIMI_K2, "bf16"), (QWEN3_NEXT, "bf16")], ids=str)
@pytest.mark.parametrize("version", ["1.0.0", "1.1.0"])
def test_the_largest_shapes_fit_and_stay_double_buffered(compile_pool, version, shape, dtype):
    triton_ascend()
    folder = Path(os.environ.get("MEGATRON_ASCEND_MOE_TEST_COMPILERS", "")) / version / "ascendnpuir" / "bin"
    if not folder.is_dir():
        missing(f"no ascendnpu-ir {version}: pip install --no-deps --target DIR/{version} ascendnpu-ir=={version}, and "
                "MEGATRON_ASCEND_MOE_TEST_COMPILERS=DIR")  # fmt: skip
    used, reports = compile_pool.submit(_compile, str(folder), shape, dtype).result()
    assert used == f"ascendnpu-ir {version}" and len(reports) == 20
    for one in reports:
        assert one.problems == (), one.operation
        assert 0 < one.ub_bytes <= one.ub_size and one.dmas > 0 and not one.multibuffer_dropped
        assert one.double_buffered is (True if one.floor_bytes else None)
        assert one.ub_reported == (version == "1.1.0")  # 1.0.0 writes no report: its buffers are read from the program
