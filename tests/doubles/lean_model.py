"""A LeanDecoder with the weights of a Hugging Face module, for tests that hold the two together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from archsearch.architecture.architecture import Architecture
from archsearch.profiling.fused import Fused
from archsearch.profiling.layers import LeanDecoder, LeanLayer


def lean_of(model: Any, arch: Architecture, fused: Fused) -> LeanDecoder:
    """The weights of a Hugging Face Llama-like module, copied together."""

    def joined(*modules: Any) -> tuple[Tensor, Tensor | None]:
        bias = (
            None
            if modules[0].bias is None
            else torch.cat([module.bias for module in modules]).detach()
        )
        return torch.cat([module.weight for module in modules]).detach(), bias

    layers = []
    for layer, window in zip(model.model.layers, arch.windows(), strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        qkv, qkv_bias = joined(attention.q_proj, attention.k_proj, attention.v_proj)
        out, out_bias = joined(attention.o_proj)
        gate_up, gate_up_bias = joined(mlp.gate_proj, mlp.up_proj)
        down, down_bias = joined(mlp.down_proj)
        norms = [
            getattr(attention, name).weight.detach() if arch.qk_norm else None
            for name in ("q_norm", "k_norm")
        ]
        layers.append(
            LeanLayer(
                norm=layer.input_layernorm.weight.detach(),
                qkv=qkv,
                qkv_bias=qkv_bias,
                q_norm=norms[0],
                k_norm=norms[1],
                out=out,
                out_bias=out_bias,
                mlp_norm=layer.post_attention_layernorm.weight.detach(),
                gate_up=gate_up,
                gate_up_bias=gate_up_bias,
                down=down,
                down_bias=down_bias,
                window=window,
            )
        )
    return LeanDecoder(
        arch,
        model.model.embed_tokens.weight.detach(),
        layers,
        model.model.norm.weight.detach(),
        model.lm_head.weight.detach(),
        model.config.rms_norm_eps,
        fused,
    )
