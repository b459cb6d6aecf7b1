"""How numbers, paths and states read in the report."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Final

from archsearch.engine_facts import ENGINES, engine_title
from archsearch.estimate import Estimate
from archsearch.runs.confirmed import Confirmed
from archsearch.runs.families import EngineComparison
from archsearch.search.objective import Score

# What the sources of an Estimate mean to a reader.
SOURCES: Final = {
    "measured": "counted or timed on this draft",
    "modelled": "from a model fitted to measurements of this device",
    "prior": "expected from published drafts of like shape; not measured here",
    "roofline": "from the device's datasheet; not measured here",
    "published": "from a publication",
    "given": "given on the command line",
}
# Bits after the leading one: the spacing of neighbouring numbers is 2^(exponent - bits).
MANTISSA_BITS: Final = {"bfloat16": 7, "float16": 10, "float32": 23}

UNPROFILED: Final = re.compile(r"WARNING:? (.+?)(?:[;.] |[;.]?$)")

NORMAL_95: Final = 1.645
"""Standard deviations to the 5 and 95 % quantiles of a normal distribution."""


def slowdown_words(slowdown: float | None) -> str:
    """What was done to measured times before their part in an error was worked out; "" where
    nothing was."""
    if slowdown is None or abs(slowdown - 1.0) < 0.005:
        return ""
    return (
        " For these parts, measured times are divided by the machine's slowdown against the"
        f" profile, {slowdown:.2f}."
    )


def break_even_words(score: Score) -> str:
    """Above which alpha a draft pays."""
    needed = score.break_even_alpha
    if needed is None:
        return f"no alpha makes this draft pay at gamma {score.gamma}"
    if needed.value <= 0:
        return "it pays at any alpha"
    return f"it pays above alpha {needed.value:.2f} ± {needed.std:.2f} ({needed.source})"


def launches(score: Score) -> str:
    """What the host launches of the draft in a round: `24 layers twice`."""
    drafter = score.proposer
    layers = drafter.architecture.num_hidden_layers
    if drafter.sharded is None or not layers:
        return "the drafter"
    times = {1: "once", 2: "twice"}.get(score.gamma, f"{score.gamma} times")
    return f"{layers} layer{'s' if layers > 1 else ''} {times}"


def host_words(score: Score) -> str:
    """What the host needs for a round: `the host's 21.8 ms to launch 24 layers twice; the kernels
    take 9.2`."""
    assert score.host_s is not None
    text = f"the host's {1e3 * score.host_s.value:.1f} ms to launch {launches(score)}"
    # its passes are the host's time too
    if score.engine in ENGINES and ENGINES[score.engine].in_process:
        return f"{text}, and the target"
    return f"{text}; the kernels take {1e3 * (score.draft_s.value + score.verify_s.value):.1f}"


def interval(gain: Estimate) -> tuple[float, float]:
    """5 and 95 % of an estimate: its own quantiles, else those of a normal distribution."""
    if gain.low is not None and gain.high is not None:
        return gain.low, gain.high
    return max(0.0, gain.value - NORMAL_95 * gain.std), gain.value + NORMAL_95 * gain.std


def verdict(gain: Estimate, *, measured: bool = False) -> str:
    """Whether speculation pays, by the 5 to 95 % interval alone: `may` where 1x lies inside."""
    low, high = interval(gain)
    if low > 1.0:
        return "pays" if measured else "should pay"
    return "does not pay" if high < 1.0 else "may pay"


def hub_name(target: str) -> str:
    """The hub id of a target of the catalogue; any other name as it is."""
    from archsearch.architecture import catalogue

    return (catalogue.load(target).hub_id or target) if target in catalogue.names() else target


def round_words(score: Score) -> str:
    """How long a round takes and what decides it; "" where the score does not say (files of version
    0.1.0)."""
    if score.round_s is None:
        return ""
    text = f"a round takes {1e3 * score.round_s.value:.1f} ms"
    if score.bound == "host":
        return f"{text}, bound by {host_words(score)}"
    if score.host_s is not None and score.host_s.value > 0:
        return f"{text}; the GPU decides, the host would need {1e3 * score.host_s.value:.1f} ms"
    return text


def speedup_words(confirmed: Confirmed) -> str:
    """The measured speed-up as both ways of counting give it."""
    pooled = confirmed.speedup_pooled
    words = "" if pooled is None else f" (pooled {pooled:.2f}x)"
    return f"{confirmed.speedup.value:.2f}x, measured{words}"


def unprofiled_words(found: Confirmed | EngineComparison) -> str:
    """What a prediction does without where the engine's own passes were never profiled; "" where it
    has them."""
    command = found.profile_first
    if not command:  # "": an earlier version wrote so where it could not measure an engine
        return ""
    return (
        f"The prediction knows nothing of {engine_title(found.engine)}'s own passes, which were"
        f" never profiled; measure them first: {command}"
    )


def identity_words(confirmed: Confirmed) -> str:
    """One sentence about whether the output is the target's own."""
    identity, exact = confirmed.identical_output, confirmed.identical_output_float32
    dtype = confirmed.dtype or "the run's dtype"
    if not identity.prompts:
        words = (
            "Output was sampled (temperature above 0), so answers are not compared token by token"
        )
    else:
        words = (
            f"Output with and without the draft: {identity.identical} of {identity.prompts} answers"
            f" identical in {dtype}"
        )
        gaps = [abs(each.logit_gap) for each in identity.differences if each.logit_gap is not None]
        if gaps:
            words += (
                f" (the others part where two tokens' logits differ by at most {max(gaps):.3g})"
            )
    if exact and dtype != "float32":
        words += f"; {exact.words(' of ')} in float32"
    return words + "."


def shell_path(path: Path) -> str:
    """Relative to the working directory where that is shorter, quoted for a shell."""
    try:
        path = path.resolve().relative_to(Path.cwd().resolve())
    except ValueError:
        pass
    return shlex.quote(str(path))


def millions(count: int) -> str:
    """1,234,567,890 as `1.23B`, 24,000,000 as `24M`, 1,500,000 as `1.5M`."""
    if count >= 1e9:
        return f"{count / 1e9:.2f}B"
    return f"{count / 1e6:.{0 if count >= 1e7 else 1}f}M"


def latency_warning(latency: str, target: str) -> str:
    """What the words for the latency warn of: an engine whose own passes nobody measured, and the
    command; "" for nothing."""
    found = UNPROFILED.search(latency)
    return found[1].replace("--target T ", f"--target {shlex.quote(target)} ") if found else ""
