"""What an engine of one version adds to a speculative round on a GPU, and how it runs a draft:
engine_rounds.yaml, row by row.

The host launches a draft pass while the GPU verifies, so a round takes the longer of the two
(`archsearch.latency.rounds`). How much the host has to launch depends on the version: vLLM ran
independent drafts without CUDA graphs in 0.15 to 0.25 and does so again from 0.31 on. Here is which
version is which, with the numbers, their std and where they come from.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

from packaging.version import InvalidVersion, Version

from archsearch.drafters.drafter import RoundKind
from archsearch.errors import ArchsearchError
from archsearch.estimate import Estimate
from archsearch.files import shipped_yaml

Graph = Literal["none", "piecewise", "full"]
Order = Literal["overlapped", "serial"]
MACHINE_STD: Final = 0.6
"""Std of the logarithm of host times between machines, about the constants: 0.93, 1.2, 1.4 and 2.6
times those on four hosts that are known (three servers; a cloud notebook, of which the version was
not verified)."""
HOSTS: Final = {"fast": (0.9, 0.2), "usual": (1.0, 0.25), "slow": (2.6, 0.3)}
"""What `--host` may say: factor on host times, and the std of their logarithm that is left. One
host each for fast and slow."""
HOST: Final = "host"
"""Among an engine's switches: the host that it runs on."""
BEYOND: Final = 2.0
"""Most factor on stds at batch sizes beyond the largest that was measured (assumed)."""


def beyond(batch: int, largest: int) -> float:
    """Factor on a std at `batch` requests where at most `largest` were measured."""
    return min(BEYOND, max(1.0, batch / largest))


