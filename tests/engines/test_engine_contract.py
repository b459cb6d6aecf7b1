"""What every engine must do: the same answers as the target alone, counts that add up, gamma
exactly as asked. A new engine is one more line in ENGINES. Engines in an environment of their own
are slow to start, so each keeps running from test to test and is started again only when a test
asks for something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from archsearch.architecture.architecture import Architecture
from archsearch.engine_facts import engine_facts
from archsearch.engines.engine import (
    Engine,
    EnginePrompt,
    EngineSettings,
    GenerationResult,
    Sampling,
)
from archsearch.engines.environments.environment import find_python
from archsearch.engines.registry import make_engine
from archsearch.errors import ArchsearchError
from archsearch.models.drafts import build_draft, save_draft

SLOW = ("vllm", "openvino", "llama.cpp")
ENGINES = ["transformers", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]

TARGET = Architecture(64, 128, 2, 2, 2, 32, 64)
DRAFT = TARGET.replace(num_hidden_layers=1)
SHAPES = {
    "target": TARGET,
    "draft": DRAFT,
    "trimmed": DRAFT.replace(draft_vocab_size=40),
    "other vocabulary": DRAFT.replace(vocab_size=96),
}
GAMMA = 3
TOGETHER = 4  # requests at once, where an engine can
PROMPTS = [
    EnginePrompt(f"p{i}", tuple((11 * i + j) % 63 + 1 for j in range(3 + i)))
    for i in range(TOGETHER)
]
GREEDY = Sampling(max_new_tokens=24, ignore_end=True)
SCHEDULE = ((1, 1, GAMMA), (2, TOGETHER, 1))


def model(name: str) -> torch.nn.Module:
    """Random weights with logits far apart, so that greedy choices have no ties. A draft is the
    target's first layer."""
    target = build_draft(TARGET)
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    if name == "target":
        return target
    built, arch = build_draft(SHAPES[name]), SHAPES[name]
    if arch.vocab_size == TARGET.vocab_size:
        weights = dict(target.state_dict())
        if arch.draft_vocab_size is not None:
            weights["lm_head.weight"] = weights["lm_head.weight"][: arch.draft_vocab_size]
        wanted = built.state_dict()
        built.load_state_dict({key: weights.get(key, value) for key, value in wanted.items()})
    return built


@dataclass
class Subject:
    """An engine under test, with the models in the form it takes (`sources`)."""

    name: str
    make: Callable[[], Engine]
    sources: dict[str, Any]
    engine: Engine = field(init=False)
    running: tuple[Any, ...] | None = None

    def __post_init__(self) -> None:
        self.engine = self.make()

    @property
    def in_process(self) -> bool:
        return engine_facts(self.name).in_process

    def start(
        self,
        draft: str | None,
        gamma: int,
        *,
        synthetic: Sequence[float] = (),
        schedule: Sequence[tuple[int, int, int]] = (),
    ) -> Engine:
        """The engine, started so; as it is where it already was."""
        asked = (draft, gamma, tuple(synthetic), tuple(schedule))
        if asked != self.running:
            self.stop()
            source = None if draft is None else self.sources[draft]
            self.engine.start(
                self.sources["target"], source, gamma, synthetic=synthetic, schedule=schedule
            )
            self.running = asked
        return self.engine

    def stop(self) -> None:
        self.engine.stop()
        self.running = None


@pytest.fixture(scope="module", params=ENGINES)
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    name, python = request.param, None
    if not engine_facts(name).in_process:
        try:
            python = find_python(name)
        except ArchsearchError as error:
            pytest.skip(str(error))
    settings = EngineSettings(
        dtype="float32", concurrency=TOGETHER, max_len=512, threads=1, python=python
    )
    sources: dict[str, Any] = {key: model(key) for key in SHAPES}
    patch = pytest.MonkeyPatch()
    if not engine_facts(name).in_process:
        root = tmp_path_factory.mktemp("models")
        patch.setenv("ARCHSEARCH_CACHE", str(root / "cache"))
        for key, module in sources.items():
            save_draft(module, root / key)
        sources = {key: root / key for key in sources}
    made = Subject(name, lambda: make_engine(name, settings), sources)
    yield made
    made.stop()
    patch.undo()


