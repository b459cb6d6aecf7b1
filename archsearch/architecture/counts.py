"""Parameters and bytes of an architecture. Arithmetic only; each function is one line of
bookkeeping, easily checked."""

from __future__ import annotations

from archsearch.architecture.architecture import Architecture
from archsearch.workload import WEIGHT_BYTES


def attention_params(arch: Architecture) -> int:
    """Weights and biases of one layer's attention."""
    if arch.kv_lora_rank:
        return _latent_params(arch)
    hidden, q, kv = arch.hidden_size, arch.q_size, arch.kv_size
    weights = hidden * (q + 2 * kv) + q * hidden
    biases = (q + 2 * kv if arch.attention_bias else 0) + (
        hidden if arch.attention_output_bias else 0
    )
    sinks = arch.num_attention_heads if arch.attention_sinks else 0
    return weights + biases + sinks + (2 * arch.head_dim if arch.qk_norm else 0)


def _latent_params(arch: Architecture) -> int:
    """MLA (DeepSeek-V2, arXiv 2405.04434, section 2.1): down and up projections with a norm
    between, and the output."""
    hidden, heads = arch.hidden_size, arch.num_attention_heads
    queries = hidden * arch.q_size
    if arch.q_lora_rank:
        queries = arch.q_lora_rank * (hidden + 1 + arch.q_size)
    down = hidden * (arch.kv_lora_rank + arch.qk_rope_head_dim) + arch.kv_lora_rank
    up = arch.kv_lora_rank * heads * (arch.head_dim - arch.qk_rope_head_dim + arch.v_head_dim)
    return queries + down + up + heads * (arch.v_head_dim or arch.head_dim) * hidden


def mlp_params(arch: Architecture) -> int:
    """Weights and biases of one layer's feed-forward network."""
    hidden, ffn = arch.hidden_size, arch.intermediate_size
    matrices = 3 if arch.gated_mlp else 2
    biases = (hidden + (matrices - 1) * ffn) if arch.mlp_bias else 0
    return matrices * hidden * ffn + biases


def expert_params(arch: Architecture) -> int:
    """Weights and biases of all routed experts of one layer."""
    hidden, ffn = arch.hidden_size, arch.moe_intermediate_size
    return arch.num_experts * (3 * hidden * ffn + (hidden + 2 * ffn if arch.mlp_bias else 0))


def moe_params(arch: Architecture) -> int:
    """Weights and biases of one layer's router, routed and shared experts."""
    router = arch.num_experts * (arch.hidden_size + (1 if arch.mlp_bias else 0))
    return router + expert_params(arch) + 3 * arch.hidden_size * arch.shared_expert_size


def norm_params(arch: Architecture) -> int:
    """Weights (and biases, for LayerNorm) of one norm."""
    return arch.hidden_size * (1 if arch.rms_norm else 2)


def layer_params(arch: Architecture) -> int:
    """Weights and biases of one decoder layer, its norms included; of one with experts where the
    model has any."""
    ffn = moe_params(arch) if arch.num_experts else mlp_params(arch)
    return attention_params(arch) + ffn + (4 if arch.sandwich_norms else 2) * norm_params(arch)


def _all_layers(arch: Architecture) -> int:
    dense = arch.first_dense_layers * (mlp_params(arch) - moe_params(arch))
    return arch.num_hidden_layers * layer_params(arch) + dense


def embedding_params(arch: Architecture) -> int:
    """Token and position tables."""
    return (arch.vocab_size + arch.learned_positions) * arch.hidden_size


def head_params(arch: Architecture) -> int:
    """The language-model head where it holds weights of its own (0 when tied)."""
    return (1 - arch.tie_word_embeddings) * arch.head_rows * arch.hidden_size


def parameters(arch: Architecture) -> int:
    """All parameters; for a trimmed head, of the trimmed model.

    >>> parameters(Architecture(576, 1536, 30, 9, 3, 64, 49152, tie_word_embeddings=True))
    134515008
    """
    return embedding_params(arch) + _all_layers(arch) + norm_params(arch) + head_params(arch)


def weight_bytes(arch: Architecture, dtype_bytes: float) -> int:
    """Bytes of all weights: layers and experts in the format of their own where they have one, the
    rest in `dtype_bytes`."""
    experts = arch.moe_layers * expert_params(arch) if arch.expert_format else 0
    narrow = _formatted(arch) if arch.weight_format else 0
    kept = experts * WEIGHT_BYTES.get(arch.expert_format, 0.0) + narrow * WEIGHT_BYTES.get(
        arch.weight_format, 0.0
    )
    return _bytes(parameters(arch) - experts - narrow, dtype_bytes) + round(kept)


def _bytes(numbers: int, each: float) -> int:
    """Bytes of so many numbers (arrays of them, for a grid of shapes)."""
    return int(numbers * each) if isinstance(numbers, int) else numbers * each


def _formatted(arch: Architecture) -> int:
    """Weights of layers that are kept in `weight_format`: projections, FFNs and shared experts.
    Latent attention is priced, and so counted, in 16 bits (NVIDIA's NVFP4 checkpoints of DeepSeek
    keep it so)."""
    attention = 0 if arch.kv_lora_rank else attention_params(arch)
    plain = arch.num_hidden_layers - arch.moe_layers
    return (
        arch.num_hidden_layers * attention
        + plain * mlp_params(arch)
        + arch.moe_layers * 3 * arch.hidden_size * arch.shared_expert_size
    )


def body_parameters(arch: Architecture) -> int:
    """Parameters without embeddings and head: what the layers hold."""
    return _all_layers(arch) + norm_params(arch)


def pass_parameters(arch: Architecture) -> int:
    """Parameters that a token is multiplied with: a row of a table is only looked up."""
    return body_parameters(arch) + arch.head_rows * arch.hidden_size


def weight_bytes_per_pass(arch: Architecture, dtype_bytes: float) -> int:
    """Bytes of weights a forward pass reads: layers, norm and head, and all experts (many tokens
    meet them all). The embedding is a lookup of a few rows."""
    if arch.expert_format or arch.weight_format:
        rest = parameters(arch) - pass_parameters(arch)
        return weight_bytes(arch, dtype_bytes) - _bytes(rest, dtype_bytes)
    return _bytes(pass_parameters(arch), dtype_bytes)


def kv_cache_bytes(
    arch: Architecture, context_len: int, dtype_bytes: float, batch_size: int = 1
) -> int:
    """Bytes of KV cache for `batch_size` sequences of `context_len` tokens; sliding layers keep
    their window only."""
    tokens = cached_tokens(arch, context_len)
    return _bytes(batch_size * tokens * arch.kv_numbers, dtype_bytes)


def cached_tokens(arch: Architecture, context_len: int) -> int:
    """Tokens of a sequence that all layers keep together, each at most its window."""
    return sum(
        count * min(context_len, window or context_len)
        for window, count in arch.layers_by_window().items()
    )
