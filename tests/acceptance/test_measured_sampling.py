import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.logits_process import TemperatureLogitsWarper, TopPLogitsWarper

import archsearch.cli.price  # noqa: F401  (registers the command)
from archsearch.acceptance import measured
from archsearch.acceptance.replay import replay_tau
from archsearch.architecture.architecture import Architecture
from archsearch.cli import main
from archsearch.engines.engine import EnginePrompt, Sampling
from archsearch.engines.transformers.engine import TransformersEngine
from archsearch.errors import ArchsearchError
from archsearch.models.drafts import build_draft, load_draft, save_draft
from archsearch.models.load import load_target
from archsearch.models.targets import resolve_target
from archsearch.pipeline.latency import choose_latency
from archsearch.text.generate import generate_text
from archsearch.text.prompts import EncodedPrompt, Prompt, encode_prompts, read_prompts
from archsearch.text.settings import Writing
from replay_vs_engine import with_states
from tests.doubles.world import TINY, make_model_folder, make_prompts, make_tokenizer, make_world

VOCAB = 30


def make_model(seed, vocab=VOCAB, scale=0.5):
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
            initializer_range=scale,
        )
    ).eval()


def near(target, seed=9, noise=0.15):
    """The target, disturbed: a draft that agrees often."""
    draft = make_model(0, target.config.vocab_size)
    draft.load_state_dict(target.state_dict())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return draft


def random_texts(target, count=4, prompt=3, written=7):
    """Text at random with the target's states; what the numbers are does not depend on who chose
    the tokens."""
    generator = torch.Generator().manual_seed(5)
    prompts, answers = [], []
    for i in range(count):
        ids = torch.randint(0, VOCAB, (prompt + written + i,), generator=generator).tolist()
        prompts.append(EncodedPrompt(tuple(ids[:prompt]), f"c{i % 2}", f"t{i}"))
        answers.append(ids[prompt:])
    return with_states(target, prompts, answers)


# -------------------------------------------------------------------------------------------------
# what engines sample from


@pytest.mark.parametrize(
    ("temperature", "top_p"),
    [(1.0, 1.0), (0.7, 1.0), (1.0, 0.9), (0.5, 0.3), (2.0, 0.999), (1.3, 1e-6)],
)
def test_warped_probabilities_are_those_of_the_engines_processors(temperature, top_p):
    logits = 3 * torch.randn(50, 400, generator=torch.Generator().manual_seed(0))
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    got = measured.warped_probs(logits, temperature, top_p)
    assert torch.allclose(got, expected.softmax(-1), atol=1e-6)
    assert torch.equal(got > 0, expected.softmax(-1) > 0)


def test_tokens_outside_a_trimmed_head_get_nothing():
    logits = torch.tensor([[1.0, float("-inf"), 2.0, 0.5]])
    assert measured.warped_probs(logits, 1.0, 0.8)[0, 1] == 0


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 0.8)])
def test_the_trace_is_the_overlap_and_the_chance_at_every_token(temperature, top_p):
    target = make_model(0)
    draft = near(target)
    texts = random_texts(target)
    trace = measured.sampling_trace(
        draft, texts, temperature=temperature, top_p=top_p, head=target.lm_head.weight.detach()
    )
    for text, chances, overlaps, agrees in zip(
        texts, trace.chances, trace.overlaps, trace.agreements, strict=True
    ):
        with torch.no_grad():
            logits = [
                model(text.token_ids[None, :-1]).logits[0, text.prompt_tokens - 1 :]
                for model in (target, draft)
            ]
        probs = []
        for raw in logits:
            warped = TemperatureLogitsWarper(temperature)(None, raw)
            probs.append(
                (TopPLogitsWarper(top_p)(None, warped) if top_p < 1 else warped).softmax(-1)
            )
        at = torch.arange(len(text.written)), text.written
        expected = torch.where(
            probs[0][at] > 0, (probs[1][at] / probs[0][at]).clamp(max=1), torch.tensor(0.0)
        )
        assert np.allclose(chances, expected, atol=1e-4)
        assert np.allclose(overlaps, torch.minimum(*probs).sum(-1), atol=1e-4)
        assert agrees.tolist() == (logits[0].argmax(-1) == logits[1].argmax(-1)).tolist()
    assert trace.sampled and 0.1 < measured.alpha(trace).value < 0.95


