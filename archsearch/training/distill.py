"""Distillation: a draft learns to propose what its target would write.

The target's logits are rebuilt from its cached hidden states on the draft's own vocabulary, so training runs no target. The loss
is counted where the target wrote, never on the prompt. Every draft sees the same batches in the same order (seeded), so drafts
are compared on equal tokens.

Schedule: a warm-up of so many tokens, a stable trunk, and a linear anneal to zero over the last part of the budget (WSD, arXiv
2404.06395). The trunk does not know the budget: a run that is continued to a larger one goes back to where its anneal began, so
training to B and then to 2B ends where training to 2B ends. A running mean of the trunk's weights (power function of the step:
Karras et al., arXiv 2312.02696, section 3.1) stands in for an anneal at every point of the trunk, at the cost of one weighted
sum every few steps: that is what learning curves and rungs of a search look at.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as functional

from archsearch.errors import ArchsearchError, RunFailed
from archsearch.models.runtime import tune_malloc
from archsearch.progress import say
from archsearch.text.cache import CachedSequence, TextCache
from archsearch.training.checkpoint import load_state, save_state
from archsearch.training.pace import Pace, Slowdown

logger = logging.getLogger(__name__)

FORMAT: Final = 2
CHECKPOINT: Final = "checkpoint.pt"
TRUNK: Final = "trunk.pt"
_AVERAGE_EVERY: Final = 4  # steps between updates of the running mean
_FULL_HEAD_LIMIT: Final = 16384  # above this many rows the loss is taken on a shortlist
_RANDOM_NEGATIVES: Final = 512  # without them a shortlisted full head learns nothing about the other rows

Progress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class DistillConfig:
    """How long and how to train. Give `budget_s`, `max_steps` or `max_tokens` (several: whichever ends first).

    `batch_tokens`: tokens per step, prompts included. `warmup_tokens`: tokens until the full learning rate. `anneal`: share of
    the run, at its end; 0 leaves the running mean of the weights in the draft instead. `average_power`: that mean weighs step t
    by t^power (mean age: 1 / (power + 2) of the run so far); None keeps none. `evaluate_at`: tokens at which the trunk's alpha is
    looked at, instead of `evaluations` equally spaced points. `kl_weight`, `ce_weight`,
    `tv_weight`, `feature_weight`: Kullback-Leibler divergence from the target at `teacher_temperature`, cross entropy on the
    target's greedy token, total variation (1 - the acceptance of sampling), and relative squared error of the final hidden state
    (left out where draft and target differ in width). `shortlist`: tokens that a head of more than 16,384 rows is trained on per
    step, besides those of the batch and random ones. `autocast`: bfloat16 arithmetic; None asks the machine.
    """

    budget_s: float | None = None
    max_steps: int | None = None
    max_tokens: int | None = None
    lr: float = 1.5e-3
    batch_tokens: int = 512
    warmup_tokens: int = 10_000
    anneal: float = 0.25
    average_power: float | None = 6.0
    clip: float = 1.0
    kl_weight: float = 1.0
    ce_weight: float = 0.0
    tv_weight: float = 0.0
    feature_weight: float = 0.3
    teacher_temperature: float = 1.0
    weight_decay: float = 0.0
    train_embedding: bool = False
    shortlist: int = 8192
    heldout_sequences: int = 64
    evaluations: int = 8
    evaluate_at: tuple[int, ...] = ()
    checkpoint_every_s: float = 30.0
    autocast: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        limits = (self.budget_s, self.max_steps, self.max_tokens)
        if all(limit is None for limit in limits) or any(limit is not None and limit <= 0 for limit in limits):
            raise ArchsearchError(f"training needs a positive budget_s, max_steps or max_tokens, got {limits}")
        averages = self.average_power is None or self.average_power > 0
        schedule_fits = self.warmup_tokens >= 0 and 0 <= self.anneal <= 1 and averages
        if not 0 < self.lr < 1 or self.batch_tokens < 2 or not schedule_fits or self.teacher_temperature <= 0:
            raise ArchsearchError(
                f"training settings out of range: lr={self.lr}, batch_tokens={self.batch_tokens}, "
                f"warmup_tokens={self.warmup_tokens}, anneal={self.anneal}, average_power={self.average_power}, "
                f"teacher_temperature={self.teacher_temperature}"
            )

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with: everything but the length of the run, its end and how it is watched."""
        free = ("budget_s", "max_steps", "max_tokens", "anneal", "checkpoint_every_s", "evaluations", "evaluate_at")
        return {key: value for key, value in dataclasses.asdict(self).items() if key not in free}


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """`value` (a loss or an alpha) after so many steps, tokens (prompts included) and seconds.

    An alpha's `weights`: "start", "average" (running mean of the trunk), "trunk" (as they are) or "annealed" (at the end of the
    anneal, or on its way there). `hits`: agreed tokens of each held-out text, so that drafts can be compared in pairs.
    """

    step: int
    tokens: int
    seconds: float
    value: float
    weights: str = ""
    hits: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DistillResult:
    """What a run did. `tokens_per_s`: input tokens per second of training steps alone; `alpha_curve`: greedy agreement on the
    held-out texts, before training first, after it last; `heldout_tokens`: length of each of those texts; `slowdowns`: when this
    call fell far below the speed it began with."""

    loss_curve: tuple[CurvePoint, ...]
    alpha_curve: tuple[CurvePoint, ...]
    steps: int
    tokens: int
    seconds: float
    tokens_per_s: float
    heldout_tokens: tuple[int, ...] = ()
    slowdowns: tuple[Slowdown, ...] = ()

    @property
    def alpha(self) -> float:
        return self.alpha_curve[-1].value


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences side by side, right-padded: `input_ids` [rows, width]; `positions` [n] into the flattened inputs, where written
    tokens are predicted; there `hidden` [n, target hidden], `greedy_ids`, `token_ids` [n]. `tokens`: inputs without padding."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    hidden: torch.Tensor
    greedy_ids: torch.Tensor
    token_ids: torch.Tensor
    tokens: int


