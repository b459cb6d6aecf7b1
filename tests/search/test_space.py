"""Spaces: what they allow, how they follow the target, and how they complain."""

import itertools

import pytest

from archsearch.architecture import catalogue
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import parameters
from archsearch.errors import ArchsearchError, InvalidShapeError
from archsearch.search.space import SearchSpace, list_spaces, load_space

LLAMA_8B = Architecture(4096, 14336, 32, 32, 8, 128, 128256)


def _space(**dimensions):
    data = {"dimensions": {"num_hidden_layers": [2], "hidden_size": [256], **dimensions}}
    constraints = data["dimensions"].pop("constraints", None)
    if constraints:
        data["constraints"] = constraints
    return SearchSpace.from_dict(data, "test")


def test_shipped_spaces_load_and_allow_shapes():
    assert {"demo", "default", "wide-shallow"} <= set(list_spaces())
    for name, target in (
        ("demo", "smollm2-135m"),
        ("default", "llama-3.1-8b"),
        ("wide-shallow", "llama-65b"),
    ):
        space, architecture = load_space(name), catalogue.load(target).architecture
        space.check(architecture)
        assert space.description and load_space(list_spaces()[name]) == space
    assert SearchSpace.from_dict(load_space("demo").to_dict(), "demo") == load_space("demo")


def test_demo_space_is_small_enough_to_enumerate(smollm2):
    shapes = list(load_space("demo").enumerate(smollm2))
    limit = 0.75 * parameters(smollm2)
    counted = set()  # the same space by brute force, with its own arithmetic
    for layers, hidden, ratio, kv, group, rows in itertools.product(
        (1, 2, 3, 4, 5, 6, 8),
        (256, 384, 512, 576, 768, 1024),
        (1, 2, 1536 / 576, 4),
        (1, 2, 3, 4),
        (1, 2, 3, 4),
        (2048, 4096, 8192, 16384, 49152),
    ):
        width, ffn = kv * group * 64, max(64, round(ratio * hidden / 64) * 64)
        head = 0 if rows == 49152 else rows * hidden  # the full head is tied
        size = (
            49152 * hidden
            + layers * (2 * hidden * (width + kv * 64) + 3 * hidden * ffn + 2 * hidden)
            + hidden
            + head
        )
        if hidden % (kv * group) == 0 and 0.5 * hidden <= width <= 1.5 * hidden and size <= limit:
            counted.add((layers, hidden, ffn, kv, kv * group, rows))
    assert len(shapes) == len(set(shapes)) == len(counted) <= 20_000
    assert max(map(parameters, shapes)) <= limit
    assert {s.num_hidden_layers for s in shapes} == {1, 2, 3, 4, 5, 6, 8}
    assert {s.attention_kind for s in shapes} == {"MHA", "GQA", "MQA"}


def test_wide_drafts_of_the_paper_are_in_the_wide_space():
    """arXiv 2402.01528: wide 1.3B is 12 x 2560, 20 heads, FFN 9280; wide 796M is 5 x 4096, 32
    heads, FFN 11008."""
    target = catalogue.load("llama-65b").architecture
    space = load_space("wide-shallow")
    for layers, hidden, heads, ffn in ((12, 2560, 20, 9280), (5, 4096, 32, 11008)):
        wanted = {
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "ffn_ratio": ffn / hidden,
            "num_key_value_heads": heads,
            "kv_group_size": 1,
            "head_dim": 128,
            "window": "L",
            "draft_vocab_size": 32000,
        }
        shape = space.build(space.nearest(wanted, target), target)
        assert (shape.num_hidden_layers, shape.hidden_size, shape.intermediate_size) == (
            layers,
            hidden,
            ffn,
        )
        assert shape.num_attention_heads == shape.num_key_value_heads == heads and not shape.trimmed