def test_a_target_accepts_all_of_its_own_and_padding_rows_change_nothing():
    target = make_model(0)
    texts = random_texts(target)
    head = target.lm_head.weight.detach()
    own = measured.sampling_trace(target, texts, temperature=0.8, head=head)
    assert measured.alpha(own).value == pytest.approx(1.0, abs=1e-5) and replay_tau(
        own, 4
    ).tau == pytest.approx(5.0, abs=1e-4)
    # The same weights with three more rows, far below all others: some vendors pad the vocabulary
    # of one size and not of another.
    padded = make_model(0, VOCAB + 3)
    weights = target.state_dict()
    weights["model.embed_tokens.weight"] = torch.cat(
        [weights["model.embed_tokens.weight"], torch.zeros(3, 16)]
    )
    weights["lm_head.weight"] = torch.cat([weights["lm_head.weight"], torch.zeros(3, 16)])
    padded.load_state_dict(weights)
    bigger = measured.sampling_trace(padded, texts, temperature=0.1, head=head)
    assert measured.alpha(bigger).value > 0.9
    smaller = measured.sampling_trace(
        target, texts, temperature=0.1, head=weights["lm_head.weight"]
    )
    assert measured.alpha(smaller).value == pytest.approx(
        measured.alpha(bigger).value, abs=1e-4
    )  # min(p, q) is symmetric


def test_a_trimmed_head_is_compared_on_its_own_rows():
    target = make_model(0)
    texts = random_texts(target)
    kept = list(range(0, VOCAB, 3))
    draft = build_draft(
        Architecture(16, 24, 1, 2, 1, 8, VOCAB, draft_vocab_size=len(kept)), draft_token_ids=kept
    )
    trace = measured.sampling_trace(
        draft, texts, temperature=1.0, head=target.lm_head.weight.detach()
    )
    for text, chances, overlaps in zip(texts, trace.chances, trace.overlaps, strict=True):
        with torch.no_grad():
            p, q = (
                m(text.token_ids[None, :-1]).logits[0, text.prompt_tokens - 1 :].softmax(-1)
                for m in (target, draft)
            )
        assert np.allclose(overlaps, torch.minimum(p, q).sum(-1), atol=1e-5)
        assert not chances[~np.isin(text.written.numpy(), kept)].any()


def test_settings_that_no_engine_takes():
    target = make_model(0)
    texts = random_texts(target, 1)
    head = target.lm_head.weight.detach()
    for temperature, top_p, words in [
        (-0.5, 1.0, "temperature"),
        (0.0, 1.0, "greedy"),
        (1.0, 0.0, "top_p"),
        (1.0, 1.5, "top_p"),
        (float("nan"), 1.0, "temperature"),
    ]:
        with pytest.raises(ArchsearchError, match=words):
            measured.sampling_trace(target, texts, temperature=temperature, top_p=top_p, head=head)
    with pytest.raises(ArchsearchError, match="no text"):
        measured.sampling_trace(target, [], temperature=1.0, head=head)


# --------------------------------------------------------------------------------------------------
# a real sampled loop


def test_replay_of_the_engines_own_text_is_what_the_engine_did():
    # transformers' assisted sampling on tiny models: given its text, its rounds differ from the
    # expected ones by coins only.
    target = make_model(0, scale=0.35)
    draft = near(target, noise=0.04)
    temperature, gamma, limit = 1.0, 3, 40
    engine = TransformersEngine(dtype="float32")
    engine.start(target, draft, gamma)
    prompts = [EncodedPrompt((i % VOCAB, (7 * i) % VOCAB, 3), "", str(i)) for i in range(16)]
    requests = [EnginePrompt(p.id, p.token_ids) for p in prompts]
    results = [
        engine.generate([r], Sampling(limit, temperature, seed=i))[0]
        for i, r in enumerate(requests)
    ]
    lengths = [n for r in results for n in r.round_lengths]
    own = with_states(target, prompts, [r.token_ids for r in results])
    trace = measured.sampling_trace(
        draft, own, temperature=temperature, head=target.lm_head.weight.detach()
    )
    expected = replay_tau(trace, gamma)
    assert 1.8 < expected.tau < 3.6
    assert np.mean(lengths) == pytest.approx(
        expected.tau, abs=4 * np.std(lengths) / np.sqrt(len(lengths))
    )
    shares = [np.mean([n > k for n in lengths]) for k in range(1, gamma + 1)]
    assert shares == pytest.approx(list(expected.accepted_by_position), abs=0.12)


# --------------------------------------------------------------------------------------------------
# sampled text


