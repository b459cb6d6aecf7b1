"""Search spaces: a YAML file (docs/files.md) becomes dimensions with choices, and choices become
Architectures.

Heads are sampled as KV heads, group size and head_dim and multiplied; what cannot be (query heads
must divide the hidden size, as Hugging Face's Llama demands) is returned as an
`InvalidShapeError`, not raised.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import parameters
from archsearch.architecture.ops import check_shards
from archsearch.drafters.drafter import FAMILY_NAMES, Draft
from archsearch.drafters.models import Independent
from archsearch.drafters.registry import as_drafter, family, is_family
from archsearch.errors import ArchsearchError, InvalidShapeError
from archsearch.files import read_yaml
from archsearch.paths import data_dir
from archsearch.search import space_file as checked
from archsearch.search.space_file import NUMERIC, Value

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

DIMENSIONS: Final = (*NUMERIC, "window_pattern", "sliding_window", "tie_word_embeddings")
REQUIRED: Final = ("num_hidden_layers", "hidden_size")
CONSTRAINTS: Final = ("max_parameters", "max_memory", "attention_width")
TOP_LEVEL: Final = ("description", "dimensions", "ffn_multiple", "constraints", "family", "drafter")
# Relative hidden sizes are rounded to this, so that heads and kernels find something to divide.
HIDDEN_MULTIPLE: Final = 32
Indices = tuple[int, ...]
"""One choice per dimension of a space."""
CHECKED: Final = 1_000_000  # combinations of choices that are looked at for a valid one


@dataclass(frozen=True, slots=True)
class Dimension:
    """One dimension for one target: its choices in order. `ordered`: neighbours in the list are
    alike (numbers)."""

    name: str
    choices: tuple[Value, ...]
    ordered: bool

    @property
    def step(self) -> int | None:
        """The common difference where the choices are whole numbers at equal distances."""
        if not self.ordered or not all(isinstance(value, int) for value in self.choices):
            return None
        steps = {int(b) - int(a) for a, b in itertools.pairwise(self.choices)}
        return steps.pop() if len(steps) == 1 else None

    @property
    def parameter(self) -> str:
        """Its name in Optuna. Uneven numbers are kept as an index, so that who reads the study
        knows which are neighbours."""
        if not self.ordered or self.step or len(self.choices) == 1:
            return self.name
        return f"{self.name}_index"

    def encode(self, index: int) -> Value:
        """The value of the choice at `index` as Optuna keeps it."""
        return index if self.parameter != self.name else self.choices[index]

    def decode(self, value: Value) -> int:
        """The index of an Optuna parameter's value."""
        return int(value) if self.parameter != self.name else self.choices.index(value)

    def distribution(self) -> BaseDistribution:
        """The distribution of it that Optuna samples."""
        from optuna.distributions import CategoricalDistribution, IntDistribution

        if not self.ordered:
            return CategoricalDistribution(self.choices)
        if self.step:
            return IntDistribution(int(self.choices[0]), int(self.choices[-1]), step=self.step)
        return IntDistribution(0, len(self.choices) - 1)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a draft may take; None means no limit."""

    max_parameters: int | None = None
    max_memory_bytes: int | None = None


@dataclass(frozen=True)
class SearchSpace:
    """Dimensions with choices, absolute or relative to a target, and limits. Made by `load_space`
    or `from_dict`.

    `family`, `extras`: what drafts, and the choices that only such a drafter has. `draft_ranks`,
    `longest`: how the draft will be served, see `served`, `kept`: which choices are left, see
    `part`; no part of the file.
    """

    name: str
    description: str
    choices: tuple[tuple[str, tuple[Value, ...]], ...]
    ffn_multiple: int = 64
    constraints: tuple[tuple[str, Any], ...] = ()
    draft_ranks: int = 1
    longest: int | None = None
    family: str = Independent.family
    extras: tuple[tuple[str, tuple[Value, ...]], ...] = ()
    kept: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def served(self, draft_ranks: int = 1, longest: int | None = None) -> SearchSpace:
        """The same space for drafts sharded over `draft_ranks` devices and sequences of at most
        `longest` tokens.

        Shapes whose heads or FFN do not divide by the ranks become invalid, and a window that holds
        the whole sequence becomes full attention, which it is.
        """
        return replace(self, draft_ranks=draft_ranks, longest=longest)

    def part(self, kept: Mapping[str, tuple[int, ...]]) -> SearchSpace:
        """The same space with some of the choices of its dimensions for a target, by their
        indices."""
        return replace(self, kept=tuple(kept.items()))

    def within(
        self, layers: int | None, states: int | None, ngram_sizes: Mapping[str, int]
    ) -> SearchSpace:
        """The same space for an engine that runs heads of so many layers at most, on so many hidden
        states (None: of any), and looks up n-grams of such sizes."""
        kept = dict(self.choices)
        if layers is not None and (depths := kept.get("num_hidden_layers")):
            kept["num_hidden_layers"] = tuple(
                n for n in depths if isinstance(n, int) and n <= layers
            )
        fixed = {"states": states, **ngram_sizes}
        extras = tuple(
            (key, values if (only := fixed.get(key)) is None else (only,))
            for key, values in self.extras
        )
        return replace(self, choices=tuple(kept.items()), extras=extras)

    def edges(self, shape: Architecture, target: Architecture) -> list[str]:
        """The dimensions in which a shape has the first or last of several choices, so that a
        better one may lie outside.

        Not where nothing lies beyond: one layer, a head with all rows. How heads are cut is left
        out: it moves little.
        """
        last = {"num_hidden_layers": 1, "hidden_size": None, "ffn_ratio": None}
        last["draft_vocab_size"] = target.vocab_size
        values, found = numeric_values(shape), []
        for dimension in self.dimensions(target):
            name, value = dimension.name, values.get(dimension.name, 0.0)
            if len(dimension.choices) < 2 or name not in last or value == last[name]:
                continue
            slack = self.ffn_multiple / shape.hidden_size / 2 if name == "ffn_ratio" else 0.0
            low, high = (float(dimension.choices[end]) for end in (0, -1))
            if not low + slack < value < high - slack:
                found.append(name)
        return found

    # --- for one target

    def dimensions(self, target: Architecture) -> tuple[Dimension, ...]:
        """The dimensions with choices made absolute; window_pattern and sliding_window become one
        dimension, `window`."""
        return _dimensions(self, target)

    def limits(self, target: Architecture) -> Limits:
        """What a draft for `target` may take: parameters, bytes."""
        limit = dict(self.constraints)
        count = limit.get("max_parameters")
        if isinstance(count, str):
            count = checked.fraction(count) * parameters(target)
        return Limits(None if count is None else int(count), limit.get("max_memory"))

    def size(self, target: Architecture) -> int:
        """Combinations of choices, valid or not: an upper bound on the shapes."""
        return math.prod(self._lengths(target))

    def _lengths(self, target: Architecture) -> list[int]:
        return [len(dimension.choices) for dimension in self.dimensions(target)]

    def build(self, indices: tuple[int, ...], target: Architecture) -> Draft | InvalidShapeError:
        """What one choice per dimension makes (indices in the order of `dimensions`): the shape of
        an independent draft, or a drafter of another family."""
        chosen = zip(self.dimensions(target), indices, strict=True)
        picked = {dimension.name: dimension.choices[index] for dimension, index in chosen}
        made = family(self.family)
        layers = self._layers(picked, target) if made.has_layers else None
        if layers is not None and (made is Independent or isinstance(layers, InvalidShapeError)):
            return layers
        try:
            return made.of(target, layers, {name: picked[name] for name, _ in self.extras})
        except InvalidShapeError as error:
            return error

    def _layers(
        self, picked: Mapping[str, Value], target: Architecture
    ) -> Architecture | InvalidShapeError:
        hidden, head_dim = int(picked["hidden_size"]), int(picked["head_dim"])
        kv_heads = int(picked["num_key_value_heads"])
        heads = kv_heads * int(picked["kv_group_size"])
        if hidden % heads:
            return InvalidShapeError(f"hidden_size {hidden} is no multiple of {heads} heads")
        if head_dim % 2:
            return InvalidShapeError(f"rotary embeddings need an even head_dim, not {head_dim}")
        low, high = dict(self.constraints).get("attention_width", (0.0, math.inf))
        if not low <= heads * head_dim / hidden <= high:
            words = f"is outside {low} to {high} times hidden_size {hidden}"
            return InvalidShapeError(f"attention of {heads} x {head_dim} {words}")
        rows = int(picked["draft_vocab_size"])
        trimmed = rows < target.vocab_size
        pattern = (text := str(picked["window"])).rstrip("0123456789")
        window = int(text.removeprefix(pattern)) if text != pattern else None
        if window is not None and self.longest is not None and window >= self.longest:
            pattern, window = "L", None
        multiple, ffn = self.ffn_multiple, float(picked["ffn_ratio"]) * hidden
        shape = Architecture(
            hidden_size=hidden,
            intermediate_size=max(multiple, round(ffn / multiple) * multiple),
            num_hidden_layers=int(picked["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=target.vocab_size,
            draft_vocab_size=rows if trimmed else None,
            tie_word_embeddings=bool(picked["tie_word_embeddings"]) and not trimmed,
            window_pattern=pattern,
            sliding_window=window,
            max_position_embeddings=target.max_position_embeddings,
            rope_theta=target.rope_theta,
        )
        try:
            check_shards(shape, self.draft_ranks)
        except InvalidShapeError as error:
            return error
        return shape

    def combinations(self, target: Architecture) -> Iterator[Indices]:
        """One choice per dimension, every combination in the order of the file."""
        return itertools.product(*map(range, self._lengths(target)))

    def random_combinations(
        self, target: Architecture, rng: random.Random, count: int
    ) -> Iterator[Indices]:
        """What `count` random draws bring, each once: a small space is soon drawn."""
        lengths = self._lengths(target)
        seen: set[Indices] = set()
        size = math.prod(lengths)
        for _ in range(count):
            drawn = tuple(map(rng.randrange, lengths))
            if drawn not in seen:
                seen.add(drawn)
                yield drawn
            if len(seen) == size:
                break

    def sample(self, target: Architecture, count: int, seed: int = 0) -> list[Architecture]:
        """Up to `count` distinct valid shapes drawn at random: what a sweep covers and a check
        draws from."""
        tried = self.random_combinations(target, random.Random(seed), 200 * count)
        found: dict[Architecture, None] = {}
        for _, drawn in self.distinct(target, tried):
            if (drafter := as_drafter(drawn)).has_layers:
                found[drafter.architecture] = None
            if len(found) >= count:
                break
        if not found:
            self.check(target)
        return list(found)

    def distinct(
        self, target: Architecture, combinations: Iterable[Indices]
    ) -> Iterator[tuple[Indices, Draft]]:
        """The valid shapes of `combinations`, each once, with the first choices that make it."""
        seen: set[Draft] = set()
        for indices in combinations:
            shape = self.build(indices, target)
            if not isinstance(shape, InvalidShapeError) and shape not in seen:
                seen.add(shape)
                yield indices, shape

    def enumerate(
        self, target: Architecture, combinations: Iterable[Indices] | None = None
    ) -> Iterator[Draft]:
        """Every valid shape within max_parameters, once, in the order of the file; of
        `combinations` only, where they are given."""
        limit = self.limits(target).max_parameters
        every = self.combinations(target) if combinations is None else combinations
        for _, shape in self.distinct(target, every):
            if limit is None or as_drafter(shape).parameters() <= limit:
                yield shape

    def check(self, target: Architecture) -> None:
        """Raise ArchsearchError where no shape is valid for this target, with the commonest reason.
        Of more than CHECKED combinations as many are drawn at random."""
        few = self.size(target) <= CHECKED
        tried = None if few else self.random_combinations(target, random.Random(0), CHECKED)
        if next(self.enumerate(target, tried), None) is not None:
            return
        some = itertools.islice(self.combinations(target), 10_000)
        shapes = (self.build(choice, target) for choice in some)
        reasons = [str(shape) for shape in shapes if isinstance(shape, InvalidShapeError)]
        limit = self.limits(target).max_parameters
        reasons = reasons or [f"all have more than max_parameters ({limit:,})"]
        why = f"{statistics.mode(reasons)}; widen its dimensions"
        raise ArchsearchError(f"space {self.name} allows no valid shape for this target: {why}")

    def neighbours(
        self, indices: tuple[int, ...], target: Architecture
    ) -> Iterator[tuple[int, ...]]:
        """Choices that differ in one dimension: one step for numbers, any other choice for the
        rest; then in two of hidden size, KV heads and group size at once, because query heads must
        divide the hidden size and single steps may all be invalid.
        """
        dimensions = self.dimensions(target)

        def steps(position: int) -> list[int]:
            here, count = indices[position], len(dimensions[position].choices)
            if dimensions[position].ordered:
                return [index for index in (here - 1, here + 1) if 0 <= index < count]
            return [index for index in range(count) if index != here]

        for position in range(len(dimensions)):
            for index in steps(position):
                yield (*indices[:position], index, *indices[position + 1 :])
        names = [dimension.name for dimension in dimensions]
        for first, second in itertools.combinations(range(len(dimensions)), 2):
            both = {names[first], names[second]}
            if both <= {"num_key_value_heads", "kv_group_size", "hidden_size"}:
                for a, b in itertools.product(steps(first), steps(second)):
                    moved = list(indices)
                    moved[first], moved[second] = a, b
                    yield tuple(moved)

    def nearest(self, wanted: Mapping[str, Value], target: Architecture) -> tuple[int, ...]:
        """The choices closest to `wanted` (numbers by ratio; what is not named or not offered: the
        first choice)."""
        result = []
        for dimension in self.dimensions(target):
            value = wanted.get(dimension.name)
            if value is None:
                result.append(0)
            elif dimension.ordered:
                gaps = [abs(math.log(float(choice) / float(value))) for choice in dimension.choices]
                result.append(gaps.index(min(gaps)))
            else:
                result.append(dimension.choices.index(value) if value in dimension.choices else 0)
        return tuple(result)

    def to_dict(self) -> dict[str, object]:
        """As in the file; `from_dict` reads it back."""
        constraints = {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in self.constraints
        }
        drafter = {name: list(values) for name, values in self.extras}
        special = {"family": self.family, "drafter": drafter}
        return ({} if self.family == Independent.family else special) | {
            "description": self.description,
            "dimensions": {name: list(values) for name, values in self.choices},
            "ffn_multiple": self.ffn_multiple,
            "constraints": constraints,
        }

    @classmethod
    def from_dict(cls, data: Any, name: str, where: str | None = None) -> SearchSpace:
        """Check and freeze. `where` (a file) is named in errors, with the key and what is allowed.

        Raises ArchsearchError for what no space can have.
        """
        where = where or name

        def wrong(words: str) -> ArchsearchError:
            return ArchsearchError(f"{where}: {words}")

        checked.check_keys(data, TOP_LEVEL, where, "key", "the file")
        kind = str(data.get("family", Independent.family))
        if not is_family(kind):
            raise wrong(f"unknown family {kind!r}; allowed are {', '.join(FAMILY_NAMES)}")
        made = family(kind)
        special = data.get("drafter") or {}
        own = f"choice of the family {made.family}:"
        checked.check_keys(special, tuple(made.choices), where, own, "drafter")
        given = {key: special.get(key, list(usual)) for key, usual in made.choices.items()}
        extras = tuple(
            (key, checked.allowed(values, checked.EXTRA, f"{where}: drafter.{key}"))
            for key, values in given.items()
        )
        if not made.has_layers:
            data = {"dimensions": {}, **data}
        if "dimensions" not in data:
            raise wrong(f"dimensions is missing; it names what may vary ({', '.join(DIMENSIONS)})")
        dimensions = data["dimensions"]
        checked.check_keys(dimensions, DIMENSIONS, where, "dimension", "dimensions")
        if not made.has_layers and dimensions:
            own = ", ".join(made.choices)
            raise wrong(f"a drafter of the family {made.family} has no dimensions; it has {own}")
        for required in REQUIRED if made.has_layers else ():
            if required not in dimensions:
                raise wrong(
                    f"dimensions.{required} is missing; give a list of choices or min and max"
                )
        found = {
            key: checked.choices(key, dimensions[key], where)
            for key in DIMENSIONS
            if key in dimensions
        }
        slides = any("S" in str(pattern) for pattern in found.get("window_pattern", ()))
        if slides and "sliding_window" not in found:
            raise wrong(
                "dimensions.window_pattern has an S, so dimensions.sliding_window needs tokens"
            )
        multiple = data.get("ffn_multiple", 64)
        if not checked.is_whole(multiple):
            raise wrong(f"ffn_multiple must be a positive whole number, got {multiple!r}")
        constraints = data.get("constraints") or {}
        checked.check_keys(constraints, CONSTRAINTS, where, "constraint", "constraints")
        limits = tuple(
            (key, checked.constraint(key, constraints[key], where))
            for key in CONSTRAINTS
            if key in constraints
        )
        about = str(data.get("description", ""))
        choices = tuple(found.items())
        return cls(name, about, choices, multiple, limits, family=made.family, extras=extras)


# --- files


def list_spaces() -> dict[str, Path]:
    """Name -> file of every space that `load_space` finds by name: in ./search_spaces first, then
    of those that ship with archsearch."""
    found: dict[str, Path] = {}
    for folder in (Path("search_spaces").resolve(), data_dir("search_spaces").resolve()):
        for path in sorted(folder.glob("*.yaml")):
            found.setdefault(path.stem, path)
    return found


def load_space(name_or_path: str | Path) -> SearchSpace:
    """A space by its name or from a YAML file. What is wrong in it is one line: the file, the key
    and what is allowed.

    Raises ArchsearchError for either.
    """
    known = list_spaces()
    path = known.get(str(name_or_path)) or Path(name_or_path)
    if not path.is_file():
        names = ", ".join(known) or "(none)"
        raise ArchsearchError(
            f"no search space called {str(name_or_path)!r}; use one of {names} or a YAML file"
        )
    return SearchSpace.from_dict(read_yaml(path, "search space"), path.stem, str(path))


def numeric_values(shape: Architecture) -> dict[str, float]:
    """What a shape has in the dimensions that are numbers."""
    return {
        "num_hidden_layers": shape.num_hidden_layers,
        "hidden_size": shape.hidden_size,
        "ffn_ratio": shape.intermediate_size / shape.hidden_size,
        "num_key_value_heads": shape.num_key_value_heads,
        "kv_group_size": shape.kv_group_size,
        "head_dim": shape.head_dim,
        "draft_vocab_size": shape.head_rows,
    }


def _absolute(name: str, value: Value, target: Architecture) -> float | int:
    if not isinstance(value, str):
        number = float(value)
    else:
        number = checked.fraction(value) * numeric_values(target)[name]
        if name == "hidden_size" and value != "target":
            number = max(1, round(number / HIDDEN_MULTIPLE)) * HIDDEN_MULTIPLE
    if name == "ffn_ratio":
        return number
    whole = max(1, round(number))
    return min(whole, target.vocab_size) if name == "draft_vocab_size" else whole


@lru_cache(maxsize=64)
def _dimensions(space: SearchSpace, target: Architecture) -> tuple[Dimension, ...]:
    if space.kept:
        kept, found = dict(space.kept), _dimensions(replace(space, kept=()), target)
        return tuple(
            replace(item, choices=tuple(item.choices[i] for i in kept[item.name])) for item in found
        )
    given = dict(space.choices)
    result = []
    for name, options in space.extras:
        # text: a fraction of the target's layers
        layers = target.num_hidden_layers
        numbers = {
            max(1, round(checked.fraction(each) * layers)) if isinstance(each, str) else each
            for each in options
        }
        ordered = not any(isinstance(value, bool) for value in numbers)
        result.append(Dimension(name, tuple(sorted(numbers)), ordered))
    if not family(space.family).has_layers:
        return tuple(result)
    for name in NUMERIC:
        values = sorted({_absolute(name, value, target) for value in given.get(name, ("target",))})
        result.append(Dimension(name, tuple(values), ordered=True))
    windows: list[Value] = []
    for pattern in given.get("window_pattern", ("L",)):
        lengths = given["sliding_window"] if "S" in str(pattern) else ()
        windows += [f"{pattern}{tokens}" for tokens in lengths] or ["L"]
    result.append(Dimension("window", tuple(dict.fromkeys(windows)), ordered=False))
    tied = [
        target.tie_word_embeddings if value == "target" else value
        for value in given.get("tie_word_embeddings", ("target",))
    ]
    result.append(Dimension("tie_word_embeddings", tuple(dict.fromkeys(tied)), ordered=False))
    return tuple(result)