COSTS: Final = (
    "round",
    "token",
    "sequence",
    "host_round",
    "host_token",
    "host_layer",
    "host_target_layer",
    "host_all_reduce",
)
MEASURED_HOST_STD: Final = 0.3
"""Std of the logarithm that is left where a host's speed was measured by another code than the
engine's: assumed."""
_ZERO: Final = Estimate(0.0, 0.0, "published")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCosts:
    """One class of engine: how a draft's passes are launched, and what a round takes beside its
    kernels, in seconds; how these add up on GPU and host: `latency.rounds`.

    `host_all_reduce_s`: for every all-reduce of a pass without graph; `host_scatter_s`: a draft
    token, where a trimmed head's logits are written into rows of the whole vocabulary, launch by
    launch.

    Of drafters that do not propose in every round (n-gram, suffix): `padded`: they are filled up to
    gamma for every sequence, so each round verifies all of them; else `ragged_layer_s`: the host's
    time for a layer of the target where sequences verify different numbers of tokens, which no
    graph of the whole pass fits, and `waits_s`: what a round without any proposal adds to a plain
    step.
    """

    name: str
    title: str
    graph: Graph
    order: Order
    round_s: Estimate
    token_s: Estimate
    sequence_s: Estimate
    host_round_s: Estimate
    host_token_s: Estimate
    host_layer_s: Estimate
    host_target_layer_s: Estimate
    host_all_reduce_s: Estimate
    first_tokens: tuple[int, int]
    largest_batch: int
    source: str
    assumed: bool = False  # no round of it was found
    row_s: Estimate = _ZERO  # for each token that is verified, of any sequence
    row_token_s: Estimate = _ZERO  # for each verified row and token of its context
    gap_s: Estimate = _ZERO  # the GPU idles so long between the graphs of a draft's layers
    # verification reads each token as a sequence of its own, so its cache gamma + 1 times
    expands: bool = False
    # of COSTS, s^2, where they were measured together; the machine is in it
    covariance: tuple[tuple[float, ...], ...] = ()
    padded: bool = False
    ragged_layer_s: Estimate = _ZERO
    waits_s: Estimate = _ZERO
    host_scatter_s: Estimate = _ZERO
    machine_std: float = MACHINE_STD  # of the logarithm of the host's times
    largest_graph: int | None = None  # rows of the largest CUDA graph of the target
    ungraphed_layer_s: Estimate = _ZERO  # the host's time for a layer of a pass beyond it
    tree_step_s: Estimate | None = None  # what a step of a tree adds; None: it drafts no trees

    def launching(self, rows: float) -> RoundCosts:
        """The costs of a pass of the target over `rows` rows: beyond the largest graph the host
        launches it layer by layer."""
        if self.largest_graph is None or rows <= self.largest_graph:
            return self
        layer = max(self.ungraphed_layer_s, self.host_target_layer_s, key=lambda each: each.value)
        return replace(self, host_target_layer_s=layer)

    def without_round(self) -> RoundCosts:
        """The same without what a round adds by itself."""
        return replace(self, round_s=replace(self.round_s, value=0.0))

    def of_trees(self) -> RoundCosts:
        """The costs of rounds that draft trees. Raises ArchsearchError where there are none."""
        if self.tree_step_s is None:
            raise ArchsearchError(f"no trees are known of this engine ({self.title})")
        return replace(self, token_s=self.tree_step_s.plus(self.token_s))

    def certain(self) -> RoundCosts:
        """The same without any doubt: those of one machine, whose rounds are the larger of two
        times and not its mean over machines."""
        sure: dict[str, Any] = {
            f"{name}_s": replace(getattr(self, f"{name}_s"), std=0.0)
            for name in (*COSTS, "row", "row_token", "gap", "host_scatter", "ungraphed_layer")
        }
        return replace(self, machine_std=0.0, covariance=(), **sure)

    def on_host(self, host: str | None) -> RoundCosts:
        """The costs on a host of that speed (`host_speed`); as they are where nobody says."""
        if host is None or self.covariance:  # measured: the machine's own
            return self
        factor, std = host_speed(host)
        names = [name for name in COSTS if name.startswith("host")]
        names += ["host_scatter", "ungraphed_layer", "ragged_layer", "waits"]
        slower: dict[str, Any] = {
            f"{name}_s": getattr(self, f"{name}_s").times(factor) for name in names
        }
        return replace(self, machine_std=std, **slower)

    def first_pass_tokens(self, gamma: int) -> int:
        """Tokens per sequence that the draft's first pass of a round reads."""
        constant, slope = self.first_tokens
        return constant + slope * gamma

    def std_of(self, **weights: float) -> float | None:
        """Std of a weighted sum of COSTS that were measured together, whose errors cancel in part;
        None where they were not. Weights may be arrays."""
        if not self.covariance:
            return None
        chosen = [weights.get(name, 0.0) for name in COSTS]
        rows = zip(chosen, self.covariance, strict=True)
        square = sum(a * b * value for a, row in rows for b, value in zip(chosen, row, strict=True))
        return (square * (square > 0.0)) ** 0.5

    @property
    def rests_on(self) -> str:
        """The source of its times."""
        return "measured" if self.covariance else "published"

    def band(self, batch: int) -> float:
        """Factor on the std of what a round adds: wider beyond the batch sizes that were
        measured."""
        return beyond(batch, self.largest_batch)


@dataclass(frozen=True, slots=True)
class PlainCosts:
    """What a plain step of the target takes beside its kernels: `step_s` + batch x `sequence_s`,
    seconds."""

    step_s: Estimate = _ZERO
    sequence_s: Estimate = _ZERO
    largest_batch: int = 1
    source: str = ""

    def at(self, batch: int) -> Estimate:
        """Seconds at `batch` sequences; the std grows beyond the batches that were measured."""
        value = self.step_s.value + self.sequence_s.value * batch
        std = math.hypot(self.step_s.std, self.sequence_s.std * batch)
        return Estimate(value, std * beyond(batch, self.largest_batch), "published")


