"""The verdict on a run's text: what more of it would bring, by the curve of one training, and in
which words."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from archsearch.acceptance.estimator import GivenAcceptance
from archsearch.architecture import catalogue
from archsearch.architecture.architecture import Architecture
from archsearch.drafts.records import TrainedDraft
from archsearch.estimate import Estimate
from archsearch.files import read_json, write_json
from archsearch.hardware.device import devices
from archsearch.latency.roofline import RooflineLatency
from archsearch.pipeline.search import text_result
from archsearch.pipeline.train import narrowest, predicted, rounded, speedup_at, text_verdict
from archsearch.records import as_data, from_data
from archsearch.report.headline import Headline, with_text
from archsearch.runs.candidate import TrainingRecord
from archsearch.runs.tables import TEXT_VERDICT_FILE, TextStand, TextVerdict
from archsearch.search.objective import Score, Scorer
from archsearch.speedup import logit, sigmoid, tau_estimate
from archsearch.text.cache import CachedSequence
from archsearch.text.prompt_set import PromptSet
from archsearch.text.prompts import Prompt
from archsearch.training.curves import effective_tokens
from archsearch.workload import Workload

TARGET = catalogue.load("smollm2-135m").architecture
DRAFT = Architecture(576, 1536, 2, 9, 3, 64, 49152, draft_vocab_size=4096)
EPOCH = 40_000  # of one pass over the text, prompts included


def measured(value: float, std: float = 0.02) -> Estimate:
    return Estimate(value, std, "measured")


def level(tokens: float, epoch: int) -> float:
    """A made-up law that rises with the logarithm of effective tokens."""
    return -1.2 + 0.3 * math.log(effective_tokens(tokens, epoch) / 64_000)


def draft(alpha: float = 0.30, epochs: float = 30.0, **categories: Estimate) -> TrainedDraft:
    points = tuple(
        (t, sigmoid(level(t, EPOCH)))
        for t in (round(EPOCH * epochs / 2**n) for n in range(7, -1, -1))
    )
    tau = {gamma: tau_estimate(measured(alpha), gamma) for gamma in range(1, 6)}
    return TrainedDraft(
        DRAFT, Path("x"), measured(alpha), categories, tau, {}, points[-1][0], points
    )


def record(tokens: int = 1, stopped: str = "") -> TrainingRecord:
    data = {
        "architecture": DRAFT.to_dict(),
        "tokens": tokens,
        "seconds": 60.0,
        "epoch_tokens": EPOCH,
        "stopped": stopped,
    }
    return TrainingRecord.from_dict(data | {"distinct_tokens": 24_000})


@pytest.fixture
def scorer() -> Scorer:
    device = devices()["h100-sxm5-80gb"]
    return Scorer(
        TARGET,
        Workload(1, 160, 1, "bfloat16", "graph"),
        RooflineLatency(device, "bfloat16", "graph"),
        GivenAcceptance(0.5),
    )


def stand(alpha: float, speedup: float, prompts: int = 317, tokens: int = 24_000) -> TextStand:
    return TextStand(prompts, tokens, measured(alpha), measured(speedup))


def test_ten_times_the_prompts_by_the_curve_of_one_training(scorer: Scorer) -> None:
    learnt, more = predicted(
        scorer, draft(), record(stopped="held-out acceptance no longer rises"), stand(0.30, 1.09)
    )
    assert learnt is None and more is not None and more.prompts == 3000
    assert more.distinct_tokens == pytest.approx(24_000 * 3000 / 317, rel=0.01)
    end, kept = level(1e12, round(EPOCH * 3000 / 317)), level(30 * EPOCH, EPOCH)
    truth = sigmoid(logit(0.30) + end - kept)
    assert abs(more.alpha.value - truth) < 2 * more.alpha.std and more.alpha.value > 0.33
    assert more.speedup.value > scorer.measured(DRAFT, draft().alpha, draft().tau).speedup.value


def test_the_steep_start_of_a_small_text_promises_nothing_absurd(scorer: Scorer) -> None:
    """A curve of 45 prompts: ten times as many were said to bring alpha 0.98."""
    tokens = (1446, 2370, 8363, 10186, 12553, 15200, 18480, 22176, 26325)
    alphas = (0.065, 0.065, 0.488, 0.391, 0.515, 0.562, 0.626, 0.629, 0.636)
    points = tuple(zip(tokens, alphas, strict=True))
    small = replace(draft(0.60), points=points)
    learnt_by = replace(record(), record={**record().record, "epoch_tokens": 3696})
    learnt, more = predicted(scorer, small, learnt_by, stand(0.60, 1.36, 45, 1433))
    assert more is not None and 0.75 < more.alpha.value < 0.85 and 0.05 < more.alpha.std < 0.12
    assert learnt is not None and learnt.alpha.value < 0.66


def test_a_text_that_was_not_learnt_in_full_says_what_it_still_holds(scorer: Scorer) -> None:
    learnt, _ = predicted(scorer, draft(epochs=1.0), record(), stand(0.25, 1.0))
    assert learnt is not None and learnt.prompts == 317 and learnt.alpha.value > 0.27
    again, _ = predicted(scorer, draft(epochs=30.0), record(), stand(0.30, 1.0))
    assert again is None or again.alpha.value < 0.33  # next to nothing is left
    nothing = TrainedDraft(DRAFT, Path("x"), measured(0.3), {}, draft().tau, {})
    assert predicted(scorer, nothing, record(), stand(0.30, 1.0)) == (None, None)


def test_the_speedup_at_another_alpha(scorer: Scorer) -> None:
    own = scorer.measured(DRAFT, draft().alpha, draft().tau).speedup.value
    assert speedup_at(scorer, draft(), measured(0.30)).value == pytest.approx(own, rel=1e-6)
    assert speedup_at(scorer, draft(), measured(0.60)).value > own


def test_the_words() -> None:
    now, more = stand(0.30, 1.09), stand(0.41, 1.30, 3000, 227_000)
    text = TextVerdict("2x576", 317, now, more=more)
    assert (
        text.words()
        == "24k distinct tokens from 317 prompts: alpha 0.30 ± 0.02 (1.09x). 3,000 prompts like"
        " these would bring about 0.41 ± 0.02 (1.30x); or narrow the domain."
    )
    narrow = TextVerdict(
        "2x576", 400, now, stand(0.33, 1.12), more, "maths", measured(0.62), ("bad",)
    )
    assert (
        "from 317 of 400 prompts" in narrow.words()
        and "learnt in full, this text would bring about 0.33" in narrow.words()
    )
    assert narrow.words().endswith("; or narrow the domain: 'maths' alone has alpha 0.62.")
    assert from_data(TextVerdict, json.loads(json.dumps(as_data(narrow)))) == narrow
    full = TextVerdict("2x576", 317, now, more=stand(0.305, 1.10, 3000))
    assert (
        "More would bring little: 3,000 prompts like these about 0.30" in full.words()
        and "narrow" not in full.words()
    )
    assert "is not known" in TextVerdict("2x576", 317, now).words()
    head = with_text(Headline("It pays.", ["first"], [], None), narrow)
    assert (
        head.lines[1].startswith("Text: 24k distinct") and head.lines[2] == "Text is at fault: bad."
    )
    assert with_text(head, None) is head


def test_a_category_that_would_be_worth_a_draft_of_its_own() -> None:
    assert narrowest(draft(0.30, maths=measured(0.62), chat=measured(0.25))) == (
        "maths",
        measured(0.62),
    )
    assert narrowest(draft(0.30, maths=measured(0.62, 0.4), chat=measured(0.25))) == ("", None)
    assert narrowest(draft(0.30, maths=measured(0.62))) == ("", None)  # the only one


@pytest.mark.parametrize(
    ("count", "said"), [(3170, 3000), (3600, 4000), (80, 80), (960, 1000), (1, 1)]
)
def test_round_numbers(count: int, said: int) -> None:
    assert rounded(count) == said


def test_the_verdict_is_kept_with_the_run_and_names_what_is_wrong(
    scorer: Scorer, tmp_path: Path
) -> None:
    prompts = [Prompt((("user", f"prompt {n}"),)) for n in range(20)]
    circles = torch.tensor([1, 2, *([5, 6, 7] * 20)])
    answers = [CachedSequence(circles, 2, torch.zeros(60, 4), circles[2:], "", "")] * 12
    texts = SimpleNamespace(training=lambda: SimpleNamespace(sequences=answers))
    trainer = SimpleNamespace(
        folder=tmp_path, texts=texts, prompts=PromptSet(prompts[:15], prompts[15:], "made up")
    )
    trained = replace(draft(), folder=tmp_path)
    write_json(tmp_path / "training.json", record().to_dict())
    verdict = text_verdict(scorer, trainer, trained)
    assert (verdict.now.prompts, verdict.asked, verdict.now.distinct_tokens) == (12, 15, 24_000)
    assert (
        "from 12 of 15 prompts" in verdict.words()
        and verdict.more is not None
        and verdict.more.prompts == 100
    )
    few, repeats = verdict.faults
    assert few.startswith("only 20 prompts") and repeats.startswith(
        "the target repeats itself in 12 of 12"
    )
    kept = from_data(TextVerdict, read_json(tmp_path / TEXT_VERDICT_FILE, "verdict"))
    assert kept == verdict
    result = text_result(scorer, trainer, [verdict_score(scorer)], [trained])
    assert result == verdict
    assert text_result(scorer, trainer, [verdict_score(scorer)], []) is None


def verdict_score(scorer: Scorer) -> Score:
    return scorer.measured(DRAFT, draft().alpha, draft().tau)