def test_text_from_a_nucleus_stays_in_it_and_resumes(tmp_path, monkeypatch):
    make_model_folder(tmp_path / "target")
    target, tokenizer = load_target(resolve_target(str(tmp_path / "target")), "float32")
    prompts = read_prompts(make_prompts(tmp_path / "p.jsonl", 10))
    calls = []
    monkeypatch.setattr("archsearch.text.batch.ROWS", 4)
    settings = Writing(12, 0.9, 0.6)
    folder = tmp_path / "cache"
    texts = generate_text(
        target,
        tokenizer,
        prompts,
        cache_dir=folder,
        writing=settings,
        progress=lambda *said: calls.append(said),
    )
    assert texts.complete and len(texts.sequences) == 10 and calls[-1][1:] == (10, 10)
    assert sorted(s.category for s in texts.sequences) == sorted(p.category for p in prompts)
    outside = 0
    for sequence in texts.sequences:
        with torch.no_grad():
            logits = target(sequence.token_ids[None, :-1]).logits[0, sequence.prompt_tokens - 1 :]
        assert torch.allclose(logits, sequence.hidden @ texts.head.T, atol=1e-3)
        assert torch.equal(logits.argmax(-1), sequence.greedy_ids)
        probs = measured.warped_probs(logits, 0.9, 0.6)
        outside += int((probs.gather(1, sequence.written[:, None]) == 0).sum())
    assert outside == 0
    assert any(not torch.equal(s.written, s.greedy_ids) for s in texts.sequences)  # it is sampled
    again = generate_text(
        target,
        tokenizer,
        prompts,
        cache_dir=folder,
        writing=settings,
        progress=lambda *said: calls.append(said),
    )
    assert [s.token_ids.tolist() for s in again.sequences] == [
        s.token_ids.tolist() for s in texts.sequences
    ]
    with pytest.raises(ArchsearchError, match="other settings"):
        generate_text(
            target, tokenizer, prompts, cache_dir=folder, writing=replace(settings, top_p=0.5)
        )
    # What is sampled depends on the prompt's place and the seed, not on what is written beside it.
    monkeypatch.setattr("archsearch.text.batch.ROWS", 1)
    single = generate_text(
        target, tokenizer, prompts, cache_dir=tmp_path / "alone", writing=settings
    )
    assert [s.token_ids.tolist() for s in single.sequences] == [
        s.token_ids.tolist() for s in texts.sequences
    ]


def test_states_of_given_text_are_those_the_target_wrote_it_with():
    target = make_model(0)
    ids = torch.tensor([[3, 1, 4]])
    with torch.no_grad():
        whole = target.generate(
            ids, max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(ids)
        )[0]
    sequence = with_states(target, [EncodedPrompt((3, 1, 4), "c", "i")], [whole[3:].tolist()])[0]
    assert (
        torch.equal(sequence.written, sequence.greedy_ids)
        and sequence.hidden.shape == (6, 16)
        and sequence.prompt_tokens == 3
    )


# --------------------------------------------------------------------------------------------------
# the command


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = make_world(tmp_path_factory.mktemp("world"))
    tokenizer = make_tokenizer()
    make_model_folder(
        folder / "plain_draft", TINY.replace(num_hidden_layers=1), seed=1
    )  # nothing of ours in it
    trimmed = build_draft(TINY.replace(draft_vocab_size=100, tie_word_embeddings=False), seed=2)
    save_draft(trimmed, folder / "trimmed_draft", tokenizer=tokenizer)
    return folder


def call(*arguments):
    return CliRunner().invoke(main, ["acceptance", *map(str, arguments)])


