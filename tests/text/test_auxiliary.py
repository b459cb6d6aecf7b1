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
from archsearch.text.cache import TextCache
from tests.doubles.tiny_heads import AUX, HIDDEN, make_deep_target, write_texts


@pytest.fixture(scope="module")
def target():
    return make_deep_target()


@pytest.fixture
def cache(tmp_path: Path, target) -> TextCache:
    return write_texts(tmp_path / "text", target, 12)


def test_states_are_the_inputs_of_the_layers(cache: TextCache, target) -> None:
    states = auxiliary_states(target, cache, AUX)
    assert states.layers == AUX and states.width == len(AUX) * HIDDEN
    for sequence in cache.sequences:
        with torch.no_grad():
            hidden = target.model(sequence.token_ids[None], output_hidden_states=True).hidden_states
        expected = torch.cat([hidden[layer][0] for layer in AUX], -1)[:-1]
        # Computed in bfloat16 where the machine is fast in it, so single small numbers may be far
        # off.
        assert (
            states.of(sequence).float() - expected
        ).norm() < 0.03 * expected.norm()  # another layer: about 1


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
    with pytest.raises(ArchsearchError, match="given|made for other texts"):
        auxiliary_states(target, cache, AUX).of(
            write_texts(tmp_path / "other", make_deep_target(seed=9), 10).sequences[0]
        )
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
