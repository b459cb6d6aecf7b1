"""Heads on the target's hidden states, trained on a run's texts: beside the finalists, one folder a
family (docs/files.md)."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from archsearch.acceptance.replay import Replay, replay_chains, replays
from archsearch.drafters.forms import auxiliary_layers
from archsearch.drafters.heads import Eagle3
from archsearch.drafts.trainer import LOOK_RATIO, PATIENCE, DraftTrainer, of_run
from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.estimate import Estimate
from archsearch.files import atomic_path
from archsearch.models.files import HEAD_FAMILIES, HeadFamily, has_weights, head_family_of
from archsearch.progress import ProgressLine, say
from archsearch.records import load, save
from archsearch.training.pace import Slowdown

if TYPE_CHECKING:
    import numpy as np

    from archsearch.text.cache import TextCache
    from archsearch.training.heads.chains import Head
    from archsearch.training.heads.eagle3 import Eagle3Head

FOLDER: Final = "heads"
RECORD: Final = "training.json"
RECORD_WORDS: Final = "the head's training record"
CHAINS: Final = "chains.npz"
# Unless something else is asked: rows of the vocabulary, and layers (published P-EAGLE heads have
# four; two is assumed).
HEAD_ROWS: Final[dict[HeadFamily, int]] = {"eagle3": 4096, "medusa": 2048, "peagle": 4096}
HEAD_LAYERS: Final[dict[HeadFamily, int]] = {"eagle3": 1, "medusa": 1, "peagle": 2}
LONGEST_CHAIN: Final = 16
USUAL_JUDGED: Final = 1000  # chains, where a record does not say how many were judged
LOSSES_KEPT: Final = 500  # of the loss curve, in training.json
TRAINABLE: Final = ("llama", "mistral", "qwen2")


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """What is trained. `gamma`: draft tokens a round, which the head is trained for; `rows`: tokens
    its vocabulary keeps (None: the family's usual, HEAD_ROWS); `layers`, `aux_layers`: of an
    EAGLE-3 or P-EAGLE head, whose inputs it reads (empty: 2, n / 2, n - 3).
    """

    family: HeadFamily
    gamma: int = 3
    rows: int | None = None
    layers: int = 1
    aux_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if (
            not 1 <= self.gamma <= LONGEST_CHAIN
            or self.layers < 1
            or (self.rows is not None and self.rows < 1)
        ):
            raise ArchsearchError(
                f"a head needs a gamma of 1 to {LONGEST_CHAIN}, a layer and a vocabulary, got gamma"
                f" {self.gamma}, {self.layers} layers, {self.rows} rows"
            )

    @classmethod
    def usual(cls, family: HeadFamily, gamma: int) -> HeadPlan:
        """A head as it is trained unless something else is asked."""
        return cls(family, gamma, layers=HEAD_LAYERS[family])

    def head_rows(self, vocab_size: int) -> int:
        return min(self.rows or HEAD_ROWS[self.family], vocab_size)


@dataclass(frozen=True, slots=True)
class HeadAcceptance:
    """On the texts that choose. `conditional` [gamma]: the chance of each draft token, given that
    those before it are right; `judged`: chains that got so far; `tau`, `accepted_by_position`: by
    gamma, of rounds as an engine walks them."""

    conditional: tuple[float, ...]
    judged: tuple[int, ...] = ()
    tau: Mapping[int, Estimate] = field(default_factory=dict)
    accepted_by_position: Mapping[int, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HeadRecord:
    """heads/<family>/training.json. `rows`: tokens that the vocabulary keeps; `auxiliary_s`: that
    the states took; `text_tokens`: written ones it learnt from, `epoch_tokens`: with their prompts;
    `stopped`: why it ended before its time; `best`, `curve`: `HeadPoint`s; `loss_curve`: (seconds,
    loss); `taken_from`: the folder of another trainer, which held out `prompts`."""

    plan: HeadPlan
    seconds: float
    tokens: int
    heldout: HeadAcceptance
    steps: int = 0
    tokens_per_s: float = 0.0
    rows: int = 0
    aux_layers: tuple[int, ...] = ()
    auxiliary_s: float = 0.0
    vocabulary_coverage: float = 1.0
    text_tokens: int = 0
    epoch_tokens: int = 0
    stopped: str = ""
    prompts: str = ""
    seed: int = 0
    slowdowns: tuple[Slowdown, ...] = ()
    best: Mapping[str, object] = field(default_factory=dict)
    curve: tuple[Mapping[str, object], ...] = ()
    loss_curve: tuple[tuple[float, float], ...] = ()
    taken_from: str = ""

    def better_than(self, later: HeadRecord) -> bool:
        """Whether it writes more tokens a round, on the same text, than the head it became."""
        ours, theirs = self.heldout, later.heldout
        same = self.plan == later.plan and ours.judged[:1] == theirs.judged[:1]
        gamma = max(ours.tau.keys() & theirs.tau.keys(), default=0)
        return same and gamma > 0 and ours.tau[gamma].value > theirs.tau[gamma].value


@dataclass(frozen=True, slots=True)
class TrainedHead:
    """A head with weights. `folder`: that engines load; `replays`: tokens a round by gamma, on the
    texts that choose."""

    folder: Path
    record: HeadRecord
    replays: dict[int, Replay]

    @property
    def plan(self) -> HeadPlan:
        return self.record.plan

    @property
    def conditional(self) -> tuple[float, ...]:
        return self.record.heldout.conditional

    @property
    def taus(self) -> dict[int, Estimate]:
        return {gamma: replay.estimate() for gamma, replay in self.replays.items()}

    @property
    def alpha(self) -> Estimate:
        """Of its first token, with the std of counting."""
        first, judged = self.conditional[0], self.record.heldout.judged
        std = math.sqrt(first * (1.0 - first) / (judged[0] if judged else USUAL_JUDGED))
        return Estimate(first, std, "measured")


class HeadTrainer:
    """Where heads of one run are trained: its trainer has the target and the texts."""

    def __init__(self, trainer: DraftTrainer) -> None:
        self.trainer = trainer

    def check(self, plan: HeadPlan) -> None:
        """Raise ArchsearchError, before anything is loaded, for a target whose heads cannot be
        trained here."""
        arch = self.trainer.target.architecture
        if arch.model_type not in TRAINABLE or arch.qk_norm:
            raise ArchsearchError(
                f"heads can be trained for targets of {', '.join(TRAINABLE)} without QK norms, not"
                f" for {arch.model_type!r}; use another target, or train a draft model"
            )
        if plan.aux_layers:
            from archsearch.text.auxiliary import check_layers

            check_layers(plan.aux_layers, arch.num_hidden_layers)

    def keep_states(self, plan: HeadPlan) -> None:
        """Let the target keep what the head of `plan` reads while it writes; raises as `check`."""
        self.check(plan)
        if plan.family != "medusa":
            self.trainer.texts.layers = self._layers(plan)

    def _layers(self, plan: HeadPlan) -> tuple[int, ...]:
        layers = self.trainer.target.architecture.num_hidden_layers
        return tuple(sorted(plan.aux_layers)) or auxiliary_layers(layers)

    def train(self, plan: HeadPlan, budget_s: float, seed: int = 0) -> TrainedHead:
        """Train a head for `budget_s` seconds in all (a checkpoint's time counts), Medusa's until
        held-out acceptance no longer rises, and measure it on held-out text.

        An EAGLE-3 head's auxiliary states that were not kept while the texts were written are made
        first, once for all heads that read the same layers, outside the budget.
        """
        from archsearch.training.heads.train import head_config, train_head

        self.check(plan)
        trainer = self.trainer
        folder = head_folder(trainer.folder, plan.family)
        caches, choosing = trainer.texts.all_training(), trainer.texts.choosing()
        start = time.monotonic()
        if plan.family != "medusa":
            *caches, choosing = self._with_states(plan, [*caches, choosing])
        before = load(folder / RECORD, RECORD_WORDS, HeadRecord)  # of a head that goes on
        auxiliary_s = time.monotonic() - start + (before.auxiliary_s if before else 0.0)
        vocabulary = trainer.texts.vocabulary(folder, plan.head_rows(caches[0].vocab_size))
        head = self._initial(plan, vocabulary.token_ids, seed)
        config = head_config(budget_s, seed=seed)
        if plan.family == "medusa":  # an EAGLE-3 head lost by it: its chains rise late (docs/log)
            config = replace(config, look_ratio=LOOK_RATIO, patience=PATIENCE)
        with ProgressLine(f"train {plan.family}") as line:
            result = train_head(
                head,
                caches,
                plan.gamma,
                config,
                checkpoint_dir=folder / "checkpoint",
                progress=line,
            )
        matches = _matches(head, choosing, plan.gamma)
        run = result.run
        every = max(1, math.ceil(len(run.loss_curve) / LOSSES_KEPT))
        record = HeadRecord(
            plan,
            **of_run(run),
            heldout=_acceptance(matches, plan.gamma),
            rows=len(vocabulary.token_ids),
            aux_layers=choosing.layers,
            auxiliary_s=auxiliary_s,
            vocabulary_coverage=vocabulary.coverage,
            text_tokens=sum(cache.written_tokens for cache in caches),
            prompts=trainer.prompts.source,
            seed=seed,
            best=result.best.to_dict(),
            curve=tuple(point.to_dict() for point in result.curve),
            loss_curve=tuple((point.seconds, point.value) for point in run.loss_curve[::every]),
        )
        if before is not None and has_weights(folder) and before.better_than(record):
            say(f"the weights of {folder} stay as they were: more training made them no better")
            save(folder / RECORD, replace(record, heldout=before.heldout, best=before.best))
            return load_head(folder)
        self._save(head.to("cpu"), folder, caches[0])
        return _kept(folder, record, matches)

    def take(self, head: Eagle3Head, plan: HeadPlan, texts: TextCache, **said: Any) -> TrainedHead:
        """Measure and keep a head that was trained elsewhere, on `texts` that its trainer held out;
        `said`: fields of its record."""
        (texts,) = self._with_states(plan, [texts])
        matches = _matches(head, texts, plan.gamma)
        folder = head_folder(self.trainer.folder, plan.family)
        (folder / RECORD).unlink(missing_ok=True)  # it does not speak for other weights
        self._save(head, folder, texts)
        record = HeadRecord(
            plan,
            0.0,
            heldout=_acceptance(matches, plan.gamma),
            rows=len(head.lm_head.draft_token_ids),
            aux_layers=head.aux_layers,
            **said,
        )
        return _kept(folder, record, matches)

    def _with_states(self, plan: HeadPlan, caches: Sequence[TextCache]) -> list[TextCache]:
        from archsearch.text.auxiliary import auxiliary_states

        layers, loaded = self._layers(plan), self.trainer.loaded
        with ProgressLine("auxiliary states of the texts") as line:
            # Held-out text may have been written in another dtype than the training text.
            return [
                auxiliary_states(loaded.model(cache.dtype), cache, layers, line) for cache in caches
            ]

    def _initial(self, plan: HeadPlan, kept: Sequence[int], seed: int) -> Head:
        from archsearch.training.heads.eagle3 import initialise_eagle3
        from archsearch.training.heads.folder import eagle3_config
        from archsearch.training.heads.medusa import initialise_medusa

        target = self.trainer.source_of_weights()
        if plan.family == "medusa":
            return initialise_medusa(target, plan.gamma, kept).to(self.trainer.device)
        decoder = Eagle3.usual(self.trainer.target.architecture).architecture
        decoder = decoder.replace(num_hidden_layers=plan.layers, draft_vocab_size=len(kept))
        words = self.trainer.tokenizer
        # what the further rows of a P-EAGLE head read: a token that says nothing in text
        ids = (words.pad_token_id, words.unk_token_id, words.eos_token_id)
        mask = int(next((i for i in ids if i is not None), 0)) if plan.family == "peagle" else None
        head = initialise_eagle3(
            target, eagle3_config(decoder, target), self._layers(plan), kept, seed, mask
        )
        return head.to(self.trainer.device)

    def _save(self, head: Head, folder: Path, cache: TextCache) -> None:
        """The folder that engines load, with the target's tokenizer."""
        import torch

        from archsearch.models.drafts import save_tokenizer
        from archsearch.training.heads.eagle3 import Eagle3Head
        from archsearch.training.heads.folder import save_eagle3, save_medusa, target_facts

        save_tokenizer(self.trainer.tokenizer, folder)
        target = self.trainer.target
        facts = target_facts(target.architecture, target.name, cache.target_fingerprint)
        if isinstance(head, Eagle3Head):
            save_eagle3(head, folder, facts)
            return
        hidden = torch.cat([sequence.hidden for sequence in cache.sequences[:16]]).float()
        with torch.inference_mode():
            mean = torch.stack(head(hidden)).mean((0, 1))
        save_medusa(head, folder, facts, mean)


def _matches(head: Head, texts: TextCache, gamma: int) -> list[np.ndarray]:
    from archsearch.training.heads.chains import chain_matches

    return chain_matches(head, [s for s in texts.sequences if len(s.written) > 1], gamma)


def _acceptance(matches: Sequence[np.ndarray], gamma: int) -> HeadAcceptance:
    from archsearch.training.heads.chains import count_chains

    counts, found = count_chains(matches), replays_of(matches, gamma)
    return HeadAcceptance(
        counts.conditional,
        counts.judged,
        {gamma: replay.estimate() for gamma, replay in found.items()},
        {gamma: tuple(replay.accepted_by_position) for gamma, replay in found.items()},
    )


def _kept(folder: Path, record: HeadRecord, matches: Sequence[np.ndarray]) -> TrainedHead:
    import numpy as np

    chains: dict[str, Any] = {f"{n:05d}": rows for n, rows in enumerate(matches)}
    with atomic_path(folder / CHAINS) as temporary, open(temporary, "wb") as file:
        np.savez_compressed(file, **chains)
    save(folder / RECORD, record)
    return TrainedHead(folder, record, replays_of(matches, record.plan.gamma))


def head_folder(run: Path, family: HeadFamily) -> Path:
    """Where a run keeps its head of `family`."""
    return run / FOLDER / family


def trained_heads(run: Path) -> list[HeadFamily]:
    """The families of which a run has a head with weights."""
    folders = {family: head_folder(run, family) for family in HEAD_FAMILIES}
    return [
        family
        for family, folder in folders.items()
        if has_weights(folder) and (folder / RECORD).exists()
    ]


def find_head(run: Path, family: HeadFamily) -> TrainedHead | None:
    """The head of a family that a run has; None where it has none."""
    return load_head(head_folder(run, family)) if family in trained_heads(run) else None


def run_head(run: Path, name: str) -> TrainedHead:
    """The head of the family `name` that a run has. MissingDataError, with the command that trains
    it, where it has none."""
    family = head_family_of(name)
    if (head := find_head(run, family)) is None:
        raise MissingDataError(
            f"{run} has no trained {family} head; train it first: archsearch train"
            f" {shlex.quote(str(run))} --family {family}"
        )
    return head


def load_head(folder: Path) -> TrainedHead:
    """What `HeadTrainer.train` left in `folder`. Raises ArchsearchError where there is nothing."""
    import numpy as np

    if (record := load(folder / RECORD, RECORD_WORDS, HeadRecord)) is None:
        raise ArchsearchError(f"{RECORD_WORDS} not found: {folder / RECORD}")
    with np.load(folder / CHAINS) as stored:
        chains = [stored[name] for name in sorted(stored.files)]
    return TrainedHead(folder, record, replays_of(chains, record.plan.gamma))


def replays_of(chains: Sequence[Any], gamma: int) -> dict[int, Replay]:
    """Tokens a round for 1 to `gamma` draft tokens."""
    return replays(gamma, partial(replay_chains, chains))
