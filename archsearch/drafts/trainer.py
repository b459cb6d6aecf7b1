"""Finalists: drafts that get weights. Text is written once by the target; every draft is initialised from the target, distilled
on that text, and measured on held-out text, all on the same sequences.

Folders inside a run:

    text/        what the target wrote for the training prompts, with its hidden states
    heldout/     the same for the held-out prompts: what acceptance is measured on
    more/        sampled answers to the training prompts, where the climb had time for them
    finalists/<shape>/   draft folder (weights), checkpoint/, trace.npz, training.json; of a short training curve.json
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from archsearch.architecture.architecture import Architecture
from archsearch.drafts.records import ShortTraining, TrainedDraft, trained_draft
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.files import read_json, write_json
from archsearch.models.targets import TargetRef
from archsearch.progress import ProgressLine
from archsearch.text.prompt_set import PromptSet

if TYPE_CHECKING:
    from archsearch.acceptance.estimator import VocabularyCoverage
    from archsearch.text.cache import TextCache
    from archsearch.text.vocabulary import DraftVocabulary


ANSWER_TOKENS: Final = 96


SUPERNET_FIRST_TOKENS: Final = 4000  # per shape: to learn the speed


MORE_TEMPERATURE: Final = 0.7  # of further answers: near what the target writes greedily, yet not the same again


COVERAGE_SIZES: Final = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


class Workshop:
    """Where drafts of one target are trained: the target, its tokenizer, its text. Loads what is needed, when it is needed."""

    def __init__(
        self,
        target: TargetRef,
        dtype: str,
        prompts: PromptSet,
        folder: Path,
        *,
        answer_tokens: int = ANSWER_TOKENS,
        plain_text: Path | None = None,
        threads: int | None = None,
    ) -> None:
        self.target, self.dtype, self.prompts, self.folder = target, dtype, prompts, folder
        self.answer_tokens, self.plain_text = answer_tokens, plain_text
        self._models: dict[str, Any] = {}
        self._tokenizer: Any = None
        self._texts: dict[str, TextCache] = {}
        if threads is not None:
            import torch

            torch.set_num_threads(threads)

    def model(self, dtype: str | None = None) -> Any:
        """The target in `dtype` (the run's by default)."""
        from archsearch.models.load import load_target

        name = dtype or self.dtype
        if name not in self._models:
            self._models[name], self._tokenizer = load_target(self.target, name)
        return self._models[name]

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            from archsearch.models.load import load_tokenizer

            self._tokenizer = load_tokenizer(self.target)
        return self._tokenizer

    def write_text(self, budget_s: float) -> TextCache:
        """The training text, written within about `budget_s`; a finished or interrupted cache is used and continued."""
        from archsearch.text.generate import generate_text
        from archsearch.text.plain import encode_text

        both = {prompt.text for prompt in self.prompts.heldout} & {prompt.text for prompt in self.prompts.train}
        if both:
            raise ArchsearchError(
                f"{len(both)} prompts are in both the training and the held-out file (one: {min(both)[:60]!r}); "
                "remove them from one"
            )
        with ProgressLine("target writes training text") as line:
            self._texts["text"] = generate_text(
                self.model(),
                self.tokenizer,
                self.prompts.train,
                cache_dir=self.folder / "text",
                max_new_tokens=self.answer_tokens,
                budget_s=budget_s,
                progress=lambda p: line(f"{p['tokens']} tokens, {p['tokens_per_s']:.0f}/s", p["seconds"], budget_s),
            )
        if self.plain_text is not None:
            with ProgressLine("target reads plain text") as line:
                self._texts["plain"] = encode_text(
                    self.model(),
                    self.tokenizer,
                    self.plain_text,
                    cache_dir=self.folder / "plain",
                    budget_s=0.3 * budget_s,
                    progress=lambda p: line("", p["seconds"], 0.3 * budget_s),
                )
        return self._texts["text"]

    def write_more(self, budget_s: float) -> TextCache | None:
        """Sampled answers to the training prompts, where every prompt has its greedy one: more text to train on, none of it for
        prompts whose answers are kept out to compare drafts on. None where there is none and no time for it."""
        from archsearch.text.generate import generate_text
        from archsearch.text.prompts import encode_prompts
        from archsearch.training.distill import DistillConfig, split_heldout

        if budget_s > 0 and self.text().complete:
            numbered = [replace(prompt, id=str(number)) for number, prompt in enumerate(self.prompts.train)]
            encoded = {prompt.id: prompt.token_ids for prompt in encode_prompts(numbered, self.tokenizer)}
            kept_out = split_heldout(self.text().sequences, DistillConfig(max_steps=1).heldout_sequences)[1]
            unseen = {tuple(sequence.token_ids[: sequence.prompt_tokens].tolist()) for sequence in kept_out}
            with ProgressLine("target writes more training text") as line:
                generate_text(
                    self.model(),
                    self.tokenizer,
                    [prompt for prompt in numbered if prompt.id in encoded and encoded[prompt.id] not in unseen],
                    cache_dir=self.folder / "more",
                    max_new_tokens=self.answer_tokens,
                    temperature=MORE_TEMPERATURE,
                    seed=1,
                    budget_s=budget_s,
                    progress=lambda p: line(f"{p['tokens']} tokens, {p['tokens_per_s']:.0f}/s", p["seconds"], budget_s),
                )
        self._load_further_text()
        return self._texts.get("more")

    def text(self) -> TextCache:
        """The training text written before. Raises MissingDataError where there is none."""
        from archsearch.text.cache import TextCache

        if "text" not in self._texts:
            if not (self.folder / "text" / "cache.json").exists():
                raise MissingDataError(f"{self.folder} has no training text; run the search with --confirm, or archsearch train")
            self._texts["text"] = TextCache.load(self.folder / "text")
        return self._texts["text"]

    def heldout_text(self) -> TextCache:
        """What the target writes, greedily, for the held-out prompts."""
        from archsearch.text.generate import generate_text

        if "heldout" not in self._texts:
            with ProgressLine("target writes held-out text") as line:
                self._texts["heldout"] = generate_text(
                    self.model(),
                    self.tokenizer,
                    self.prompts.heldout,
                    cache_dir=self.folder / "heldout",
                    max_new_tokens=self.answer_tokens,
                    progress=lambda p: line(f"{p['tokens']} tokens", float(p["done"]), float(p["total"])),
                )
        return self._texts["heldout"]

    def training_caches(self) -> list[TextCache]:
        self._load_further_text()
        return [self.text(), *(self._texts[name] for name in ("plain", "more") if name in self._texts)]

    def _load_further_text(self) -> None:
        from archsearch.text.cache import TextCache

        for name in ("plain", "more"):
            if name not in self._texts and any((self.folder / name).glob("shard-*.safetensors")):
                self._texts[name] = TextCache.load(self.folder / name)

    def coverage(self) -> VocabularyCoverage:
        """Which share of the held-out text the most frequent tokens of the training text cover, by head size."""
        from archsearch.acceptance.estimator import VocabularyCoverage
        from archsearch.text.vocabulary import choose_draft_vocab, token_frequencies

        frequencies = token_frequencies(self.text())
        heldout = token_frequencies(self.heldout_text()).written
        shares, best = [], 0.0
        for size in (size for size in COVERAGE_SIZES if size < len(heldout)):
            kept = list(choose_draft_vocab(frequencies, size, self.tokenizer).token_ids)
            best = max(best, float(heldout[kept].sum() / heldout.sum()))
            shares.append((size, best))
        return VocabularyCoverage((*shares, (len(heldout), 1.0)))

    # -- one draft --------------------------------------------------------------------------------------------------------------

    def draft_folder(self, arch: Architecture) -> Path:
        """finalists/<shape>, with a short hash so that shapes that print alike stay apart."""
        digest = hashlib.sha256(json.dumps(arch.to_dict(), sort_keys=True).encode()).hexdigest()[:6]
        return (
            self.folder
            / "finalists"
            / f"{arch.num_hidden_layers}x{arch.hidden_size}-ffn{arch.intermediate_size}-head{arch.head_rows}-{digest}"
        )

    def _initial(self, arch: Architecture, caches: list[TextCache], seed: int) -> tuple[Any, DraftVocabulary | None]:
        """The untrained draft (float32) out of the target, and the vocabulary of a trimmed head, chosen once per shape."""
        import torch

        from archsearch.text.vocabulary import DraftVocabulary, choose_draft_vocab, token_frequencies
        from archsearch.training.initialise import initialise_draft

        folder = self.draft_folder(arch)
        # The ids are kept with the draft: a cache that has grown since would choose others, and the checkpoint would not fit.
        stored = folder / "vocabulary.json"
        if arch.trimmed and stored.exists():
            vocabulary = DraftVocabulary(**read_json(stored, "draft vocabulary"))
        elif arch.trimmed:
            vocabulary = choose_draft_vocab(token_frequencies(*caches), arch.head_rows, self.tokenizer)
            write_json(stored, asdict(vocabulary))
        else:
            vocabulary = None
        calibration = _calibration_ids(caches[0])
        draft = initialise_draft(
            self.model("float32"),
            arch,
            draft_token_ids=vocabulary.token_ids if vocabulary else None,
            calibration_ids=calibration,
            seed=seed,
            dtype=torch.float32,
        )
        return draft, vocabulary

    def train_short(
        self, arch: Architecture, tokens: int, seed: int = 0, label: str = "", *, limit_s: float | None = None
    ) -> ShortTraining:
        """Distil `arch` until it has seen `tokens` in all (or for `limit_s` seconds in all), without an anneal: its curve so far.

        alpha is measured on answers to training prompts that no draft is trained on, the same for all: the held-out prompts stay
        unseen until a finalist is measured. Continues its checkpoint; what is done is not done again; `train` goes on from there.
        """
        from archsearch.training.distill import DistillConfig, distill

        folder = self.draft_folder(arch)
        path = folder / "curve.json"
        before = ShortTraining.from_dict(read_json(path, "learning curve")) if path.exists() else None
        if before is not None and (before.tokens >= tokens or (limit_s is not None and before.seconds >= limit_s)):
            return before
        caches = self.training_caches()
        draft, _ = self._initial(arch, caches, seed)
        start = time.monotonic()
        with ProgressLine(f"train {label or arch.label()}") as line:
            result = distill(
                draft,
                caches,
                DistillConfig(budget_s=limit_s, max_tokens=tokens, seed=seed, anneal=0.0, evaluate_at=(tokens // 4, tokens // 2)),
                checkpoint_dir=folder / "checkpoint",
                progress=lambda p: line(
                    f"loss {p['loss']:.3f} alpha {p['alpha'] or 0:.3f} {p['tokens_per_s']:.0f} tokens/s",
                    float(p["fraction"]),
                    1.0,
                ),
            )
        from archsearch.training.curves import alpha_points

        looks = [point for point in result.alpha_curve if point.weights == "average"]
        short = ShortTraining(
            arch,
            result.tokens,
            result.seconds,
            result.tokens_per_s,
            tuple((point.tokens, point.alpha) for point in alpha_points(result.alpha_curve)),
            looks[-1].hits if looks else (),
            result.heldout_tokens,
            time.monotonic() - start,
        )
        write_json(path, short.to_dict())
        return short

    def train_supernet(self, shapes: Sequence[Architecture], seconds: float, seed: int = 0) -> list[float]:
        """alpha of each shape's slice of one supernet, trained for about `seconds`, on the texts that `train_short` compares on.

        The shapes have one head. Continues its checkpoint. Raises ArchsearchError for shapes that cannot share weights.
        """
        from archsearch.text.vocabulary import choose_draft_vocab, token_frequencies
        from archsearch.training.distill import split_heldout
        from archsearch.training.supernet import SupernetConfig, build_supernet, slice_matches, train_supernet

        caches = self.training_caches()
        ids = None
        if shapes[0].trimmed:
            ids = choose_draft_vocab(token_frequencies(*caches), shapes[0].head_rows, self.tokenizer).token_ids
        net = build_supernet(
            self.model("float32"), shapes, draft_token_ids=ids, calibration_ids=_calibration_ids(caches[0]), seed=seed
        )
        first = SupernetConfig(tokens=SUPERNET_FIRST_TOKENS * len(shapes), seed=seed)
        folder = self.folder / "supernet"
        with ProgressLine(f"train a supernet over {len(shapes)} shapes") as line:
            begin = time.monotonic()
            # As much again as fits into the time at the speed of the first part; a checkpoint of an earlier process counts.
            done = train_supernet(net, shapes, caches[0], first, checkpoint_dir=folder)
            spent = max(time.monotonic() - begin, 1e-3)
            tokens = max(done.tokens, int(first.tokens * seconds / spent)) if done.tokens < 2 * first.tokens else done.tokens
            train_supernet(
                net, shapes, caches[0], replace(first, tokens=tokens), checkpoint_dir=folder,
                progress=lambda p: line(f"loss {p['loss']:.3f}", float(p["fraction"]), 1.0),
            )  # fmt: skip
            kept_out = split_heldout(caches[0].sequences, first.heldout_sequences)[1] or caches[0].sequences[:8]
            matches = slice_matches(net, shapes, kept_out)
        return [float(sum(m.sum() for m in rows) / sum(len(m) for m in rows)) for rows in matches]

    def train(self, arch: Architecture, budget_s: float, seed: int = 0, label: str = "") -> TrainedDraft:
        """Initialise `arch` from the target and distil it until `budget_s` seconds of training in all; continues a checkpoint.

        Writes the draft folder and measures acceptance on the held-out text.
        """
        from archsearch.acceptance.measured import agreement_trace
        from archsearch.models.drafts import save_draft
        from archsearch.training.distill import DistillConfig, distill

        folder = self.draft_folder(arch)
        caches = self.training_caches()
        draft, vocabulary = self._initial(arch, caches, seed)
        with ProgressLine(f"train {label or arch.label()}") as line:
            result = distill(
                draft,
                caches,
                DistillConfig(budget_s=budget_s, seed=seed),
                checkpoint_dir=folder / "checkpoint",
                progress=lambda p: line(
                    f"loss {p['loss']:.3f} alpha {p['alpha'] or 0:.3f} {p['tokens_per_s']:.0f} tokens/s",
                    float(p["fraction"]),
                    1.0,
                ),
            )
        draft.eval()
        trace = agreement_trace(draft, self.heldout_text())
        trace.save(folder / "trace.npz")
        save_draft(draft, folder, tokenizer=self.tokenizer, mean_hidden=_mean_hidden(draft, caches[0]))
        write_json(
            folder / "training.json",
            {
                "architecture": arch.to_dict(),
                "seconds": result.seconds,
                "steps": result.steps,
                "tokens": result.tokens,
                "tokens_per_s": result.tokens_per_s,
                "seed": seed,
                "vocabulary_coverage": vocabulary.coverage if vocabulary else 1.0,
                "text_tokens": caches[0].written_tokens,
                "prompts": self.prompts.source,
                "alpha_curve": [[point.seconds, point.value] for point in result.alpha_curve],
                "loss_curve": [[point.seconds, point.value] for point in result.loss_curve],
            },
        )
        return trained_draft(arch, folder, trace)


def choose_finalists(ranked: Sequence[Any], count: int) -> list[Any]:
    """The best score, then the best of each other depth, then the next best.

    What a prior is least sure of is depth against width.
    """
    chosen: list[Any] = []
    for distinct in (True, False):
        for score in ranked:
            if len(chosen) >= count:
                return chosen
            depths = {other.architecture.num_hidden_layers for other in chosen}
            if score not in chosen and not (distinct and score.architecture.num_hidden_layers in depths):
                chosen.append(score)
    return chosen


def _calibration_ids(cache: TextCache, tokens: int = 64, rows: int = 32) -> Any:
    """[rows, tokens] of the target's text, for the statistics that narrow initialisations need; None where texts are short."""
    import torch

    long = [sequence.token_ids[:tokens] for sequence in cache.sequences if len(sequence.token_ids) >= tokens][:rows]
    return torch.stack(long).long() if long else None


def _mean_hidden(draft: Any, cache: TextCache, count: int = 16) -> Any:
    """Mean final hidden state of the draft over some text [hidden]: what padding rows point away from."""
    import torch

    with torch.inference_mode():
        states = [
            draft.model(sequence.token_ids[None].long(), use_cache=False).last_hidden_state[0]
            for sequence in cache.sequences[:count]
        ]
    return torch.cat(states).float().mean(0)