@dataclass(frozen=True, slots=True)
class EngineRounds:
    """An engine of one version with its switches, running one kind of drafter.

    `eager`: the target too runs without CUDA graphs. `note`: what a reader must know about the
    version that was taken. `without_graphs`: why drafts run without graphs here, "" where they do
    not; `remedy`: (version, options) that mend it. `tree`: that it drafts trees where a chain is
    priced.
    """

    engine: str
    version: str
    drafter: RoundKind
    costs: RoundCosts
    plain: PlainCosts
    options: Mapping[str, str]
    eager: bool = False
    note: str = ""
    tree: str = ""
    without_graphs: str = ""
    remedy: tuple[str, Mapping[str, str]] | None = None
    # an all-reduce and the norm after it are one kernel, where the GPU has it
    fuses_reduces: bool = False
    # of the kernel that quantises activations before each GEMM in fp8, where it is one of its own
    quantise_s: Estimate = _ZERO
    measured: int = 0  # rounds of the profile that the costs were fitted to

    def label(self) -> str:
        """`vllm 0.33.0 (VLLM_USE_V2_MODEL_RUNNER=0), a CUDA graph per layer of the draft`."""
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return (
            f"{self.engine} {self.version}{f' ({options})' if options else ''}, {self.costs.title}"
        )

    def cache_dtype(self, dtype: str) -> str:
        """The dtype of the KV cache where weights are kept in `dtype`: 16 bits by default. The fp8
        checkpoints of TensorRT-LLM ask for 8 bits themselves."""
        asked, narrow = self.options.get("kv_cache_dtype", "auto"), "float8_e4m3fn"
        if asked.startswith("fp8"):
            return narrow
        wide = self.engine != "tensorrt-llm" or asked == "bfloat16"
        return "bfloat16" if wide and dtype == narrow else dtype

    def running(self, drafter: RoundKind) -> EngineRounds:
        """The same version and switches with another kind of drafter; the measured fit of the same
        kind is kept. Raises ArchsearchError where it runs none."""
        if drafter == self.drafter:
            return self
        return _running(self.engine, self.version, tuple(sorted(self.options.items())), drafter)

    def remedied(self) -> EngineRounds | None:
        """The same engine with graphs for drafts; None where nothing is known to give them."""
        if self.remedy is None:
            return None
        version, options = self.remedy
        return engine_rounds(self.engine, version, {**self.options, **options}, self.drafter)

    def for_rows(self, rows: int) -> EngineRounds:
        """The same; where graphs of the target end before `rows`, `remedy` holds larger ones."""
        most, (version, options) = self.costs.largest_graph, self.remedy or (self.version, {})
        known = _table()["graphs"].get(self.engine)
        if self.eager or not most or rows <= most or Version(version) < Version(known["since"]):
            return self
        size = str(1 << (rows - 1).bit_length())
        return replace(self, remedy=(version, {**options, known["option"]: size}))

    def remedy_words(self) -> str:
        """What to change, as an instruction; "" where nothing is known."""
        version, options = self.remedy or (self.version, {})
        other = [f"use {self.engine} {version}"] * (version != self.version)
        return " and ".join(other + [f"set {name}={value}" for name, value in options.items()])


@cache
def _table() -> Any:
    return shipped_yaml(Path(__file__).with_suffix(".yaml"))


@cache
def round_costs(name: str) -> RoundCosts:
    """The class `name` of engine_rounds.yaml."""
    row = dict(_table()["classes"][name])
    while "like" in row:  # what a row does not say is its model's
        row = {**_table()["classes"][row.pop("like")], **row}
    costs: dict[str, Any] = {
        field.name: _ms(row.get(field.name.removesuffix("_s")))
        for field in fields(RoundCosts)
        if field.name.endswith("_s") and field.name != "tree_step_s"
    }
    return RoundCosts(
        name=name,
        first_tokens=tuple(row["first_tokens"]),
        source=" ".join(row["source"].split()),
        assumed=row.get("assumed", False),
        padded=row.get("padded", False),
        tree_step_s=_ms(row["tree_step"]) if "tree_step" in row else None,
        expands=bool(row.get("expands", False)),
        **{each: row[each] for each in ("title", "graph", "order", "largest_batch")},
        **costs,
    )


def known_engines() -> tuple[str, ...]:
    """Engines whose rounds are described."""
    return tuple(_table()["versions"])


def known_options(engine: str) -> tuple[str, ...]:
    """The switches of `engine` that matter to a round."""
    return tuple(_table()["versions"].get(engine, {}).get("options", {}))


