"""The shapes that the benchmark measures: one rank's tokens of well-known models."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """T tokens of hidden size H to K of E experts, each expert's segment padded to a multiple of M."""

    name: str
    T: int
    H: int
    E: int
    K: int
    M: int = 128

    def __str__(self) -> str:
        return f"{self.name} T{self.T} H{self.H} E{self.E} K{self.K} M{self.M}"


MODELS = {
    shape.name: shape
    for shape in (
        Shape("mixtral-8x7b", 8192, 4096, 8, 2),
        Shape("qwen3-30b-a3b", 8192, 2048, 128, 8),
        Shape("deepseek-v3", 4096, 7168, 256, 8),
        Shape("kimi-k2", 4096, 7168, 384, 8),
        Shape("gpt-oss-120b", 8192, 2880, 128, 4),
        Shape("deepseek-v3-few-tokens", 512, 7168, 256, 8, M=16),
    )
}
SMOKE = Shape("smoke", 24, 40, 6, 2, M=8)