def test_values_relative_to_the_target():
    space = _space(
        hidden_size=["0.25x", "target"], ffn_ratio=["target"], draft_vocab_size=["0.25x", "target"]
    )
    shapes = list(space.enumerate(LLAMA_8B))
    assert {s.hidden_size for s in shapes} == {1024, 4096}
    assert {s.head_rows for s in shapes} == {32064, 128256}
    wide = next(s for s in shapes if s.hidden_size == 4096)
    assert wide.intermediate_size == 14336 and wide.head_dim == 128
    assert (wide.num_attention_heads, wide.num_key_value_heads) == (32, 8)


def test_trimmed_heads_are_not_tied_and_windows_need_a_pattern(smollm2):
    space = _space(
        draft_vocab_size=[8192, "target"],
        tie_word_embeddings=[True, False],
        window_pattern=["L", "S"],
        sliding_window=[64, 128],
        num_key_value_heads=[1],
        kv_group_size=[4],
    )
    shapes = list(space.enumerate(smollm2))
    assert len(shapes) == 3 * 3  # (trimmed, tied, untied) x (L, S64, S128)
    assert space.size(smollm2) == 2 * 2 * 3
    assert not any(s.trimmed and s.tie_word_embeddings for s in shapes)
    assert all(s.draft_vocab_size is None for s in shapes if s.head_rows == 49152)


def test_invalid_shapes_say_why(smollm2):
    space = _space(num_key_value_heads=[3], kv_group_size=[3])
    shape = space.build((0,) * len(space.dimensions(smollm2)), smollm2)
    assert str(shape) == "hidden_size 256 is no multiple of 9 heads"
    with pytest.raises(
        ArchsearchError, match="space test allows no valid shape.*256 is no multiple of 9 heads"
    ):
        space.check(smollm2)
    with pytest.raises(ArchsearchError, match="more than max_parameters"):
        _space(
            num_key_value_heads=[1], kv_group_size=[4], constraints={"max_parameters": 1000}
        ).check(smollm2)


def test_every_valid_shape_loads_as_a_llama_config(smollm2, small_space):
    from transformers import LlamaConfig

    shapes = {
        (s.hidden_size, s.num_attention_heads, s.num_key_value_heads): s
        for s in small_space.enumerate(smollm2)
    }
    for shape in shapes.values():
        LlamaConfig(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
        )


def test_choices_are_kept_as_optuna_parameters(smollm2, small_space):
    """What a study's record says of a shape leads back to it, and its distributions hold every
    choice."""
    dimensions = [
        dimension for dimension in small_space.dimensions(smollm2) if len(dimension.choices) > 1
    ]
    for dimension in dimensions:
        distribution = dimension.distribution()
        for index in range(len(dimension.choices)):
            value = dimension.encode(index)
            assert (
                distribution._contains(distribution.to_internal_repr(value))
                and dimension.decode(value) == index
            )
    assert {dimension.parameter for dimension in dimensions} >= {
        "num_hidden_layers",
        "hidden_size_index",
        "window",
    }


def test_served_spaces_leave_out_what_does_not_divide_and_windows_that_hold_all(smollm2):
    space = _space(
        num_key_value_heads=[4, 5],
        kv_group_size=[1, 2],
        head_dim=[64],
        hidden_size=[320, 640],
        ffn_ratio=[2],
        window_pattern=["L", "S"],
        sliding_window=[512, 1024],
    )
    heads = {shape.num_attention_heads for shape in space.enumerate(smollm2)}
    assert heads == {4, 5, 8, 10}
    assert {shape.num_attention_heads for shape in space.served(4).enumerate(smollm2)} == {4, 8}
    assert {shape.sliding_window for shape in space.served(1, 600).enumerate(smollm2)} == {
        None,
        512,
    }
    assert space.served(4, 600).to_dict() == space.to_dict()


