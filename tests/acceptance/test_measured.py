import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from archsearch.acceptance import measured
from archsearch.acceptance.measured import Trace
from archsearch.errors import ArchsearchError
from archsearch.training.data import CachedSequence


def trace(rows, categories=None):
    categories = categories or ["" for _ in rows]
    return Trace(tuple(np.array(r, dtype=bool) for r in rows), tuple(categories), tuple(str(i) for i in range(len(rows))))


def test_alpha_is_the_share_of_ones_over_tokens_not_over_texts():
    estimate = measured.alpha(trace([[1, 1, 1, 1, 0, 0], [1, 1]]))
    assert estimate.value == pytest.approx(6 / 8) and estimate.source == "measured"


def test_the_std_is_the_spread_over_texts():
    # 40 texts that are all ones or all zeros: the std of the mean of 40 coin flips, whatever the number of tokens.
    rows = [np.full(200, i % 2) for i in range(40)]
    assert measured.alpha(trace(rows)).std == pytest.approx(0.5 / np.sqrt(40), rel=0.15)
    # The same tokens mixed inside each text: texts do not differ at all.
    assert measured.alpha(trace([np.arange(200) % 2 for _ in range(40)])).std == pytest.approx(0.0, abs=1e-12)
    assert measured.alpha(trace([[1, 0, 1, 0]])).std == pytest.approx(0.5)


def test_alpha_by_category():
    result = measured.alpha_by_category(trace([[1, 1], [0, 0], [1, 0]], ["a", "b", "a"]))
    assert list(result) == ["a", "b"]
    assert (result["a"].value, result["b"].value) == (0.75, 0.0)


def test_pairing_removes_what_texts_share():
    rng = np.random.default_rng(0)
    easy = rng.random(60)
    first = [rng.random(300) < p for p in easy]
    second = [row & (rng.random(300) < 0.9) for row in first]
    difference = measured.paired_difference(trace(first), trace(second))
    unpaired = np.hypot(measured.alpha(trace(first)).std, measured.alpha(trace(second)).std)
    assert difference.value == pytest.approx(measured.alpha(trace(first)).value - measured.alpha(trace(second)).value)
    assert difference.std < 0.25 * unpaired
    with pytest.raises(ArchsearchError, match="not of the same texts"):
        measured.paired_difference(trace(first), trace(second[:10]))


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
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, bos_token_id=None, eos_token_id=None, initializer_range=0.4,
    )).eval()  # fmt: skip


def texts_of(model, count=5):
    sequences = []
    for i in range(count):
        ids = torch.randint(0, 40, (1, 4 + i), generator=torch.Generator().manual_seed(i))
        with torch.no_grad():
            whole = model.generate(ids, max_new_tokens=9 + i, do_sample=False, attention_mask=torch.ones_like(ids))[0]
            hidden = model.model(whole[None]).last_hidden_state[0, ids.shape[1] - 1 : -1]
        sequences.append(CachedSequence(whole, ids.shape[1], hidden, whole[ids.shape[1] :].clone(), f"c{i % 2}", f"t{i}"))
    return sequences


def test_a_target_agrees_with_itself_and_another_model_does_not():
    target = make_model(0)
    texts = texts_of(target)
    own = measured.agreement_trace(target, texts)
    assert measured.alpha(own).value == 1.0
    assert own.ids == tuple(t.id for t in texts) and [a.shape[0] for a in own.agreements] == [9, 10, 11, 12, 13]
    assert measured.alpha(measured.agreement_trace(make_model(1), texts)).value < 0.5


def test_the_trace_is_the_drafts_argmax_token_by_token():
    target, draft = make_model(0), make_model(2)
    # A draft that agrees sometimes: the target's own weights, disturbed.
    with torch.no_grad():
        for ours, theirs in zip(draft.parameters(), target.parameters(), strict=True):
            ours.copy_(theirs + 0.05 * torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1)))
    texts = texts_of(target)
    result = measured.agreement_trace(draft, texts)
    for text, got in zip(texts, result.agreements, strict=True):
        for position, agrees in enumerate(got):
            with torch.no_grad():
                token = draft(text.token_ids[None, : text.prompt_tokens + position]).logits[0, -1].argmax()
            assert bool(agrees) == bool(token == text.token_ids[text.prompt_tokens + position])
    assert 0 < measured.alpha(result).value < 1


def test_no_text_is_told():
    with pytest.raises(ArchsearchError, match="no text"):
        measured.agreement_trace(make_model(0), [])
    with pytest.raises(ArchsearchError, match="no tokens"):
        measured.alpha(trace([]))
