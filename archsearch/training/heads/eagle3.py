"""An EAGLE-3 head: a few Llama layers that read several of the target's states and the token it
wrote (arXiv 2503.01840).

Row i of a text has the token i + 1 and the states that the target had at token i; it proposes token
i + 2, at position i. The first layer reads both side by side, [norm(embedding), norm(fc(states))],
with a residual that is fc(states) alone; later layers are plain. In a round the first draft token
comes from a row with the target's states, every further one from a row whose states are the head's
own output of the row before (before the final norm), which it must be trained on: `unroll`. A
P-EAGLE head (vLLM's `parallel_drafting`) drafts in one pass instead: its further rows read a mask
token and, in place of states, `mask_hidden`, both alike for all rows, and see the rows before them.
Computes what vLLM's `llama_eagle3.py` computes with `norm_before_residual` false; parameters have
the names of its files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from archsearch.models.drafts import TrimmedHead


class Eagle3Head(nn.Module):
    """The head of one target. `config`: its layers (LlamaConfig, with the target's vocabulary);
    `aux_layers`: whose inputs fc reads; `embedding` [vocab, hidden] is the target's own: frozen,
    and no part of what is saved. `mask_token_id`: of a P-EAGLE head, the token that its further
    rows read."""

    def __init__(
        self,
        config: LlamaConfig,
        target_hidden_size: int,
        aux_layers: Sequence[int],
        kept: Sequence[int],
        embedding: Tensor,
        mask_token_id: int | None = None,
    ) -> None:
        super().__init__()
        self.config, self.target_hidden_size = config, target_hidden_size
        self.aux_layers = tuple(aux_layers)
        self.embedding = nn.Embedding.from_pretrained(embedding.float(), freeze=True)
        self.fc = nn.Linear(
            len(self.aux_layers) * target_hidden_size, config.hidden_size, bias=False
        )
        self.layers = nn.ModuleList(
            _Layer(config, first=place == 0) for place in range(config.num_hidden_layers)
        )
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = TrimmedHead(config.hidden_size, config.vocab_size, kept)
        self.rotary = LlamaRotaryEmbedding(config)
        self.mask_token_id = mask_token_id
        if mask_token_id is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, self.fc.in_features))

    @property
    def parallel(self) -> bool:
        """Whether all draft tokens come from one pass (P-EAGLE)."""
        return self.mask_token_id is not None

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def saved(self) -> dict[str, Tensor]:
        """The tensors of an EAGLE-3 file, but for the ids that the head keeps."""
        left_out = ("embedding.weight", "lm_head.draft_token_ids")
        return {name: tensor for name, tensor in self.state_dict().items() if name not in left_out}

    def unroll(self, rows: Rows, steps: int) -> Iterator[Tensor]:
        """The head's normed outputs [texts, starts, hidden] at 1, 2, .. `steps` tokens from each of
        `rows.starts`.

        Step s reads the true token, as a round does whose draft tokens were right so far, and what
        the head itself made of the step before; that of a P-EAGLE head the mask token and
        `mask_hidden`. It sees the target's rows up to the start, and the start's earlier steps.
        """
        x = self.fc(rows.states.to(self.fc.weight.dtype))
        every = torch.arange(x.shape[1], device=x.device)[None]
        angles = self.rotary(x, every)
        memory: list[_Memory] = []
        embedded = self.embedding(rows.next_ids)
        layers: Any = self.layers
        for layer in layers:
            seen = _Memory(*layer.keys_values(x, embedded, angles))
            memory.append(seen)
            # The layers below must answer for every row: their output is read as keys.
            last = len(memory) == len(layers)
            asking = rows.starts if last else every.expand(x.shape[0], -1)
            turned = angles[0][0][asking], angles[1][0][asking]
            x = layer(_rows_of(x, asking), _rows_of(embedded, asking), turned, seen, asking)
        yield self.norm(x)
        for step in range(1, steps):
            if self.mask_token_id is not None:
                x = self.fc(self.mask_hidden).expand(*rows.starts.shape, -1)
                embedded = self.embedding(torch.full_like(rows.starts, self.mask_token_id))
            else:
                known = (rows.starts + step).clamp_max(rows.next_ids.shape[1] - 1)
                embedded = self.embedding(_rows_of(rows.next_ids, known))
            angles = self.rotary(x, rows.starts + step)
            for layer, seen in zip(layers, memory, strict=True):
                seen.own.append(layer.keys_values(x, embedded, angles))
                x = layer(x, embedded, angles, seen, rows.starts)
            yield self.norm(x)


@dataclass(frozen=True)
class Rows:
    """Texts side by side, right-padded. `states` [texts, rows, aux * hidden]; `next_ids` [texts,
    rows]: the token after each row's own; `starts` [texts, starts]: the rows from which rounds
    begin (padded with any row)."""

    states: Tensor
    next_ids: Tensor
    starts: Tensor


class _Memory:
    """Keys and values [texts, kv heads, rows, head_dim] of the target's rows, and of each later
    step for every start."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self.own: list[tuple[Tensor, Tensor]] = []


class _Layer(nn.Module):
    """A Llama layer; the `first` reads [embedding, hidden] through two norms."""

    def __init__(self, config: LlamaConfig, first: bool) -> None:
        super().__init__()
        self.first = first
        self.self_attn = _Attention(config, (2 if first else 1) * config.hidden_size)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if first:
            self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def _normed(self, x: Tensor, embedded: Tensor) -> Tensor:
        if self.first:
            return torch.cat([self.input_layernorm(embedded), self.hidden_norm(x)], -1)
        return self.input_layernorm(x)

    def keys_values(
        self, x: Tensor, embedded: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        return self.self_attn.keys_values(self._normed(x, embedded), angles)

    def forward(
        self,
        x: Tensor,
        embedded: Tensor,
        angles: tuple[Tensor, Tensor],
        seen: _Memory,
        starts: Tensor,
    ) -> Tensor:
        """[texts, starts, hidden]: rows that see the target's rows up to `starts` and their own in
        `seen`."""
        x = x + self.self_attn(self._normed(x, embedded), angles, seen, starts)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Attention(nn.Module):
    def __init__(self, config: LlamaConfig, inputs: int) -> None:
        super().__init__()
        # The config leaves two of them open for Llama's defaults.
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads or self.heads
        self.head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
        self.q_proj = nn.Linear(inputs, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:2], heads, self.head_dim).transpose(1, 2)

    def keys_values(self, normed: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[texts, kv heads, rows, head_dim] each; keys turned to their positions."""
        keys = self._split(self.k_proj(normed), self.kv_heads)
        turned = apply_rotary_pos_emb(keys, keys, *angles)[1]
        return turned, self._split(self.v_proj(normed), self.kv_heads)

    def forward(
        self, normed: Tensor, angles: tuple[Tensor, Tensor], seen: _Memory, starts: Tensor
    ) -> Tensor:
        texts, rows = normed.shape[:2]
        group = self.heads // self.kv_heads
        queries = self._split(self.q_proj(normed), self.heads)
        queries = apply_rotary_pos_emb(queries, queries, *angles)[0]
        by_group = (texts, self.kv_heads, group, rows)
        grouped = queries.reshape(*by_group, self.head_dim) * self.head_dim**-0.5
        # [texts, kv heads, group * rows, keys]
        scores = grouped.flatten(2, 3) @ seen.keys.transpose(-1, -2)
        scores = scores.view(*by_group, -1)
        # [texts, rows, keys]
        later = torch.arange(seen.keys.shape[2], device=starts.device) > starts[..., None]
        scores = scores.masked_fill(later[:, None, None], float("-inf"))
        diagonals = [(grouped * keys[:, :, None]).sum(-1, keepdim=True) for keys, _ in seen.own]
        shares = torch.cat([scores, *diagonals], -1).float().softmax(-1).to(seen.values.dtype)
        known = seen.keys.shape[2]
        answer = (shares[..., :known].flatten(2, 3) @ seen.values).view(*by_group, self.head_dim)
        for place, (_, values) in enumerate(seen.own):
            answer = answer + shares[..., known + place, None] * values[:, :, None]
        joined = answer.flatten(1, 2).transpose(1, 2).reshape(texts, rows, -1)
        return self.o_proj(joined)


def _rows_of(x: Tensor, rows: Tensor) -> Tensor:
    """[texts, chosen, ...] of x [texts, rows, ...]."""
    return x[torch.arange(x.shape[0], device=x.device)[:, None], rows]


# -- made from the target


def initialise_eagle3(
    target: Any,
    config: LlamaConfig,
    aux_layers: Sequence[int],
    kept: Sequence[int],
    seed: int = 0,
    mask_token_id: int | None = None,
) -> Eagle3Head:
    """A head that begins as the target's own last layers, where shapes allow.

    fc passes on the highest of the states; layers are the target's last ones, whose q, k and v read
    the hidden half (the embedding half begins at 0); the head has the target's rows, the final norm
    is copied. What does not fit (another FFN, other heads) is random. `mask_token_id`: for a
    P-EAGLE head.
    """
    generator = torch.Generator().manual_seed(seed)
    body = target.base_model
    embedding = body.embed_tokens.weight.detach()
    head = Eagle3Head(
        config, int(target.config.hidden_size), aux_layers, kept, embedding, mask_token_id
    )
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.dim() > 1 and not name.startswith("embedding"):
                parameter.normal_(std=0.02, generator=generator)
        width = min(config.hidden_size, head.target_hidden_size)
        head.fc.weight.zero_()
        head.fc.weight[:width, -head.target_hidden_size :][:, :width] = torch.eye(width)
        sources = body.layers[-len(head.layers) :] if len(head.layers) <= len(body.layers) else []
        layers: Any = head.layers
        for layer, source in zip(layers, sources, strict=False):
            _take_layer(layer, source)
        _take(head.norm.weight, body.norm.weight)
        rows = target.get_output_embeddings().weight.detach()[head.lm_head.draft_token_ids]
        _take(head.lm_head.weight, rows)
    return head


def _take_layer(layer: _Layer, source: Any) -> None:
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(layer.self_attn, name).weight
        given = getattr(source.self_attn, name).weight
        if layer.first and weight.shape == (given.shape[0], 2 * given.shape[1]):
            weight[:, : given.shape[1]] = 0
            weight[:, given.shape[1] :] = given
        else:
            _take(weight, given)
    _take(layer.self_attn.o_proj.weight, source.self_attn.o_proj.weight)
    for name in ("gate_proj", "up_proj", "down_proj"):
        _take(getattr(layer.mlp, name).weight, getattr(source.mlp, name).weight)
    _take(layer.post_attention_layernorm.weight, source.post_attention_layernorm.weight)
    _take(
        (layer.hidden_norm if layer.first else layer.input_layernorm).weight,
        source.input_layernorm.weight,
    )


def _take(weight: Tensor, given: Tensor) -> None:
    if weight.shape == given.shape:
        weight.copy_(given)
