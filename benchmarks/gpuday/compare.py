"""A day beside what was predicted for its device: by the composed profile that ships, else by the
datasheet's roofline; and by the profile that the day itself measured, on passes it has not seen."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from archsearch.architecture.architecture import Architecture
from archsearch.architecture.grid import Pass
from archsearch.architecture.ops import Attention, Part
from archsearch.engine_rounds import EngineRounds, engine_rounds, round_costs
from archsearch.errors import MissingDataError
from archsearch.estimate import Estimate
from archsearch.hardware.device import Device
from archsearch.latency.model import LatencyModel
from archsearch.latency.ops import op_of
from archsearch.latency.roofline import RELATIVE_STD, RooflineLatency
from archsearch.latency.round_fit import rounds_of_row
from archsearch.profiles import ForwardShape, Profile, RoundShape, list_profiles
from archsearch.workload import Workload
from gpuday.cycles import round_law
from gpuday.runner import data_of


class Passes(Protocol):
    """What prices a pass, with the choice of the next tokens where the device makes it: a
    LatencyModel or a RooflineLatency."""

    def pass_s(self, arch: Architecture, asked: Pass, ranks: int) -> Estimate: ...


@dataclass(frozen=True)
class Case:
    """One thing measured and predicted, in seconds. `by`: which prediction."""

    group: str
    name: str
    by: str
    measured_s: float
    predicted_s: float
    std_s: float

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted_s / self.measured_s - 1.0


def shipped_models(
    device: Device,
    dtype: str,
    engine: str | None = None,
    rounds: EngineRounds | None = None,
    modes: Sequence[str] = ("graph", "eager"),
) -> tuple[str, dict[str, Any]]:
    """The composed models of a device where imported tables of it ship, else rooflines; which it
    is, in words.

    `engine`, `rounds`: whose rounds they price.
    """
    for folder in list_profiles():
        if folder.parent.name != device.key:
            continue
        profile = Profile.load(folder)
        if profile.imported:
            return profile.origin, {
                mode: LatencyModel(profile, dtype, mode, engine, rounds) for mode in modes
            }
    return "roofline of its datasheet", {
        mode: RooflineLatency(device, dtype, mode, engine, rounds) for mode in modes
    }


def fitted_models(folder: Path, dtype: str) -> dict[str, Passes]:
    """The models of the day's own profile; a mode with too few rows is left out."""
    models: dict[str, Passes] = {}
    if not (folder / "profile.json").is_file():
        return models
    profile = Profile.load(folder)
    for mode in ("graph", "eager"):
        try:
            model = LatencyModel(profile, dtype, mode)
        except MissingDataError:
            continue
        if model.composed_ is None:  # kernels without whole passes: that is no model of its own
            models[mode] = model
    return models


def op_cases(profile: Profile, dtype: str, model: Passes, by: str) -> list[Case]:
    """Kernels of the day's profile from memory under CUDA graphs, against the tables (or the
    roofline)."""
    found = []
    for kind in ("gemm", "attention", "elementwise"):
        for row in profile.select(
            kind, dtype, "graph", "warm" if kind == "elementwise" else "cold"
        ):
            if row.grossly_noisy or row.throttled:
                continue
            op = op_of(row)
            if isinstance(model, LatencyModel):
                assert model.composed_ is not None
                seconds, std = model.composed_.op_s(op)
            else:
                assert isinstance(model, RooflineLatency)
                seconds, std = model.op_s(op), RELATIVE_STD["graph"]
            group = kind
            if isinstance(op, Attention):
                group = "attention, decode" if op.tokens == 1 else "attention, verification"
            name = ", ".join(
                f"{key} {value}" for key, value in row.sizes().items() if value is not None
            )
            found.append(Case(f"kernels: {group}", name, by, row.median_s, seconds, std * seconds))
    return found


def pass_s(model: Passes, shape: ForwardShape, cold: bool) -> Estimate:
    """A pass that ends with the logits, as it was measured."""
    if isinstance(model, LatencyModel):
        return model.measured_pass_s(shape, cold)
    part = Part(shape.batch, shape.tokens, shape.context)
    return model.pass_s(shape.architecture, (part, cold), 1)


