"""Auxiliary states of texts: the right layers' inputs, made once, refused where they do not
belong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from archsearch.drafters.forms import auxiliary_layers
from archsearch.errors import ArchsearchError
from archsearch.text import auxiliary
from archsearch.text.auxiliary import auxiliary_states, check_layers
from archsearch.text.cache import CachedSequence, TextCache
from archsearch.text.generate import write_answers
from archsearch.text.prompts import EncodedPrompt
from archsearch.text.settings import Writing
from tests.doubles.tiny_heads import AUX, HIDDEN, VOCAB, make_deep_target, write_texts


@pytest.fixture(scope="module")
def target():
    return make_deep_target()


@pytest.fixture
def cache(tmp_path: Path, target) -> TextCache:
    return write_texts(tmp_path / "text", target, 12)


def test_states_are_the_inputs_of_the_layers(cache: TextCache, target) -> None:
    states = auxiliary_states(target, cache, AUX)
    assert states.layers == AUX and len(states.sequences) == len(cache.sequences)
    for sequence in states.sequences:
        with torch.no_grad():
            hidden = target.model(sequence.token_ids[None], output_hidden_states=True).hidden_states
        expected = torch.cat([hidden[layer][0] for layer in AUX], -1)[:-1]
        # Computed in bfloat16 where the machine is fast in it, so single small numbers may be far
        # off.
        assert sequence.states.shape[1] == len(AUX) * HIDDEN
        # another layer: about 1
        assert (sequence.states.float() - expected).norm() < 0.03 * expected.norm()


def test_what_is_on_disk_is_used_again_and_other_texts_make_it_anew(
    cache: TextCache, target, monkeypatch
) -> None:
    seen = []
    auxiliary_states(target, cache, AUX, lambda *said: seen.append(said))
    assert seen[-1][1] == seen[-1][2] == sum(len(s) - 1 for s in cache.sequences)
    assert not list(cache.folder.glob(".*")), "no temporary files stay"
    shards = sorted(cache.folder.glob("auxiliary-*"))
    assert len(shards) == 2
    monkeypatch.setattr(auxiliary, "_layer_inputs", None)  # nothing may run
    auxiliary_states(target, cache, AUX)
    monkeypatch.undo()
    shards[1].unlink()  # killed between two shards
    again = []
    auxiliary_states(target, cache, AUX, lambda *said: again.append(said))
    assert again[-1][2] < seen[-1][2]
    auxiliary_states(target, cache, (0, 2))
    assert len(list(cache.folder.glob("auxiliary-0-2-*"))) == 2, "other layers stand beside"


def test_the_text_cache_does_not_take_them_for_texts(cache: TextCache, target) -> None:
    auxiliary_states(target, cache, AUX)
    assert len(TextCache.load(cache.folder).sequences) == len(cache.sequences)


def test_another_target_a_full_disk_and_unknown_texts_are_refused(
    cache: TextCache, target, tmp_path, monkeypatch
) -> None:
    with pytest.raises(ArchsearchError, match="written by another target"):
        auxiliary_states(make_deep_target(seed=7), cache, AUX)
    other = write_texts(tmp_path / "other", make_deep_target(seed=9), 10).sequences
    with pytest.raises(ArchsearchError, match="made for other texts"):
        auxiliary_states(target, cache.part(other), AUX)
    monkeypatch.setattr(
        auxiliary.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 100})()
    )
    with pytest.raises(ArchsearchError, match="GB are free"):
        auxiliary_states(target, cache, (5,))


def test_layers_must_be_the_targets() -> None:
    assert auxiliary_layers(30) == (2, 15, 27) and auxiliary_layers(2) == (0, 1)
    assert check_layers([4, 1], 6) == (1, 4)
    for wrong in ([], [1, 1], [-1, 2], [6]):
        with pytest.raises(ArchsearchError, match="between 0 and 5"):
            check_layers(wrong, 6)


# ---- kept while the target writes


def prompts(count: int = 10) -> list[EncodedPrompt]:
    """Of 5 to 11 tokens, the first three of all alike."""
    draws = torch.Generator().manual_seed(1)
    return [
        EncodedPrompt(
            (7, 3, 9, *torch.randint(0, VOCAB, (2 + i % 7,), generator=draws).tolist()), "", str(i)
        )
        for i in range(count)
    ]


@pytest.fixture(autouse=True)
def small_batches():
    """Reads are cut, rows leave and come."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("archsearch.text.batch.ROWS", 4)
        patched.setattr("archsearch.text.batch.prefill_tokens", lambda target: 6)
        yield


