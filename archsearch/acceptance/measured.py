"""Acceptance measured: a draft beside the text its target wrote.

One teacher-forced pass of the draft over cached text records, at every written token, what a
verification would decide (a trace):

- greedy text: whether the draft's most likely token is the target's (0 or 1);
- sampled text: min(1, q(x) / p(x)) for the target's token x, the chance that the token was drafted
  and kept and not resampled, and the overlap, the sum over all tokens of min(p, q), which is the
  chance that a draft token is accepted there (arXiv 2211.17192, theorem 3.5). p and q are the
  target's and the draft's distribution after temperature and top-p, as engines sample from both.

The mean is alpha; the sequence, replayed (`replay.py`), is tau for every gamma. Drafts are compared
in pairs on the same texts: the spread over prompts is larger than their differences.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from archsearch.errors import ArchsearchError, MissingDataError
from archsearch.estimate import Estimate
from archsearch.files import atomic_path
from archsearch.progress import Progress, silent
from archsearch.text.settings import check_sampling, warped_probs

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from archsearch.text.cache import CachedSequence, TextCache

RESAMPLES: Final = 500
_BATCH_TOKENS: Final = 4096  # of the draft's pass
_HEAD_ROWS: Final = 256  # positions whose [rows, vocab] logits are held at a time


@dataclass(frozen=True, slots=True)
class Trace:
    """What a draft does at every token its target wrote: one array per text, with the text's
    category and id.

    `agreements` [tokens] bool: both argmaxes are the same token. `ended`: which texts end by
    themselves, with the end token last (the others were cut at a length); empty where that was not
    recorded. Sampled text (`temperature` > 0) has two arrays more, `chances` and `overlaps`
    [tokens]. `confidences` [tokens]: the probability that the draft gives its most likely token, on
    greedy text (empty in files of earlier versions): what a chain lets it stop by.
    """

    agreements: tuple[np.ndarray, ...]
    categories: tuple[str, ...]
    ids: tuple[str, ...]
    ended: tuple[bool, ...] = ()
    chances: tuple[np.ndarray, ...] = ()
    overlaps: tuple[np.ndarray, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    confidences: tuple[np.ndarray, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.agreements)
        if not count == len(self.categories) == len(self.ids):
            raise ValueError("a trace needs one category and one id per text")
        if len(self.ended) not in (0, count):
            raise ValueError("a trace knows the end of every text or of none")
        parts = (self.agreements, self.chances, self.overlaps) if self.sampled else ()
        if len({tuple(each.shape for each in part) for part in parts}) > 1:
            raise ValueError(
                "a trace of sampled text needs a chance and an overlap for every token"
            )

    @property
    def sampled(self) -> bool:
        """Whether the target sampled the texts."""
        return self.temperature > 0

    @property
    def tokens(self) -> int:
        """Tokens at which draft and target were compared."""
        return sum(int(a.shape[0]) for a in self.agreements)

    @property
    def accepted(self) -> tuple[np.ndarray, ...]:
        """Per text [tokens] float: the chance that this token was an accepted draft token, if a
        round asked for it."""
        if self.sampled:
            return self.chances
        return tuple(np.asarray(a, dtype=np.float64) for a in self.agreements)

    @property
    def shares(self) -> tuple[np.ndarray, ...]:
        """Per text [tokens]: what alpha is the mean of. The overlap has the mean of `accepted` with
        less noise."""
        return self.overlaps if self.sampled else self.agreements

    def ends(self, index: int) -> bool:
        """Whether text `index` ended by itself; False where that was not recorded."""
        return bool(self.ended) and bool(self.ended[index])

    def of_category(self, category: str) -> Trace:
        """The texts of one category."""
        return self.pick([i for i, name in enumerate(self.categories) if name == category])

    def pick(self, indices: Sequence[int]) -> Trace:
        """These texts, in this order."""
        chosen: dict[str, Any] = {
            each.name: tuple(values[i] for i in indices)
            for each in fields(self)
            if isinstance(values := getattr(self, each.name), tuple) and values
        }
        return replace(self, **chosen)

    def save(self, path: Path | str) -> None:
        """Write the trace as .npz (atomically)."""
        lengths = np.array([a.shape[0] for a in self.agreements], dtype=np.int64)
        arrays: dict[str, Any] = {
            "agreement": np.packbits(_joined(self.agreements, bool)),
            "lengths": lengths,
            "labels": np.array(json.dumps([self.categories, self.ids])),
        }
        if self.ended:
            arrays["ended"] = np.array(self.ended, dtype=bool)
        for name in _MEASURED:
            if values := getattr(self, name):
                arrays[name] = _joined(values, np.float32)
        if self.sampled:
            arrays["sampling"] = np.array([self.temperature, self.top_p])
        with atomic_path(Path(path)) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: Path | str) -> Trace:
        """Read a trace that `save` wrote, of this version or an earlier one.

        Earlier ones hold greedy agreement only and do not say which texts ended: those shorter than
        the longest did, since all were cut at one length. Raises ArchsearchError for a file that is
        no trace.
        """
        try:
            with np.load(path, allow_pickle=False) as data:
                lengths = data["lengths"]
                agreements = _split(
                    np.unpackbits(data["agreement"], count=int(lengths.sum())).astype(bool), lengths
                )
                categories, ids = json.loads(str(data["labels"]))
                known = data["ended"] if "ended" in data else lengths < lengths.max(initial=0)
                more: dict[str, Any] = {
                    name: _split(data[name], lengths) for name in _MEASURED if name in data
                }
                if "sampling" in data:
                    more["temperature"], more["top_p"] = map(float, data["sampling"])
                labels = (tuple(categories), tuple(ids), tuple(map(bool, known)))
                return cls(agreements, *labels, **more)
        except FileNotFoundError:
            raise MissingDataError(f"agreement trace not found: {path}") from None
        except (OSError, EOFError, ValueError, TypeError, KeyError, zipfile.BadZipFile) as error:
            raise ArchsearchError(
                f"{path} is not an agreement trace ({error}); measure the draft again"
            ) from error


# numbers at every token, beside `agreements`
_MEASURED: Final = ("confidences", "chances", "overlaps")


def _joined(arrays: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate(arrays).astype(dtype) if arrays else np.zeros(0, dtype=dtype)


def _split(flat: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, ...]:
    if flat.shape[0] != int(lengths.sum()):
        raise ValueError(f"{flat.shape[0]} values for {int(lengths.sum())} tokens")
    return tuple(np.split(flat, np.cumsum(lengths)[:-1])) if len(lengths) else ()


# --- recording


def agreement_trace(
    draft: PreTrainedModel,
    texts: TextCache | Sequence[CachedSequence],
    *,
    end_ids: Collection[int] | None = None,
    progress: Progress = silent,
) -> Trace:
    """Where `draft` and the target agree along the target's own greedy text: one teacher-forced
    pass in the draft's dtype.

    `end_ids`: tokens that end an answer (default: those of the draft's own configs). Raises
    ArchsearchError for no text, text of another vocabulary, or a draft whose states are not finite.
    """
    head = _DraftHead(draft)

    def judge(sequence: CachedSequence, part: slice, states: Tensor) -> _Judged:
        tokens, sure = head.best(states)
        return tokens == sequence.greedy_ids[part], sure

    (agreements, confidences), labels = _along(draft, texts, judge, end_ids, progress)
    return Trace(agreements, *labels, confidences=confidences)


def sampling_trace(
    draft: PreTrainedModel,
    texts: TextCache | Sequence[CachedSequence],
    *,
    temperature: float,
    top_p: float = 1.0,
    head: Tensor | None = None,
    end_ids: Collection[int] | None = None,
    progress: Progress = silent,
) -> Trace:
    """Acceptance along text that the target sampled at `temperature` and `top_p`. `head` [vocab,
    hidden]: the target's (default: the text cache's), for its logits.

    Both distributions get the same temperature and top-p. A vocabulary shorter or longer than the
    target's (padding rows) is compared on the ids that both have. Raises as `agreement_trace`, for
    settings out of range and at temperature 0, which is greedy text.
    """
    import torch
    from torch.nn import functional

    check_sampling(temperature, top_p)
    if temperature == 0:
        raise ArchsearchError("temperature 0 is greedy text: measure agreement instead")
    draft_head = _DraftHead(draft)
    target_head = texts.head if head is None else head  # type: ignore[union-attr]

    def judge(sequence: CachedSequence, part: slice, states: Tensor) -> _Judged:
        target_logits = functional.linear(sequence.hidden[part].to(target_head.dtype), target_head)
        target_probs = warped_probs(target_logits, temperature, top_p)
        draft_logits = draft_head.logits(states)
        ids = draft_head.ids[draft_head.ids < target_probs.shape[-1]]  # sorted: a beginning
        draft_probs = warped_probs(draft_logits, temperature, top_p)[:, : len(ids)]
        overlap = torch.minimum(target_probs[:, ids], draft_probs).sum(-1)
        written = sequence.written[part][:, None]
        of_target = target_probs.gather(1, written)[:, 0]
        full = torch.zeros_like(target_probs).index_copy_(1, ids, draft_probs)
        of_draft = full.gather(1, written)[:, 0]
        # p(x) = 0: x stood at the edge of the nucleus and rounding moved it out; nothing is
        # known, count a rejection.
        chance = torch.where(
            of_target > 0, (of_draft / of_target.clamp_min(1e-30)).clamp_max(1.0), 0.0
        )
        agrees = draft_head.ids[draft_logits.argmax(-1)] == sequence.greedy_ids[part]
        return agrees, chance.float(), overlap.clamp(0.0, 1.0).float()

    (agreements, chances, overlaps), labels = _along(draft, texts, judge, end_ids, progress)
    settings = (float(temperature), float(top_p))
    return Trace(agreements, *labels, chances, overlaps, *settings)


_Judged = tuple["Tensor", ...]


def _along(
    draft: PreTrainedModel,
    texts: TextCache | Sequence[CachedSequence],
    judge: Callable[[CachedSequence, slice, Tensor], _Judged],
    end_ids: Collection[int] | None,
    progress: Progress,
) -> tuple[tuple[tuple[np.ndarray, ...], ...], _Labels]:
    """What `judge` says of some positions of a text and the draft's states there, for all of them:
    of each of its answers an array per text; and the texts' labels."""
    import torch

    from archsearch.text.generate import eos_ids

    sequences: list[CachedSequence] = list(
        texts.sequences if hasattr(texts, "sequences") else texts
    )
    if not sequences:
        raise ArchsearchError("there is no text to measure acceptance on; generate some first")
    found: list[tuple[np.ndarray, ...]] = [()] * len(sequences)
    for done, (index, states) in enumerate(_draft_states(draft, sequences), start=1):
        starts = range(0, states.shape[0], _HEAD_ROWS)
        # [rows, vocab]: a part at a time, for whole texts do not fit
        parts = [slice(start, start + _HEAD_ROWS) for start in starts]
        with torch.no_grad():
            judged = [judge(sequences[index], part, states[part]) for part in parts]
        found[index] = tuple(torch.cat(each).numpy() for each in zip(*judged, strict=True))
        progress("draft beside the target's text", done, len(sequences))
    ends = set(eos_ids(draft) if end_ids is None else end_ids)
    return tuple(zip(*found, strict=True)), text_labels(sequences, ends)


