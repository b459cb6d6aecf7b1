import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from archsearch.acceptance import measured
from archsearch.acceptance.measured import Trace
from archsearch.errors import ArchsearchError
from archsearch.text.cache import CachedSequence


def trace(rows, categories=None):
    categories = categories or ["" for _ in rows]
    return Trace(
        tuple(np.array(r, dtype=bool) for r in rows),
        tuple(categories),
        tuple(str(i) for i in range(len(rows))),
    )


def test_alpha_is_the_share_of_ones_over_tokens_not_over_texts():
    estimate = measured.alpha(trace([[1, 1, 1, 1, 0, 0], [1, 1]]))
    assert estimate.value == pytest.approx(6 / 8) and estimate.source == "measured"


def test_the_std_is_the_spread_over_texts():
    # 40 texts that are all ones or all zeros: the std of the mean of 40 coin flips, whatever the
    # number of tokens.
    rows = [np.full(200, i % 2) for i in range(40)]
    assert measured.alpha(trace(rows)).std == pytest.approx(0.5 / np.sqrt(40), rel=0.15)
    # The same tokens mixed inside each text: texts do not differ at all.
    assert measured.alpha(trace([np.arange(200) % 2 for _ in range(40)])).std == pytest.approx(
        0.0, abs=1e-12
    )
    assert measured.alpha(trace([[1, 0, 1, 0]])).std == pytest.approx(0.5)


def test_alpha_by_category():
    result = measured.alpha_by_category(trace([[1, 1], [0, 0], [1, 0]], ["a", "b", "a"]))
    assert list(result) == ["a", "b"]
    assert (result["a"].value, result["b"].value) == (0.75, 0.0)


def test_a_trace_survives_its_file(tmp_path):
    original = trace([[1, 0, 1], [0] * 11, [1] * 8], ["x", "y", "x"])
    original.save(tmp_path / "trace.npz")
    loaded = Trace.load(tmp_path / "trace.npz")
    assert [a.tolist() for a in loaded.agreements] == [a.tolist() for a in original.agreements]
    assert (loaded.categories, loaded.ids, loaded.tokens) == (original.categories, original.ids, 22)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["trace.npz"]
    (tmp_path / "bad.npz").write_text("nothing")
    with pytest.raises(ArchsearchError, match="is not an agreement trace"):
        Trace.load(tmp_path / "bad.npz")
    with pytest.raises(ArchsearchError, match="not found"):
        Trace.load(tmp_path / "none.npz")


def make_model(seed, layers=2):
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            bos_token_id=None,
            eos_token_id=None,
            initializer_range=0.4,
        )
    ).eval()


def texts_of(model, count=5):
    sequences = []
    for i in range(count):
        ids = torch.randint(0, 40, (1, 4 + i), generator=torch.Generator().manual_seed(i))
        with torch.no_grad():
            whole = model.generate(
                ids, max_new_tokens=9 + i, do_sample=False, attention_mask=torch.ones_like(ids)
            )[0]
            hidden = model.model(whole[None]).last_hidden_state[0, ids.shape[1] - 1 : -1]
        sequences.append(
            CachedSequence(
                whole, ids.shape[1], hidden, whole[ids.shape[1] :].clone(), f"c{i % 2}", f"t{i}"
            )
        )
    return sequences


def test_a_trace_of_sampled_text_survives_its_file_and_old_files_still_load(tmp_path):
    chances = (np.array([0.5, 1.0], dtype=np.float32), np.array([0.25], dtype=np.float32))
    overlaps = (np.array([0.4, 0.9], dtype=np.float32), np.array([0.3], dtype=np.float32))
    agreements = (np.array([True, False]), np.array([True]))
    original = Trace(agreements, ("x", "y"), ("a", "b"), (True, False), chances, overlaps, 0.7, 0.9)
    original.save(tmp_path / "trace.npz")
    loaded = Trace.load(tmp_path / "trace.npz")
    assert [a.tolist() for a in loaded.chances] == [a.tolist() for a in chances]
    assert [a.tolist() for a in loaded.overlaps] == [a.tolist() for a in overlaps]
    assert (loaded.ended, loaded.temperature, loaded.top_p) == ((True, False), 0.7, 0.9)
    assert measured.alpha(loaded).value == pytest.approx(
        1.6 / 3
    )  # of overlaps, not of chances or agreements
    assert measured.alpha(loaded.of_category("y")).value == pytest.approx(0.3)
    # What earlier versions wrote: agreements, lengths and labels, nothing else.
    np.savez_compressed(
        tmp_path / "old.npz",
        agreement=np.packbits(np.array([1, 0, 1], dtype=bool)),
        lengths=np.array([1, 2]),
        labels=np.array('[["x", "y"], ["a", "b"]]'),
    )
    old = Trace.load(tmp_path / "old.npz")
    assert [a.tolist() for a in old.agreements] == [[True], [False, True]]
    assert not old.sampled and old.ended == (True, False)  # the shorter text was not cut
    assert [a.tolist() for a in old.accepted] == [[1.0], [0.0, 1.0]]
    # Chances that do not fit the texts are no trace.
    np.savez_compressed(
        tmp_path / "cut.npz",
        agreement=np.packbits(np.array([1, 0, 1], dtype=bool)),
        lengths=np.array([1, 2]),
        labels=np.array('[["x", "y"], ["a", "b"]]'),
        sampling=np.array([1.0, 1.0]),
        chances=np.zeros(2),
        overlaps=np.zeros(3),
    )
    with pytest.raises(ArchsearchError, match="is not an agreement trace"):
        Trace.load(tmp_path / "cut.npz")