def newest_version(engine: str) -> str:
    """The newest version of `engine` that the table describes."""
    return str(_table()["versions"][engine]["newest"])


def parse_version(engine: str, text: str) -> Version:
    """A version of `engine`; raises ArchsearchError, with an example, for what is none."""
    try:
        return Version(text)
    except InvalidVersion:
        known = newest_version(engine) if engine in known_engines() else "1.2.3"
        raise ArchsearchError(
            f"{text!r} is no version of {engine}; write it as in --engine-version {known}"
        ) from None


def parse_options(engine: str, texts: tuple[str, ...]) -> dict[str, str]:
    """`NAME=VALUE` texts as switches of `engine`; raises ArchsearchError for one that it does not
    have, or given two values."""
    known = _table()["versions"].get(engine, {}).get("options", {})
    found: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        value = {"true": "1", "false": "0"}.get(value.strip().lower(), value.strip())
        if name not in known:
            words = f"it knows {', '.join(known)}" if known else f"none is known for {engine}"
            raise ArchsearchError(f"{engine} has no switch {name!r} here; {words}")
        if known[name] == "number":
            if not value.isdigit():
                raise ArchsearchError(f"{name} is a number of rows, 0 or more, not {value!r}")
        elif value not in known[name]:
            raise ArchsearchError(f"{name} is {' or '.join(known[name])}, not {value!r}")
        if found.get(name, value) != value:
            raise ArchsearchError(
                f"{name} was given as {found[name]} and as {value}; leave one out"
            )
        found[name] = value
    return found