_Labels = tuple[tuple[str, ...], tuple[str, ...], tuple[bool, ...]]


def text_labels(sequences: Sequence[CachedSequence], ends: Collection[int]) -> _Labels:
    """Categories, ids and which texts ended by themselves: what a trace says of its texts."""
    ended = tuple(int(s.token_ids[-1]) in ends for s in sequences)
    return tuple(s.category for s in sequences), tuple(s.id for s in sequences), ended


class _DraftHead:
    """A draft's head: [n, hidden] -> logits [n, rows], and the token of each row (`ids` [rows])."""

    def __init__(self, draft: PreTrainedModel) -> None:
        import torch

        from archsearch.models.drafts import head_token_ids
        from archsearch.text.generate import check_logits

        check_logits(draft.config, "draft")
        module = draft.get_output_embeddings()
        self.weight, self.bias = module.weight.detach(), getattr(module, "bias", None)
        kept = head_token_ids(draft)
        self.ids = torch.arange(self.weight.shape[0]) if kept is None else kept.cpu()

    def logits(self, states: Tensor) -> Tensor:
        from torch.nn import functional

        return functional.linear(states, self.weight, self.bias).cpu()

    def best(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """The most likely tokens' ids [n] and probabilities [n] (float32)."""
        logits = self.logits(states)
        best = logits.argmax(-1)
        sure = logits.float().log_softmax(-1).gather(1, best[:, None])[:, 0].exp()
        return self.ids[best], sure


def _draft_states(
    draft: PreTrainedModel, sequences: Sequence[CachedSequence]
) -> Iterator[tuple[int, Tensor]]:
    """(index of a sequence, the draft's final states [written, hidden] that predict its written
    tokens), shortest texts first."""
    import torch

    from archsearch.training.batches import batches_of, draft_states

    largest = max(int(s.token_ids.max()) for s in sequences)
    rows = draft.get_input_embeddings().weight.shape[0]  # type: ignore[index]
    if largest >= rows:
        raise ArchsearchError(
            f"the text holds token id {largest}, the draft's vocabulary ends at {rows - 1}: another"
            " tokenizer"
        )
    training = draft.training
    draft.eval()
    try:
        for chosen, batch in batches_of(sequences, _BATCH_TOKENS, draft.device):
            # No autocast: an engine runs the draft in its own dtype, and near ties fall differently
            # in another one.
            with torch.inference_mode():
                states = draft_states(draft, batch)
                if not bool(torch.isfinite(states).all()):
                    words = "its weights are broken; train or load it again"
                    raise ArchsearchError(f"the draft computes NaN or infinite states: {words}")
            yield from zip(chosen, batch.by_text(states), strict=True)
    finally:
        draft.train(training)


# --- summaries


@dataclass(frozen=True, slots=True)
class Resampled:
    """A measured ratio, with what it was on texts drawn again with replacement (bootstrap): std and
    intervals over prompts."""

    value: float
    draws: np.ndarray = field(repr=False, compare=False)
    fallback_std: float = 0.0

    @property
    def std(self) -> float:
        """Over the draws; `fallback_std` where one text alone says nothing about the spread over
        texts."""
        return float(np.std(self.draws, ddof=1)) if len(self.draws) > 1 else self.fallback_std

    def estimate(self) -> Estimate:
        return Estimate(self.value, self.std, "measured")

    def interval(self, level: float = 0.95) -> tuple[float, float] | None:
        """The central interval that holds `level` of the draws (percentile bootstrap); None for a
        single text."""
        if len(self.draws) < 2:
            return None
        low, high = np.quantile(self.draws, [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)

    def intervals(self) -> dict[int, tuple[float, float] | None]:
        """At 90 and 95 %."""
        return {level: self.interval(level / 100) for level in (90, 95)}


def resampled_ratio(
    totals: np.ndarray, *, resamples: int = RESAMPLES, seed: int = 0, fallback_std: float = 0.0
) -> Resampled:
    """sum(totals[:, 0]) / sum(totals[:, 1]) over rows (texts), with bootstrap draws of the rows.
    `totals` [texts, 2]."""
    whole = totals.sum(axis=0)
    value = float(whole[0] / whole[1])
    if len(totals) < 2 or resamples < 2:
        return Resampled(value, np.zeros(0), fallback_std if len(totals) < 2 else 0.0)
    # [resamples, texts]: texts are drawn, not tokens, which depend on each other
    picks = np.random.default_rng(seed).integers(len(totals), size=(resamples, len(totals)))
    sums = np.take(totals.T, picks, axis=1).sum(axis=2)
    filled = sums[1] > 0
    return Resampled(value, sums[0, filled] / sums[1, filled], fallback_std)


def alpha_resampled(trace: Trace, *, seed: int = 0) -> Resampled:
    """alpha with its bootstrap over texts (tokens of one text are not independent of each other).

    Raises ArchsearchError for a trace without tokens.
    """
    counts = np.array([[a.sum(), len(a)] for a in trace.shares], dtype=np.float64).reshape(-1, 2)
    if counts[:, 1].sum() == 0:
        raise ArchsearchError("the trace holds no tokens; measure on more text")
    value = float(counts[:, 0].sum() / counts[:, 1].sum())
    # One text says nothing about the spread over texts: the widest a share can have.
    return resampled_ratio(counts, seed=seed, fallback_std=float(np.sqrt(value * (1 - value))))


def alpha(trace: Trace) -> Estimate:
    """Mean acceptance at a token (greedy: share of agreements; sampled: mean overlap), with its
    bootstrap std over texts."""
    return alpha_resampled(trace).estimate()


def alpha_by_category(trace: Trace) -> dict[str, Estimate]:
    """alpha of every category, in the order of first appearance."""
    return {name: alpha(trace.of_category(name)) for name in dict.fromkeys(trace.categories)}
