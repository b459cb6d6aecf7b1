"""The recipe's folder: templates filled in, configs written, everything built beside its place and
renamed."""

from __future__ import annotations

import json
import shlex
from importlib.resources import files
from pathlib import Path
from typing import Final

import archsearch
from archsearch.drafters.forms import mask_token
from archsearch.drafters.heads import PEagle
from archsearch.engine_facts import ENGINES
from archsearch.export.card import filled
from archsearch.export.engines import Setup, serving
from archsearch.export.folder import MARKER, building, check_output
from archsearch.files import write_json, write_text
from archsearch.hardware.device import devices
from archsearch.recipes import forms
from archsearch.recipes.initial import DRAFTER, RECIPE_FILE, initial_weights
from archsearch.recipes.plan import CHECKPOINTS, SPECFORGE_COMMIT, Recipe

HELD_OUT_EVERY: Final = 50
"""One prompt in so many is kept apart."""
TRAINED: Final = "trained"
HELD_OUT: Final = "data/heldout-prompts.jsonl"
SHOWN: Final = (
    "library family gamma run rank device vllm prompts temperature text_tokens longest gpus needs"
    " stages initialised hub_start switches beyond quantise"
).split()
"""What the templates name of a recipe."""


def write_recipe(recipe: Recipe, output: Path, *, weights: bool) -> Path:
    """Write everything that the training takes to `output`; returns it. `weights`: make the first
    weights now, for which the target's must be there.

    Raises ArchsearchError for a shape that the library does not train, and where `output` holds
    anything but an earlier recipe.
    """
    forms.check_shape(recipe)
    output = output.expanduser().absolute()
    check_output(output / DRAFTER, output)
    with building(output) as folder:
        texts = _texts(recipe, weights=weights)
        for name, text in texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_text(folder / name, text)
            if name.endswith(".sh"):
                (folder / name).chmod(0o755)
        record = {
            **recipe.to_dict(),
            "archsearch": archsearch.__version__,
            "layers_read": forms.layers_read(recipe),
        }
        if isinstance(recipe.drafter, PEagle):
            record["mask_token_id"] = mask_token(recipe.target)
        write_json(folder / RECIPE_FILE, record)
        if weights:
            initial_weights(folder)
        commands = {name: ["bash", name] for name in texts if name.endswith(".sh")}
        write_json(folder / MARKER, {"archsearch": archsearch.__version__, "commands": commands})
    return output


def _texts(recipe: Recipe, *, weights: bool) -> dict[str, str]:
    library, shape = recipe.library, recipe.drafter.architecture
    own = library.name == "archsearch"
    made = {**library.files, "README.md": "README.md"}
    if not own:
        common = ["answers.py", "answers.sh", "environments.sh", "serve.sh"]
        made |= {name: name for name in common + ["initialise.py"] * recipe.initialised}
    texts = {} if own else _configs(recipe)
    values = _values(recipe, weights=weights) | {"trimmed": shape.trimmed}
    # jinja2's own tojson writes &, < and > as escapes for HTML.
    filters = {"quote": shlex.quote, "tojson": json.dumps}
    templates = files("archsearch.recipes") / "templates"
    return texts | {
        name: filled(templates / f"{template}.j2", filters, **values)
        for name, template in made.items()
    }


def _configs(recipe: Recipe) -> dict[str, str]:
    from yaml import safe_dump

    library = recipe.library
    found = {f"{DRAFTER}/config.json": json.dumps(forms.drafter_form(recipe), indent=2) + "\n"}
    if library.name == "trl":
        found["train.json"] = json.dumps(forms.trl_training(recipe), indent=2) + "\n"
        found["accelerate.yaml"] = safe_dump(forms.accelerate_form(recipe), sort_keys=False)
    else:
        own = {"speculators": forms.speculators_training, "specforge": forms.specforge_training}
        found["train.yaml"] = safe_dump(own[library.name](recipe), sort_keys=False)
    return found | {file: f"{requirement}\n" for _, file, requirement in _environments(recipe)}


def _environments(recipe: Recipe) -> list[tuple[str, str, str]]:
    """(name, file, requirement) of each environment."""
    needed = [("vllm", f"vllm=={recipe.vllm}"), (recipe.library.name, recipe.library.requirement)]
    if recipe.initialised:
        needed.append(("archsearch", f"archsearch[torch]=={archsearch.__version__}"))
    return [(name, f"requirements-{name}.txt", requirement) for name, requirement in needed]


