"""Parameters of a model from its Megatron flags, without building it.

Counts are of the model that Megatron builds (its padded vocabulary, its norms and biases), as one rank would
hold it without any parallelism; the tests compare them with built models.
"""

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a model; `active` are those that one token meets."""

    total: int
    active: int
    embedding: int
    attention: int
    dense_mlp: int
    routed_experts: int
    shared_experts: int
    router: int
    norms: int
    mtp: int


def count_parameters(flags: Mapping[str, Any]) -> ParameterCounts:
    """Count the parameters of the model that the flags describe.

    Raises:
        ValueError: a flag that the count needs is missing, or a layer pattern does not fit `num-layers`.
    """
    layers = integer(flags, "num-layers")
    moe_layers = layer_pattern(flags, "moe-layer-freq", layers) if "num-experts" in flags else [0] * layers
    linear_layers = (
        linear_attention_pattern(flags, layers) if "experimental-attention-variant" in flags else [0] * layers
    )
    hidden = integer(flags, "hidden-size")
    attention = sum(_linear_attention(flags) if linear else _attention(flags) for linear in linear_layers)
    num_moe = sum(moe_layers)
    dense = (layers - num_moe) * _mlp(flags, integer(flags, "ffn-hidden-size", _default_ffn(flags)))
    expert = _mlp(flags, moe_ffn_hidden(flags)) if num_moe else 0
    experts, topk = integer(flags, "num-experts", 0), integer(flags, "moe-router-topk", 2)
    routed = num_moe * experts * expert
    shared = num_moe * _shared_expert(flags)
    router = num_moe * _router(flags)
    norms = (2 * layers + 1) * _norm(flags, hidden)
    embedding = _embedding(flags)
    mtp, mtp_active = _mtp(flags, bool(moe_layers[-1]), bool(linear_layers[-1]))
    total = embedding + attention + dense + routed + shared + router + norms + mtp
    inactive = num_moe * (experts - topk) * expert if num_moe else 0
    return ParameterCounts(
        total=total,
        active=total - inactive - mtp + mtp_active,
        embedding=embedding,
        attention=attention,
        dense_mlp=dense,
        routed_experts=routed,
        shared_experts=shared,
        router=router,
        norms=norms,
        mtp=mtp,
    )


def integer(flags: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """The value of an integer flag.

    Raises:
        ValueError: missing without a default, or no integer.
    """
    value = flags.get(key)
    if value is None:
        if default is None:
            raise ValueError(f"flag {key!r} is missing: the model's shape needs it")
        return default
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ValueError(f"flag {key!r}: expected an integer, got {value!r}") from None


def moe_ffn_hidden(flags: Mapping[str, Any]) -> int:
    """FFN width of a routed expert; Megatron takes the dense width where it is not given."""
    return integer(flags, "moe-ffn-hidden-size", integer(flags, "ffn-hidden-size", _default_ffn(flags)))


def layer_pattern(flags: Mapping[str, Any], key: str, layers: int) -> list[int]:
    """Megatron's layer pattern: N means one layer in N, starting with the first; a string is a list expression
    such as "([0]*3+[1]*58)"."""
    value = flags.get(key, 1)
    text = str(value).strip()
    if text.isdigit():
        return [int(i % int(text) == 0) for i in range(layers)]
    pattern = _list_expression(text, key)
    if len(pattern) != layers:
        raise ValueError(f"{key} {text!r} describes {len(pattern)} layers, num-layers is {layers}")
    return pattern


def linear_attention_pattern(flags: Mapping[str, Any], layers: int) -> list[int]:
    """1 where a layer has linear attention. N means that every N-th layer has softmax attention instead."""
    text = str(flags.get("linear-attention-freq", "")).strip()
    if text.isdigit():
        return [int((i + 1) % int(text) != 0) for i in range(layers)]
    return layer_pattern(flags, "linear-attention-freq", layers)


def _list_expression(text: str, key: str) -> list[int]:
    """Evaluate lists of integers, `+` between lists and `*` with an integer; nothing else."""

    def value(node: ast.AST) -> Any:
        if isinstance(node, ast.Expression):
            return value(node.body)
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.List):
            return [value(item) for item in node.elts]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return value(node.left) + value(node.right)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            return value(node.left) * value(node.right)
        raise ValueError

    try:
        pattern = value(ast.parse(text, mode="eval"))
    except (SyntaxError, TypeError, ValueError):
        pattern = None
    if not isinstance(pattern, list) or not all(type(item) is int for item in pattern):
        raise ValueError(f"{key} {text!r} is no layer pattern: expected an integer or a list such as ([0]*3+[1]*58)")
    return pattern


def _biased(flags: Mapping[str, Any]) -> bool:
    """Megatron's linear layers have biases unless told otherwise."""
    return not flags.get("disable-bias-linear")


def _norm(flags: Mapping[str, Any], width: int) -> int:
    return width if flags.get("normalization", "LayerNorm") == "RMSNorm" else 2 * width


def _gated(flags: Mapping[str, Any]) -> bool:
    return bool(flags.get("swiglu") or flags.get("quick-geglu"))