# ---------------------------------------------------------------------------------------------------------------- batches


def make_batch(sequences: Sequence[CachedSequence]) -> Batch:
    """One right-padded batch; the last token of each sequence is predicted, never an input."""
    width = max(len(s) for s in sequences) - 1
    input_ids = torch.zeros(len(sequences), width, dtype=torch.long)
    positions = []
    for row, sequence in enumerate(sequences):
        length = len(sequence) - 1
        input_ids[row, :length] = sequence.token_ids[:-1]
        positions.append(torch.arange(sequence.prompt_tokens - 1, length) + row * width)
    return Batch(
        input_ids, torch.cat(positions), torch.cat([s.hidden for s in sequences]), torch.cat([s.greedy_ids for s in sequences]),
        torch.cat([s.written for s in sequences]), sum(len(s) - 1 for s in sequences),
    )  # fmt: skip


def plan_epoch(lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Indices of the sequences of each batch: neighbours in length together (about 1% padding), batches in random order.

    A pure function of its arguments: every draft sees the same batches, and a resumed run goes on where it stopped.
    """
    rng = np.random.default_rng([seed, epoch])
    # A little noise on the length mixes who is whose neighbour from epoch to epoch.
    order = np.argsort(np.asarray(lengths) * (1 + 0.02 * rng.random(len(lengths))), kind="stable")
    batches: list[list[int]] = []
    current: list[int] = []
    widest = 0
    for index in order.tolist():
        widest = max(widest, lengths[index])
        if current and (len(current) + 1) * widest > batch_tokens:
            batches.append(current)
            current, widest = [], lengths[index]
        current.append(index)
    batches.append(current)
    return [batches[i] for i in rng.permutation(len(batches))]


def split_heldout(sequences: Sequence[CachedSequence], count: int) -> tuple[list[CachedSequence], list[CachedSequence]]:
    """(training, held-out): at most `count` and a tenth of the sequences are held out, the same ones for every draft and seed."""
    held = min(count, len(sequences) // 10)
    chosen = set(np.random.default_rng(0).permutation(len(sequences))[:held].tolist())
    train = [s for i, s in enumerate(sequences) if i not in chosen]
    return train, [s for i, s in enumerate(sequences) if i in chosen]


# ------------------------------------------------------------------------------------------------------------------ draft


def kept_token_ids(draft: Any) -> torch.Tensor | None:
    """The ids [kept] (sorted) that a trimmed head proposes, None for a full head."""
    return getattr(draft.lm_head, "draft_token_ids", None)


def draft_states(draft: Any, batch: Batch) -> torch.Tensor:
    """The draft's final hidden states [n, hidden] at the positions that predict a written token."""
    # No mask: padding stands on the right, where a causal model does not look.
    states = draft.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    return states.reshape(-1, states.shape[-1])[batch.positions]


def greedy_matches(draft: Any, sequences: Sequence[CachedSequence], *, batch_tokens: int = 4096) -> list[np.ndarray]:
    """Per sequence [n] bool: whether the draft's argmax is the target's greedy token, given the true text before it.

    One teacher-forced pass; with this along greedy text, any gamma can be replayed afterwards.
    """
    if not sequences:
        return []
    kept = kept_token_ids(draft)
    weight = draft.lm_head.weight
    results: list[np.ndarray | None] = [None] * len(sequences)
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    training = draft.training
    draft.eval()
    with torch.inference_mode(), _autocast(weight, None if weight.dtype == torch.float32 else False):
        start = 0
        while start < len(order):
            stop = start + 1
            while stop < len(order) and (stop + 1 - start) * len(sequences[order[stop]]) <= batch_tokens:
                stop += 1
            chosen = order[start:stop]
            batch = make_batch([sequences[i] for i in chosen])
            best = functional.linear(draft_states(draft, batch).to(weight.dtype), weight).argmax(-1)
            matches = ((best if kept is None else kept[best]) == batch.greedy_ids).numpy()
            offset = 0
            for i in chosen:
                count = int(sequences[i].greedy_ids.shape[0])
                results[i] = matches[offset : offset + count]
                offset += count
            start = stop
    draft.train(training)
    return [r for r in results if r is not None]


def native_bf16(device: torch.device) -> bool:
    """Whether bfloat16 matrix products are faster than float32 ones on `device`."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
        return any(check is not None and check() for check in checks)
    return False


def _autocast(weight: torch.Tensor, enabled: bool | None) -> torch.autocast:
    use = native_bf16(weight.device) if enabled is None else enabled
    return torch.autocast(weight.device.type, torch.bfloat16, enabled=use)


# ------------------------------------------------------------------------------------------------------------------- loss


def distill_loss(
    draft_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    greedy_index: torch.Tensor,
    config: DistillConfig,
    draft_hidden: torch.Tensor | None = None,
    teacher_hidden: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean loss over positions. `draft_logits`, `teacher_logits` [n, vocab] over the same tokens (a trimmed vocabulary
    renormalises both); `greedy_index` [n] into them, -100 where the target's greedy token is not among them."""
    log_draft = functional.log_softmax(draft_logits.float(), -1)
    with torch.no_grad():
        log_teacher = functional.log_softmax(teacher_logits.float() / config.teacher_temperature, -1)
        teacher = log_teacher.exp()
    loss = log_draft.new_zeros(())
    if config.kl_weight:
        loss = loss + config.kl_weight * functional.kl_div(log_draft, log_teacher, reduction="batchmean", log_target=True)
    if config.ce_weight and bool((greedy_index >= 0).any()):
        loss = loss + config.ce_weight * functional.nll_loss(log_draft, greedy_index, ignore_index=-100)
    if config.tv_weight:
        loss = loss + config.tv_weight * 0.5 * (teacher - log_draft.exp()).abs().sum(-1).mean()
    if config.feature_weight and draft_hidden is not None and teacher_hidden is not None:
        reference = teacher_hidden.float()
        error = (draft_hidden.float() - reference).square().sum(-1) / reference.square().sum(-1).clamp_min(1e-6)
        loss = loss + config.feature_weight * error.mean()
    return loss


def learning_rate(config: DistillConfig, progress: float, tokens: int) -> float:
    """Warm-up by `tokens` seen, stable, linear anneal to zero by `progress` of the run from 0 to 1."""
    warm = 0.05 + 0.95 * tokens / config.warmup_tokens if tokens < config.warmup_tokens else 1.0
    left = 1.0 - progress
    return config.lr * min(warm, left / config.anneal if left < config.anneal else 1.0)


# ------------------------------------------------------------------------------------------------------------------- runs


def distill(
    draft: Any,
    cache: TextCache | Sequence[TextCache],
    config: DistillConfig,
    *,
    heldout: Sequence[CachedSequence] | None = None,
    checkpoint_dir: Path | str | None = None,
    progress: Progress | None = None,
) -> DistillResult:
    """Train `draft` (in place, float32) on what the target of `cache` wrote.

    The alpha curve is measured on `heldout`; without it on texts of the (first) cache that are kept out of training either way.
    With `checkpoint_dir` the state is written there every `checkpoint_every_s` seconds, at the end and on Ctrl-C, and a run that
    finds a checkpoint there goes on exactly where it stopped; with a larger budget, from where its anneal began. `progress` gets
    {"step", "tokens", "seconds", "fraction", "loss", "alpha", "tokens_per_s"}. Raises ArchsearchError for a checkpoint of another
    draft, cache or settings, and RunFailed when the loss stops being a number (the last good checkpoint stays).
    """
    tune_malloc()
    caches = [cache] if isinstance(cache, TextCache) else list(cache)
    if len({c.target_fingerprint for c in caches}) != 1:
        raise ArchsearchError("the text caches come from different targets; train on the text of one")
    run = _Run(draft, caches, config, None if checkpoint_dir is None else Path(checkpoint_dir), progress, heldout)
    try:
        return run.train()
    finally:
        run.close()


class _Run:
    """The state of one training run: optimizer, position, curves."""

    def __init__(
        self,
        draft: Any,
        caches: list[TextCache],
        config: DistillConfig,
        folder: Path | None,
        progress: Progress | None,
        heldout: Sequence[CachedSequence] | None = None,
    ) -> None:
        self.draft, self.config, self.progress = draft.float(), config, progress
        self.path = None if folder is None else folder / CHECKPOINT
        first, kept_out = split_heldout(caches[0].sequences, config.heldout_sequences)
        self.heldout = list(heldout) if heldout else kept_out or first[:8]
        self.sequences = first + [s for c in caches[1:] for s in c.sequences]
        self.lengths = [len(s) - 1 for s in self.sequences]
        self.kept = kept_token_ids(draft)
        self.weight = draft.lm_head.weight
        self.rows = int(self.weight.shape[0])
        fits = self.rows == caches[0].vocab_size if self.kept is None else int(self.kept.max()) < caches[0].vocab_size
        if not fits:
            raise ArchsearchError(
                f"the draft's vocabulary ({self.rows} head rows) does not fit the text's target ({caches[0].vocab_size} tokens); "
                "give a draft of the same target"
            )
        head = caches[0].head
        self.teacher_head = head if self.kept is None else head[self.kept]
        self.index_of = torch.full((caches[0].vocab_size,), -100, dtype=torch.long)
        self.index_of[torch.arange(caches[0].vocab_size) if self.kept is None else self.kept] = torch.arange(self.rows)
        self.frequent = self._frequent_rows() if self.rows > _FULL_HEAD_LIMIT else None
        self.same_width = int(self.weight.shape[1]) == caches[0].hidden_size
        self.was_trainable = {name: p.requires_grad for name, p in draft.named_parameters()}
        if (embedding := draft.get_input_embeddings()) is not None:
            embedding.weight.requires_grad_(config.train_embedding)
        self.trainable = {name: p for name, p in draft.named_parameters() if p.requires_grad}
        on_cpu_or_cuda = self.weight.device.type in ("cpu", "cuda")
        self.optimizer = torch.optim.AdamW(
            self.trainable.values(), lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=on_cpu_or_cuda
        )
        self.identity = self._identity(caches)
        self.step = self.tokens = self.trained_tokens = 0
        self.seconds = self.step_seconds = 0.0
        self.losses: list[CurvePoint] = []
        self.alphas: list[CurvePoint] = []
        self.evaluated_at = 0.0
        self.average: dict[str, torch.Tensor] = {}
        self.averaged = 0
        self.annealing = False
        self.pace = Pace(torch.get_num_threads(), torch.set_num_threads, say)

    def close(self) -> None:
        self.pace.close()
        for name, parameter in self.draft.named_parameters():
            parameter.requires_grad_(self.was_trainable[name])
        self.draft.zero_grad(set_to_none=True)
        self.draft.eval()

    def _identity(self, caches: list[TextCache]) -> dict[str, str]:
        shapes = {name: list(p.shape) for name, p in self.draft.named_parameters()}
        kept = b"" if self.kept is None else self.kept.numpy().tobytes()
        return {
            "draft": _digest([shapes, hashlib.sha256(kept).hexdigest()]),
            "text": _digest([c.fingerprint for c in caches]),
            "settings": _digest(self.config.identity()),
        }

    def _frequent_rows(self) -> torch.Tensor:
        counts = torch.zeros(self.index_of.shape[0], dtype=torch.long)
        for sequence in self.sequences:
            counts += torch.bincount(sequence.written, minlength=counts.shape[0])
        rows = self.index_of[counts.argsort(descending=True, stable=True)]
        return rows[rows >= 0][: self.config.shortlist]

    # ---- the loop

    def train(self) -> DistillResult:
        self._resume()
        clock = time.monotonic() - self.seconds
        saved = time.monotonic()
        if not self.alphas and not self.config.evaluate_at:
            self._evaluate()
        self.evaluated_at = self.fraction()
        self.seconds = time.monotonic() - clock
        self.draft.train()
        try:
            for batch_indices in self._plan():
                fraction = self.fraction()
                if fraction >= 1:
                    break
                if not self.annealing and self.config.anneal > 0 and 1 - fraction < self.config.anneal:
                    self._save(TRUNK)
                    self.annealing = True
                begin = time.monotonic()
                lr = learning_rate(self.config, fraction, self.tokens)
                batch = self._batch(batch_indices)
                loss = self._update(batch, lr)
                self.step_seconds += time.monotonic() - begin
                self.seconds = time.monotonic() - clock
                self.pace.step(batch.tokens)
                self._record(loss)
                if self._due():
                    self._evaluate()
                    self.pace.restart()
                    self.evaluated_at = self.fraction()
                    self.seconds = time.monotonic() - clock
                if self.path is not None and time.monotonic() - saved >= self.config.checkpoint_every_s:
                    self._save()
                    self.pace.restart()
                    saved = time.monotonic()
                    self.seconds = time.monotonic() - clock
        except KeyboardInterrupt:
            self._save()
            raise
        if not self.alphas or self.alphas[-1].step < self.step:
            self._evaluate()
        self.seconds = time.monotonic() - clock
        self._save()
        if self.average and not self.annealing:
            self._swap()  # after the checkpoint, which holds the trunk
        speed = self.trained_tokens / max(self.step_seconds, 1e-9)
        lengths = tuple(int(s.greedy_ids.shape[0]) for s in self.heldout)
        return DistillResult(
            tuple(self.losses), tuple(self.alphas), self.step, self.tokens, self.seconds, speed, lengths,
            tuple(self.pace.slowdowns),
        )  # fmt: skip

    def fraction(self) -> float:
        """How much of the run is done, 0 to 1, by whichever limit is nearest."""
        pairs = ((self.seconds, self.config.budget_s), (self.step, self.config.max_steps), (self.tokens, self.config.max_tokens))
        return min(1.0, max(done / limit for done, limit in pairs if limit is not None))

    def _due(self) -> bool:
        """Whether alpha is to be looked at now; the end of the run is looked at anyhow."""
        if self.fraction() >= 1:
            return False
        if self.config.evaluate_at:
            since = self.alphas[-1].tokens if self.alphas else 0
            return not self.annealing and any(since < mark <= self.tokens for mark in self.config.evaluate_at)
        return bool(self.config.evaluations) and self.fraction() >= self._next_evaluation()

    def _next_evaluation(self) -> float:
        """The next of the equally spaced fractions at which alpha is looked at; a longer budget spaces them anew."""
        parts = self.config.evaluations + 1
        return (math.floor(self.evaluated_at * parts + 1e-9) + 1) / parts

    def _plan(self) -> Iterator[list[int]]:
        """Batches from the current step on; epochs are replayed cheaply to find the place."""
        skip, epoch = self.step, 0
        while True:
            batches = plan_epoch(self.lengths, self.config.batch_tokens, self.config.seed, epoch)
            yield from batches[skip:]
            skip, epoch = max(0, skip - len(batches)), epoch + 1

    def _update(self, batch: Batch, lr: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self._loss(batch)
        value = loss.item()
        if math.isfinite(value):
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.trainable.values(), self.config.clip).item()
        if not math.isfinite(value) or not math.isfinite(norm):
            place = "" if self.path is None or not self.path.exists() else f"; the last good checkpoint is {self.path}"
            raise RunFailed(
                f"training failed at step {self.step}: the loss is {value} (not a number or infinite); "
                f"try a lower learning rate than {self.config.lr}{place}"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += batch.tokens
        self.trained_tokens += batch.tokens
        if self.config.average_power is not None and not self.annealing and self.step % _AVERAGE_EVERY == 0:
            self._add_to_average(self.config.average_power)
        return value

    def _add_to_average(self, power: float) -> None:
        self.averaged += 1
        if not self.average:
            self.average = {name: p.detach().clone() for name, p in self.trainable.items()}
            return
        share = 1.0 - (1.0 - 1.0 / self.averaged) ** (power + 1.0)
        torch._foreach_lerp_(list(self.average.values()), [p.detach() for p in self.trainable.values()], share)

    def _swap(self) -> None:
        """Exchange the weights in the draft and their running mean."""
        for name, parameter in self.trainable.items():
            parameter.data, self.average[name] = self.average[name], parameter.data

    def _loss(self, batch: Batch) -> torch.Tensor:
        greedy = self.index_of[batch.greedy_ids]
        with _autocast(self.weight, self.config.autocast):
            hidden = draft_states(self.draft, batch)
            weight, teacher_head = self.weight, self.teacher_head
            if self.frequent is not None:
                rows = self._shortlist(batch)
                weight, teacher_head = weight[rows], teacher_head[rows]
                greedy = torch.where(greedy >= 0, torch.searchsorted(rows, greedy), -100)
            logits = functional.linear(hidden, weight)
        with torch.no_grad():
            teacher_logits = functional.linear(batch.hidden.to(teacher_head.dtype), teacher_head)
        features = (hidden, batch.hidden) if self.same_width else (None, None)
        return distill_loss(logits, teacher_logits, greedy, self.config, *features)

    # ---- what heads on hidden states do otherwise, besides `_loss` (archsearch.training.heads)

    def _batch(self, indices: Sequence[int]) -> Batch:
        """The sequences of one step."""
        return make_batch([self.sequences[i] for i in indices])

    def _matches(self) -> list[np.ndarray]:
        """Of each held-out text, what is right of what could be, with the weights as they are."""
        return greedy_matches(self.draft, self.heldout)

    def _extra(self) -> dict[str, Any]:
        """What a checkpoint holds besides."""
        return {}

    def _take_extra(self, extra: dict[str, Any]) -> None:
        """Go on from what `_extra` gave to a checkpoint."""

    def _shortlist(self, batch: Batch) -> torch.Tensor:
        """Sorted head rows of this step: frequent tokens, those of the batch, and random negatives (by step, so resumable)."""
        assert self.frequent is not None
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + self.step)
        negatives = torch.randint(self.rows, (_RANDOM_NEGATIVES,), generator=generator)
        present = self.index_of[torch.cat([batch.greedy_ids, batch.token_ids])]
        return torch.cat([self.frequent, present[present >= 0], negatives]).unique()

    def _record(self, loss: float) -> None:
        self.losses.append(CurvePoint(self.step, self.tokens, self.seconds, loss))
        if self.progress is not None:
            self.progress({
                "step": self.step, "tokens": self.tokens, "seconds": self.seconds, "fraction": self.fraction(), "loss": loss,
                "alpha": self.alphas[-1].value if self.alphas else 0.0,
                "tokens_per_s": self.trained_tokens / max(self.step_seconds, 1e-9),
            })  # fmt: skip

    def _evaluate(self) -> None:
        averaged = bool(self.average) and not self.annealing
        if averaged:
            self._swap()
        matches = self._matches()
        if averaged:
            self._swap()
        weights = "annealed" if self.annealing else "average" if averaged else "trunk" if self.step else "start"
        value, hits = float(np.concatenate(matches).mean()), tuple(int(m.sum()) for m in matches)
        self.alphas.append(CurvePoint(self.step, self.tokens, self.seconds, value, weights, hits))

    # ---- checkpoints

    def _save(self, name: str = CHECKPOINT) -> None:
        if self.path is None:
            return
        state = {
            "format": FORMAT, "identity": self.identity, "sequences": len(self.sequences), "step": self.step,
            "optimizer": self.optimizer.state_dict(),
            "weights": {name: p.detach() for name, p in self.trainable.items()}, "tokens": self.tokens, "seconds": self.seconds,
            "step_seconds": self.step_seconds, "trained_tokens": self.trained_tokens, "rng": torch.get_rng_state(),
            "average": self.average, "averaged": self.averaged, "annealing": self.annealing,
            "losses": [dataclasses.astuple(p) for p in self.losses], "alphas": [dataclasses.astuple(p) for p in self.alphas],
            "extra": self._extra(),
        }  # fmt: skip
        save_state(self.path.with_name(name), state)

    def _resume(self) -> None:
        if self.path is None or not self.path.exists():
            return
        state = self._read(self.path)
        spent = {key: state[key] for key in ("seconds", "step_seconds", "trained_tokens")}
        if state["annealing"]:
            self.seconds, self.step, self.tokens = state["seconds"], state["step"], state["tokens"]
            trunk = self.path.with_name(TRUNK)
            if 1 - self.fraction() > self.config.anneal and trunk.exists():
                # A larger budget: the trunk goes on. The anneal's time was spent all the same.
                state = self._read(trunk) | spent
        if state["sequences"] != len(self.sequences):
            logger.warning(
                "the text went from %d to %d sequences since this training began: it goes on, in another order of the data",
                state["sequences"], len(self.sequences),
            )  # fmt: skip
        with torch.no_grad():
            for name, parameter in self.trainable.items():
                parameter.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        self.step, self.tokens = state["step"], state["tokens"]
        self.seconds, self.step_seconds = state["seconds"], state["step_seconds"]
        self.trained_tokens = state["trained_tokens"]
        self.average, self.averaged, self.annealing = state["average"], state["averaged"], state["annealing"]
        self.losses = [CurvePoint(*p) for p in state["losses"]]
        self.alphas = [CurvePoint(*p) for p in state["alphas"]]
        self._take_extra(state.get("extra", {}))
        if self.annealing and 1 - self.fraction() > self.config.anneal:
            self.annealing = False  # no trunk was kept: the annealed weights are all there is
        logger.info("resumed at step %d (%d tokens, %.0f s)", self.step, self.tokens, self.seconds)

    def _read(self, path: Path) -> dict[str, Any]:
        state = load_state(path)
        reasons = {
            "draft": "a draft of another shape or vocabulary", "text": "other text or another target",
            "settings": "other training settings",
        }  # fmt: skip
        differs = [words for key, words in reasons.items() if state.get("identity", {}).get(key) != self.identity[key]]
        if state.get("format") != FORMAT or differs:
            words = " and ".join(differs) or "another version of archsearch"
            raise ArchsearchError(f"the checkpoint {path} was made for {words}; delete it or name another folder")
        return state


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
