"""Hidden size, experts and experts per token of published Mixture-of-Experts models."""

# model: (H, E, K); those marked are from memory of the published configuration
MODEL_SHAPES = {
    "mixtral-8x7b": (4096, 8, 2),
    "mixtral-8x22b": (6144, 8, 2),  # from memory
    "deepseek-v2-lite": (2048, 64, 6),
    "deepseek-v2": (5120, 160, 6),  # from memory
    "deepseek-v3": (7168, 256, 8),
    "qwen3-30b-a3b": (2048, 128, 8),
    "qwen3-235b-a22b": (4096, 128, 8),
    "qwen3-coder-480b": (6144, 160, 8),
    "qwen3-next-80b-a3b": (2048, 512, 10),  # from memory
    "glm-4.5": (5120, 160, 8),
    "glm-4.5-air": (4096, 128, 8),
    "kimi-k2": (7168, 384, 8),
    "gpt-oss-20b": (2880, 32, 4),
    "gpt-oss-120b": (2880, 128, 4),
}
