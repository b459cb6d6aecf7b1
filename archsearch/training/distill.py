"""Distillation: a draft learns to propose what its target would write.

The target's logits are rebuilt from its cached hidden states on the draft's own vocabulary, so
training runs no target. The loss is counted where the target wrote, never on the prompt. Every
draft sees the same batches in the same order (seeded), so drafts are compared on equal tokens.

Schedule: a warm-up of so many tokens, a stable trunk, and a linear anneal to zero over the last
part of the budget (WSD, arXiv 2404.06395). The trunk does not know the budget: a run that is
continued to a larger one goes back to where its anneal began, so training to B and then to 2B ends
where training to 2B ends. A running mean of the trunk's weights (power function of the step: Karras
et al., arXiv 2312.02696, section 3.1) stands in for an anneal at every point of the trunk, at the
cost of one weighted sum every few steps: that is what learning curves and rungs of a search look
at.

Text decides, not epochs: where a text has taught what it can, more epochs learn it by heart and
held-out acceptance falls. With `keep_best` the weights of the best look are the ones that stay,
with `patience` a training ends where looks no longer rise; on more text it goes on from its best
look.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as functional

from archsearch.errors import ArchsearchError, RunFailed
from archsearch.models.runtime import tune_malloc
from archsearch.progress import say
from archsearch.text.cache import CachedSequence, TextCache
from archsearch.training.batches import (
    Batch,
    NoisyEmbedding,
    autocast,
    draft_states,
    greedy_matches,
    kept_token_ids,
    make_batch,
    plan_epoch,
    split_heldout,
)
from archsearch.training.checkpoint import load_state, save_state
from archsearch.training.pace import Pace
from archsearch.training.settings import CurvePoint, DistillConfig, DistillResult, Progress

logger = logging.getLogger(__name__)

FORMAT: Final = 2
CHECKPOINT: Final = "checkpoint.pt"
TRUNK: Final = "trunk.pt"
BEST: Final = "best.pt"  # the whole state at the best look
NO_RISE: Final = "held-out acceptance no longer rises"
_FIRST_LOOK: Final = 8_000  # tokens, of `look_ratio`
_ANNEAL_LOOKS: Final = 3
_AVERAGE_EVERY: Final = 4  # steps between updates of the running mean
_FULL_HEAD_LIMIT: Final = 16384  # above this many rows the loss is taken on a shortlist
_RANDOM_NEGATIVES: Final = (
    512  # without them a shortlisted full head learns nothing about the other rows
)


# --------------------------------------------------------------------------------------------------
# loss


def distill_loss(
    draft_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    greedy_index: torch.Tensor,
    config: DistillConfig,
    draft_hidden: torch.Tensor | None = None,
    teacher_hidden: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean loss over positions. `draft_logits`, `teacher_logits` [n, vocab] over the same tokens (a
    trimmed vocabulary renormalises both); `greedy_index` [n] into them, -100 where the target's
    greedy token is not among them."""
    log_draft = functional.log_softmax(draft_logits.float(), -1)
    with torch.no_grad():
        log_teacher = functional.log_softmax(
            teacher_logits.float() / config.teacher_temperature, -1
        )
        teacher = log_teacher.exp()
    loss = log_draft.new_zeros(())
    if config.kl_weight:
        loss = loss + config.kl_weight * functional.kl_div(
            log_draft, log_teacher, reduction="batchmean", log_target=True
        )
    if config.ce_weight and bool((greedy_index >= 0).any()):
        loss = loss + config.ce_weight * functional.nll_loss(
            log_draft, greedy_index, ignore_index=-100
        )
    if config.tv_weight:
        loss = loss + config.tv_weight * 0.5 * (teacher - log_draft.exp()).abs().sum(-1).mean()
    if config.feature_weight and draft_hidden is not None and teacher_hidden is not None:
        reference = teacher_hidden.float()
        error = (draft_hidden.float() - reference).square().sum(-1) / reference.square().sum(
            -1
        ).clamp_min(1e-6)
        loss = loss + config.feature_weight * error.mean()
    return loss


def learning_rate(config: DistillConfig, progress: float, tokens: int) -> float:
    """Warm-up by `tokens` seen, stable, linear anneal to zero by `progress` of the run from 0 to
    1."""
    warm = 0.05 + 0.95 * tokens / config.warmup_tokens if tokens < config.warmup_tokens else 1.0
    left = 1.0 - progress
    return config.lr * min(warm, left / config.anneal if left < config.anneal else 1.0)


