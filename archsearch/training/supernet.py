"""A supernet: one draft with shared weights, whose slices are the candidate drafts.

The widest and deepest candidate is initialised from the target with its residual stream turned to principal components, FFN
channels, KV groups and query heads sorted by importance. So every candidate is a prefix of it in every dimension:

- hidden size: the first channels of the turned stream (what SliceGPT, arXiv 2401.15024, would keep);
- depth: the same ends of the target that a stand-alone draft of that depth takes (`choose_layers`);
- FFN, KV groups, heads per group: the most important ones.

Norm weights are not shared: each (hidden size, depth) has its own, for they are cheap and what a slice misses most. Training
takes a batch and lets a few candidates learn from the target on it (no chain from large to small: the target's logits are there
anyway). Candidates take turns so that all get equal tokens; each turn pairs a dear one with a cheap one, which bounds the cost of
a step like the sandwich rule (arXiv 1903.05134) does without spending most of it on a largest net that nobody wants. What is
evaluated is the running mean of the weights, cut out as an ordinary draft (`Supernet.slice`), which can be trained further.

Not covered: candidates wider than the target (nothing to take the channels from), of another head_dim, with another head or
with biases.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import body_parameters
from archsearch.architecture.hf_config import from_hf_config
from archsearch.errors import ArchsearchError, RunFailed
from archsearch.models.drafts import build_draft
from archsearch.models.runtime import tune_malloc
from archsearch.text.cache import CachedSequence, TextCache
from archsearch.training import checkpoint
from archsearch.training import distill as training
from archsearch.training.distill import Batch, DistillConfig
from archsearch.training.initialise import choose_layers, ffn_energy, initialise_draft

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHECKPOINT: Final = "supernet.pt"
FORMAT: Final = 1
_SLICED: Final = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                  "max_position_embeddings", "rope_theta")  # fmt: skip
Progress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class SupernetConfig:
    """How long and how to train. `tokens`: inputs summed over candidates, so that it compares with stand-alone trainings.

    `per_step`: candidates that learn from each batch. `average_power`: as in DistillConfig. The rest as there.
    """

    tokens: int
    lr: float = 1.5e-3
    batch_tokens: int = 512
    per_step: int = 2
    warmup_tokens: int = 20_000
    anneal: float = 0.0
    average_power: float = 6.0
    clip: float = 1.0
    heldout_sequences: int = 64
    autocast: bool | None = None
    checkpoint_every_s: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens <= 0 or self.per_step < 1 or not 0 < self.lr < 1 or not 0 <= self.anneal <= 1:
            raise ArchsearchError(
                f"supernet settings out of range: tokens={self.tokens}, per_step={self.per_step}, lr={self.lr}, "
                f"anneal={self.anneal}"
            )


def covering_shape(candidates: Sequence[Architecture]) -> Architecture:
    """The smallest shape that has every candidate as a slice. Raises ArchsearchError where there is none."""
    if not candidates:
        raise ArchsearchError("a supernet needs at least one candidate")
    first = candidates[0]
    for arch in candidates[1:]:
        same = {name: getattr(first, name) for name in _SLICED}
        if arch.replace(**same) != first:
            raise ArchsearchError(
                f"a supernet shares head, head_dim and kind between its slices: {arch.label()} and {first.label()} differ in "
                "more than width, depth, FFN and heads"
            )
    groups = max(arch.num_key_value_heads for arch in candidates)
    return first.replace(
        hidden_size=max(arch.hidden_size for arch in candidates),
        intermediate_size=max(arch.intermediate_size for arch in candidates),
        num_hidden_layers=max(arch.num_hidden_layers for arch in candidates),
        num_key_value_heads=groups,
        num_attention_heads=groups * max(arch.kv_group_size for arch in candidates),
    )


def covers(target: Architecture, arch: Architecture) -> bool:
    """Whether `arch` can be a slice of a supernet of `target`'s: not wider than it, same head_dim, no sliding window."""
    return arch.hidden_size <= target.hidden_size and arch.head_dim == target.head_dim and "S" not in arch.window_pattern