def test_the_bootstrap_interval_holds_what_it_says():
    # Texts whose alpha is uniform on 0..1: the mean of 50 of them has std 1 / sqrt(12 * 50) and is
    # nearly normal.
    rng = np.random.default_rng(0)
    hits = {0.90: 0, 0.95: 0}
    for trial in range(200):
        rows = [rng.random(40) < share for share in rng.random(50)]
        result = measured.alpha_resampled(trace(rows), seed=trial)
        for level in hits:
            low, high = result.interval(level)
            hits[level] += low <= 0.5 <= high
    assert hits[0.90] / 200 == pytest.approx(0.90, abs=0.07) and hits[0.95] / 200 == pytest.approx(
        0.95, abs=0.05
    )
    assert result.std == pytest.approx(np.sqrt((1 / 12 + 1 / 6 / 40) / 50), rel=0.25)
    assert measured.alpha_resampled(trace([[1, 0]])).interval() is None


def test_a_target_agrees_with_itself_and_another_model_does_not():
    target = make_model(0)
    texts = texts_of(target)
    own = measured.agreement_trace(target, texts)
    assert measured.alpha(own).value == 1.0
    assert own.ids == tuple(t.id for t in texts) and [a.shape[0] for a in own.agreements] == [
        9,
        10,
        11,
        12,
        13,
    ]
    assert measured.alpha(measured.agreement_trace(make_model(1), texts)).value < 0.5


def test_the_trace_is_the_drafts_argmax_token_by_token():
    target, draft = make_model(0), make_model(2)
    # A draft that agrees sometimes: the target's own weights, disturbed.
    with torch.no_grad():
        for ours, theirs in zip(draft.parameters(), target.parameters(), strict=True):
            ours.copy_(
                theirs
                + 0.05 * torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1))
            )
    texts = texts_of(target)
    result = measured.agreement_trace(draft, texts)
    for text, got in zip(texts, result.agreements, strict=True):
        for position, agrees in enumerate(got):
            with torch.no_grad():
                token = (
                    draft(text.token_ids[None, : text.prompt_tokens + position])
                    .logits[0, -1]
                    .argmax()
                )
            assert bool(agrees) == bool(token == text.token_ids[text.prompt_tokens + position])
    assert 0 < measured.alpha(result).value < 1


def test_the_end_token_tells_which_texts_ended():
    target = make_model(0)
    texts = texts_of(target)
    last = int(texts[2].token_ids[-1])
    result = measured.agreement_trace(target, texts, end_ids=[last])
    assert result.ended == tuple(int(t.token_ids[-1]) == last for t in texts) and result.ends(2)
    assert not any(
        measured.agreement_trace(target, texts).ended
    )  # the model's own config knows no end token
    target.config.eos_token_id = [last]
    assert measured.agreement_trace(target, texts).ends(2)


def test_a_trimmed_head_agrees_only_on_what_it_keeps():
    from archsearch.architecture.architecture import Architecture
    from archsearch.models.drafts import build_draft

    target = make_model(0)
    texts = texts_of(target)
    kept = sorted({int(t) for text in texts for t in text.written[::2]})
    draft = build_draft(
        Architecture(16, 24, 2, 2, 1, 8, 40, draft_vocab_size=len(kept)), draft_token_ids=kept
    )
    result = measured.agreement_trace(draft, texts)
    for text, got in zip(texts, result.agreements, strict=True):
        assert not got[~np.isin(text.written.numpy(), kept)].any()
        with torch.no_grad():
            best = draft(text.token_ids[None, :-1]).logits[0, text.prompt_tokens - 1 :].argmax(-1)
        assert got.tolist() == (best == text.written).tolist()


def test_broken_weights_and_another_vocabulary_are_told():
    target, draft = make_model(0), make_model(1)
    texts = texts_of(target)
    with torch.no_grad():
        draft.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(ArchsearchError, match="NaN"):
        measured.agreement_trace(draft, texts)
    small = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=20,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )
    with pytest.raises(ArchsearchError, match="vocabulary ends at 19: another tokenizer"):
        measured.agreement_trace(small, texts)


def test_no_text_is_told():
    with pytest.raises(ArchsearchError, match="no text"):
        measured.agreement_trace(make_model(0), [])
    with pytest.raises(ArchsearchError, match="no tokens"):
        measured.alpha(trace([]))
