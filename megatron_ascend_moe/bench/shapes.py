"""The shapes that the benchmark measures: one rank's tokens of well-known models."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """T tokens of hidden size H to K of E experts, each expert's segment padded to a multiple of M; F is the experts'
    hidden size, which only a whole layer has."""

    name: str
    T: int
    H: int
    E: int
    K: int
    F: int
    M: int = 128

    def __str__(self) -> str:
        return f"{self.name} T{self.T} H{self.H} E{self.E} K{self.K} M{self.M}"


MODELS = {
    shape.name: shape
    for shape in (
        Shape("mixtral-8x7b", 8192, 4096, 8, 2, 14336),
        Shape("qwen3-30b-a3b", 8192, 2048, 128, 8, 768),
        Shape("deepseek-v3", 4096, 7168, 256, 8, 2048),
        Shape("kimi-k2", 4096, 7168, 384, 8, 2048),
        Shape("gpt-oss-120b", 8192, 2880, 128, 4, 2880),
        Shape("kimi-k2-many-tokens", 16384, 7168, 384, 8, 2048),
        Shape("kimi-k2-beyond-int32", 40960, 7168, 384, 8, 2048),  # T K H > 2^31
        Shape("deepseek-v3-few-tokens", 512, 7168, 256, 8, 2048, M=16),
    )
}
SMOKE = Shape("smoke", 24, 40, 6, 2, 16, M=8)