def _default_ffn(flags: Mapping[str, Any]) -> int:
    hidden = integer(flags, "hidden-size")
    # Megatron keeps the size of a gated MLP near that of a plain one, in multiples of 64
    return int((4 * hidden * 2 / 3) / 64) * 64 if flags.get("swiglu") else 4 * hidden


def _mlp(flags: Mapping[str, Any], ffn: int) -> int:
    hidden, first = integer(flags, "hidden-size"), ffn * (2 if _gated(flags) else 1)
    return hidden * first + ffn * hidden + (first + hidden if _biased(flags) else 0)


def _shared_expert(flags: Mapping[str, Any]) -> int:
    width = integer(flags, "moe-shared-expert-intermediate-size", 0)
    gate = integer(flags, "hidden-size") if flags.get("moe-shared-expert-gate") else 0
    return _mlp(flags, width) + gate if width else 0


def _router(flags: Mapping[str, Any]) -> int:
    experts = integer(flags, "num-experts")
    return experts * integer(flags, "hidden-size") + (experts if _biased(flags) else 0)


def _attention(flags: Mapping[str, Any]) -> int:
    if flags.get("multi-latent-attention"):
        return _latent_attention(flags)
    hidden, heads = integer(flags, "hidden-size"), integer(flags, "num-attention-heads")
    channels = integer(flags, "kv-channels", hidden // heads)
    groups = integer(flags, "num-query-groups", 1) if flags.get("group-query-attention") else heads
    query = heads * channels * (2 if flags.get("attention-output-gate") else 1)
    qkv = query + 2 * groups * channels
    count = hidden * qkv + heads * channels * hidden
    if _biased(flags):
        count += qkv + hidden
    elif flags.get("add-qkv-bias"):
        count += qkv
    if flags.get("qk-layernorm"):
        count += 2 * _norm(flags, channels)
    if flags.get("softmax-type") == "learnable":
        count += heads
    return count


def _latent_attention(flags: Mapping[str, Any]) -> int:
    """Multi-latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""
    hidden, heads = integer(flags, "hidden-size"), integer(flags, "num-attention-heads")
    position, value = integer(flags, "qk-pos-emb-head-dim", 64), integer(flags, "v-head-dim", 128)
    query = integer(flags, "qk-head-dim", 128)
    kv_rank, q_rank = integer(flags, "kv-lora-rank", 32), integer(flags, "q-lora-rank", 0)
    normed = bool(flags.get("qk-layernorm"))
    count = hidden * (kv_rank + position) + kv_rank * heads * (query + value) + heads * value * hidden
    count += _norm(flags, kv_rank) if normed else 0
    if q_rank:
        count += hidden * q_rank + q_rank * heads * (query + position)
        count += _norm(flags, q_rank) if normed else 0
    else:
        count += hidden * heads * (query + position)
    return count + (hidden if _biased(flags) else 0)


def _linear_attention(flags: Mapping[str, Any]) -> int:
    """A gated delta net layer (arXiv 2412.06464): projections, short convolution, decay and step, output norm."""
    hidden = integer(flags, "hidden-size")
    key = integer(flags, "linear-num-key-heads", 16) * integer(flags, "linear-key-head-dim", 128)
    heads, width = integer(flags, "linear-num-value-heads", 32), integer(flags, "linear-value-head-dim", 128)
    value = heads * width
    projections = hidden * (2 * key + 2 * value + 2 * heads) + value * hidden
    convolution = (2 * key + value) * integer(flags, "linear-conv-kernel-dim", 4)
    return projections + convolution + 2 * heads + width


def _embedding(flags: Mapping[str, Any]) -> int:
    hidden = integer(flags, "hidden-size")
    copies = 2 if flags.get("untie-embeddings-and-output-weights") else 1
    count = copies * padded_vocabulary(flags) * hidden
    if flags.get("position-embedding-type", "learned_absolute") == "learned_absolute":
        count += integer(flags, "max-position-embeddings") * hidden
    return count


def padded_vocabulary(flags: Mapping[str, Any]) -> int:
    """Rows of the embedding: the vocabulary rounded up as Megatron does."""
    if flags.get("padded-vocab-size") is not None:
        return integer(flags, "padded-vocab-size")
    multiple = integer(flags, "make-vocab-size-divisible-by", 128)
    multiple *= integer(flags, "tensor-model-parallel-size", 1)
    return -(-integer(flags, "vocab-size") // multiple) * multiple


def _mtp(flags: Mapping[str, Any], moe: bool, linear: bool) -> tuple[int, int]:
    """Multi-token-prediction layers: two norms, a 2H -> H projection, a layer like the last, a final norm."""
    hidden = integer(flags, "hidden-size")
    depth = integer(flags, "mtp-num-layers", 0)
    if not depth:
        return 0, 0
    layer = _linear_attention(flags) if linear else _attention(flags)
    layer += 5 * _norm(flags, hidden) + 2 * hidden * hidden
    active = layer
    if moe:
        expert, around = _mlp(flags, moe_ffn_hidden(flags)), _shared_expert(flags) + _router(flags)
        layer += around + integer(flags, "num-experts") * expert
        active += around + integer(flags, "moe-router-topk", 2) * expert
    else:
        mlp = _mlp(flags, integer(flags, "ffn-hidden-size", _default_ffn(flags)))
        layer, active = layer + mlp, active + mlp
    return depth * layer, depth * active
