"""confirm() on an engine whose answers and times are made up, so that every figure is known."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from archsearch.engines.child.answers import round_statistics
from archsearch.engines.engine import EnginePrompt, GenerationResult, Sampling
from archsearch.engines.measure.figures import (
    best_of_gammas,
    by_prompt,
    choice_cost,
    identities,
)
from archsearch.engines.measure.results import ByPrompt
from archsearch.engines.measure.turns import Plan, Variant, run_plan
from archsearch.errors import ArchsearchError, RunFailed
from archsearch.progress import silent
from archsearch.speedup import counting_doubt

PROMPTS = [EnginePrompt(f"p{i}", (1, 2, i), "code" if i % 2 else "chat") for i in range(4)]
CALLS: list[tuple[int, str]] = []


def confirm(
    make, target, draft, gammas, prompts, progress=silent, **options
) -> dict[int, ByPrompt]:  # noqa: ANN001, ANN003
    """A draft at several gammas; what came out by gamma."""
    variants = [Variant(f"gamma {gamma}", draft or "draft", gamma) for gamma in sorted(gammas)]
    plan = Plan(target, variants, prompts, **options)
    return {
        found.gamma: found
        for found in run_plan(lambda _: make(), plan, best_of_gammas, progress=progress).values()
    }


def compare(make, target, drafters, prompts, sampling) -> dict[str, ByPrompt]:  # noqa: ANN001
    """Several drafters; what came out by name."""
    variants = [Variant(name, draft, gamma) for name, (draft, gamma) in drafters.items()]
    return run_plan(lambda _: make(), Plan(target, variants, prompts, sampling), by_prompt)


class FakeEngine:
    """Alone 10 ms a token. With a draft: rounds of lengths 3, 1, 2 (times 4), 12 ms a round;
    prefill 100 ms."""

    name = "fake"
    version = "1"
    wrong: frozenset[str] = frozenset()
    lengths = (3, 1, 2) * 4

    def start(
        self, target: object, draft: object, gamma: int, *, synthetic=(), schedule=()
    ) -> None:
        self.gamma = gamma

    def steps(self) -> tuple:
        return ()

    def stop(self) -> None:
        CALLS.append((self.gamma, "stop"))

    def token_logits(self, token_ids, candidates) -> list[float]:
        assert len(token_ids) == 3 + 5
        return [2.0 if token == 5 else 1.9 for token in candidates]

    def generate(self, prompts, sampling: Sampling) -> list[GenerationResult]:
        return [self.one(prompt) for prompt in prompts]

    def one(self, prompt: EnginePrompt) -> GenerationResult:
        CALLS.append((self.gamma, prompt.prompt_id))
        tokens = list(range(25))
        if self.gamma == 0:
            return GenerationResult(prompt.prompt_id, "", tuple(tokens), 0.1 + 0.24, 0.1, 0.24, 24)
        if prompt.prompt_id in self.wrong:
            tokens[5] = 99
        lengths = [min(length, self.gamma + 1) for length in self.lengths]
        by_position = round_statistics(lengths, self.gamma)
        decode_s = 0.012 * (len(lengths) - 1)
        return GenerationResult(
            prompt.prompt_id,
            "",
            tuple(tokens),
            0.1 + decode_s,
            0.1,
            decode_s,
            sum(lengths) - lengths[0],
            len(lengths),
            self.gamma * len(lengths),
            by_position,
            tuple(lengths),
            (0.012,) * (len(lengths) - 1),
        )


def test_figures() -> None:
    CALLS.clear()
    seen: list[tuple[str, float, float]] = []
    results = confirm(
        FakeEngine, None, None, [2, 1], PROMPTS, progress=lambda *args: seen.append(args)
    )
    assert list(results) == [1, 2]
    two = results[2]
    # Per cycle of three rounds: accepted 2 + 0 + 1, rejected 0 + 1 + 1.
    assert (
        two.alpha.value == pytest.approx(3 / 5)
        and two.alpha.std < 1e-9
        and two.alpha.source == "measured"
    )
    assert two.accepted_by_position == pytest.approx((2 / 3, 1 / 3))
    assert two.tau.value == pytest.approx(2.0)
    assert two.rounds == 48 and two.prompts == 4
    # Decode window: 21 tokens in 11 rounds of 12 ms.
    assert two.baseline_tokens_per_s == pytest.approx(100.0) and two.decode_s == pytest.approx(
        0.010
    )
    assert two.tokens_per_s == pytest.approx(21 / 0.132)
    assert (
        two.speedup.value == pytest.approx(0.010 * 21 / 0.132) == pytest.approx(two.speedup_pooled)
    )
    assert two.speedup_interval == pytest.approx((two.speedup.value,) * 2)
    assert two.speedup_end_to_end == pytest.approx(0.34 / 0.232)
    assert two.round_s == pytest.approx(0.012)
    assert set(two.categories) == {"chat", "code"} and two.categories["code"].prompts == 2
    assert two.categories["chat"].alpha == pytest.approx(0.6) and two.categories[
        "chat"
    ].tau == pytest.approx(2.0)
    assert two.identical_output.identical == two.identical_output.prompts == 4
    # gamma 1: of each cycle (2, 1, 2) two accepted, one rejected.
    assert results[1].alpha.value == pytest.approx(2 / 3) and results[
        1
    ].accepted_by_position == pytest.approx((2 / 3,))
    assert seen[-1][1:] == (15, 15), "three starts and twelve requests"


def test_a_disturbed_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt ran ten times slower with the draft: the median hides it, the pooled figure does
    not."""
    usual = FakeEngine.one

    def one(self: FakeEngine, prompt: EnginePrompt) -> GenerationResult:
        answer = usual(self, prompt)
        slow = self.gamma and prompt.prompt_id == "p1"
        return (
            dataclasses.replace(answer, decode_seconds=10 * answer.decode_seconds)
            if slow
            else answer
        )

    calm = confirm(FakeEngine, None, "draft", [2], PROMPTS)[2]
    monkeypatch.setattr(FakeEngine, "one", one)
    rough = confirm(FakeEngine, None, "draft", [2], PROMPTS)[2]
    assert (
        calm.speedup_pooled
        == pytest.approx(calm.speedup.value)
        == pytest.approx(rough.speedup.value)
    )
    assert rough.speedup_pooled < 0.85 * rough.speedup.value