class Supernet(nn.Module):
    """Shared weights of all slices of `shape`; `norms[hidden x depth]` are each slice's own.

    `embedding` [vocab, hidden] and `head` [kept, hidden] are the turned target's; the embedding is frozen.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, draft: PreTrainedModel, shape: Architecture, candidates: Sequence[Architecture]) -> None:
        super().__init__()
        self.shape = shape
        self.eps = float(draft.config.rms_norm_eps)
        self.inherited = {
            name: getattr(draft.config, name)
            for name in ("bos_token_id", "eos_token_id", "pad_token_id", "rms_norm_eps", "rope_parameters", "hidden_act")
            if hasattr(draft.config, name)
        }
        tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
        self.generation = {name: getattr(draft.generation_config, name) for name in tokens}
        kept = training.kept_token_ids(draft)
        self.kept_ids: list[int] | None = None if kept is None else kept.tolist()
        self.embedding = nn.Parameter(draft.model.embed_tokens.weight.detach().clone(), requires_grad=False)
        self.head = nn.Parameter(draft.lm_head.weight.detach().clone())
        self.layers = nn.ModuleList()
        for block in draft.model.layers:
            parts = {name: getattr(block.self_attn, f"{name}_proj").weight for name in "qkvo"}
            parts |= {name: getattr(block.mlp, f"{name}_proj").weight for name in ("gate", "up", "down")}
            self.layers.append(nn.ParameterDict({name: nn.Parameter(weight.detach().clone()) for name, weight in parts.items()}))
        self.norms = nn.ParameterDict()
        for arch in candidates:
            if self._key(arch) not in self.norms:
                scale = math.sqrt(shape.hidden_size / arch.hidden_size)
                weights = torch.full((2 * arch.num_hidden_layers + 1, arch.hidden_size), scale)
                self.norms[self._key(arch)] = nn.Parameter(weights)
        with torch.no_grad():
            positions = torch.arange(shape.max_position_embeddings)[None]
            cos, sin = draft.model.rotary_emb(self.embedding[:1], positions)
        self.register_buffer("cos", cos[0].float(), persistent=False)
        self.register_buffer("sin", sin[0].float(), persistent=False)

    @staticmethod
    def _key(arch: Architecture) -> str:
        return f"{arch.hidden_size}x{arch.num_hidden_layers}"

    def layer_indices(self, depth: int) -> list[int]:
        """Which of the supernet's layers a slice of `depth` layers is made of: both ends."""
        return [*range((depth + 1) // 2), *range(self.shape.num_hidden_layers - depth // 2, self.shape.num_hidden_layers)]

    def _check(self, arch: Architecture) -> None:
        fits = (
            self._key(arch) in self.norms
            and covering_shape([self.shape, arch]) == self.shape
            and arch.kv_group_size <= self.shape.kv_group_size
        )
        if not fits:
            raise ArchsearchError(f"{arch.label()} is no slice of the supernet {self.shape.label()}; train one that covers it")

    def _cut(self, arch: Architecture, index: int) -> dict[str, Tensor]:
        """The slice's weights of one layer (views)."""
        layer: Any = self.layers[index]
        hidden, dim, size = arch.hidden_size, arch.head_dim, self.shape.kv_group_size
        groups, kept = arch.num_key_value_heads, arch.kv_group_size
        q = layer["q"].view(-1, size, dim, self.shape.hidden_size)[:groups, :kept, :, :hidden].reshape(-1, hidden)
        o = layer["o"].view(self.shape.hidden_size, -1, size, dim)[:hidden, :groups, :kept].reshape(hidden, -1)
        ffn = arch.intermediate_size
        return {
            "q": q, "k": layer["k"][: groups * dim, :hidden], "v": layer["v"][: groups * dim, :hidden], "o": o,
            "gate": layer["gate"][:ffn, :hidden], "up": layer["up"][:ffn, :hidden], "down": layer["down"][:hidden, :ffn],
        }  # fmt: skip

    def states(self, arch: Architecture, input_ids: Tensor) -> Tensor:
        """Final normalised hidden states [rows, width, hidden of arch] of the slice, causal, without padding mask."""
        self._check(arch)
        rows, width = input_ids.shape
        norms = self.norms[self._key(arch)]
        stream = self.embedding[input_ids][..., : arch.hidden_size]
        # Heads may be fewer than the stream is wide: [1, 1, width, head_dim] broadcasts over rows and heads.
        cos, sin = self.cos[:width][None, None], self.sin[:width][None, None]
        for number, index in enumerate(self.layer_indices(arch.num_hidden_layers)):
            weights = self._cut(arch, index)
            x = functional.rms_norm(stream, (arch.hidden_size,), norms[2 * number], self.eps)
            q, k, v = (functional.linear(x, weights[name]).view(rows, width, -1, arch.head_dim).transpose(1, 2) for name in "qkv")
            q, k = _rotate(q, cos, sin).to(v.dtype), _rotate(k, cos, sin).to(v.dtype)
            if arch.kv_group_size > 1:
                k, v = (part.repeat_interleave(arch.kv_group_size, 1) for part in (k, v))
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            stream = stream + functional.linear(mixed.transpose(1, 2).reshape(rows, width, -1), weights["o"])
            x = functional.rms_norm(stream, (arch.hidden_size,), norms[2 * number + 1], self.eps)
            x = functional.silu(functional.linear(x, weights["gate"])) * functional.linear(x, weights["up"])
            stream = stream + functional.linear(x, weights["down"])
        return functional.rms_norm(stream, (arch.hidden_size,), norms[-1], self.eps)

    def logits(self, arch: Architecture, states: Tensor) -> Tensor:
        """[..., kept]: logits over the kept tokens from final states [..., hidden of arch]."""
        return functional.linear(states, self.head[:, : arch.hidden_size])

    def slice(self, arch: Architecture) -> PreTrainedModel:
        """The slice as an ordinary draft of its own (float32, eval): to be measured, or trained further."""
        self._check(arch)
        draft = build_draft(arch, torch.float32, self.kept_ids, **self.inherited)
        for name, values in self.generation.items():
            setattr(draft.generation_config, name, values)
        norms = self.norms[self._key(arch)].detach()
        hidden = arch.hidden_size
        with torch.no_grad():
            draft.model.embed_tokens.weight.copy_(self.embedding[:, :hidden])
            draft.lm_head.weight.copy_(self.head[:, :hidden])
            draft.model.norm.weight.copy_(norms[-1])
            for number, index in enumerate(self.layer_indices(arch.num_hidden_layers)):
                block = draft.model.layers[number]
                for name, weight in self._cut(arch, index).items():
                    getattr(block.self_attn if name in "qkvo" else block.mlp, f"{name}_proj").weight.copy_(weight)
                block.input_layernorm.weight.copy_(norms[2 * number])
                block.post_attention_layernorm.weight.copy_(norms[2 * number + 1])
        return draft.eval()


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, halves rotated as in transformers."""
    first, second = states.chunk(2, -1)
    return states * cos + torch.cat([-second, first], -1) * sin


def build_supernet(
    target_model: PreTrainedModel,
    candidates: Sequence[Architecture],
    *,
    draft_token_ids: Sequence[int] | None = None,
    calibration_ids: Tensor | None = None,
    seed: int = 0,
) -> Supernet:
    """A supernet over `candidates` out of the target's weights.

    Raises ArchsearchError for candidates wider than the target, of another head_dim, or that differ in their head.
    """
    target = from_hf_config(target_model.config.to_dict())
    for arch in candidates:
        if not covers(target, arch):
            raise ArchsearchError(
                f"{arch.label()} cannot be a slice of a supernet of this target: wider, windowed or another head_dim"
            )
    shape = covering_shape(candidates).replace(hidden_size=target.hidden_size, rope_theta=target.rope_theta)
    draft = initialise_draft(
        target_model, shape, draft_token_ids=draft_token_ids, calibration_ids=calibration_ids, seed=seed, rotate=True
    )
    layers = choose_layers(shape.num_hidden_layers, target.num_hidden_layers)
    energies = ffn_energy(target_model, layers, calibration_ids)
    with torch.no_grad():
        for block, source in zip(draft.model.layers, layers, strict=True):
            _sort_channels(block.mlp, energies.get(-1 if source is None else source))
            _sort_heads(block.self_attn, shape)
    return Supernet(draft, shape, candidates)


def _sort_channels(mlp: Any, energy: Tensor | None) -> None:
    """FFN channels by what they write, new (silent) ones last. `energy` [target's channels] where all of them are kept."""
    gate, up, down = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
    activity = gate.norm(dim=1) * up.norm(dim=1)
    if energy is not None and len(energy) <= len(activity):
        activity = functional.pad(energy.to(activity.dtype).sqrt(), (0, len(activity) - len(energy)))
    order = (activity * down.norm(dim=0)).argsort(descending=True, stable=True)
    gate.copy_(gate[order].clone())
    up.copy_(up[order].clone())
    down.copy_(down[:, order].clone())


def _sort_heads(attention: Any, shape: Architecture) -> None:
    """KV groups, and query heads inside each, by the norm of their output projection."""
    dim, size, groups = shape.head_dim, shape.kv_group_size, shape.num_key_value_heads
    q, o = attention.q_proj.weight, attention.o_proj.weight
    outs = o.view(o.shape[0], groups, size, dim).square().sum((0, 3))  # [groups, size]
    group_order = outs.sum(1).argsort(descending=True, stable=True)
    head_order = outs.argsort(dim=1, descending=True, stable=True)
    picked = torch.stack([group * size + head_order[group] for group in group_order.tolist()]).reshape(-1)
    q.copy_(q.view(groups * size, dim, -1)[picked].reshape(q.shape).clone())
    o.copy_(o.view(-1, groups * size, dim)[:, picked].reshape(o.shape).clone())
    for linear in (attention.k_proj, attention.v_proj):
        linear.weight.copy_(linear.weight.view(groups, dim, -1)[group_order].reshape(linear.weight.shape).clone())


# --------------------------------------------------------------------------------------------------------------- training


def turns(candidates: Sequence[Architecture], per_step: int, seed: int, cycle: int) -> list[list[int]]:
    """Which candidates learn at each step of one cycle, in which everyone learns once: dear and cheap ones together."""
    order = sorted(range(len(candidates)), key=lambda i: (body_parameters(candidates[i]), i))
    steps = math.ceil(len(order) / per_step)
    groups: list[list[int]] = [[] for _ in range(steps)]
    for place, index in enumerate(order):  # a snake over the groups: 0 1 2 2 1 0 0 1 2
        lap, offset = divmod(place, steps)
        groups[offset if lap % 2 == 0 else steps - 1 - offset].append(index)
    return [groups[i] for i in np.random.default_rng([seed, cycle]).permutation(steps)]


@dataclass(frozen=True, slots=True)
class SupernetResult:
    """What a supernet's training did. `tokens`: inputs summed over the candidates that learnt; `cpu_s`: processor seconds."""

    tokens: int
    steps: int
    cpu_s: float
    losses: tuple[float, ...]


def train_supernet(
    supernet: Supernet,
    candidates: Sequence[Architecture],
    cache: TextCache,
    config: SupernetConfig,
    *,
    checkpoint_dir: Path | str | None = None,
    progress: Progress | None = None,
) -> SupernetResult:
    """Train `supernet` in place until `config.tokens`; afterwards it holds the running mean of its weights (if no anneal).

    Resumes from `checkpoint_dir`, also to a larger budget (without an anneal). `progress` gets {"step", "tokens", "fraction",
    "loss", "cpu_s"}. Raises ArchsearchError for a checkpoint of other candidates, RunFailed when the loss stops being a number.
    """
    tune_malloc()
    if cache.vocab_size != supernet.embedding.shape[0]:
        raise ArchsearchError(
            f"the text's target has {cache.vocab_size} tokens, the supernet's {supernet.embedding.shape[0]}; "
            "use text of the same target"
        )
    for arch in candidates:
        supernet._check(arch)
    folder = None if checkpoint_dir is None else Path(checkpoint_dir)
    return _SupernetRun(supernet, list(candidates), cache, config, folder, progress).train()


class _SupernetRun:
    def __init__(
        self,
        supernet: Supernet,
        candidates: list[Architecture],
        cache: TextCache,
        config: SupernetConfig,
        folder: Path | None,
        progress: Progress | None,
    ) -> None:
        self.net, self.candidates, self.config, self.progress = supernet, candidates, config, progress
        self.path = None if folder is None else folder / CHECKPOINT
        self.sequences, _ = training.split_heldout(cache.sequences, config.heldout_sequences)
        self.lengths = [len(s) - 1 for s in self.sequences]
        kept = None if supernet.kept_ids is None else torch.tensor(supernet.kept_ids)
        self.teacher_head = cache.head if kept is None else cache.head[kept]
        self.loss_config = DistillConfig(
            max_tokens=1, lr=config.lr, warmup_tokens=config.warmup_tokens, anneal=config.anneal, feature_weight=0.0
        )
        self.trainable = {name: p for name, p in supernet.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(self.trainable.values(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        names = [arch.to_dict() for arch in candidates]
        free = ("tokens", "anneal", "checkpoint_every_s")
        settings = {key: value for key, value in dataclasses.asdict(config).items() if key not in free}
        self.identity = training._digest([names, settings, cache.fingerprint, supernet.shape.to_dict()])
        self.step = self.tokens = self.averaged = 0
        self.cpu_s = 0.0
        self.losses: list[float] = []
        self.average: dict[str, Tensor] = {}

    def train(self) -> SupernetResult:
        self._resume()
        begin = time.process_time() - self.cpu_s
        saved = time.monotonic()
        plan = self._plan()
        while (fraction := self.tokens / self.config.tokens) < 1:
            batch, chosen = next(plan)
            self._update(batch, chosen, training.learning_rate(self.loss_config, fraction, self.tokens))
            self.cpu_s = time.process_time() - begin
            if self.progress is not None:
                self.progress({"step": self.step, "tokens": self.tokens, "fraction": self.tokens / self.config.tokens,
                               "loss": self.losses[-1], "cpu_s": self.cpu_s})  # fmt: skip
            if self.path is not None and time.monotonic() - saved >= self.config.checkpoint_every_s:
                self._save()
                saved = time.monotonic()
        self._save()
        if self.average and not self.config.anneal:
            with torch.no_grad():
                for name, parameter in self.trainable.items():
                    parameter.copy_(self.average[name])
        return SupernetResult(self.tokens, self.step, self.cpu_s, tuple(self.losses))

    def _plan(self) -> Any:
        """(batch, indices of candidates) from the current step on."""
        number = epoch = cycle = 0
        batches: list[list[int]] = []
        turn: list[list[int]] = []
        while True:
            if not batches:
                batches = training.plan_epoch(self.lengths, self.config.batch_tokens, self.config.seed, epoch)
                epoch += 1
            if not turn:
                turn = turns(self.candidates, self.config.per_step, self.config.seed, cycle)
                cycle += 1
            batch, chosen = batches.pop(0), turn.pop(0)
            if number >= self.step:
                yield training.make_batch([self.sequences[i] for i in batch]), chosen
            number += 1

    def _update(self, batch: Batch, chosen: list[int], lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with torch.no_grad():
            teacher = functional.linear(batch.hidden.to(self.teacher_head.dtype), self.teacher_head)
        greedy = torch.full_like(batch.greedy_ids, -100)  # the KL needs none
        total = 0.0
        for index in chosen:
            arch = self.candidates[index]
            with training.autocast(self.net.head, self.config.autocast):
                states = self.net.states(arch, batch.input_ids).reshape(-1, arch.hidden_size)[batch.positions]
                logits = self.net.logits(arch, states)
            loss = training.distill_loss(logits, teacher, greedy, self.loss_config) / len(chosen)
            total += loss.item()
            loss.backward()
        used = [p for p in self.trainable.values() if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(used, self.config.clip).item()
        if not math.isfinite(total) or not math.isfinite(norm):
            raise RunFailed(
                f"training the supernet failed at step {self.step}: the loss is {total} (not a number or infinite); "
                f"try a lower learning rate than {self.config.lr}"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += batch.tokens * len(chosen)
        self.losses.append(total)
        if self.step % training._AVERAGE_EVERY == 0:
            self.averaged += 1
            if not self.average:
                self.average = {name: p.detach().clone() for name, p in self.trainable.items()}
            else:
                share = 1.0 - (1.0 - 1.0 / self.averaged) ** (self.config.average_power + 1.0)
                torch._foreach_lerp_(list(self.average.values()), [p.detach() for p in self.trainable.values()], share)

    def _save(self) -> None:
        if self.path is None:
            return
        checkpoint.save_state(
            self.path,
            {
                "format": FORMAT, "identity": self.identity, "step": self.step, "tokens": self.tokens, "cpu_s": self.cpu_s,
                "weights": {name: p.detach() for name, p in self.trainable.items()}, "average": self.average,
                "averaged": self.averaged, "optimizer": self.optimizer.state_dict(), "losses": self.losses,
            },
        )  # fmt: skip

    def _resume(self) -> None:
        if self.path is None or not self.path.exists():
            return
        state = checkpoint.load_state(self.path)
        if state.get("format") != FORMAT or state.get("identity") != self.identity:
            raise ArchsearchError(
                f"the checkpoint {self.path} was made for other candidates, text or settings; delete it or name another folder"
            )
        with torch.no_grad():
            for name, parameter in self.trainable.items():
                parameter.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens, self.cpu_s = state["step"], state["tokens"], state["cpu_s"]
        self.average, self.averaged, self.losses = state["average"], state["averaged"], state["losses"]


def slice_matches(
    supernet: Supernet, candidates: Sequence[Architecture], heldout: Sequence[CachedSequence]
) -> list[list[np.ndarray]]:
    """Per candidate and held-out text [n] bool: where the slice's greedy token is the target's. Seconds per candidate."""
    return [training.greedy_matches(supernet.slice(arch), heldout) for arch in candidates]