@pytest.fixture(scope="module")
def alone() -> list[tuple[int, ...]]:
    """The target's own greedy answers, by plain passes over the whole text, no cache and no
    engine."""
    target, answers = model("target"), []
    with torch.inference_mode():
        for prompt in PROMPTS:
            tokens = list(prompt.token_ids)
            for _ in range(GREEDY.max_new_tokens):
                tokens.append(int(target(torch.tensor([tokens])).logits[0, -1].argmax()))
            answers.append(tuple(tokens[len(prompt.token_ids) :]))
    return answers


def check_counts(results: Sequence[GenerationResult], gamma: int) -> None:
    """Whole rounds of exactly gamma draft tokens, and times that make sense."""
    assert [result.prompt_id for result in results] == [
        prompt.prompt_id for prompt in PROMPTS[: len(results)]
    ]
    for result in results:
        assert (
            result.rounds == len(result.round_lengths) > 0
            and result.drafted == gamma * result.rounds
        )
        assert len(result.accepted_by_position) == gamma
        assert result.accepted + result.rounds == sum(result.round_lengths) <= len(result.token_ids)
        assert list(result.accepted_by_position) == sorted(
            result.accepted_by_position, reverse=True
        )
        assert 0 < result.decode_seconds <= result.seconds and 0 < result.first_s <= result.seconds
        assert result.seconds == pytest.approx(result.first_s + result.decode_seconds, rel=0.2)
        assert sum(result.gaps_s) == pytest.approx(result.decode_seconds)


# -- without a draft
# --------------------------------------------------------------------------------------------------


def test_it_is_an_engine_and_says_which(subject: Subject) -> None:
    engine = subject.engine
    assert (
        isinstance(engine, Engine) and engine.name == subject.name and engine.version[0].isdigit()
    )


def test_alone_it_writes_the_target_s_greedy_answers(
    subject: Subject, alone: list[tuple[int, ...]]
) -> None:
    engine = subject.start(None, 0)
    results = engine.generate(PROMPTS, GREEDY)
    assert [result.prompt_id for result in results] == [prompt.prompt_id for prompt in PROMPTS]
    assert [result.token_ids for result in results] == alone
    for result in results:
        assert (result.rounds, result.drafted, result.accepted, result.round_lengths) == (
            0,
            0,
            0,
            (),
        )
        assert result.decode_tokens == GREEDY.max_new_tokens - 1 == len(result.gaps_s)
    steps = engine.steps()
    assert sum(step.written for step in steps) == sum(map(len, alone))
    assert {step.gamma for step in steps} == {0} and not any(step.draft_s for step in steps)


def test_token_logits_are_the_target_s(subject: Subject) -> None:
    ids = [3, 1, 4, 1, 5]
    with torch.inference_mode():
        expected = model("target")(torch.tensor([ids])).logits[0, -1]
    tolerance = 1e-4 if subject.in_process else 1e-3  # other kernels add up in another order
    engine = subject.start(None, 0)
    for _ in range(2):
        found = engine.token_logits(ids, [7, 2, 7])
        wanted = expected[[7, 2, 7]].tolist()
        if (
            subject.name == "llama.cpp"
        ):  # its server tells log-probabilities: less by one number that all share
            found, wanted = (
                [value - found[0] for value in found],
                [value - wanted[0] for value in wanted],
            )
        assert found == pytest.approx(wanted, abs=tolerance)


def test_sampling_repeats_with_its_seed(subject: Subject) -> None:
    engine = subject.start(None, 0)
    first, again, other = (
        engine.generate(PROMPTS, Sampling(16, 1.0, seed, True)) for seed in (1, 1, 2)
    )
    assert (
        [r.token_ids for r in first] == [r.token_ids for r in again] != [r.token_ids for r in other]
    )


# -- with one
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [1, 4])
@pytest.mark.parametrize("draft", ["draft", "trimmed"])
def test_greedy_answers_are_the_target_s_and_counts_add_up(
    subject: Subject, alone: list[tuple[int, ...]], draft: str, gamma: int
) -> None:
    if not subject.in_process and (draft, gamma) != ("trimmed", 4):
        pytest.skip(
            "a start takes seconds; the other tests run this engine with the whole draft and"
            " another gamma"
        )
    results = subject.start(draft, gamma).generate(PROMPTS, GREEDY)
    assert [result.token_ids for result in results] == alone
    check_counts(results, gamma)


