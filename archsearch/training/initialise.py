"""Draft weights out of the target's: chosen layers, rotated or padded residual stream, chosen heads
and channels, trimmed head.

A draft of the target's own shape computes what the target computes. Smaller shapes keep what is
shown to matter:

- width: PCA of the residual stream, one orthogonal Q for the whole draft. RMSNorm commutes with a
  rotation once its weights are folded into the linears that follow (SliceGPT, arXiv 2401.15024,
  section 3); cutting Q to d' columns leaves sqrt(d / d') for the norm to make up.
- attention: KV groups by the norm of their output projection, or their mean where a draft group
  serves more query heads than a target group (GQA, arXiv 2305.13245, section 2.1); head_dim by
  rotary pairs of matching frequency and the best low-rank values.
- FFN: channels by what they write on calibration text (|activation| |down|), without text by |gate|
|up| |down|.

Larger shapes get channels that change nothing at first (zero on the way out) and learn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.hf_config import from_hf_config
from archsearch.errors import ArchsearchError
from archsearch.models.drafts import TrimmedHead, build_draft
from archsearch.models.runtime import cheap_initialisation, hooked

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

SUPPORTED: Final = ("llama", "mistral", "ministral", "qwen2")
_SMALL: Final = 0.1  # standard deviation of new channels, relative to the existing ones


def choose_layers(draft_layers: int, target_layers: int) -> list[int | None]:
    """Target layer for each draft layer: half from each end, {0}, {0, last}, {0, 1, last}, {0, 1,
    last-1, last}, ...

    A trained network misses its middle least: untrained, SmolLM2-135M without 4 contiguous middle
    layers of 30 agreed with itself on 0.54 of the tokens of one text, without 4 spread over the
    middle on 0.14. A draft deeper than its target gets None (a layer that passes its input on)
    before the last one.
    """
    last = target_layers - 1
    if draft_layers > target_layers:
        return [*range(last), *[None] * (draft_layers - target_layers), last]
    return [
        *range((draft_layers + 1) // 2),
        *range(target_layers - draft_layers // 2, target_layers),
    ]


def initialise_draft(
    target_model: PreTrainedModel,
    arch: Architecture,
    *,
    draft_token_ids: Sequence[int] | None = None,
    calibration_ids: Tensor | None = None,
    seed: int = 0,
    observed: dict[tuple[int, ...], Observed] | None = None,
) -> PreTrainedModel:
    """A draft of shape `arch` with weights made from `target_model`'s, in float32 and eval mode.

    `draft_token_ids`: the tokens a trimmed head keeps. `calibration_ids` [sequences, tokens]: text
    on which the target is observed when the draft is narrower; without it its token embeddings are.
    `observed`: on this text, by the layers that drafts are made of; what is new is added.
    rope_theta and the special tokens are the target's. Raises
    ArchsearchError for a target that is not Llama-like, a draft of another kind or another
    vocabulary.
    """
    target_arch = from_hf_config(target_model.config.to_dict())
    _check(target_model, target_arch, arch)
    arch = arch.replace(rope_theta=target_arch.rope_theta)
    config, tokens = target_model.config, ("bos_token_id", "eos_token_id", "pad_token_id")
    names = (*tokens, "rms_norm_eps", "rope_parameters", "hidden_act", "initializer_range")
    inherited = {name: getattr(config, name) for name in names if hasattr(config, name)}
    with cheap_initialisation():
        draft = build_draft(arch, torch.float32, draft_token_ids, seed, **inherited)
    for name in tokens:
        setattr(draft.generation_config, name, getattr(target_model.generation_config, name))
    random = torch.Generator().manual_seed(seed)
    layers = choose_layers(arch.num_hidden_layers, target_arch.num_hidden_layers)
    with torch.no_grad():
        old, new = target_arch.hidden_size, arch.hidden_size
        rotation, used = None, tuple(sorted({layer for layer in layers if layer is not None}))
        energy: dict[int, Tensor] = {}
        if new < old or arch.intermediate_size < target_arch.intermediate_size:
            observed = {} if observed is None else observed
            if used not in observed:
                observed[used] = observe(target_model, used, calibration_ids)
            vectors, energy = observed[used]
            rotation = vectors[:, -new:].flip(1).float() if new < old else None
        width = _Width(old, new, rotation, random)
        _fill_ends(target_model, draft, width)
        for index, source in enumerate(layers):
            block = draft.model.layers[index]
            # A layer that adds nothing: the weights of some target layer, with silent outputs.
            given = source if source is not None else index % target_arch.num_hidden_layers
            whole = target_model.model.layers[given]
            for name in ("input_layernorm", "post_attention_layernorm"):
                norm = getattr(whole, name).weight.float()
                getattr(block, name).weight.copy_(width.norm(norm))
            _fill_attention(whole, block, target_arch, arch, width)
            _fill_mlp(whole, block, arch, width, energy.get(given))
            if source is None:
                for silent in (block.self_attn.o_proj, block.mlp.down_proj):
                    silent.weight.zero_()
                    if silent.bias is not None:
                        silent.bias.zero_()
    return draft.eval()


def _check(target_model: PreTrainedModel, target: Architecture, arch: Architecture) -> None:
    kind = target_model.config.model_type
    if kind not in SUPPORTED or target.qk_norm:
        raise ArchsearchError(
            f"drafts can be made from targets of {', '.join(SUPPORTED)} without QK norms, not from"
            f" {kind!r}; use another target"
        )
    if arch.qk_norm or not arch.rms_norm or not arch.gated_mlp or arch.learned_positions:
        raise ArchsearchError(
            "a draft made from a Llama-like target needs RMSNorm, a gated MLP, rotary positions and"
            " no QK norm"
        )
    if arch.vocab_size != target.vocab_size:
        raise ArchsearchError(
            f"the draft's vocabulary has {arch.vocab_size} tokens, the target's"
            f" {target.vocab_size}; make them equal"
        )


# -- the residual stream


@dataclass(frozen=True)
class _Width:
    """How the residual stream [..., d] becomes the draft's [..., d']: kept, rotated and cut, or
    padded."""

    old: int
    new: int
    rotation: Tensor | None  # [d, d'], orthonormal columns, when d' < d
    random: torch.Generator

    @property
    def norm_scale(self) -> float:
        """RMSNorm divides by the root mean square over d' instead of d channels that hold (almost)
        the same energy."""
        return (self.old / self.new) ** 0.5

    def produce(self, weight: Tensor) -> Tensor:
        """[d, in] -> [d', in]: a linear (or a transposed embedding) that writes to the stream."""
        if self.rotation is not None:
            return self.rotation.T @ weight
        if self.new == self.old:
            return weight
        return torch.cat([weight, self.noise((self.new - self.old, weight.shape[1]), weight)])

    def consume(self, weight: Tensor, norm: Tensor) -> Tensor:
        """[out, d] -> [out, d']: a linear that reads the stream through the norm with weights
        `norm` [d]."""
        if self.rotation is not None:
            return (weight * norm) @ self.rotation
        return torch.cat([weight, weight.new_zeros(weight.shape[0], self.new - self.old)], dim=1)

    def norm(self, norm: Tensor) -> Tensor:
        """[d] -> [d']: what is left of a norm's weights."""
        if self.rotation is not None:
            return norm.new_full((self.new,), self.norm_scale)
        return torch.cat([norm, norm.mean().expand(self.new - self.old)]) * self.norm_scale

    def tied_norm(self, norm: Tensor, embedding: Tensor) -> Tensor:
        """[d] -> [d']: the final norm when the head is the rotated embedding [vocab, d] itself:
        nothing can be folded into that.

        Per channel the factor that brings E Q diag(factor) nearest to E diag(norm) Q.
        """
        if self.rotation is None:
            return self.norm(norm)
        plain, wanted = embedding @ self.rotation, (embedding * norm) @ self.rotation
        return self.norm_scale * (plain * wanted).sum(0) / plain.square().sum(0).clamp_min(1e-12)

    def noise(self, shape: tuple[int, int], like: Tensor) -> Tensor:
        """Small weights of new channels."""
        return torch.randn(shape, generator=self.random) * (_SMALL * like.std())

    def noise_rows(self, shape: tuple[int, int], like: Tensor) -> Tensor:
        """The same with no bias, which is the last column."""
        rows = self.noise(shape, like)
        rows[:, -1] = 0.0
        return rows


Observed = tuple[Tensor, dict[int, Tensor]]
"""Directions [d, d], float64, of the normalised residual stream where the chosen layers and the
head read it: eigenvectors of its second moment, weakest first. By layer the sum of squares
[intermediate] of each FFN channel's activation; {} without text."""


def observe(
    target_model: PreTrainedModel, layers: Sequence[int], calibration_ids: Tensor | None
) -> Observed:
    """What the target does on a text, or on its token embeddings."""
    hidden, model = target_model.config.hidden_size, target_model.model
    moment = torch.zeros(hidden, hidden, dtype=torch.float64)
    energy: dict[int, Tensor] = {}

    def add(states: Tensor) -> None:
        flat = states.detach().reshape(-1, hidden).float()
        flat = flat / flat.square().mean(1, keepdim=True).clamp_min(1e-12).sqrt()
        moment.add_((flat.T @ flat).double())

    def add_energy(layer: int, states: Tensor) -> None:
        square = states.detach().float().square().reshape(-1, states.shape[-1]).sum(0)
        energy[layer] = energy.get(layer, 0) + square

    def watch(module: nn.Module, of: Callable[[Tensor], None]) -> object:
        return module.register_forward_pre_hook(lambda _, inputs: of(inputs[0]))

    if calibration_ids is None:
        add(model.embed_tokens.weight)
    else:
        hooks = [watch(model.norm, add)]
        for layer in layers:
            block = model.layers[layer]
            hooks += [watch(block.input_layernorm, add), watch(block.post_attention_layernorm, add)]
            hooks.append(watch(block.mlp.down_proj, partial(add_energy, layer)))
        with hooked(hooks):
            for rows in calibration_ids.split(8):
                model(rows, use_cache=False)
    return torch.linalg.eigh(moment)[1], energy


def _fill_ends(target_model: PreTrainedModel, draft: PreTrainedModel, width: _Width) -> None:
    """Embedding, final norm and head."""
    embedding = target_model.model.embed_tokens.weight.float()
    head = target_model.lm_head.weight.float()
    norm = target_model.model.norm.weight.float()
    draft.model.embed_tokens.weight.copy_(width.produce(embedding.T).T)
    if draft.config.tie_word_embeddings:
        draft.model.norm.weight.copy_(width.tied_norm(norm, head))
        return
    draft.model.norm.weight.copy_(width.norm(norm))
    rows = head[draft.lm_head.draft_token_ids] if isinstance(draft.lm_head, TrimmedHead) else head
    draft.lm_head.weight.copy_(width.consume(rows, norm))


# -- one layer


def _with_bias(linear: nn.Linear) -> Tensor:
    """[out, in + 1]: the bias is one more column, so it goes wherever the rows go."""
    bias = linear.weight.new_zeros(linear.weight.shape[0]) if linear.bias is None else linear.bias
    return torch.cat([linear.weight.float(), bias.float()[:, None]], dim=1)


def _set_reader(linear: nn.Linear, rows: Tensor, norm: Tensor, width: _Width) -> None:
    """Set a linear that reads the stream from `rows` [out, d + 1] of the target (last column:
    bias)."""
    linear.weight.copy_(width.consume(rows[:, :-1], norm))
    if linear.bias is not None:
        linear.bias.copy_(rows[:, -1])
    elif rows[:, -1].any():
        log.warning(
            "the target has biases where the draft has none: they are dropped, which costs"
            " acceptance until trained"
        )


def _set_writer(linear: nn.Linear, columns: Tensor, bias: Tensor | None, width: _Width) -> None:
    """Set a linear that writes to the stream from `columns` [d, in] of the target."""
    linear.weight.copy_(width.produce(columns))
    if linear.bias is not None:
        linear.bias.zero_()
        if bias is not None:
            linear.bias.copy_(width.produce(bias.float()[:, None])[:, 0])


def _fill_attention(
    source: Any, block: Any, target: Architecture, arch: Architecture, width: _Width
) -> None:
    old, new = source.self_attn, block.self_attn
    dim, hidden = target.head_dim, target.hidden_size
    norm = source.input_layernorm.weight.float()
    # each [heads, head_dim, d + 1]
    readers = (old.q_proj, old.k_proj, old.v_proj)
    q, k, v = (_with_bias(linear).view(-1, dim, hidden + 1) for linear in readers)
    # [heads, d, head_dim]
    o = old.o_proj.weight.float().view(hidden, target.num_attention_heads, dim).permute(1, 0, 2)
    importance = o.square().sum((1, 2)).sqrt()
    groups = choose_heads(
        importance, target.num_key_value_heads, arch.num_key_value_heads, arch.kv_group_size
    )
    keep, places = rotary_pairs(dim, arch.head_dim)
    # Attention divides by sqrt(head_dim): the query makes up for another head_dim.
    q_scale = (arch.head_dim / dim) ** 0.5
    new_q, new_k, new_v, new_o = [], [], [], []
    for kv_heads, q_heads in groups:
        key = k[kv_heads].mean(0)
        served = [o[head] for head in q_heads if head is not None]
        value, outs = _fit_values(v[kv_heads].mean(0), served, arch.head_dim, width)
        new_k.append(_place(key[keep], places, arch.head_dim))
        new_v.append(value)
        remaining = iter(outs)
        for head in q_heads:
            if head is None:  # a head the target does not have: random question, silent answer
                new_q.append(width.noise_rows((arch.head_dim, hidden + 1), q))
                new_o.append(o.new_zeros(hidden, arch.head_dim))
            else:
                new_q.append(q_scale * _place(q[head][keep], places, arch.head_dim))
                new_o.append(next(remaining))
    for linear, made in ((new.q_proj, new_q), (new.k_proj, new_k), (new.v_proj, new_v)):
        _set_reader(linear, torch.cat(made), norm, width)
    _set_writer(new.o_proj, torch.cat(new_o, dim=1), old.o_proj.bias, width)


def choose_heads(
    importance: Tensor, target_groups: int, draft_groups: int, draft_group_size: int
) -> list[tuple[list[int], list[int | None]]]:
    """For each draft KV head: the target KV heads it is the mean of, and the target query heads it
    serves (None: a new one).

    `importance` [target heads]. As many or fewer query heads per group: the most important groups,
    or copies of them where the draft has more groups, each with its most important heads. More per
    group: neighbouring groups are merged, their keys and values averaged.
    """
    size = len(importance) // target_groups
    by_group = importance.view(target_groups, size).square().sum(1)
    if draft_group_size > size and draft_groups < target_groups:
        edges = [round(slot * target_groups / draft_groups) for slot in range(draft_groups + 1)]
        slots = [
            (list(range(low, high)), list(range(low * size, high * size)))
            for low, high in pairwise(edges)
        ]
    else:
        # Copies, of fewer groups one or none, go to the groups in turn, most important first; each
        # copy serves its share of the group's query heads.
        order = by_group.argsort(descending=True).tolist()
        copies = [draft_groups // target_groups] * target_groups
        for group in order[: draft_groups % target_groups]:
            copies[group] += 1
        slots = []
        for group in range(target_groups):
            heads = list(range(group * size, (group + 1) * size))
            slots += [([group], heads[copy :: copies[group]]) for copy in range(copies[group])]
    result: list[tuple[list[int], list[int | None]]] = []
    for kv_heads, heads in slots:
        best = sorted(sorted(heads, key=lambda head: -float(importance[head]))[:draft_group_size])
        result.append((kv_heads, [*best, *[None] * (draft_group_size - len(best))]))
    return result


def rotary_pairs(target_dim: int, draft_dim: int) -> tuple[list[int], list[int]]:
    """Target channels to keep and the draft channels they go to, so that their rotary frequencies
    theta^(-2i/dim) agree.

    Pair i is channels (i, i + dim/2), as transformers rotates halves. Exact when one dim divides
    the other, else the nearest.
    """
    old, new = target_dim // 2, draft_dim // 2
    count = min(old, new)
    pairs = [min(old - 1, round(index * old / count)) for index in range(count)]
    places = [round(index * new / count) for index in range(count)]
    return pairs + [pair + old for pair in pairs], places + [place + new for place in places]


def _place(rows: Tensor, places: list[int], size: int) -> Tensor:
    placed = rows.new_zeros(size, *rows.shape[1:])
    placed[places] = rows
    return placed


def _fit_values(
    value: Tensor, outs: list[Tensor], draft_dim: int, width: _Width
) -> tuple[Tensor, list[Tensor]]:
    """Values [dim, d + 1] and output slices [d, dim] of their heads with `draft_dim` channels: best
    low-rank product, or padded.

    Only the product out @ value matters. Its truncated SVD over all heads of the group is the
    nearest of lower rank.
    """
    dim = value.shape[0]
    if draft_dim == dim:
        return value, outs
    if not outs:
        padded = value[:draft_dim] if draft_dim < dim else _place(value, [*range(dim)], draft_dim)
        return padded, []
    if draft_dim > dim:
        shape, extra = (draft_dim - dim, value.shape[1]), (0, draft_dim - dim)
        noise = width.noise_rows(shape, value)
        return torch.cat([value, noise]), [nn.functional.pad(out, extra) for out in outs]
    stacked = torch.cat(outs)  # [heads * d, dim]
    left, upper = torch.linalg.qr(stacked)
    right, lower = torch.linalg.qr(value.T)
    u, s, vh = torch.linalg.svd(upper @ lower.T)
    root = s[:draft_dim].sqrt()
    new_out = left @ (u[:, :draft_dim] * root)
    new_value = (root[:, None] * vh[:draft_dim]) @ right.T
    return new_value, list(new_out.split(outs[0].shape[0]))


def _fill_mlp(
    source: Any, block: Any, arch: Architecture, width: _Width, energy: Tensor | None
) -> None:
    """Fewer channels: those that write most, by |activation| |down| on text, by |gate| |up| |down|
    without."""
    gate, up = _with_bias(source.mlp.gate_proj), _with_bias(source.mlp.up_proj)
    down = source.mlp.down_proj.weight.float()
    norm = source.post_attention_layernorm.weight.float()
    old, new = gate.shape[0], arch.intermediate_size
    if new < old:
        gate_size, up_size = ((rows[:, :-1] * norm).norm(dim=1) for rows in (gate, up))
        activity = gate_size * up_size if energy is None else energy.sqrt()
        kept = (activity * down.norm(dim=0)).argsort(descending=True)[:new].sort().values
        gate, up, down = gate[kept], up[kept], down[:, kept]
    elif new > old:
        gate, up = (
            torch.cat([rows, width.noise_rows((new - old, rows.shape[1]), rows)])
            for rows in (gate, up)
        )
        down = nn.functional.pad(down, (0, new - old))
    _set_reader(block.mlp.gate_proj, gate, norm, width)
    _set_reader(block.mlp.up_proj, up, norm, width)
    _set_writer(block.mlp.down_proj, down, source.mlp.down_proj.bias, width)