def test_the_interval_covers_both_ways_of_counting_and_a_contradiction_decides_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three prompts gain 1.78, one long stall makes 32.5 tokens/s alone 31.2 with the draft: no
    interval over medians sees it."""
    usual = FakeEngine.one
    calm = confirm(FakeEngine, None, "draft", [2], PROMPTS)[2]
    gain = calm.speedup.value

    def one(self: FakeEngine, prompt: EnginePrompt) -> GenerationResult:
        answer = usual(self, prompt)
        slow = 1.0 if not self.gamma else gain / 1.78
        if self.gamma and prompt.prompt_id == "p3":
            slow = gain * (
                4 * 32.5 / 31.2 - 3 / 1.78
            )  # of all seconds, so that all of it is 31.2 / 32.5
        return dataclasses.replace(answer, decode_seconds=slow * answer.decode_seconds)

    monkeypatch.setattr(FakeEngine, "one", one)
    rough = confirm(FakeEngine, None, "draft", [2], PROMPTS)[2]
    assert rough.speedup.value == pytest.approx(1.78) and rough.speedup_pooled == pytest.approx(
        31.2 / 32.5
    )
    low, high = rough.speedup_interval
    assert low < rough.speedup_pooled < rough.speedup.value <= high + 1e-9
    doubt = counting_doubt(1.78, rough.speedup_pooled, rough.prompts, rough.steady) or ""
    assert "disturbed" in doubt and "1.78x" in doubt and "0.96x" in doubt


def test_the_best_of_several_gammas_bears_the_cost_of_being_picked() -> None:
    """Four gammas that all bring 1x, 24 prompts: the lower end of the best lies above 1 in 5 % of
    cases, not in 13 %."""
    rng, cases = np.random.default_rng(0), 300
    above = {"as picked": 0, "with its cost": 0}
    for seed in range(cases):
        ratios = np.exp(rng.normal(0, 0.15, (1, 24)) + rng.normal(0, 0.15, (4, 24)))
        best = int(np.median(ratios, axis=1).argmax())
        cost = choice_cost(ratios, (1, 2, 3, 4), best + 1, seed)
        draws = np.median(
            ratios[best][np.random.default_rng(seed).integers(0, 24, (300, 24))], axis=1
        )
        low = float(np.quantile(draws, 0.05))
        above["as picked"] += low > 1.0
        above["with its cost"] += low - cost.optimism > 1.0
    assert above["as picked"] / cases > 0.09 and above["with its cost"] / cases < 0.075


def test_only_the_best_of_several_gammas_says_what_it_was_picked_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = FakeEngine.one

    def one(self: FakeEngine, prompt: EnginePrompt) -> GenerationResult:
        answer = usual(self, prompt)
        # each gamma is good at every other prompt
        better = self.gamma and self.gamma == 1 + int(prompt.prompt_id[1:]) % 2
        return dataclasses.replace(
            answer, decode_seconds=answer.decode_seconds * (0.8 if better else 1.0)
        )

    monkeypatch.setattr(FakeEngine, "one", one)
    alone = {gamma: confirm(FakeEngine, None, None, [gamma], PROMPTS)[gamma] for gamma in (1, 2)}
    both = confirm(FakeEngine, None, None, [1, 2], PROMPTS)
    assert alone[2].best_of is None and both[1].best_of is None and both[1] == alone[1]
    picked = both[2]  # the better of the two
    assert (
        picked.best_of.gammas == (1, 2)
        and 0 < picked.best_of.optimism
        and 0 < picked.best_of.share <= 1
    )
    assert picked.speedup_interval[0] == pytest.approx(
        alone[2].speedup_interval[0] - picked.best_of.optimism
    )
    assert (
        picked.speedup_interval[1] == alone[2].speedup_interval[1]
        and picked.speedup == alone[2].speedup
    )


@pytest.mark.parametrize(
    ("median", "pooled", "steady", "why"),
    [
        (1.78, 0.96, None, "disturbed"),
        (1.78, 0.96, 1.75, "disturbed"),
        (1.24, 1.43, 1.42, None),  # three prompts of 17 that repeat themselves, on a quiet machine
        (1.05, 0.97, None, "contradict"),
        (0.97, 1.04, 0.97, "contradict"),
        (1.5, 1.4, None, None),
        (0.9, 0.8, None, None),
    ],
)
def test_what_decides_nothing(
    median: float, pooled: float, steady: float | None, why: str | None
) -> None:
    doubt = counting_doubt(median, pooled, 12, steady)
    assert doubt is None if why is None else why in (doubt or "")
    few = [counting_doubt(median, pooled, prompts, steady) or "" for prompts in (1, 3)]
    assert "on one prompt says too little" in few[0] and "on 3 prompts" in few[1]


def test_interleaving() -> None:
    CALLS.clear()
    confirm(FakeEngine, None, None, [3, 1], PROMPTS[:2])
    warm_up, timed = CALLS[:3], CALLS[3:9]
    assert warm_up == [(0, "p0"), (1, "p0"), (3, "p0")]
    assert timed == [(0, "p0"), (1, "p0"), (3, "p0"), (3, "p1"), (1, "p1"), (0, "p1")]
    assert sorted(CALLS[9:]) == [(0, "stop"), (1, "stop"), (3, "stop")]


def test_differences_are_shown_with_the_targets_logits() -> None:
    class Wrong(FakeEngine):
        wrong = frozenset({"p2"})

    result = confirm(Wrong, None, None, [2], PROMPTS)[2]
    identity = result.identical_output
    assert (identity.identical, identity.prompts) == (3, 4)
    [difference] = identity.differences
    assert (
        difference.prompt_id,
        difference.position,
        difference.alone_token,
        difference.draft_token,
    ) == ("p2", 5, 5, 99)
    assert difference.logit_gap == pytest.approx(0.1)
    for engine, same in ((Wrong, 3), (FakeEngine, 4)):
        plan = Plan("target", [Variant("draft", "draft", 2)], PROMPTS, apart=True, starts=1)
        found = run_plan(lambda _, engine=engine: engine(), plan, identities)["draft"]
        assert found.identical == same and found.alpha == pytest.approx(0.6)


def test_refusals() -> None:
    with pytest.raises(ArchsearchError, match="give prompts"):
        confirm(FakeEngine, None, None, [2], [])

    class Silent(FakeEngine):
        def one(self, prompt: EnginePrompt) -> GenerationResult:
            return GenerationResult(
                prompt.prompt_id, "", (1,), 0.1, 0.1, 0.0, 0, 0, 0, (0,) * self.gamma
            )

    CALLS.clear()
    with pytest.raises(RunFailed, match="no whole round of gamma 2"):
        confirm(Silent, None, None, [2], PROMPTS)
    assert (2, "stop") in CALLS  # engines are released


def test_prompts_before_a_failure_are_kept() -> None:
    class Dies(FakeEngine):
        def generate(self, prompts, sampling: Sampling) -> list[GenerationResult]:
            if self.gamma and prompts[0].prompt_id == "p2" and sampling.max_new_tokens > 16:
                raise RunFailed("the engine was killed by signal 9")
            return super().generate(prompts, sampling)

    with pytest.raises(RunFailed, match="signal 9") as caught:
        confirm(Dies, None, None, [2], PROMPTS)
    assert caught.value.results["gamma 2"].prompts == 2
    assert caught.value.results["gamma 2"].tau.value == pytest.approx(2.0)


def test_engines_that_do_not_fit_together_take_turns() -> None:
    alive: set[int] = set()
    most: list[int] = []

    class Alone(FakeEngine):
        def start(self, target: object, draft: object, gamma: int, **options: object) -> None:
            super().start(target, draft, gamma)
            alive.add(id(self))
            most.append(len(alive))

        def stop(self) -> None:
            alive.discard(id(self))

    Alone.wrong = frozenset({"p1"})
    kept: list[Alone] = []
    results = confirm(
        lambda: kept.append(Alone()) or kept[-1], None, None, [1, 2], PROMPTS, apart=True
    )
    assert max(most) == 1 and not alive
    together = confirm(FakeEngine, None, None, [1, 2], PROMPTS)
    assert (
        results[2].speedup.value == pytest.approx(together[2].speedup.value)
        and results[2].rounds == together[2].rounds
    )
    assert (
        results[2].identical_output.identical == 3
    )  # the target alone was started again to look at the tie


def test_drafters_of_several_kinds_take_turns() -> None:
    CALLS.clear()
    found = compare(
        FakeEngine, "target", {"head": ("a", 2), "lookup": ("b", 1)}, PROMPTS, Sampling(25)
    )
    assert {name: result.gamma for name, result in found.items()} == {"head": 2, "lookup": 1}
    assert found["head"].tau.value == pytest.approx(2.0) and found[
        "lookup"
    ].tau.value == pytest.approx(5 / 3)
    assert found["head"].identical_output.identical == found["head"].prompts == 4
    timed = [call for call in CALLS if call[1] != "stop"][3:]  # after the warm-ups
    assert timed[:6] == [(0, "p0"), (2, "p0"), (1, "p0"), (1, "p1"), (2, "p1"), (0, "p1")], (
        "the order is reversed"
    )


def test_a_drafter_that_proposes_nothing_is_left_out() -> None:
    class Silent(FakeEngine):
        def one(self, prompt: EnginePrompt) -> GenerationResult:
            result = super().one(prompt)
            return (
                dataclasses.replace(result, rounds=0, round_lengths=(), accepted_by_position=(0,))
                if self.gamma == 1
                else result
            )

    assert set(
        compare(Silent, "target", {"head": ("a", 2), "lookup": ("b", 1)}, PROMPTS, Sampling(25))
    ) == {"head"}