def test_neighbours_connect_the_space(smollm2, small_space):
    dimensions = small_space.dimensions(smollm2)
    everything = itertools.product(*(range(len(d.choices)) for d in dimensions))
    valid = {
        i for i in everything if not isinstance(small_space.build(i, smollm2), InvalidShapeError)
    }
    reached, frontier = set(), [next(iter(valid))]
    while frontier:
        here = frontier.pop()
        if here in reached:
            continue
        reached.add(here)
        frontier += [
            i for i in small_space.neighbours(here, smollm2) if i in valid and i not in reached
        ]
    assert reached == valid


def test_limits(smollm2):
    space = _space(constraints={"max_parameters": "0.5x", "max_memory": "1.5GiB"})
    limits = space.limits(smollm2)
    assert (
        limits.max_parameters == parameters(smollm2) // 2 and limits.max_memory_bytes == 3 * 2**29
    )
    assert _space().limits(smollm2).max_parameters is None


DIMENSIONS = "dimensions: {num_hidden_layers: [1], hidden_size: [64]"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- 1\n", "the file must be a mapping"),
        ("dimensions: {num_hidden_layers: [1]}\n", "dimensions.hidden_size is missing"),
        ("dimension: {}\n", "unknown key 'dimension'; allowed are description, dimensions"),
        (DIMENSIONS + ", depth: [1]}\n", "unknown dimension 'depth'; allowed are"),
        (DIMENSIONS + ", head_dim: [0]}\n", "head_dim: 0 is not allowed; use a positive whole"),
        (DIMENSIONS + ", head_dim: [1.5]}\n", "1.5 is not allowed"),
        (DIMENSIONS + ", head_dim: []}\n", "head_dim is empty"),
        (DIMENSIONS + ", head_dim: {min: 4, max: 2}}\n", "min <= max"),
        (DIMENSIONS + ", head_dim: {min: 4}}\n", "min <= max"),
        (DIMENSIONS + ", head_dim: [half]}\n", "'half' is not allowed.*0.5x, or target"),
        (DIMENSIONS + ", window_pattern: [LX]}\n", "text made of L and S"),
        (DIMENSIONS + ", window_pattern: [S]}\n", "sliding_window needs"),
        (DIMENSIONS + "}\nconstraints: {max_memory: 2 boxes}\n", "max_memory: '2 boxes'"),
        (DIMENSIONS + "}\nconstraints: {max_params: 1}\n", "unknown constraint"),
        ("dimensions: {num_hidden_layers: [1\n", "line 2 is not YAML"),
    ],
)
def test_schema_errors_name_file_key_and_what_is_allowed(tmp_path, text, words):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ArchsearchError, match=words) as caught:
        load_space(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_unknown_space_lists_the_known():
    with pytest.raises(ArchsearchError, match="no search space called 'nope'.*demo"):
        load_space("nope")


def test_edges_of_a_space() -> None:
    target = Architecture(4096, 11008, 32, 32, 32, 128, 32000)
    space = SearchSpace.from_dict(
        {
            "dimensions": {
                "num_hidden_layers": [1, 2, 4],
                "hidden_size": [1024, 2048, 4096],
                "ffn_ratio": [1, 2, 4],
                "num_key_value_heads": [8],
                "kv_group_size": [1],
                "head_dim": [128],
                "draft_vocab_size": [8192, 16384, "target"],
            }
        },
        "three",
    )
    inside = Architecture(2048, 4096, 2, 8, 8, 128, 32000, draft_vocab_size=16384)
    assert space.edges(inside, target) == []
    assert space.edges(inside.replace(hidden_size=4096, intermediate_size=8192), target) == [
        "hidden_size"
    ]
    assert space.edges(inside.replace(num_hidden_layers=4, intermediate_size=8192), target) == [
        "num_hidden_layers",
        "ffn_ratio",
    ]
    assert space.edges(inside.replace(draft_vocab_size=8192), target) == ["draft_vocab_size"]
    # nothing lies beyond one layer, or beyond a head with all rows
    assert space.edges(inside.replace(num_hidden_layers=1, draft_vocab_size=None), target) == []
