"""Distillation: a draft learns to propose what its target would write (docs/concepts.md, "Training
and its curves").

The target's logits are rebuilt from its cached hidden states, so training runs no target. The loss
is counted where the target wrote. The schedule is WSD (arXiv 2404.06395): with a larger budget a
run goes back to where its anneal began. On more text a training that ended, because its text had
taught what it can, goes on from its best look.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, fields
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from archsearch.errors import ArchsearchError, RunFailed
from archsearch.files import digest
from archsearch.models.runtime import tune_malloc
from archsearch.progress import Progress, say, silent
from archsearch.text.cache import CachedSequence, TextCache
from archsearch.training.batches import (
    Batch,
    Teacher,
    autocast,
    draft_states,
    greedy_matches,
    make_batch,
    plan_epoch,
    split_heldout,
)
from archsearch.training.looks import Looks, Place, RunningMean, copy_into, load_state, save_state
from archsearch.training.pace import Pace
from archsearch.training.settings import CurvePoint, DistillConfig, DistillResult

logger = logging.getLogger(__name__)

FORMAT: Final = 2
CHECKPOINT: Final = "checkpoint.pt"
TRUNK: Final = "trunk.pt"
BEST: Final = "best.pt"  # the whole state at the best look
_AVERAGE_EVERY: Final = 4  # steps between updates of the running mean


# -- loss


def distill_loss(
    draft_logits: Tensor,
    teacher_logits: Tensor,
    feature_weight: float = 0.0,
    draft_hidden: Tensor | None = None,
    teacher_hidden: Tensor | None = None,
) -> Tensor:
    """Mean over positions of the Kullback-Leibler divergence from the target, and of the relative
    squared error of the hidden states [n, hidden] where they are given. `draft_logits`,
    `teacher_logits` [n, vocab] over the same tokens (a trimmed vocabulary renormalises both)."""
    log_draft = functional.log_softmax(draft_logits.float(), -1)
    with torch.no_grad():
        log_teacher = functional.log_softmax(teacher_logits.float(), -1)
    loss = functional.kl_div(log_draft, log_teacher, reduction="batchmean", log_target=True)
    if feature_weight and draft_hidden is not None and teacher_hidden is not None:
        reference = teacher_hidden.float()
        # [n]: each position counts by its own size, however large its state
        size = reference.square().sum(-1).clamp_min(1e-6)
        error = (draft_hidden.float() - reference).square().sum(-1) / size
        loss = loss + feature_weight * error.mean()
    return loss


def learning_rate(config: DistillConfig, progress: float, tokens: int) -> float:
    """Warm-up by `tokens` seen, stable, linear anneal to zero by `progress` of the run from 0 to
    1."""
    warm = 0.05 + 0.95 * tokens / config.warmup_tokens if tokens < config.warmup_tokens else 1.0
    left = 1.0 - progress
    return config.lr * min(warm, left / config.anneal if left < config.anneal else 1.0)


# -- runs


def distill(
    draft: torch.nn.Module,
    cache: TextCache | Sequence[TextCache],
    config: DistillConfig,
    *,
    heldout: Sequence[CachedSequence] | None = None,
    checkpoint_dir: Path | str | None = None,
    progress: Progress = silent,
) -> DistillResult:
    """Train `draft` (in place, float32) on what the target of `cache` wrote.

    The alpha curve is measured on `heldout`; without it on texts of the (first) cache that are kept
    out of training either way. With `checkpoint_dir` the state is written there every
    `checkpoint_every_s` seconds, at the end and on Ctrl-C; a run that finds one there goes on.
    Raises ArchsearchError for a checkpoint of another draft, cache or settings, and RunFailed when
    the loss stops being a number (the last good checkpoint stays).
    """
    caches = [cache] if isinstance(cache, TextCache) else list(cache)
    if len({c.target_fingerprint for c in caches}) != 1:
        raise ArchsearchError(
            "the text caches come from different targets; train on the text of one"
        )
    folder = None if checkpoint_dir is None else Path(checkpoint_dir)
    with TrainingRun(draft, caches, config, folder, progress, heldout) as run:
        return run.train()


class TrainingRun:
    """One training run of a draft: its optimizer, its place, and what was seen on the way.

    Heads on hidden states (`archsearch.training.heads`) differ in `_batch`, `_loss`, `_matches`,
    `_due`, `_identity` and what a checkpoint holds besides (`_extra`, `_take_extra`).
    """

    said = "alpha"  # what looks measure, in progress

    def __init__(
        self,
        draft: Any,
        caches: list[TextCache],
        config: DistillConfig,
        folder: Path | None,
        progress: Progress = silent,
        heldout: Sequence[CachedSequence] | None = None,
    ) -> None:
        tune_malloc()
        self.draft, self.config, self.progress = draft.float(), config, progress
        self.path = None if folder is None else folder / CHECKPOINT
        first, kept_out = split_heldout(caches[0].sequences, config.heldout_sequences)
        self.heldout = list(heldout) if heldout else kept_out or first[:8]
        self.sequences = first + [s for c in caches[1:] for s in c.sequences]
        self.lengths = [len(s) - 1 for s in self.sequences]
        self.teacher = Teacher(draft, caches[0], self.sequences, config.shortlist)
        self.weight = draft.lm_head.weight
        self.device = self.weight.device
        self.same_width = int(self.weight.shape[1]) == caches[0].hidden_size
        self.was_trainable = {name: p.requires_grad for name, p in draft.named_parameters()}
        if (embedding := draft.get_input_embeddings()) is not None:
            embedding.weight.requires_grad_(False)
        if embedding is None or self.weight is not embedding.weight:
            self.weight.requires_grad_(True)
        self.trainable = {name: p for name, p in draft.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(
            self.trainable.values(),
            lr=config.lr,
            betas=(0.9, 0.95),
            weight_decay=config.weight_decay,
            fused=self.device.type in ("cpu", "cuda"),
        )
        self.identity = self._identity(caches)
        self.place, self.looks = Place(), Looks(config)
        self.mean = RunningMean(self.trainable)
        self.losses: list[CurvePoint] = []
        self.annealing = False
        self.pace = Pace(torch.get_num_threads(), torch.set_num_threads, say)
        self._clock = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.pace.close()
        for name, parameter in self.draft.named_parameters():
            parameter.requires_grad_(self.was_trainable[name])
        self.draft.zero_grad(set_to_none=True)
        self.draft.eval()

    def _identity(self, caches: list[TextCache]) -> dict[str, Any]:
        shapes = {name: list(p.shape) for name, p in self.draft.named_parameters()}
        kept = self.teacher.kept
        ids = b"" if kept is None else kept.cpu().numpy().tobytes()
        prints = [c.fingerprint for c in caches]
        return {
            "draft": digest([shapes, hashlib.sha256(ids).hexdigest()])[:16],
            "text": [digest(prints[: count + 1])[:16] for count in range(len(caches))],
            "settings": digest(self.config.identity())[:16],
        }

    # ---- the loop

    def train(self) -> DistillResult:
        self._resume()
        self._clock = saved = time.monotonic()
        self._clock -= self.place.seconds
        if not self.looks.points and not self.config.evaluate_at:
            self._look()
        self.looks.last_at = self._tick()
        self.draft.train()
        try:
            for indices in self._plan():
                fraction = self.place.fraction(self.config)
                if fraction >= 1 or self.looks.stopped:
                    break
                if not self.annealing and 1 - fraction < self.config.anneal:
                    self._save(TRUNK)
                    self.annealing = True
                lr = learning_rate(self.config, fraction, self.place.tokens)
                self._step(indices, lr)
                if self._due():
                    self._look()
                    if not self.annealing:  # an anneal is gone through to its end
                        self.looks.stop_where_flat(self.place)
                    self.pace.restart()
                    self.looks.last_at = self.place.fraction(self.config)
                    self._tick()
                if time.monotonic() - saved >= self.config.checkpoint_every_s:
                    self._save()
                    self.pace.restart()
                    saved = time.monotonic()
                    self._tick()
        except KeyboardInterrupt:
            self._save()
            raise
        if not self.looks.points or self.looks.points[-1].step < self.place.step:
            self._look()
        self._tick()
        self._save()
        if self.mean.values and not self.annealing:
            self.mean.swap()  # after the checkpoint, which holds the trunk
        return self._result()

    def _result(self) -> DistillResult:
        """What the run did; the best weights are put into the draft where others are worse."""
        kept, best = self.looks.points[-1], self.looks.best
        if best is not None and best.value > kept.value:
            kept = best
            copy_into(self.trainable, self.looks.best_weights)
        return DistillResult(
            tuple(self.losses),
            tuple(self.looks.points),
            self.place.step,
            self.place.tokens,
            self.place.seconds,
            self.place.tokens_per_s,
            tuple(int(s.greedy_ids.shape[0]) for s in self.heldout),
            tuple(self.pace.slowdowns),
            kept,
            self.looks.stopped,
            sum(self.lengths),
        )

    def _tick(self) -> float:
        """Note the time; the fraction of the run that is done."""
        self.place.seconds = time.monotonic() - self._clock
        return self.place.fraction(self.config)

    def _due(self) -> bool:
        return self.looks.due(self.place, self.annealing)

    def _plan(self) -> Iterator[list[int]]:
        """Batches from the current step on; epochs are replayed cheaply to find the place."""
        skip, epoch = self.place.step, 0
        while True:
            batches = plan_epoch(self.lengths, self.config.batch_tokens, self.config.seed, epoch)
            yield from batches[skip:]
            skip, epoch = max(0, skip - len(batches)), epoch + 1

    def _step(self, indices: Sequence[int], lr: float) -> None:
        begin, place = time.monotonic(), self.place
        batch = self._batch(indices)
        loss = self._update(batch, lr)
        place.step += 1
        place.tokens += batch.tokens
        place.trained_tokens += batch.tokens
        power = self.config.average_power
        if power is not None and not self.annealing and place.step % _AVERAGE_EVERY == 0:
            self.mean.add(power)
        place.step_seconds += time.monotonic() - begin
        fraction = self._tick()
        self.pace.step(batch.tokens)
        self.losses.append(CurvePoint(place.step, place.tokens, place.seconds, loss))
        seen = self.looks.points[-1].value if self.looks.points else 0.0
        self.progress(
            f"step {place.step}: loss {loss:.3f} {self.said} {seen:.3f}"
            f" {place.tokens_per_s:.0f} tokens/s",
            fraction,
            1.0,
        )

    def _update(self, batch: Batch, lr: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self._loss(batch)
        value = loss.item()
        # asked before the step, so that no checkpoint holds weights of a broken one
        if math.isfinite(value):
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.trainable.values(), self.config.clip).item()
        if not math.isfinite(value) or not math.isfinite(norm):
            saved = self.path is not None and self.path.exists()
            place = f"; the last good checkpoint is {self.path}" if saved else ""
            raise RunFailed(
                f"training failed at step {self.place.step}: the loss is {value} (not a number or"
                f" infinite); try a lower learning rate than {self.config.lr}{place}"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return value

    def _loss(self, batch: Batch) -> Tensor:
        rows = self.teacher.shortlist(batch, self.config.seed * 1_000_003 + self.place.step)
        with autocast(self.weight, self.config.autocast):
            hidden = draft_states(self.draft, batch)
            logits = functional.linear(hidden, self.weight if rows is None else self.weight[rows])
        features = (hidden, batch.hidden) if self.same_width else (None, None)
        teacher = self.teacher.logits(batch.hidden, rows)
        return distill_loss(logits, teacher, self.config.feature_weight, *features)

    def _batch(self, indices: Sequence[int]) -> Batch:
        return make_batch([self.sequences[i] for i in indices]).to(self.device)

    # ---- looks

    def _matches(self) -> list[np.ndarray]:
        """Of each held-out text, what is right of what could be, with the weights as they are."""
        return greedy_matches(self.draft, self.heldout)

    def _weights(self) -> str:
        """Which weights a look is taken with: `CurvePoint.weights`."""
        if self.annealing:
            return "annealed"
        return "average" if self.mean.values else "trunk" if self.place.step else "start"

    def _look(self) -> None:
        weights = self._weights()
        if weights == "average":
            self.mean.swap()
        matches = self._matches()
        if weights == "average":
            self.mean.swap()
        value, hits = float(np.concatenate(matches).mean()), tuple(int(m.sum()) for m in matches)
        place = self.place
        point = CurvePoint(place.step, place.tokens, place.seconds, value, weights, hits)
        plain = {name: p.detach() for name, p in self.trainable.items()}
        if self.looks.add(point, self.mean.values if weights == "average" else plain):
            self._save(BEST)

    # ---- checkpoints

    def _extra(self) -> dict[str, object]:
        return {}

    def _take_extra(self, extra: dict[str, object]) -> None:
        pass

    def _save(self, name: str = CHECKPOINT) -> None:
        if self.path is None:
            return
        best = self.looks.best
        state = {
            "format": FORMAT,
            "identity": self.identity,
            "sequences": len(self.sequences),
            **asdict(self.place),
            "optimizer": self.optimizer.state_dict(),
            "weights": {name: p.detach() for name, p in self.trainable.items()},
            "rng": torch.get_rng_state(),
            "average": self.mean.values,
            "averaged": self.mean.count,
            "annealing": self.annealing,
            "stopped": self.looks.stopped,
            "best": None if best is None else astuple(best),
            "losses": [astuple(p) for p in self.losses],
            "alphas": [astuple(p) for p in self.looks.points],
            "extra": self._extra(),
            "best_weights": {} if name == BEST else self.looks.best_weights,
        }
        save_state(self.path.with_name(name), state)

    def _resume(self) -> None:
        if self.path is None or not self.path.exists():
            return
        state = self._read(self.path)
        spent = {key: state[key] for key in ("seconds", "step_seconds", "trained_tokens")}
        trunk, best = self.path.with_name(TRUNK), self.path.with_name(BEST)
        grown = state["sequences"] != len(self.sequences)
        if state["annealing"] and self._longer(state) and trunk.exists():
            # A larger budget: the trunk goes on. The anneal's time was spent all the same.
            state = self._read(trunk) | spent
        if state.get("best") and best.exists():
            found, point = self._read(best), CurvePoint(*state["best"])
            # Its own: BEST may hold those of an anneal that was better and is gone back from.
            seen = (
                state.get("best_weights")
                or found["average" if point.weights == "average" else "weights"]
            )
            if seen:  # older versions did not keep them
                self.looks.best = point
                self.looks.best_weights = {name: p.clone() for name, p in seen.items()}
            if state["stopped"] and grown and not found["annealing"]:
                # More text: on from where the old one had taught most. What was trained beyond took
                # its time all the same.
                state = found | spent | {"stopped": ""}
        if state["sequences"] != len(self.sequences):
            logger.info(
                "the text went from %d to %d sequences since this training began: it goes on, in"
                " another order of the data",
                state["sequences"],
                len(self.sequences),
            )
        self._take(state)
        logger.info("resumed at step %d (%d tokens)", self.place.step, self.place.tokens)

    def _longer(self, state: dict[str, object]) -> bool:
        """Whether the trunk goes on beyond the place of `state`, which lies in an anneal."""
        return 1 - _place_of(state).fraction(self.config) > self.config.anneal

    def _take(self, state: dict[str, Any]) -> None:
        copy_into(self.trainable, state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        self.place = _place_of(state)
        self.mean.values = {name: p.to(self.device) for name, p in state["average"].items()}
        self.mean.count = state["averaged"]
        self.looks.stopped = str(state.get("stopped") or "")
        self.losses = [CurvePoint(*p) for p in state["losses"]]
        self.looks.points = [CurvePoint(*p) for p in state["alphas"]]
        self._take_extra(state.get("extra", {}))
        # Where no trunk was kept, the annealed weights are all there is.
        self.annealing = state["annealing"] and not self._longer(state)

    def _read(self, path: Path) -> dict[str, Any]:
        state = load_state(path)
        reasons = {
            "draft": "a draft of another shape or vocabulary",
            "text": "other text or another target",
            "settings": "other training settings",
        }
        kept = dict(state.get("identity", {}))
        if texts := kept.get("text"):
            # More may have come behind those that it began with; version 0.1.0 wrote one digest.
            last = texts[-1] if isinstance(texts, list) else texts
            kept["text"] = self.identity["text"] if last in self.identity["text"] else []
        differs = [words for key, words in reasons.items() if kept.get(key) != self.identity[key]]
        if state.get("format") != FORMAT or differs:
            words = " and ".join(differs) or "another version of archsearch"
            raise ArchsearchError(
                f"the checkpoint {path} was made for {words}; delete it or name another folder"
            )
        return state


def _place_of(state: dict[str, Any]) -> Place:
    return Place(**{field.name: state[field.name] for field in fields(Place)})