def run(folder, draft, *more):
    result = call(
        "--target",
        folder / "target",
        "--draft",
        folder / draft,
        "--prompts",
        folder / "prompts.jsonl",
        "--max-prompts",
        12,
        "--answer-tokens",
        16,
        "--cache",
        folder / "texts",
        *more,
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_measures_a_plain_draft_a_trimmed_one_and_the_target_itself(built, tmp_path):
    data = json.loads(
        run(
            built,
            "plain_draft",
            "--json",
            "--output",
            tmp_path / "o.json",
            "--trace",
            tmp_path / "t.npz",
        )
    )
    assert json.loads((tmp_path / "o.json").read_text()) == data
    assert (
        data["prompts"] == 12 and data["temperature"] == 0 and data["alpha"]["source"] == "measured"
    )
    assert Architecture.from_dict(data["architecture"]).num_hidden_layers == 1
    assert list(data["by_category"]) == ["travel", "orders"] or set(data["by_category"]) == {
        "travel",
        "orders",
    }
    assert sum(part["tokens"] for part in data["by_category"].values()) == data["tokens"]
    assert (
        list(data["tau"]) == [str(gamma) for gamma in range(1, 9)]
        and len(data["accepted_by_position"]) == 8
    )
    trace = measured.Trace.load(tmp_path / "t.npz")
    assert replay_tau(trace, 3).tau == data["tau"]["3"]["value"]
    low, high = data["intervals"]["alpha"]["95"]
    assert low <= data["alpha"]["value"] <= high
    # By hand: the target's greedy text, the draft's argmax beside it.
    target, tokenizer = load_target(resolve_target(str(built / "target")), "float32")
    draft = load_draft(built / "plain_draft")
    from archsearch.text.prompt_set import spread

    agreed = total = 0
    for prompt in encode_prompts(spread(read_prompts(built / "prompts.jsonl"), 12), tokenizer):
        ids = torch.tensor([prompt.token_ids])
        with torch.no_grad():
            text = target.generate(
                ids,
                max_new_tokens=16,
                do_sample=False,
                attention_mask=torch.ones_like(ids),
                pad_token_id=0,
            )
            best = draft(text[:, :-1]).logits[0, ids.shape[1] - 1 :].argmax(-1)
        agreed, total = agreed + int((best == text[0, ids.shape[1] :]).sum()), total + len(best)
    assert (data["tokens"], data["alpha"]["value"]) == (total, pytest.approx(agreed / total))

    assert json.loads(run(built, "trimmed_draft", "--json"))["alpha"]["value"] < 1
    own = json.loads(run(built, "target", "--json"))
    assert own["alpha"]["value"] == 1.0 and own["tau"]["8"]["value"] == 9.0


def test_the_prior_reads_what_the_command_writes(built, tmp_path, monkeypatch):
    from archsearch.acceptance.known import known_drafts

    monkeypatch.chdir(built)
    (built / "trimmed_draft" / "training.json").write_text('{"tokens": 12345}')
    run(
        built,
        "trimmed_draft",
        "--temperature",
        0.8,
        "--domain",
        "chat",
        "--output",
        tmp_path / "alpha.json",
    )
    (known,) = known_drafts(str(built / "target"), [tmp_path])
    observation = known.observation
    written = json.loads((tmp_path / "alpha.json").read_text())
    assert (
        observation.alpha.value == written["alpha"]["value"]
        and observation.architecture.draft_vocab_size == 100
    )
    context = observation.context
    assert (context.temperature, context.domain, context.trained_tokens) == (0.8, "chat", 12345.0)
    assert context.target is not None and context.target.hidden_size == TINY.hidden_size


def test_a_second_draft_needs_no_target(built, monkeypatch):
    run(built, "plain_draft")
    monkeypatch.setattr("archsearch.models.load.load_target", None)
    assert "alpha" in run(built, "trimmed_draft")


def test_sampling_by_the_command(built):
    data = json.loads(run(built, "plain_draft", "--temperature", 0.8, "--top-p", 0.9, "--json"))
    assert (data["temperature"], data["top_p"]) == (0.8, 0.9) and 0 < data["alpha"]["value"] < 1
    assert json.loads(run(built, "target", "--temperature", 0.8, "--json"))["alpha"][
        "value"
    ] == pytest.approx(1.0, abs=1e-4)
    text = run(built, "plain_draft", "--temperature", 0.8)
    halves = json.loads(
        run(built, "plain_draft", "--temperature", 0.8, "--dtype", "bf16", "--json")
    )
    assert halves["dtype"] == "bfloat16" and 0 < halves["alpha"]["value"] < 1
    assert "mean overlap" in text and "temperature 0.8" in text and "orders" in text


def test_the_modelled_speed_up_at_each_gamma(built, monkeypatch):
    monkeypatch.chdir(built)
    data = json.loads(run(built, "target", "--gpu", "cpu", "--json"))
    assert set(data["speedup"]) == set(data["tau"]) and data["best_gamma"] in range(9)
    assert all("best_gamma" in part for part in data["by_category"].values())
    gains = {int(gamma): gain["value"] for gamma, gain in data["speedup"].items()}
    best = max(gains, key=lambda gamma: gains[gamma])
    assert data["best_gamma"] == (best if gains[best] > 1 else 0)
    assert "speed-up" in run(built, "target", "--gpu", "cpu")


def test_explain_needs_no_weights(built, tmp_path):
    (tmp_path / "shape").mkdir()
    (tmp_path / "shape" / "config.json").write_text(
        (built / "plain_draft" / "config.json").read_text()
    )
    for draft in (tmp_path / "shape", tmp_path / "shape" / "config.json", "wide-796m"):
        result = call("--target", "llama-65b", "--draft", draft, "--explain", "--json")
        assert result.exit_code == 0, result.output
        data = json.loads(result.stdout)
        assert (
            "tau" not in data
            and data["explanation"]["terms"]
            and data["explanation"]["alpha"]["source"] == "prior"
        )
    assert "logit" in call("--target", "llama-65b", "--draft", "wide-796m", "--explain").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--target", "target", "--draft", "nowhere"), "unknown target 'nowhere'"),
        (("--target", "wide-829m", "--draft", "plain_draft"), "known by its shape only"),
        (("--target", "target", "--draft", "shape"), "no weights to measure"),
        (("--target", "bare", "--draft", "plain_draft"), "no weights in"),
        (("--target", "target", "--draft", "other_tokens"), "differs from the target's ("),
        (("--target", "target", "--draft", "other_size"), "differs from the target's ("),
        (("--target", "target", "--draft", "no_tokenizer"), "has no tokenizer to compare"),
        (
            ("--target", "target", "--draft", "plain_draft", "--prompts", "short.jsonl"),
            "shorter than two tokens",
        ),
        (
            ("--target", "target", "--draft", "plain_draft", "--prompts", "none.jsonl"),
            "prompt file not found",
        ),
        (
            ("--target", "target", "--draft", "plain_draft", "--temperature", "-1"),
            "temperature must be at least 0",
        ),
        (
            ("--target", "target", "--draft", "plain_draft", "--temperature", "1", "--top-p", "0"),
            "top_p must lie above 0",
        ),
        (("--target", "target", "--draft", "broken"), "hold NaN or infinity, model.norm.weight"),
        (
            ("--target", "target", "--draft", "plain_draft", "--domain", "poems"),
            "'poems' is not one of 'chat'",
        ),
    ],
)
def test_bad_input_is_one_line(built, monkeypatch, arguments, words):
    monkeypatch.chdir(built)
    bad_folders(built)
    result = call(
        *arguments,
        *(() if "--prompts" in arguments else ("--prompts", "prompts.jsonl")),
        "--max-prompts",
        3,
        "--answer-tokens",
        8,
        "--cache",
        "texts_bad",
    )
    assert result.exit_code == 2, result.output
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("Error: ") and words in line