def switches(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Switches (`NAME=VALUE`) as vLLM and SGLang are started with them: environment variables,
    options."""
    variables, options = [], []
    for name, _, value in (text.partition("=") for text in texts):
        option = f"--{name.replace('_', '-')}"
        if name.isupper():
            variables.append(f"{name}={value}")
        elif name == "fuse_allreduce_rms":
            options.append(f"-cc.pass_config.{name}={value}")
        elif name in ("async_scheduling", "enforce_eager"):
            options.append(option if value in ("1", "true") else option.replace("--", "--no-"))
        elif name.startswith("disable_"):  # SGLang's, which cannot be said not to hold
            options += [option] if value in ("1", "true") else []
        else:
            options += [option, value]
    return variables, options


def engine_rounds(
    engine: str,
    version: str | None = None,
    options: Mapping[str, str] | None = None,
    drafter: RoundKind = "draft_model",
) -> EngineRounds | None:
    """How `engine` runs rounds of a kind of drafter; None for an engine of which nothing is known.

    `version` None: the newest that is known. One newer or older than those known is answered by the
    nearest; the note says so. Raises ArchsearchError for a version that does not run such a
    drafter.
    """
    table = _table()["versions"].get(engine)
    if table is None:
        return None
    newest = Version(str(table["newest"]))
    taken, note = str(newest) if version is None else version, ""
    asked = parse_version(engine, taken)
    if asked > newest and asked.release[:2] != newest.release[:2]:
        note = (
            f"{engine} {taken} is newer than what is known here ({newest}), whose figures are used"
        )
    elif asked < Version(oldest := str(table.get("oldest_of", {}).get(drafter, table["oldest"]))):
        note = (
            f"{engine} {taken} is older than what is known here ({oldest}), whose figures are used"
        )
        asked = Version(oldest)
    chosen = dict(options or {})
    for row in table["rows"]:
        fits = row.get("drafter", drafter) == drafter and _about(row, asked)
        if fits and all(chosen.get(name) == own for name, own in row.get("options", {}).items()):
            return _resolved(engine, taken, row, chosen, drafter, note)
    # the last row of each engine fits all
    raise ArchsearchError(f"nothing is known of {drafter} in {engine} {taken}")


@lru_cache(maxsize=256)
def _running(
    engine: str, version: str, options: tuple[tuple[str, str], ...], drafter: RoundKind
) -> EngineRounds:
    found = engine_rounds(engine, version, dict(options), drafter)
    assert found is not None  # the engine is known
    return found


def _about(row: Mapping[str, object], version: Version) -> bool:
    return "below" not in row or version < Version(str(row["below"]))


def _resolved(
    engine: str,
    version: str,
    row: Mapping[str, Any],
    options: dict[str, str],
    drafter: RoundKind,
    note: str,
) -> EngineRounds:
    if "refused" in row:
        raise ArchsearchError(
            f"{engine} {version} does not run such drafts: {row['refused']}; choose another"
            " --engine-version"
        )
    better = row.get("remedy_options", {})
    costs = round_costs(row["class"])
    # of a sequence no less than in a plain step, which schedules, samples and answers it too
    least = max(costs.sequence_s, plain_costs(engine, version).sequence_s, key=lambda s: s.value)
    graph = _largest_graph(engine, version, options)
    costs = replace(costs, largest_graph=graph, sequence_s=least).on_host(options.get(HOST))
    eager = bool(row.get("eager", False))
    # the host launches the target layer by layer as well, at what a layer of the draft takes it
    if eager:
        costs = replace(
            costs, title="no CUDA graph for target or draft", host_target_layer_s=costs.host_layer_s
        )
    return EngineRounds(
        engine,
        version,
        drafter,
        costs,
        plain_costs(engine, version),
        MappingProxyType(options),
        eager=eager or engine == "transformers",
        note=note,
        tree=f"a chain is priced, {engine} {version} {row['tree']}"
        if drafter == "feature_head" and "tree" in row
        else "",
        without_graphs=str(row.get("why", "")),
        remedy=(str(row.get("remedy", version)), MappingProxyType(dict(better)))
        if better or "remedy" in row
        else None,
        fuses_reduces=_fuses_reduces(engine, version, options),
        quantise_s=_ms(_table()["quantises"].get(engine, {}).get("kernel")),
    )


def host_speed(text: str) -> tuple[float, float]:
    """(factor on host times, std of their logarithm) of a host: a name of HOSTS, or the factor that
    `archsearch profile --host` prints. Raises ArchsearchError for what is neither."""
    if text in HOSTS:
        return HOSTS[text]
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 0.05 <= factor <= 20.0:
        raise ArchsearchError(
            f"a host is {', '.join(HOSTS)} or a factor from 0.05 to 20 (archsearch profile --host"
            f" prints it), not {text!r}"
        )
    return factor, MEASURED_HOST_STD


def _largest_graph(engine: str, version: str, options: Mapping[str, str]) -> int | None:
    """Rows of the target's largest CUDA graph; None where there is no limit that is known."""
    known = _table()["graphs"].get(engine)
    if known is None:
        return None
    if (asked := options.get(known["option"])) is not None:
        return int(asked)
    own = parse_version(engine, version)
    return next(int(row["largest"]) for row in known["rows"] if _about(row, own))


def _fuses_reduces(engine: str, version: str, options: Mapping[str, str]) -> bool:
    """Whether the version with these switches runs an all-reduce and the norm after it as one
    kernel."""
    known = _table()["fused_reduces"].get(engine)
    if known is None:
        return False
    default = parse_version(engine, version) >= Version(str(known["since"]))
    return options.get(known.get("option", ""), "1" if default else "0") == "1"


def plain_costs(engine: str, version: str) -> PlainCosts:
    """What a plain step takes in `engine` of `version` beside its kernels; nothing where nothing is
    known."""
    for row in _table()["plain"].get(engine, ()):
        if _about(row, parse_version(engine, version)):
            return PlainCosts(
                _ms(row["step"]),
                _ms(row["sequence"]),
                row["largest_batch"],
                " ".join(row["source"].split()),
            )
    return PlainCosts()


def _ms(pair: list[float] | None) -> Estimate:
    return _ZERO if pair is None else Estimate(pair[0] * 1e-3, pair[1] * 1e-3, "published")


def version_in(text: str) -> str | None:
    """The version in what an engine prints of itself (`vllm 0.32.0+cpu`); None where there is
    none."""
    found = re.search(r"\d+(\.\d+)+", text)
    return found.group() if found else None