def layer_s(
    model: Passes, arch: Architecture, *, batch: int, tokens: int, context: int
) -> Estimate:
    """One layer of a stack, as the difference between a stack and one twice as deep."""
    deep = arch.replace(num_hidden_layers=2 * arch.num_hidden_layers)
    one, two = (
        model.pass_s(shape, (Part(batch, tokens, context), True), 1) for shape in (arch, deep)
    )
    layers = arch.num_hidden_layers
    return Estimate(
        max((two.value - one.value) / layers, 1e-9), abs(two.std - one.std) / layers, one.source
    )


def paper_cases(data: dict[str, Any], model: Passes, by: str) -> list[Case]:
    """The paper's drafts per token, layers of its target, and the shard of it that one device
    holds."""
    mode, found = data["mode"], []
    for row in data["rows"]:
        arch, shape = Architecture.from_dict(row["architecture"]), row["shape"]
        size = {name: shape[name] for name in ("batch", "tokens", "context")}
        cold = row["cache"] == "cold"
        if row["kind"] == "layer":
            group, predicted = f"paper: layer, {mode}", layer_s(model, arch, **size)
        else:
            verifies = " over " in row["what"]
            group = f"paper: {'shard of the target' if verifies else 'draft token'}, {mode}"
            predicted = pass_s(model, ForwardShape(arch, **size), cold)
        name = f"{row['what']}, {row['layers']} layers, {size['tokens']} tokens, {row['cache']}"
        found.append(Case(group, name, by, row["median_s"], predicted.value, predicted.std))
    return found


def round_estimate(model: Passes, data: dict[str, Any], row: dict[str, Any]) -> Estimate:
    """A round of gamma tokens: verification, the first draft token with its weights out of the
    cache, the others in a loop."""
    target, draft = (
        Architecture.from_dict(data["target_architecture"]),
        Architecture.from_dict(row["architecture"]),
    )
    gamma, context = row["gamma"], data["context"]
    verify = model.pass_s(target, (Part(1, gamma + 1, context), False), 1)
    first, later = (model.pass_s(draft, (Part(1, 1, context), cold), 1) for cold in (True, False))
    value = verify.value + first.value + (gamma - 1) * later.value
    return Estimate(
        value, (verify.std**2 + (first.std + (gamma - 1) * later.std) ** 2) ** 0.5, verify.source
    )


def cycle_cases(data: dict[str, Any], models: dict[str, Passes], by: str) -> list[Case]:
    """Decode, verification and whole rounds in one graph; whole rounds with nothing captured."""
    found = []
    target = Architecture.from_dict(data["target_architecture"])
    for row in data["rows"]:
        name = f"{row['draft']} draft, gamma {row['gamma']}"
        if "graph" in models:
            for part, tokens in (("decode", 1), ("verify", row["gamma"] + 1)):
                if part == "decode":  # no token is chosen in it
                    predicted = pass_s(
                        models["graph"], ForwardShape(target, 1, 1, data["context"]), False
                    )
                else:
                    asked = Part(1, tokens, data["context"]), False
                    predicted = models["graph"].pass_s(target, asked, 1)
                measured = row["parts"][part]["median_s"]
                found.append(
                    Case(
                        f"target: {part}, graph", name, by, measured, predicted.value, predicted.std
                    )
                )
            predicted = round_estimate(models["graph"], data, row)
            measured = row["rounds"]["one graph"]["median_s"]
            found.append(
                Case("round: one graph", name, by, measured, predicted.value, predicted.std)
            )
    return found


def transformers_cases(data: dict[str, Any], model: Any, dtype: str, by: str) -> list[Case]:
    """Plain tokens and rounds in transformers, with what is known of the engine; and rounds beside
    their passes alone."""
    found = []
    target, work = (
        Architecture.from_dict(data["target_architecture"]),
        Workload(1, data["context"], 1, dtype, "eager"),
    )
    for row in data["rows"]:
        told: list[tuple[str, str, Estimate]] = []
        if row["gamma"]:
            name, draft = (
                f"{row['draft']} draft, gamma {row['gamma']}",
                Architecture.from_dict(row["architecture"]),
            )
            told.append(
                (
                    "round: transformers",
                    name,
                    model.round(target, draft, work, row["gamma"]).round_s,
                )
            )
            told.append(
                ("round: transformers, passes alone", name, round_estimate(model, data, row))
            )
        else:
            told.append(("plain token: transformers", "target alone", model.decode_s(target, work)))
        found += [
            Case(group, name, by, row["median_s"], each.value, each.std)
            for group, name, each in told
        ]
    return found


