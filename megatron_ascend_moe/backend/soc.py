"""Ascend systems-on-chip: what a kernel must know of one when no device is there to ask.

Vector cores and Unified Buffer (UB) sizes are the figures of the vendor's platform tables. On a device both are
taken from the driver; this table serves the offline compiler and the tile planner's tests.
"""

from dataclasses import dataclass

_KIB = 1024


@dataclass(frozen=True)
class Soc:
    """One SoC: `vector_cores` programs run at a time, each with `ub_bytes` of Unified Buffer.

    `compiler` is the binary of the ascendnpu-ir wheel that takes its name as --target; `memory_report` tells
    whether that binary writes its memory plan as JSON.
    """

    name: str
    generation: str
    vector_cores: int
    ub_bytes: int
    compiler: str = "bishengir-compile"
    memory_report: bool = True


_A2_A3_UB = 192 * _KIB  # 196,608 B
_A5_UB = 248 * _KIB  # 253,952 B

SOCS: dict[str, Soc] = {
    soc.name: soc
    for soc in (
        Soc("Ascend910B1", "A2", 48, _A2_A3_UB),
        Soc("Ascend910B2", "A2", 48, _A2_A3_UB),
        Soc("Ascend910B3", "A2", 40, _A2_A3_UB),
        Soc("Ascend910B4", "A2", 40, _A2_A3_UB),
        Soc("Ascend910_9362", "A3", 40, _A2_A3_UB),
        Soc("Ascend910_9372", "A3", 40, _A2_A3_UB),
        Soc("Ascend910_9381", "A3", 48, _A2_A3_UB),
        Soc("Ascend910_9382", "A3", 48, _A2_A3_UB),
        Soc("Ascend910_9391", "A3", 48, _A2_A3_UB),
        Soc("Ascend910_9392", "A3", 48, _A2_A3_UB),
        Soc("Ascend950PR_9589", "A5", 64, _A5_UB, "bishengir-compile-a5", memory_report=False),
    )
}


def find_soc(name: str) -> Soc:
    """The SoC of that name; ValueError with the known names otherwise."""
    if name not in SOCS:
        raise ValueError(f"unknown SoC {name!r}: expected one of {', '.join(SOCS)}")
    return SOCS[name]
