"""Finalists: drafts that get weights. Every draft is initialised from the target, distilled on the
run's texts (`archsearch.drafts.texts`), and measured on its held-out text, all on the same
sequences. Their folders: finalists/<shape>/ of the run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from archsearch.acceptance.measured import Trace, agreement_trace, alpha
from archsearch.architecture.architecture import Architecture
from archsearch.drafts.records import (
    CURVE_FILE,
    ShortTraining,
    TrainedDraft,
    read_curve,
    trained_draft,
)
from archsearch.drafts.texts import RunTexts
from archsearch.files import digest, read_json, write_json
from archsearch.models.files import has_weights
from archsearch.progress import ProgressLine, say
from archsearch.records import encoded, load, save
from archsearch.search.objective import Score
from archsearch.speedup import alpha_of_divergence
from archsearch.text.prompt_set import PromptSet
from archsearch.training.settings import CurvePoint, DistillConfig, DistillResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from archsearch.models.load import LoadedTarget
    from archsearch.text.cache import CachedSequence
    from archsearch.text.vocabulary import DraftVocabulary
    from archsearch.training.initialise import Observed


ANSWER_TOKENS: Final = 96
LOOK_RATIO: Final = 1.2  # a look costs a pass over some thousand tokens
PATIENCE: Final = 1.5  # a training ends after half as many tokens again without a better look


@dataclass(frozen=True, slots=True)
class Spent:
    """What a training took, of any record of one."""

    tokens: int
    seconds: float


class DraftTrainer:
    """Where drafts of one target are trained: the target, its tokenizer, its text. Loads what is
    needed, when it is needed."""

    def __init__(
        self,
        loaded: LoadedTarget,
        prompts: PromptSet,
        folder: Path,
        *,
        answer_tokens: int = ANSWER_TOKENS,
        plain_text: Path | None = None,
        threads: int | None = None,
    ) -> None:
        """`loaded`: the target, on the device where it writes and drafts are trained."""
        self.loaded, self.prompts, self.folder = loaded, prompts, folder
        self.target, self.device = loaded.ref, loaded.device
        self.texts = RunTexts(loaded, prompts, folder, answer_tokens, plain_text)
        self._observed: dict[tuple[int, ...], Observed] = {}
        if threads is not None:
            import torch

            torch.set_num_threads(threads)

    def source_of_weights(self) -> PreTrainedModel:
        """The target that drafts are initialised from, in the CPU's memory; in float32 where it
        runs there."""
        return self.loaded.model("float32" if self.device == "cpu" else None, device="cpu")

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.loaded.tokenizer

    def looked_at(self) -> list[CachedSequence]:
        """The texts that learning curves are measured on and best weights chosen by, the same for
        every draft of the run: answers to training prompts that no draft is trained on, and the
        half of the held-out text that choices are made on."""
        kept_out = self.texts.parted()[1]
        for path in sorted((self.folder / "finalists").glob(f"*/{CURVE_FILE}")):
            curve = read_curve(path.parent)
            # A run of version 0.1.0 goes on as it began.
            if curve is not None and len(curve.heldout_tokens) == len(kept_out):
                return kept_out
        return [*kept_out, *self.texts.choosing().sequences]

    # -- the text

    def text_tokens(self) -> int:
        """Tokens of one pass over all that drafts are trained on, prompts included."""
        others = [s for cache in self.texts.all_training()[1:] for s in cache.sequences]
        return sum(len(s) - 1 for s in (*self.texts.parted()[0], *others))

    # -- one draft

    def draft_folder(self, arch: Architecture) -> Path:
        """finalists/<shape>, with a short hash so that shapes that print alike stay apart."""
        shape = f"{arch.num_hidden_layers}x{arch.hidden_size}-ffn{arch.intermediate_size}"
        return (
            self.folder / "finalists" / f"{shape}-head{arch.head_rows}-{digest(arch.to_dict())[:6]}"
        )

    def _distilled(
        self, arch: Architecture, config: DistillConfig, label: str
    ) -> tuple[Any, DraftVocabulary | None, DistillResult]:
        """The draft, initialised (float32) or as its checkpoint has it, after `config`, and the
        vocabulary of a trimmed head, chosen once per shape."""
        import torch

        from archsearch.training.distill import distill
        from archsearch.training.initialise import initialise_draft

        caches, vocabulary = self.texts.all_training(), None
        if arch.trimmed:
            vocabulary = self.texts.vocabulary(self.draft_folder(arch), arch.head_rows)
        # [32, 64 tokens] for the statistics that narrow initialisations need
        long = [each.token_ids[:64] for each in caches[0].sequences if len(each) >= 64][:32]
        draft = initialise_draft(
            self.source_of_weights(),
            arch,
            draft_token_ids=vocabulary.token_ids if vocabulary else None,
            calibration_ids=torch.stack(long).long() if long else None,
            seed=config.seed,
            observed=self._observed,
        ).to(self.device)  # type: ignore[arg-type]
        with ProgressLine(f"train {label or arch.label()}") as line:
            result = distill(
                draft,
                caches,
                config,
                heldout=self.looked_at(),
                checkpoint_dir=self.draft_folder(arch) / "checkpoint",
                progress=line,
            )
        return draft, vocabulary, result

    def train_short(
        self,
        arch: Architecture,
        tokens: int,
        seed: int = 0,
        label: str = "",
        *,
        limit_s: float | None = None,
    ) -> ShortTraining:
        """Distil `arch` until it has seen `tokens` in all (or for `limit_s` seconds in all),
        without an anneal: its curve so far, alpha on the texts of `looked_at`. Continues its
        checkpoint; what is done is not done again; `train` goes on from there."""
        folder = self.draft_folder(arch)
        before = read_curve(folder)
        if before is not None and (
            before.tokens >= tokens or (limit_s is not None and before.seconds >= limit_s)
        ):
            return before
        start = time.monotonic()
        marks = (tokens // 4, tokens // 2)
        config = DistillConfig(limit_s, None, tokens, seed=seed, anneal=0.0, evaluate_at=marks)
        _, _, result = self._distilled(arch, config, label)
        looks = result.trunk
        short = ShortTraining(
            arch,
            result.tokens,
            result.seconds,
            result.tokens_per_s,
            tuple((point.tokens, point.value) for point in looks),
            looks[-1].hits if looks else (),
            result.heldout_tokens,
            time.monotonic() - start,
            result.epoch_tokens,
        )
        save(folder / CURVE_FILE, short)
        return short

    def spent(self, arch: Architecture) -> tuple[int, float]:
        """(tokens, seconds) that a draft was trained for so far; of both its short and its full
        training."""
        found = (0, 0.0)
        for name in (CURVE_FILE, "training.json"):
            if spent := load(self.draft_folder(arch) / name, "training record", Spent):
                found = max(found[0], spent.tokens), max(found[1], spent.seconds)
        return found

    def train(
        self,
        arch: Architecture,
        budget_s: float,
        seed: int = 0,
        label: str = "",
        *,
        tokens: int | None = None,
    ) -> TrainedDraft:
        """Initialise `arch` from the target and distil it until `budget_s` seconds of training in
        all, or `tokens` tokens in all, or until held-out acceptance no longer rises, whichever
        comes first; continues a checkpoint. The weights that were best on `looked_at` are kept,
        or those of an earlier call where they were better on the held-out text.

        Writes the draft folder and measures acceptance on the held-out text.
        """
        folder, caches = self.draft_folder(arch), self.texts.all_training()
        ends = DistillConfig(budget_s, None, tokens, seed=seed, patience=PATIENCE)
        config = replace(ends, look_ratio=LOOK_RATIO, keep_best=True)
        draft, vocabulary, result = self._distilled(arch, config, label)
        trace = agreement_trace(draft.eval(), self.texts.choosing())
        if (better := self._better(folder, trace)) is not None:
            trace, kept = better
        else:
            trace.save(folder / "trace.npz")
            kept = self._keep(draft, folder) | {"kept": _look(result.kept, result)}
        write_json(
            folder / "training.json",
            {
                "architecture": arch.to_dict(),
                **encoded(of_run(result)),
                "seed": seed,
                "vocabulary_coverage": vocabulary.coverage if vocabulary else 1.0,
                "text_tokens": caches[0].written_tokens,
                "prompts": self.prompts.source,
                "distinct_tokens": sum(cache.written_tokens for cache in caches),
                **kept,
                "looks": [_look(point, result) for point in result.alpha_curve],
                "alpha_curve": [[point.seconds, point.value] for point in result.alpha_curve],
                "loss_curve": [[point.seconds, point.value] for point in result.loss_curve],
            },
        )
        return replace(
            trained_draft(arch, folder, trace),
            tokens=result.tokens,
            points=tuple((point.tokens, point.value) for point in result.trunk),
            stopped=result.stopped,
        )

    def _better(self, folder: Path, trace: Trace) -> tuple[Trace, dict[str, object]] | None:
        """Where an earlier call left better weights in `folder` than those of `trace`: their trace,
        and what training.json says of them. A trunk that goes on from before its anneal need not
        come as far again."""
        if not (has_weights(folder) and (folder / "training.json").is_file()):
            return None
        before = Trace.load(folder / "trace.npz")
        was, now = alpha(before).value, alpha(trace).value
        if was <= now or self.texts.traced(before) is None:
            return None
        say(
            f"the weights of {folder.name} stay as they were: alpha {was:.3f} on held-out text,"
            f" {now:.3f} after this training"
        )
        record = read_json(folder / "training.json", "training record")
        return before, {name: record.get(name) for name in ("divergence", "kept")}

    def _keep(self, draft: Any, folder: Path) -> dict[str, object]:
        """Write the draft's weights; its divergence from the target on held-out text."""
        import torch

        from archsearch.models.drafts import save_draft
        from archsearch.training.batches import heldout_divergence

        text = self.texts.training()
        nats, known = heldout_divergence(draft, text.head, self.texts.choosing().sequences)
        draft.to("cpu")
        with torch.inference_mode():
            states = [
                draft.model(each.token_ids[None].long(), use_cache=False).last_hidden_state[0]
                for each in text.sequences[:16]
            ]
        away = torch.cat(states).float().mean(0)  # what padding rows point away from
        save_draft(draft, folder, tokenizer=self.tokenizer, mean_hidden=away)
        return {"divergence": {"nats": nats, "alpha": known * alpha_of_divergence(nats)}}


def of_run(result: DistillResult) -> dict[str, Any]:
    """What every training record says of its run."""
    names = "seconds steps tokens tokens_per_s slowdowns epoch_tokens stopped".split()
    return {name: getattr(result, name) for name in names}


def choose_finalists(ranked: Sequence[Score], count: int) -> list[Score]:
    """The best score, then the best of each other depth, then the next best.

    What a prior is least sure of is depth against width.
    """
    best = {score.architecture.num_hidden_layers: score for score in reversed(ranked)}

    def second(score: Score) -> bool:
        return best[score.architecture.num_hidden_layers] is not score

    return sorted(ranked, key=second)[:count]


def _look(point: CurvePoint, result: DistillResult) -> dict[str, object]:
    """A row of training.json's `looks`: alpha on texts that are not trained on, and the mean loss
    of the steps before it."""
    since = 0.85 * point.tokens
    near = [loss.value for loss in result.loss_curve if since <= loss.tokens <= point.tokens]
    return {
        "tokens": point.tokens,
        "seconds": point.seconds,
        "epochs": point.tokens / max(result.epoch_tokens, 1),
        "alpha": point.value,
        "weights": point.weights,
        "loss": sum(near) / len(near) if near else None,
    }