def bad_folders(folder):
    if (folder / "broken").exists():
        return
    (folder / "shape").mkdir()
    (folder / "shape" / "config.json").write_text(
        (folder / "plain_draft" / "config.json").read_text()
    )
    make_model_folder(folder / "bare", weights=False)
    make_model_folder(folder / "other_tokens")
    make_tokenizer(seed=5).save_pretrained(folder / "other_tokens")
    vocab = json.loads((folder / "other_tokens" / "tokenizer.json").read_text())
    tokens = vocab["model"]["vocab"]
    last, before = (
        max(tokens, key=lambda t: tokens[t] - 1000 * (t == skip))
        for skip in (None, max(tokens, key=tokens.get))
    )
    tokens[last], tokens[before] = tokens[before], tokens[last]
    (folder / "other_tokens" / "tokenizer.json").write_text(json.dumps(vocab))
    make_model_folder(folder / "other_size", TINY.replace(vocab_size=300))
    save_draft(build_draft(TINY.replace(vocab_size=300)), folder / "no_tokenizer")
    (folder / "short.jsonl").write_text('{"prompt": "a"}\n')
    broken = build_draft(TINY)
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    save_draft(broken, folder / "broken")


def test_chat_forms_are_read(built, tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "send the shoes"}], "category": "a"},
        {
            "conversations": [
                {"from": "human", "value": "tell me what"},
                {"from": "gpt", "value": "no"},
            ],
            "category": "a",
        },
        {"prompt": "back to our shop"},
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = call(
        "--target",
        built / "target",
        "--draft",
        built / "plain_draft",
        "--prompts",
        tmp_path / "chat.jsonl",
        "--answer-tokens",
        16,
        "--json",
    )
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert (
        data["prompts"] == 3
        and data["by_category"]["a"]["prompts"] == 2
        and list(data["by_category"]) == ["a"]
    )
    assert Prompt((("user", "x y"),)).text == "x y"


@pytest.mark.parametrize(("more", "engine"), [((), "vllm"), (("--mode", "eager"), "transformers")])
def test_on_a_gpu_the_speed_up_is_that_of_the_engine_that_searches_are_for(
    more: tuple[str, ...], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def caught(request):  # noqa: ANN001, ANN202
        seen.append(request.asked)
        raise ArchsearchError("caught")

    monkeypatch.setattr("archsearch.pipeline.acceptance.measure_acceptance", caught)
    assert (
        call(
            "--target", "llama-3.1-8b", "--draft", "llama-3.2-1b", "--gpu", "h100", *more
        ).exit_code
        == 2
    )
    source, _ = choose_latency(seen[0], resolve_target("llama-3.1-8b").architecture)
    assert source.engine == engine