def engine_cases(profile: Profile, device: Device, dtype: str, by: str) -> list[Case]:
    """Rounds that an engine itself ran, against the shipped passes with the published terms of its
    version."""
    found: list[Case] = []
    models: dict[str, LatencyModel | RooflineLatency] = {}
    for row in profile.select("round", dtype, "graph"):
        shape = RoundShape.of(row)
        rounds = rounds_of_row(shape)
        if rounds is None:
            continue
        if rounds.costs.name not in models:
            models[rounds.costs.name] = shipped_models(
                device, dtype, shape.engine, rounds, ("graph",)
            )[1]["graph"]
        model = models[rounds.costs.name]
        work = Workload(shape.batch, shape.context, shape.tensor_parallel, dtype, "graph")
        if shape.draft is None:
            predicted, name = model.decode_s(shape.target, work), "target alone"
        else:
            predicted = model.round(shape.target, shape.draft, work, shape.gamma).round_s
            name = f"{shape.draft.num_hidden_layers} layers, gamma {shape.gamma}"
        group = f"engine: {shape.engine} {shape.version}, {rounds.costs.name}"
        found.append(Case(group, name, by, row.median_s, predicted.value, predicted.std))
    return found


def published_launches() -> dict[str, float]:
    """Seconds of host time per layer as published or fitted to what others published, by class."""
    names = ("transformers", "vllm-none-sync", "vllm-piecewise-sync")
    return {name: round_costs(name).host_layer_s.value for name in names}


def law_cases(data: dict[str, Any]) -> list[Case]:
    """Rounds beside max(device, host) and the sum of passes, from the parts that were measured with
    them: the form of the law."""
    found = []
    for row in data["rows"]:
        part = {name: values["median_s"] for name, values in row["parts"].items()}
        device_s = part["verify"] + part["drafting"]
        laws = {
            "one graph": device_s,
            "graph per pass": device_s,
            "draft eager": round_law(
                device_s, part["launch verify graph"] + part["launch drafting"]
            ),
            "draft eager, serial": part["verify"] + max(part["drafting"], part["launch drafting"]),
            "eager": round_law(device_s, part["launch whole"]),
        }
        for style, predicted in laws.items():
            measured = row["rounds"][style]["median_s"]
            name = f"{row['draft']} draft, gamma {row['gamma']}"
            found.append(Case(f"law: {style}", name, "its own parts", measured, predicted, 0.0))
    return found


def check_cases(data: dict[str, Any]) -> list[Case]:
    """What `--check` found: the fitted model on shapes it had not seen."""
    return [
        Case(
            f"check: {row['what']}, {name}",
            row["architecture"],
            "this day's profile",
            row["measured_s"],
            row["predicted_s"],
            row["predicted_std_s"],
        )
        for name, check in data.get("checks", {}).items()
        for row in check["rows"]
    ]


def groups(cases: Iterable[Case]) -> list[dict[str, Any]]:
    """By group and prediction: cases, median error, its size, the worst and its name, the share
    within two std."""
    found: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        found.setdefault((case.group, case.by), []).append(case)
    return [
        {
            "group": group,
            "by": by,
            "cases": len(members),
            "median_absolute_error": statistics.median(abs(case.error) for case in members),
            "bias": statistics.median(case.error for case in members),
            "worst": (worst := max(members, key=lambda case: abs(case.error))).error,
            "worst_case": worst.name,
            "within_two_std": (
                statistics.fmean(abs(c.predicted_s - c.measured_s) <= 2 * c.std_s for c in members)
                if any(case.std_s for case in members)
                else None
            ),
        }
        for (group, by), members in found.items()
    ]