# --------------------------------------------------------------------------------------------------
# runs


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

    The alpha curve is measured on `heldout`; without it on texts of the (first) cache that are kept
    out of training either way. With `checkpoint_dir` the state is written there every
    `checkpoint_every_s` seconds, at the end and on Ctrl-C, and a run that finds a checkpoint there
    goes on exactly where it stopped; with a larger budget, from where its anneal began. `progress`
    gets {"step", "tokens", "seconds", "fraction", "loss", "alpha", "tokens_per_s"}. Raises
    ArchsearchError for a checkpoint of another draft, cache or settings, and RunFailed when the
    loss stops being a number (the last good checkpoint stays).
    """
    tune_malloc()
    caches = [cache] if isinstance(cache, TextCache) else list(cache)
    if len({c.target_fingerprint for c in caches}) != 1:
        raise ArchsearchError(
            "the text caches come from different targets; train on the text of one"
        )
    run = _Run(
        draft,
        caches,
        config,
        None if checkpoint_dir is None else Path(checkpoint_dir),
        progress,
        heldout,
    )
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
        fits = (
            self.rows == caches[0].vocab_size
            if self.kept is None
            else int(self.kept.max()) < caches[0].vocab_size
        )
        if not fits:
            raise ArchsearchError(
                f"the draft's vocabulary ({self.rows} head rows) does not fit the text's target"
                f" ({caches[0].vocab_size} tokens); give a draft of the same target"
            )
        self.device = self.weight.device
        head = (
            caches[0].head.to(self.device).float()
        )  # bfloat16 logits of 16 to 32 lie 0.125 apart: no distribution to learn
        self.teacher_head = head if self.kept is None else head[self.kept]  # [rows, hidden]
        self.index_of = torch.full(
            (caches[0].vocab_size,), -100, dtype=torch.long, device=self.device
        )
        every = (
            torch.arange(caches[0].vocab_size, device=self.device)
            if self.kept is None
            else self.kept
        )
        self.index_of[every] = torch.arange(self.rows, device=self.device)
        self.frequent = self._frequent_rows() if self.rows > _FULL_HEAD_LIMIT else None
        self.same_width = int(self.weight.shape[1]) == caches[0].hidden_size
        self.was_trainable = {name: p.requires_grad for name, p in draft.named_parameters()}
        self.noise = None
        if (embedding := draft.get_input_embeddings()) is not None:
            embedding.weight.requires_grad_(config.train_embedding)
            self.noise = (
                NoisyEmbedding(embedding, config.embedding_noise)
                if config.embedding_noise
                else None
            )
        if embedding is None or self.weight is not embedding.weight:
            self.weight.requires_grad_(config.train_head)
        self.trainable = {name: p for name, p in draft.named_parameters() if p.requires_grad}
        fused = self.device.type in ("cpu", "cuda")
        self.optimizer = torch.optim.AdamW(
            self.trainable.values(),
            lr=config.lr,
            betas=(0.9, 0.95),
            weight_decay=config.weight_decay,
            fused=fused,
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
        self.best: CurvePoint | None = None
        self.best_weights: dict[str, torch.Tensor] = {}  # as they were looked at
        self.stopped = ""
        self.pace = Pace(torch.get_num_threads(), torch.set_num_threads, say)

    def close(self) -> None:
        self.pace.close()
        if self.noise is not None:
            self.noise.remove()
        for name, parameter in self.draft.named_parameters():
            parameter.requires_grad_(self.was_trainable[name])
        self.draft.zero_grad(set_to_none=True)
        self.draft.eval()

    def _identity(self, caches: list[TextCache]) -> dict[str, Any]:
        shapes = {name: list(p.shape) for name, p in self.draft.named_parameters()}
        kept = b"" if self.kept is None else self.kept.cpu().numpy().tobytes()
        return {
            "draft": _digest([shapes, hashlib.sha256(kept).hexdigest()]),
            "text": [
                _digest([c.fingerprint for c in caches[: count + 1]])
                for count in range(len(caches))
            ],
            "settings": _digest(self.config.identity()),
        }

    def _frequent_rows(self) -> torch.Tensor:
        counts = torch.zeros(self.index_of.shape[0], dtype=torch.long)
        for sequence in self.sequences:
            counts += torch.bincount(sequence.written, minlength=counts.shape[0])
        rows = self.index_of[counts.argsort(descending=True, stable=True).to(self.device)]
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
                if fraction >= 1 or self.stopped:
                    break
                if (
                    not self.annealing
                    and self.config.anneal > 0
                    and 1 - fraction < self.config.anneal
                ):
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
                    self._stop_where_flat()
                    self.pace.restart()
                    self.evaluated_at = self.fraction()
                    self.seconds = time.monotonic() - clock
                if (
                    self.path is not None
                    and time.monotonic() - saved >= self.config.checkpoint_every_s
                ):
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
        kept = self.alphas[-1]
        if self.best is not None and self.best.value > kept.value:
            kept = self.best
            with torch.no_grad():
                for name, parameter in self.trainable.items():
                    parameter.copy_(self.best_weights[name])
        speed = self.trained_tokens / max(self.step_seconds, 1e-9)
        lengths = tuple(int(s.greedy_ids.shape[0]) for s in self.heldout)
        return DistillResult(
            tuple(self.losses),
            tuple(self.alphas),
            self.step,
            self.tokens,
            self.seconds,
            speed,
            lengths,
            tuple(self.pace.slowdowns),
            kept,
            self.stopped,
            sum(self.lengths),
        )

    def fraction(self) -> float:
        """How much of the run is done, 0 to 1, by whichever limit is nearest."""
        pairs = (
            (self.seconds, self.config.budget_s),
            (self.step, self.config.max_steps),
            (self.tokens, self.config.max_tokens),
        )
        return min(1.0, max(done / limit for done, limit in pairs if limit is not None))

    def _due(self) -> bool:
        """Whether alpha is to be looked at now; the end of the run is looked at anyhow."""
        if self.fraction() >= 1:
            return False
        if self.config.evaluate_at:
            since = self.alphas[-1].tokens if self.alphas else 0
            return not self.annealing and any(
                since < mark <= self.tokens for mark in self.config.evaluate_at
            )
        if self.config.look_ratio is not None and not self.annealing:
            since = self.alphas[-1].tokens if self.alphas else 0
            return self.tokens >= max(_FIRST_LOOK, self.config.look_ratio * since)
        return bool(self.config.evaluations) and self.fraction() >= self._next_evaluation()

    def _stop_where_flat(self) -> None:
        """End the trunk where the best look lies far enough back; an anneal is gone through to its
        end."""
        patience, best = self.config.patience, self.best
        if patience is None or best is None or self.annealing or best.tokens == 0:
            return
        looks = sum(point.tokens > best.tokens for point in self.alphas)
        if looks >= 2 and self.tokens >= patience * best.tokens:
            self.stopped = NO_RISE

    def _next_evaluation(self) -> float:
        """The next of the equally spaced fractions at which alpha is looked at; a longer budget
        spaces them anew."""
        parts = self.config.evaluations + 1
        if (
            self.config.look_ratio is not None
        ):  # of the anneal: the trunk is looked at by its tokens
            parts = max(parts, math.ceil((_ANNEAL_LOOKS + 1) / max(self.config.anneal, 0.01)))
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
            place = (
                ""
                if self.path is None or not self.path.exists()
                else f"; the last good checkpoint is {self.path}"
            )
            raise RunFailed(
                f"training failed at step {self.step}: the loss is {value} (not a number or"
                f" infinite); try a lower learning rate than {self.config.lr}{place}"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += batch.tokens
        self.trained_tokens += batch.tokens
        if (
            self.config.average_power is not None
            and not self.annealing
            and self.step % _AVERAGE_EVERY == 0
        ):
            self._add_to_average(self.config.average_power)
        return value

    def _add_to_average(self, power: float) -> None:
        self.averaged += 1
        if not self.average:
            self.average = {name: p.detach().clone() for name, p in self.trainable.items()}
            return
        share = 1.0 - (1.0 - 1.0 / self.averaged) ** (power + 1.0)
        torch._foreach_lerp_(
            list(self.average.values()), [p.detach() for p in self.trainable.values()], share
        )

    def _swap(self) -> None:
        """Exchange the weights in the draft and their running mean."""
        for name, parameter in self.trainable.items():
            parameter.data, self.average[name] = self.average[name], parameter.data

    def _loss(self, batch: Batch) -> torch.Tensor:
        greedy = self.index_of[batch.greedy_ids]
        with autocast(self.weight, self.config.autocast):
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
        return make_batch([self.sequences[i] for i in indices]).to(self.device)

    def _matches(self) -> list[np.ndarray]:
        """Of each held-out text, what is right of what could be, with the weights as they are."""
        return greedy_matches(self.draft, self.heldout)

    def _extra(self) -> dict[str, Any]:
        """What a checkpoint holds besides."""
        return {}

    def _take_extra(self, extra: dict[str, Any]) -> None:
        """Go on from what `_extra` gave to a checkpoint."""

    def _shortlist(self, batch: Batch) -> torch.Tensor:
        """Sorted head rows of this step: frequent tokens, those of the batch, and random negatives
        (by step, so resumable)."""
        assert self.frequent is not None
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + self.step)
        negatives = torch.randint(self.rows, (_RANDOM_NEGATIVES,), generator=generator).to(
            self.device
        )
        present = self.index_of[torch.cat([batch.greedy_ids, batch.token_ids])]
        return torch.cat([self.frequent, present[present >= 0], negatives]).unique()

    def _record(self, loss: float) -> None:
        self.losses.append(CurvePoint(self.step, self.tokens, self.seconds, loss))
        if self.progress is not None:
            self.progress(
                {
                    "step": self.step,
                    "tokens": self.tokens,
                    "seconds": self.seconds,
                    "fraction": self.fraction(),
                    "loss": loss,
                    "alpha": self.alphas[-1].value if self.alphas else 0.0,
                    "tokens_per_s": self.trained_tokens / max(self.step_seconds, 1e-9),
                }
            )

    def _evaluate(self) -> None:
        averaged = bool(self.average) and not self.annealing
        if averaged:
            self._swap()
        matches = self._matches()
        if averaged:
            self._swap()
        weights = (
            "annealed"
            if self.annealing
            else "average"
            if averaged
            else "trunk"
            if self.step
            else "start"
        )
        value, hits = float(np.concatenate(matches).mean()), tuple(int(m.sum()) for m in matches)
        self.alphas.append(CurvePoint(self.step, self.tokens, self.seconds, value, weights, hits))
        if self.config.keep_best and (self.best is None or value >= self.best.value):
            shown = (
                self.average
                if averaged
                else {name: p.detach() for name, p in self.trainable.items()}
            )
            self.best = self.alphas[-1]
            self.best_weights = {name: p.to("cpu", copy=True) for name, p in shown.items()}
            self._save(BEST)

    # ---- checkpoints

    def _save(self, name: str = CHECKPOINT) -> None:
        if self.path is None:
            return
        state = {
            "format": FORMAT,
            "identity": self.identity,
            "sequences": len(self.sequences),
            "step": self.step,
            "optimizer": self.optimizer.state_dict(),
            "weights": {name: p.detach() for name, p in self.trainable.items()},
            "tokens": self.tokens,
            "seconds": self.seconds,
            "step_seconds": self.step_seconds,
            "trained_tokens": self.trained_tokens,
            "rng": torch.get_rng_state(),
            "average": self.average,
            "averaged": self.averaged,
            "annealing": self.annealing,
            "stopped": self.stopped,
            "best": None if self.best is None else dataclasses.astuple(self.best),
            "losses": [dataclasses.astuple(p) for p in self.losses],
            "alphas": [dataclasses.astuple(p) for p in self.alphas],
            "extra": self._extra(),
        }
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
        best = self.path.with_name(BEST)
        if state.get("best") and best.exists():
            self.best = CurvePoint(*state["best"])
            found = self._read(best)
            shown = found["average"] if self.best.weights == "average" else found["weights"]
            self.best_weights = {name: p.clone() for name, p in shown.items()}
            if (
                state["stopped"]
                and state["sequences"] != len(self.sequences)
                and not found["annealing"]
            ):
                # More text: on from where the old one had taught most. What was trained beyond took
                # its time all the same.
                state = found | spent | {"stopped": ""}
        if state["sequences"] != len(self.sequences):
            logger.warning(
                "the text went from %d to %d sequences since this training began: it goes on, in"
                " another order of the data",
                state["sequences"],
                len(self.sequences),
            )
        with torch.no_grad():
            for name, parameter in self.trainable.items():
                parameter.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        self.step, self.tokens = state["step"], state["tokens"]
        self.seconds, self.step_seconds, self.trained_tokens = (
            state["seconds"],
            state["step_seconds"],
            state["trained_tokens"],
        )
        self.average = {name: p.to(self.device) for name, p in state["average"].items()}
        self.averaged, self.annealing, self.stopped = (
            state["averaged"],
            state["annealing"],
            str(state.get("stopped") or ""),
        )
        self.losses = [CurvePoint(*p) for p in state["losses"]]
        self.alphas = [CurvePoint(*p) for p in state["alphas"]]
        self._take_extra(state.get("extra", {}))
        if self.annealing and 1 - self.fraction() > self.config.anneal:
            self.annealing = False  # no trunk was kept: the annealed weights are all there is
        logger.info("resumed at step %d (%d tokens, %.0f s)", self.step, self.tokens, self.seconds)

    def _read(self, path: Path) -> dict[str, Any]:
        state = load_state(path)
        reasons = {
            "draft": "a draft of another shape or vocabulary",
            "text": "other text or another target",
            "settings": "other training settings",
        }
        kept = dict(state.get("identity", {}))
        if kept.get(
            "text"
            # more texts may have come behind those that it began with; one digest in files of
            # version 0.1.0
        ):
            texts = kept["text"] if isinstance(kept["text"], list) else [kept["text"]]
            kept["text"] = self.identity["text"] if texts[-1] in self.identity["text"] else []
        differs = [words for key, words in reasons.items() if kept.get(key) != self.identity[key]]
        if state.get("format") != FORMAT or differs:
            words = " and ".join(differs) or "another version of archsearch"
            raise ArchsearchError(
                f"the checkpoint {path} was made for {words}; delete it or name another folder"
            )
        return state


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