def writing(**changes) -> Writing:
    return Writing(**{"max_new_tokens": 12, "layers": AUX} | changes)


def reads_nothing(target, cache: TextCache, monkeypatch) -> list[CachedSequence]:
    """The texts with their states, where none of them may be made."""
    with monkeypatch.context() as patched:
        patched.setattr(auxiliary, "_layer_inputs", None)
        return auxiliary_states(target, cache, AUX).sequences


def check_states(target, sequences: list[CachedSequence]) -> None:
    """As the target's own pass over each text has them, but for bfloat16."""
    for sequence in sequences:
        with torch.no_grad():
            hidden = target.model(sequence.token_ids[None], output_hidden_states=True).hidden_states
        expected = torch.cat([hidden[layer][0] for layer in AUX], -1)[:-1]
        torch.testing.assert_close(sequence.states.float(), expected, rtol=0.01, atol=2e-3)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_states_kept_while_writing_are_those_that_reading_finds(
    tmp_path: Path, target, monkeypatch, together: bool, temperature: float
) -> None:
    monkeypatch.setattr("archsearch.text.generate.SHARD_PROMPTS", 4)
    if not together:
        monkeypatch.setattr("archsearch.text.blocks.takes_blocks", lambda target: False)
    how = writing(temperature=temperature)
    cache = write_answers(target, None, prompts(), cache_dir=tmp_path / "kept", writing=how)
    check_states(target, reads_nothing(target, cache, monkeypatch))
    plain = write_answers(
        target,
        None,
        prompts(),
        cache_dir=tmp_path / "read",
        writing=writing(temperature=temperature, layers=()),
    )
    assert plain.fingerprint == cache.fingerprint and not list(plain.folder.glob("auxiliary-*"))
    read = auxiliary_states(target, plain, AUX).sequences
    for ours, other in zip(auxiliary_states(target, cache, AUX).sequences, read, strict=True):
        assert ours.token_ids.tolist() == other.token_ids.tolist()
        # reading may compute in bfloat16
        assert (ours.states - other.states).norm() < 0.03 * other.states.norm()


def test_answers_that_were_cut_go_on_with_their_states(tmp_path: Path, target, monkeypatch) -> None:
    def write(budget_s: float | None) -> TextCache:
        return write_answers(
            target, None, prompts(), cache_dir=tmp_path, writing=writing(), budget_s=budget_s
        )

    cut = write(0.0)
    assert not cut.complete and {len(s.written) for s in cut.sequences} == {1}
    check_states(target, reads_nothing(target, cut, monkeypatch))
    monkeypatch.setattr(
        "archsearch.text.batch.BatchWriter._late", lambda writer: writer.written >= 20
    )
    more = write(60.0)
    monkeypatch.undo()
    assert not more.complete and max(len(s.written) for s in more.sequences) > 1
    check_states(target, reads_nothing(target, more, monkeypatch))
    done = write(None)
    assert done.complete
    check_states(target, reads_nothing(target, done, monkeypatch))


@pytest.mark.parametrize("short_of", ["memory", "disk"])
def test_where_states_do_not_fit_the_text_is_written_and_read_later(
    tmp_path: Path, target, monkeypatch, short_of: str
) -> None:
    if short_of == "memory":
        monkeypatch.setattr("archsearch.text.generate.MOST_KEPT_BYTES", 1000)
    else:
        nothing = type("Usage", (), {"free": 100})()
        monkeypatch.setattr(auxiliary.shutil, "disk_usage", lambda folder: nothing)
    cache = write_answers(target, None, prompts(), cache_dir=tmp_path, writing=writing())
    monkeypatch.undo()
    assert cache.complete and not list(tmp_path.glob("auxiliary-*"))
    assert all(s.states is not None for s in auxiliary_states(target, cache, AUX).sequences)