def compare(folder: Path) -> dict[str, Any]:
    """A day's results beside their predictions. Raises MissingDataError where the day has no
    identity yet."""
    known = data_of(folder, "identity")
    if not known:
        raise MissingDataError(
            f"{folder} holds no day: identity.json is missing or failed; run the day first"
        )
    device = Device.from_dict(known["device"])
    dtype = next(
        (
            data["dtype"]
            for name in ("attention", "cycles", "paper-graph")
            if (data := data_of(folder, name))
        ),
        None,
    )
    dtype = dtype or ("bfloat16" if "bfloat16" in device.flops_per_s else "float16")
    words, shipped = shipped_models(device, dtype)
    fitted = fitted_models(folder / "profile", dtype)
    by, own = (
        "roofline" if isinstance(shipped["graph"], RooflineLatency) else "composed",
        "this day's profile",
    )
    cases: list[Case] = []
    if (folder / "profile" / "profile.json").is_file():
        measured = Profile.load(folder / "profile")
        cases += op_cases(measured, dtype, shipped["graph"], by) + engine_cases(
            measured, device, dtype, by
        )
    for mode in ("graph", "eager"):
        cases += check_cases(data_of(folder, f"profile-{mode}"))
        data = data_of(folder, f"paper-{mode}")
        if data:
            cases += paper_cases(data, shipped[mode], by)
            cases += paper_cases(data, fitted[mode], own) if mode in fitted else []
    data = data_of(folder, "cycles")
    if data:
        cases += cycle_cases(data, shipped, by) + cycle_cases(data, fitted, own)
    data = data_of(folder, "transformers")
    if data:
        served = shipped_models(
            device, dtype, "transformers", engine_rounds("transformers"), ("eager",)
        )[1]["eager"]
        cases += transformers_cases(data, served, dtype, by)
        if "eager" in fitted:
            own_model = LatencyModel(
                Profile.load(folder / "profile"), dtype, "eager", "transformers"
            )
            cases += transformers_cases(data, own_model, dtype, own)
    cases += law_cases(data_of(folder, "cycles") or {"rows": []})
    return {
        "device": device.key,
        "rehearsal": known["rehearsal"],
        "dtype": dtype,
        "prediction": words,
        "groups": groups(cases),
        "launch": data_of(folder, "host").get("lines", {}),
        "published_layer_s": published_launches(),
        "cases": [asdict(case) | {"error": case.error} for case in cases],
    }


def text(result: dict[str, Any], statuses: Sequence[dict[str, Any]]) -> str:
    """A table for a terminal: the steps, then errors by group, then what a launch costs."""
    lines = [f"{result['device']}, {result['dtype']}; predicted: {result['prediction']}"]
    if result["rehearsal"]:
        lines.append("REHEARSAL on a CPU: these numbers mean nothing")
    lines += ["", f"{'step':<22} {'status':<14} {'seconds':>8}"]
    lines += [
        f"{entry['step']:<22} {entry['status']:<14} {entry['seconds']:>8.1f}" for entry in statuses
    ]
    lines += [
        "",
        (
            f"{'predicted against measured':<44} {'by':<20} {'cases':>5} {'median':>7} {'bias':>7}"
            f" {'worst':>8}  worst case"
        ),
    ]
    for row in result["groups"]:
        lines.append(
            f"{row['group']:<44} {row['by']:<20} {row['cases']:>5}"
            f" {row['median_absolute_error']:>7.1%} {row['bias']:>+7.1%} {row['worst']:>+8.1%} "
            f" {row['worst_case'][:60]}"
        )
    if result["launch"]:
        lines += ["", "host time to launch one pass of a draft"]
        lines += [
            f"  {style:<14} {1e3 * line['pass_s']:.3f} ms + {1e3 * line['layer_s']:.3f} ms a layer"
            for style, line in result["launch"].items()
        ]
        told = ", ".join(
            f"{name} {1e3 * seconds:.2f}" for name, seconds in result["published_layer_s"].items()
        )
        lines.append(f"  published, ms a layer: {told}")
    return "\n".join(lines)