def test_prompts_of_one_call_run_together_or_one_after_the_other(
    subject: Subject, alone: list[tuple[int, ...]]
) -> None:
    engine = subject.start("draft", GAMMA)
    together = engine.generate(PROMPTS, GREEDY)
    steps = engine.steps()
    assert max(step.batch for step in steps) == (
        TOGETHER if engine_facts(subject.name).batches else 1
    )
    assert sum(step.written for step in steps) == sum(map(len, alone))
    one_by_one = [engine.generate([prompt], GREEDY)[0] for prompt in PROMPTS]
    check_counts(together, GAMMA)
    check_counts(one_by_one[:1], GAMMA)
    assert (
        [result.token_ids for result in together]
        == [result.token_ids for result in one_by_one]
        == alone
    )
    assert [result.round_lengths for result in together] == [
        result.round_lengths for result in one_by_one
    ]
    accepted = sum(result.accepted for result in together)
    assert (
        0 < accepted < sum(result.drafted for result in together)
    )  # or nothing above would say much


def test_steps_account_for_the_time(subject: Subject) -> None:
    engine = subject.start("draft", GAMMA)
    prompt = PROMPTS[2]
    (result,) = engine.generate([prompt], GREEDY)
    steps = engine.steps()
    assert sum(step.written for step in steps) == len(result.token_ids) == GREEDY.max_new_tokens
    assert sum(step.seconds for step in steps) == pytest.approx(result.seconds, rel=0.5)
    assert steps[0].prefill
    # Reading the prompt takes a step or two (the draft's own); from there on all are rounds.
    assert not any(step.prefill for step in steps[2:])
    whole = [step for step in steps if not step.prefill and step.target_tokens == GAMMA + 1]
    assert len(whole) >= 2
    for step in whole:
        assert step.batch == 1 and step.gamma == GAMMA and 1 <= step.written <= GAMMA + 1
        if subject.name == "llama.cpp":  # its server tells the seconds of whole rounds only
            assert not step.draft_s and step.target_s is None
            continue
        assert len(step.draft_s) == len(step.draft_tokens) == GAMMA and all(
            seconds > 0 for seconds in step.draft_s
        )
        assert step.target_s and step.other_s is not None and step.other_s > 0
    written = 0
    for before, step in pairwise(steps):
        written += before.written
        # The last token that was written is in the text, not yet in the cache: engines count it or
        # not.
        assert 0 <= len(prompt.token_ids) + written - step.context <= 1


def test_sampling_with_a_draft_repeats_or_is_refused(subject: Subject) -> None:
    engine = subject.start("draft", GAMMA)
    runs: list[list[tuple[int, ...]]] = []
    try:
        for seed in (1, 1, 2):
            results = engine.generate(PROMPTS, Sampling(16, 1.0, seed, True))
            check_counts(results, GAMMA)
            runs.append([result.token_ids for result in results])
    except ArchsearchError as error:
        assert (
            not runs
            and "sampl" in str(error)
            and "temperature" in str(error)
            and "\n" not in str(error)
        )
        assert (
            len(engine.generate(PROMPTS[:1], GREEDY)[0].token_ids) == GREEDY.max_new_tokens
        )  # it goes on after a refusal
    else:
        assert runs[0] == runs[1] != runs[2]


def test_the_target_as_draft_is_accepted_whole(
    subject: Subject, alone: list[tuple[int, ...]]
) -> None:
    results = subject.start("target", GAMMA).generate(PROMPTS, GREEDY)
    check_counts(results, GAMMA)
    for result, expected in zip(results, alone, strict=True):
        assert (
            set(result.round_lengths) == {GAMMA + 1}
            and result.rejected == 0
            and result.token_ids == expected
        )