def _values(recipe: Recipe, *, weights: bool) -> dict[str, object]:
    gpus, settings, known = recipe.gpus, recipe.settings, devices().get(recipe.device)
    return {
        **{name: getattr(recipe, name) for name in SHOWN},
        "version": archsearch.__version__,
        "title": recipe.drafter.title,
        "label": recipe.drafter.label(),
        "target": recipe.target_name,
        "every": HELD_OUT_EVERY,
        "gpu_count": len({*gpus.teacher, *gpus.trainer}),
        "gpus_words": _gpu_words(recipe),
        "weights": weights,
        "start": recipe.hub_start or DRAFTER,
        "settings": settings,
        "amd": known is not None and known.vendor == "AMD",
        "back": _back(recipe),
        "environments": _environments(recipe),
        "specforge_commit": SPECFORGE_COMMIT,
        "extraction": forms.extraction(recipe),
        "forms": forms,
        "checkpoint_count": CHECKPOINTS,
        "batch": settings.get("batch_size", 1),
        "arguments": _own_arguments(recipe),
        **_served(recipe),
    }


def _gpu_words(recipe: Recipe) -> str:
    gpus = recipe.gpus
    if recipe.library.name == "archsearch":
        return "one; archsearch's trainer takes the first"
    copies = len(gpus.writers)
    words = (
        f"{copies} {'copies' if copies > 1 else 'copy'} of the target write{'s' * (copies == 1)}"
        " the text"
    )
    if gpus.shared:
        return f"{words}, on {gpus.ranks} each; the training has all {len(gpus.trainer)}"
    return (
        f"{words}, on {gpus.ranks} each; while the drafter learns the target has"
        f" {len(gpus.teacher)}, the trainer {len(gpus.trainer)} (by their shares of the hours)"
    )


def _back(recipe: Recipe) -> str:
    """How the result becomes part of the run."""
    run, rank = shlex.quote(str(Path(recipe.run).absolute())), recipe.rank  # from this folder
    if recipe.library.name == "archsearch":
        drafts = recipe.family == "independent"
        confirm = f"--rank {rank}" if drafts else f"--family {recipe.family}"
        return f"The answer is updated by the training; then `archsearch confirm {run} {confirm}`."
    lines = []
    if recipe.family in ("independent", "eagle3"):
        curve = f" --curve {forms.CHECKPOINT_FOLDER}/alpha.jsonl" * (recipe.library.name == "trl")
        lines = [
            f"archsearch train {run} --rank {rank} --weights {TRAINED} \\",
            f"  --prompts {HELD_OUT}{curve}",
            f"archsearch confirm {run} --rank {rank} --prompts {HELD_OUT}",
        ]
    lines += [
        "bash serve.sh                               # the target with the drafter, port 8000",
        "bash serve.sh alone                         # without, port 8001",
        "archsearch bench-serve --help               # both under your load",
    ]
    return "```bash\n" + "\n".join(lines) + "\n```"


def _served(recipe: Recipe) -> dict[str, str]:
    setup = Setup(
        Path(TRAINED),
        recipe.target_name,
        recipe.gamma,
        recipe.dtype,
        tensor_parallel=recipe.gpus.ranks,
        longest=recipe.held,
        family=recipe.family,
        layers=forms.layers_read(recipe),
        quantise=recipe.quantise,
        drafts=recipe.drafts,
        switches=recipe.switches,
        temperature=recipe.temperature,
        samples=recipe.samples,
        mixed=recipe.drafter.is_model and recipe.drafter.architecture.mixed,
    )
    words = serving("vllm", setup).command
    cut = words.index("--speculative-config")
    return {
        "together": shlex.join([*words, "--port", "8000"]),
        "alone": shlex.join([*words[:cut], "--port", "8001"]),
        "quantised": ENGINES["vllm"].quantises.get(recipe.quantise, ""),
        "said": "".join(f"# {text}\n" for text in setup.precision("vllm")[1]),
    }


def _own_arguments(recipe: Recipe) -> str:
    """Options of `archsearch train`."""
    if recipe.family == "independent":
        return f"--rank {recipe.rank}"
    shape = recipe.drafter.architecture
    words = ["--family", recipe.family, "--gamma", str(recipe.gamma)]
    words += ["--head-rows", str(shape.head_rows)]
    if recipe.family != "medusa":
        layers = ",".join(map(str, forms.layers_read(recipe)))
        words += ["--layers", str(shape.num_hidden_layers), "--aux-layers", layers]
    return shlex.join(words)
