"""Parameters, bytes and FLOPs of an architecture. Arithmetic only; each function is one line of bookkeeping, easily checked."""

from __future__ import annotations

from archsearch.architecture.architecture import Architecture


def attention_params(arch: Architecture) -> int:
    """Weights and biases of one layer's attention."""
    hidden, q, kv = arch.hidden_size, arch.q_size, arch.kv_size
    weights = hidden * (q + 2 * kv) + q * hidden
    biases = (q + 2 * kv if arch.attention_bias else 0) + (hidden if arch.attention_output_bias else 0)
    return weights + biases + (2 * arch.head_dim if arch.qk_norm else 0)


def mlp_params(arch: Architecture) -> int:
    """Weights and biases of one layer's feed-forward network."""
    hidden, ffn = arch.hidden_size, arch.intermediate_size
    matrices = 3 if arch.gated_mlp else 2
    biases = (hidden + (matrices - 1) * ffn) if arch.mlp_bias else 0
    return matrices * hidden * ffn + biases


def norm_params(arch: Architecture) -> int:
    """Weights (and biases, for LayerNorm) of one norm."""
    return arch.hidden_size * (1 if arch.rms_norm else 2)


def layer_params(arch: Architecture) -> int:
    """Weights and biases of one decoder layer, its two norms included."""
    return attention_params(arch) + mlp_params(arch) + 2 * norm_params(arch)


def embedding_params(arch: Architecture) -> int:
    """Token and position tables."""
    return (arch.vocab_size + arch.learned_positions) * arch.hidden_size


def head_params(arch: Architecture) -> int:
    """The language-model head where it holds weights of its own (0 when tied)."""
    return 0 if arch.tie_word_embeddings else arch.head_rows * arch.hidden_size


def parameters(arch: Architecture) -> int:
    """All parameters; for a trimmed head, of the trimmed model."""
    return embedding_params(arch) + arch.num_hidden_layers * layer_params(arch) + norm_params(arch) + head_params(arch)


def body_parameters(arch: Architecture) -> int:
    """Parameters without embeddings and head: what the layers hold."""
    return arch.num_hidden_layers * layer_params(arch) + norm_params(arch)


def weight_bytes_per_pass(arch: Architecture, dtype_bytes: int) -> int:
    """Bytes of weights a forward pass reads: layers, norm and head. The embedding is a lookup of a few rows."""
    return (body_parameters(arch) + arch.head_rows * arch.hidden_size) * dtype_bytes


def kv_bytes_per_token(arch: Architecture, dtype_bytes: int) -> int:
    """Bytes of KV cache one token of one sequence takes, before windows cut it."""
    return 2 * arch.num_hidden_layers * arch.kv_size * dtype_bytes


def kv_cache_bytes(arch: Architecture, context_len: int, dtype_bytes: int, batch_size: int = 1) -> int:
    """Bytes of KV cache for `batch_size` sequences of `context_len` tokens; sliding layers keep their window only."""
    tokens = sum(min(context_len, window) if window else context_len for window in arch.windows())
    return 2 * batch_size * tokens * arch.kv_size * dtype_bytes


def flops_per_token(arch: Architecture, context_len: int) -> int:
    """FLOPs of a forward pass per new token: 2 per weight plus attention over the context."""
    weights = body_parameters(arch) + arch.head_rows * arch.hidden_size
    keys = sum(min(context_len, window) if window else context_len for window in arch.windows())
    return 2 * weights + 4 * keys * arch.q_size