@pytest.mark.parametrize("rates", [(0.8, 0.4, 0.3), (1.0, 1.0, 1.0), (0.0, 0.0, 0.0)])
def test_synthetic_acceptance_is_what_was_asked_or_refused(
    subject: Subject, rates: tuple[float, ...]
) -> None:
    if not subject.engine.facts.synthesises:
        with pytest.raises(ArchsearchError, match="no synthetic acceptance"):
            subject.make().start(
                subject.sources["target"], subject.sources["draft"], GAMMA, synthetic=rates
            )
        return
    if not subject.in_process and rates[0] != 0.8:
        pytest.skip("a start takes seconds; rates between 0 and 1 were seen")
    tokens = 100 if rates[0] == 0.8 else 20  # those that are all or none are no matter of chance
    results = subject.start("draft", GAMMA, synthetic=rates).generate(
        PROMPTS, Sampling(max_new_tokens=tokens, ignore_end=True)
    )
    check_counts(results, GAMMA)
    rounds = sum(result.rounds for result in results)
    for position, rate in enumerate(rates):
        seen = sum(result.accepted_by_position[position] for result in results) / rounds
        assert abs(seen - rate) <= 4.5 * (rate * (1 - rate) / rounds) ** 0.5
    assert all(len(result.token_ids) == tokens for result in results)


def test_a_schedule_is_obeyed_or_refused(subject: Subject, alone: list[tuple[int, ...]]) -> None:
    if not subject.engine.facts.schedules:
        with pytest.raises(ArchsearchError, match="schedule"):
            subject.make().start(
                subject.sources["target"], subject.sources["draft"], GAMMA, schedule=SCHEDULE
            )
        return
    engine = subject.start("draft", GAMMA, schedule=SCHEDULE)
    for count, gamma in ((1, GAMMA), (TOGETHER, 1)):
        results = engine.generate(PROMPTS[:count], GREEDY)
        assert [result.token_ids for result in results] == alone[:count]
        steady = [step for step in engine.steps() if step.batch == count and not step.prefill]
        assert len(steady) >= 3 and {step.gamma for step in steady} == {gamma}
        assert all(len(result.accepted_by_position) == GAMMA for result in results)


# -- refusals, which need no engine that runs
# ------------------------------------------------------------------------------------


def test_what_contradicts_itself_is_refused(subject: Subject) -> None:
    engine, target, draft = subject.make(), subject.sources["target"], subject.sources["draft"]
    cases: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((target, draft, 2), {"synthetic": (0.5, 0.6)}, "2 rates"),
        ((target, draft, 2), {"synthetic": (0.5,)}, "2 rates"),
        ((target, None, 0), {"synthetic": (0.5,)}, "need a draft"),
        ((target, draft, 2), {"schedule": ((2, 4, 2),)}, "schedule"),
        ((target, draft, 2), {"schedule": ((1, 4, 1),)}, "schedule's largest is 1"),
        ((target, draft, 0), {}, "gamma must be at least 1"),
        (
            (target, subject.sources["other vocabulary"], 2),
            {},
            "the draft's vocabulary has 96 tokens, the target's 64",
        ),
    ]
    for arguments, options, words in cases:
        with pytest.raises(ArchsearchError, match=words) as told:
            engine.start(*arguments, **options)
        assert "\n" not in str(told.value)


def test_modules_are_taken_in_this_process_only_and_folders_everywhere(
    subject: Subject, tmp_path: Path
) -> None:
    engine, module = subject.make(), model("target")
    if not subject.in_process:
        with pytest.raises(ArchsearchError, match=f"folder.* {type(module).__name__}"):
            engine.start(module, None, 0)
        return
    save_draft(module, tmp_path / "target")
    save_draft(model("trimmed"), tmp_path / "trimmed")
    engine.start(tmp_path / "target", tmp_path / "trimmed", GAMMA)
    check_counts(engine.generate(PROMPTS, GREEDY), GAMMA)
    engine.stop()


def test_it_can_be_started_again(subject: Subject, alone: list[tuple[int, ...]]) -> None:
    """By now it ran with other drafts, or none: nothing of that is left."""
    subject.stop()
    results = subject.start(None, 0).generate(PROMPTS[:2], GREEDY)
    assert [result.token_ids for result in results] == alone[:2] and not any(
        result.rounds for result in results
    )
    subject.stop()
    subject.stop()  # twice does no harm
    with pytest.raises(RuntimeError, match="start the engine first"):
        subject.engine.token_logits([1], [1])
