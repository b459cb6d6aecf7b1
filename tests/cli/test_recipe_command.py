"""`archsearch recipe`: what is written, that every file can be read by what reads it, and what is
refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from archsearch.errors import ArchsearchError
from archsearch.files import write_json
from archsearch.hardware.device import load_device
from archsearch.models.targets import resolve_target
from archsearch.needs import Needs
from archsearch.recipes import plan
from archsearch.recipes.plan import LIBRARIES, STAGES, choose_library, share_gpus
from archsearch.runs.run import Run, open_run
from tests.cli.commands import call, last_json, refused, single_threaded

FAMILIES = {
    "speculators": "eagle3 dflash peagle",
    "specforge": "eagle3 dflash",
    "archsearch": "eagle3",
}


def priced(**found: str) -> dict[str, str]:
    """How a run's engine is to run."""
    return {"quantise": "", "drafts": "", "switches": ""} | found


@pytest.fixture
def gpu_run(searched: Path, tmp_path: Path) -> Path:
    shutil.copytree(searched, tmp_path, dirs_exist_ok=True)
    return Path("runs/gpu")


def rank_of(run: Path, family: str, kind: str = "training") -> int:
    """The best rank of a family that is to be trained (or exists)."""
    found = (
        s for s in open_run(run).scores() if s.family == family and s.needs and s.needs.kind == kind
    )
    rank = next(found).rank
    assert rank is not None
    return rank


def parsed(folder: Path) -> dict[str, Any]:
    """Every text of a recipe, read by what reads it; the objects of its JSON and YAML files by
    name."""
    found: dict[str, Any] = {}
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        name = str(path.relative_to(folder))
        if path.suffix == ".json":
            found[name] = json.loads(path.read_text())
        elif path.suffix == ".yaml":
            found[name] = yaml.safe_load(path.read_text())
        elif path.suffix == ".sh":
            checked = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
            assert checked.returncode == 0, checked.stderr
            assert os.access(path, os.X_OK)
        elif path.suffix == ".py":
            compile(path.read_text(), name, "exec")
        else:
            assert path.suffix in (".md", ".txt", ".safetensors"), f"{name} is read by no test"
        if path.suffix in (".md", ".sh", ".py", ".txt"):
            assert not any(left in path.read_text() for left in ("{{", "{%")), name
    return found


@pytest.mark.parametrize(
    ("library", "family"),
    [(name, family) for name, all_of in FAMILIES.items() for family in all_of.split()],
)
def test_every_file_can_be_read(gpu_run: Path, library: str, family: str) -> None:
    rank = rank_of(gpu_run, family)
    made = last_json(call("recipe", str(gpu_run), "--rank", str(rank), "--with", library, "--json"))
    files = parsed(Path("recipe"))
    score = open_run(gpu_run).score(rank)
    assert score.needs is not None and score.needs.tokens is not None
    record = files["recipe.json"]
    assert record["family"] == family and record["tokens"] == score.needs.tokens
    last = record["stages"][-1]
    assert last["alpha"]["value"] == score.alpha.value and last["gpu_hours"] == pytest.approx(
        score.needs.gpu_hours
    )
    alphas = [stage["alpha"]["value"] for stage in record["stages"]]
    assert alphas == sorted(alphas) and alphas[0] < alphas[-1] - 0.03
    assert [stage["tokens"] / score.needs.tokens for stage in record["stages"]] == pytest.approx(
        STAGES
    )
    assert made["hours"] == pytest.approx(score.needs.gpu_hours / 8) and not made["weights"]
    if library == "archsearch":
        assert f"archsearch train {gpu_run} --family eagle3" in Path("recipe/train.sh").read_text()
        return
    gpus = record["gpus"]
    assert sorted(gpus["teacher"] + gpus["trainer"]) == list(range(8))
    needed = {each.read_text().strip() for each in Path("recipe").glob("requirements-*.txt")}
    assert LIBRARIES[library].requirement in needed and "vllm==" in str(needed)


def test_the_alpha_of_the_last_stage_is_what_the_law_says(gpu_run: Path) -> None:
    from archsearch.pipeline.session import SearchSession

    session = SearchSession.reopen(gpu_run)
    for family in ("eagle3", "dflash", "independent"):
        score = session.run.score(rank_of(gpu_run, family))
        if score.needs is None or score.needs.tokens is None or score.needs.init:
            continue
        scorer = session.scorer_of(score)
        context = replace(scorer.context, trained_tokens=score.needs.tokens)
        again = scorer.predicted_acceptance(score.proposer, context).acceptance.alpha
        assert again.value == pytest.approx(score.alpha.value, abs=2e-3), family


def test_speculators_gets_its_own_form(gpu_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = rank_of(gpu_run, "eagle3")
    call("recipe", str(gpu_run), "--rank", str(rank))
    files = parsed(Path("recipe"))
    config, train = files["drafter/config.json"], files["train.yaml"]["train"]
    assert train["optimizer"]["optimizer"] == "muon"
    monkeypatch.setattr(plan, "LEAST_STEPS", 10**9)  # as of a text a million times shorter
    call("recipe", str(gpu_run), "--rank", str(rank), "--output", "short")
    optimizer = parsed(Path("short"))["train.yaml"]["train"]["optimizer"]
    assert optimizer == {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.0}
    shape = open_run(gpu_run).score(rank).architecture
    assert (
        config["speculators_model_type"] == "eagle3"
        and config["draft_vocab_size"] == shape.head_rows
    )
    assert config["transformer_layer_config"]["intermediate_size"] == shape.intermediate_size
    assert (
        train["draft"]["from_pretrained"] == "drafter"
        and train["trainer"]["checkpoint_freq"] == 0.1
    )
    script = Path("recipe/train.sh").read_text()
    assert '"eagle_aux_hidden_state_layer_ids": [2, 16, 29, 32]' in script, (
        "the drafter's layers and the last"
    )
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 16, 29]
    assert "meta-llama/Llama-3.1-8B-Instruct" in Path("recipe/answers.py").read_text()


SWITCH = "VLLM_USE_V2_MODEL_RUNNER=0"


@pytest.mark.parametrize("switches", ["", SWITCH])
@pytest.mark.parametrize("family", ["eagle3", "independent"])
def test_serve_sh_runs_with_switches(
    gpu_run: Path, monkeypatch: pytest.MonkeyPatch, family: str, switches: str
) -> None:
    """Both of its branches, with a vLLM that says how it was started; a draft is served as the
    search advises, with the switch that gives it graphs."""
    monkeypatch.setattr(Run, "priced_as", property(lambda run: priced(switches=switches)))
    call("recipe", str(gpu_run), "--rank", str(rank_of(gpu_run, family)), "--gpus", "2")
    vllm = Path("recipe/.venv-vllm/bin/vllm")
    vllm.parent.mkdir(parents=True)
    vllm.write_text('#!/bin/sh\necho "${VLLM_USE_V2_MODEL_RUNNER:-unset} $*"\n')
    vllm.chmod(0o755)
    for words, speculates in (((), True), (("alone",), False)):
        ran = subprocess.run(["bash", "recipe/serve.sh", *words], capture_output=True, text=True)
        value, command, _ = ran.stdout.split(maxsplit=2)
        assert (ran.returncode, command) == (0, "serve"), ran.stderr
        assert value == ("0" if switches or family == "independent" else "unset")
        assert ("--speculative-config" in ran.stdout) is speculates


@pytest.mark.parametrize(
    ("quantise", "options", "asked", "said"),
    [
        ("", 0, "seed=0)", 0),
        ("float8_e4m3fn", 1, 'quantization="fp8_per_tensor")', 0),
        ("int4", 0, "seed=0)", 1),  # weights of their own
    ],
)
def test_the_target_has_its_precision_wherever_it_starts(
    gpu_run: Path,
    monkeypatch: pytest.MonkeyPatch,
    quantise: str,
    options: int,
    asked: str,
    said: int,
) -> None:
    """On the GPUs that hold it so, 16-bit weights do not start."""
    monkeypatch.setattr(Run, "priced_as", property(lambda run: priced(quantise=quantise)))
    rank, line = str(rank_of(gpu_run, "eagle3")), f"name its weights in {quantise}."
    call("recipe", str(gpu_run), "--rank", rank)
    call("recipe", str(gpu_run), "--rank", rank, "--with", "specforge", "--output", "specforge")
    call("recipe", str(gpu_run), "--rank", str(rank_of(gpu_run, "independent")), "--output", "trl")
    files = parsed(Path("recipe"))
    assert files["recipe.json"]["gpus"]["target_ranks"] == 1
    text = {path.name: path.read_text() for path in Path("recipe").iterdir() if path.is_file()}
    assert asked in text["answers.py"]
    assert text["train.sh"].count("--quantization fp8_per_tensor") == options
    assert "--served-model-name meta-llama/Llama-3.1-8B-Instruct" in text["train.sh"]
    for name in ("answers.py", "answers.sh", "train.sh", "serve.sh", "README.md"):
        assert text[name].count(line) == said, name
    model = parsed(Path("specforge"))["train.yaml"]["model"]
    assert model.get("sglang_quantization") == ("fp8" if options else None)
    shards = parsed(Path("trl"))["accelerate.yaml"]["distributed_type"]
    assert shards == ("FSDP" if quantise else "MULTI_GPU")
    assert Path("trl/README.md").read_text().count("loads the target in 16 bits") == bool(quantise)


def test_stages_are_those_of_the_text_that_is_learnt_from(
    gpu_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head accepts less at 32,768 tokens; its trainer, which sees 4,096, does not say so."""
    from archsearch.pipeline.session import SearchSession

    rank = rank_of(gpu_run, "eagle3")
    short = last_json(call("recipe", str(gpu_run), "--rank", str(rank), "--json"))
    context_of = SearchSession.context_of

    def far(session: SearchSession, score: Any) -> Any:
        return replace(context_of(session, score), context_len=32768)

    monkeypatch.setattr(SearchSession, "context_of", far)
    path = gpu_run / "best" / str(rank) / "score.json"
    score = json.loads(path.read_text())
    score["alpha"] = {"value": 0.45, "std": 0.37, "source": "prior"}
    write_json(path, score)
    answer = call("recipe", str(gpu_run), "--rank", str(rank))
    long = parsed(Path("recipe"))["recipe.json"]
    for one, other in zip(short["stages"], long["stages"], strict=True):
        assert other["alpha"]["value"] == pytest.approx(one["alpha"]["value"], abs=2e-3)
    line = "At the run's context of 32,768 tokens alpha 0.45 ± 0.37 is expected"
    assert short["beyond"] == "" and long["beyond"].startswith(line)
    assert line in answer.output and line in Path("recipe/README.md").read_text()


def test_amds_gpus_are_told_that_requirements_are_for_cuda(
    gpu_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = str(rank_of(gpu_run, "eagle3"))
    call("recipe", str(gpu_run), "--rank", rank, "--output", "cuda")
    key = open_run(gpu_run).device
    amd = {key: replace(load_device(key), vendor="AMD")}
    monkeypatch.setattr("archsearch.recipes.folder.devices", lambda: amd)
    call("recipe", str(gpu_run), "--rank", rank, "--output", "rocm")
    said = [Path(name, "README.md").read_text().count("ROCm") for name in ("cuda", "rocm")]
    assert said == [0, 1]


def test_specforge_gets_disjoint_gpus(gpu_run: Path) -> None:
    call("recipe", str(gpu_run), "--rank", str(rank_of(gpu_run, "eagle3")), "--with", "specforge")
    train = parsed(Path("recipe"))["train.yaml"]
    stack = train["deployment"]["disaggregated"]["managed_local"]
    serving = [
        device for server in stack["capture_servers"] for device in server["cuda_visible_devices"]
    ]
    assert not set(serving) & set(stack["trainer_cuda_visible_devices"])
    assert train["deployment"]["trainer"]["nproc_per_node"] == len(
        stack["trainer_cuda_visible_devices"]
    )
    assert train["model"]["vocab_mapping_path"] == "drafter/vocab_mapping.pt"


def test_an_earlier_recipe_is_replaced_and_nothing_else(gpu_run: Path) -> None:
    command = ("recipe", str(gpu_run), "--rank", str(rank_of(gpu_run, "eagle3")))
    call(*command)
    call(*command, "--gpus", "4")
    assert json.loads(Path("recipe/recipe.json").read_text())["gpus"]["trainer"][-1] == 3
    Path("recipe/data").mkdir()
    assert "data" in refused(*command)


def test_what_is_refused(gpu_run: Path) -> None:
    run, eagle3 = str(gpu_run), str(rank_of(gpu_run, "eagle3"))
    line = refused("recipe", run, "--rank", str(rank_of(gpu_run, "eagle3", "exists")))
    assert (
        "exists already: yuhuili/EAGLE3-LLaMA3.1-Instruct-8B" in line
        and "to be trained: --rank" in line
    )
    line = refused("recipe", run, "--rank", eagle3, "--with", "trl")
    assert "no drafter of the family eagle3" in line and "--with speculators" in line
    with pytest.raises(ArchsearchError, match="use 2 or more"):
        share_gpus(1, 2, Needs("training", tokens=1.0), online=False, halves=True)
    with pytest.raises(ArchsearchError, match="use 3 or more"):
        share_gpus(2, 2, Needs("training", tokens=1.0), online=True, halves=True)
    # Qwen3-32B in half of an H100 beside its trainer did not start, 17 hours into the recipe
    with pytest.raises(ArchsearchError, match="more than half of a GPU .* use 2 or more"):
        share_gpus(1, 1, Needs("training", tokens=1.0), online=True, halves=False)
    with pytest.raises(ArchsearchError, match="no library .* early_exit"):
        choose_library(None, "early_exit")
    assert not Path("recipe").exists()


def test_a_shape_that_a_library_does_not_train(gpu_run: Path) -> None:
    rank = rank_of(gpu_run, "eagle3")
    path = gpu_run / "best" / str(rank) / "score.json"
    score = json.loads(path.read_text())
    score["architecture"]["num_hidden_layers"] = 2
    write_json(path, score)
    assert "heads of one layer" in refused(
        "recipe", str(gpu_run), "--rank", str(rank), "--with", "specforge"
    )
    score["architecture"] |= {"hidden_size": 2048, "num_hidden_layers": 1}
    score["drafter"]["own_embedding"] = True
    write_json(path, score)
    assert "as wide as their target (4096)" in refused("recipe", str(gpu_run), "--rank", str(rank))


def test_a_head_that_vllm_does_not_run_has_no_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """train.sh failed at its own vLLM, after 18 hours of text."""
    monkeypatch.chdir(tmp_path)
    asked = ("--target", "gemma-3-27b", "--gpu", "h100", "--engine", "sglang")
    call("search", *asked, "--family", "eagle3", "--trials", "2", "--run", "run")
    for library in ("speculators", "specforge"):
        line = refused("recipe", "run", "--rank", "1", "--with", library, "--gpus", "2")
        assert "a recipe's scripts run vLLM: vLLM's class of gemma3_text" in line
    assert not Path("recipe").exists()
    assert "of gemma3_text" in refused("schedule", "run", "--rank", "1", "--engine", "vllm")


def test_a_target_without_weights(with_ranks: Path) -> None:
    rank = rank_of(Path("runs/a"), "independent")
    Path("target/model.safetensors").unlink()
    line = refused("recipe", "runs/a", "--rank", str(rank))
    assert (
        "no weights in" in line
        and "put model.safetensors there" in line
        and not Path("recipe").exists()
    )


FAKE_VLLM = """
import json, os
from types import SimpleNamespace as N

class SamplingParams(N):
    pass

class Tokenizer:
    chat_template = None
    def encode(self, text, add_special_tokens=True):
        return [ord(letter) % 97 for letter in text]

class LLM:
    def __init__(self, **asked):
        self.asked = asked
    def get_tokenizer(self):
        return Tokenizer()
    def generate(self, prompts, settings):
        made = []
        for prompt, setting in zip(prompts, settings, strict=True):
            with open("asked.txt", "a") as file:
                file.write(json.dumps(prompt["prompt_token_ids"]) + "\\n")
            tokens = [7] * min(10, setting.max_tokens)
            made.append(N(outputs=[N(token_ids=tokens, text="seven" * 10)]))
        return made
"""


def lines(pattern: str) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in sorted(Path("recipe/data").glob(pattern))
        for line in path.read_text().splitlines()
    ]


def test_answers_resume_and_keep_held_out_prompts_apart(with_ranks: Path) -> None:
    """The script itself, with a vLLM that writes sevens: every prompt is answered once, whatever
    was killed in between."""
    prompts = [{"prompt": f"question number {number}"} for number in range(300)]
    Path("many.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*prompts, *prompts[:50]])
    )
    rank = rank_of(Path("runs/a"), "independent")
    with single_threaded():
        call("recipe", "runs/a", "--rank", str(rank), "--gpus", "1", "--prompts", "many.jsonl")
    Path("recipe/vllm.py").write_text(FAKE_VLLM)

    def write(*more: str) -> str:
        command = [sys.executable, "answers.py", "--shards", "2", *more]
        ran = subprocess.run(command, cwd="recipe", capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    write("--shard", "0", "--tokens", "1000000")
    first = Path("recipe/data/train-0.jsonl")
    whole = first.read_bytes()
    first.write_bytes(whole[: len(whole) // 2])  # killed in the middle of a line
    before = len(Path("recipe/asked.txt").read_text().splitlines())
    write("--shard", "0", "--tokens", "1000000")
    again = len(Path("recipe/asked.txt").read_text().splitlines()) - before
    assert 0 < again < before, "only what was lost is asked again"
    assert "or add prompts" in write("--shard", "1", "--tokens", "1000000")
    train, heldout, apart = lines("train-*"), lines("heldout-[0-9]*"), lines("heldout-prompts-*")
    ids = [row["id"] for row in (*train, *heldout)]
    assert len(ids) == len(set(ids)) == 300, "each prompt once, though the file repeats fifty"
    assert 0 < len(heldout) < 30 and [row["id"] for row in heldout] == [row["id"] for row in apart]
    for row in train:
        assert len(row["input_ids"]) == len(row["loss_mask"]) and sum(row["loss_mask"]) == 10
        assert row["input_ids"][-10:] == [7] * 10 and row["loss_mask"][0] == 0
    assert "as many as are needed" in write("--shard", "0", "--tokens", "100")
    from archsearch.text.prompts import read_prompts

    Path("apart.jsonl").write_text("".join(json.dumps(row) + "\n" for row in apart))
    assert read_prompts("apart.jsonl")[0].text.startswith("question number")


def test_targets_with_weights_here_get_first_weights(with_ranks: Path) -> None:
    """A tiny target in a folder: the draft is cut out of it, and transformers loads it."""
    from transformers import AutoModelForCausalLM

    rank = rank_of(Path("runs/a"), "independent")
    with single_threaded():
        made = last_json(
            call("recipe", "runs/a", "--rank", str(rank), "--with", "trl", "--gpus", "1", "--json")
        )
    files = parsed(Path("recipe"))
    assert made["weights"] and made["target"].endswith("target")
    shape = open_run(Path("runs/a")).score(rank).architecture
    draft = AutoModelForCausalLM.from_pretrained("recipe/drafter")
    assert (
        draft.config.num_hidden_layers == shape.num_hidden_layers
        and draft.config.hidden_size == shape.hidden_size
    )
    assert draft.lm_head.weight.shape[0] == shape.vocab_size, "GKD compares whole vocabularies"
    target = AutoModelForCausalLM.from_pretrained("target")
    if shape.hidden_size == target.config.hidden_size:
        first = draft.model.embed_tokens.weight.float()
        assert (first - target.model.embed_tokens.weight).abs().max() < 1e-2
    assert files["train.json"]["lmbda"] == 0.0 and files["accelerate.yaml"]["num_processes"] == 1
    # a text is divided into so many steps that it teaches, and no batch is larger than 8 answers
    tokens, batch = made["tokens"], files["train.json"]["per_device_train_batch_size"]
    assert batch == min(max(int(tokens / 250_000), 1), 8)
    assert files["recipe.json"]["settings"]["per_device_train_batch_size"] == batch


def test_a_head_for_speculators_begins_with_the_embedding_of_the_target(with_ranks: Path) -> None:
    """It leaves one that its file does not hold at zeros, and learns without the tokens."""
    from safetensors.torch import load_file

    from archsearch.drafters.heads import Eagle3
    from archsearch.recipes import initial_weights

    shape = Eagle3.usual(resolve_target("target").architecture).architecture
    shape = shape.replace(draft_vocab_size=None)
    own = {"library": "speculators", "family": "eagle3", "target": "target", "layers_read": [0, 1]}
    Path("recipe/drafter").mkdir(parents=True)
    write_json(Path("recipe/recipe.json"), own | {"architecture": shape.to_dict()})
    write_json(Path("recipe/drafter/config.json"), {})
    made = load_file(initial_weights(Path("recipe")))
    target = load_file("target/model.safetensors")["model.embed_tokens.weight"]
    assert made["embed_tokens.weight"].equal(target.float())


def interpreter(library: str) -> str:
    """A Python that has `library`: ARCHSEARCH_RECIPE_PYTHON, else this one; skips with the
    reason."""
    python = os.environ.get("ARCHSEARCH_RECIPE_PYTHON", sys.executable)
    seen = subprocess.run([python, "-c", f"import {library}"], capture_output=True, text=True)
    if seen.returncode:
        why = (seen.stderr.strip().splitlines() or ["?"])[-1]
        pytest.skip(
            f"{library} cannot be imported by {python} ({why}); name one in"
            " ARCHSEARCH_RECIPE_PYTHON"
        )
    return python


READERS = {
    "speculators": (
        """
from speculators import SpeculatorModelConfig
from speculators.train.config import TrainConfig
train = TrainConfig.from_sources(cli={}, config_path="train.yaml", argv=[])
drafter = SpeculatorModelConfig.from_pretrained("drafter")
assert train.speculator_type == drafter.speculators_model_type, train
assert train.flatten()["optimizer"] == "muon"
"""
    ),
    "specforge": (
        """
from specforge.config.schema import Config
train = Config.from_file("train.yaml")
assert train.mode == "online" and train.training.save_interval
"""
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "family"), [(name, family) for name in READERS for family in FAMILIES[name].split()]
)
def test_the_library_reads_its_files(gpu_run: Path, library: str, family: str) -> None:
    python = interpreter(library)
    call("recipe", str(gpu_run), "--rank", str(rank_of(gpu_run, family)), "--with", library)
    read = subprocess.run(
        [python, "-c", READERS[library]], cwd="recipe", capture_output=True, text=True
    )
    assert read.returncode == 0, read.stderr[-2000:]


@pytest.mark.slow
def test_trl_reads_its_files(with_ranks: Path) -> None:
    python = interpreter("trl")
    call(
        "recipe",
        "runs/a",
        "--rank",
        str(rank_of(Path("runs/a"), "independent")),
        "--with",
        "trl",
        "--gpus",
        "1",
    )
    code = """
import json
from accelerate.commands.config.config_args import load_config_from_file
from trl.experimental.gkd import GKDConfig
config = GKDConfig(**(json.load(open("train.json")) | {"bf16": False, "use_cpu": True}))
assert config.beta == 0.0 and config.save_steps == 0.1
assert load_config_from_file("accelerate.yaml").num_processes == 1
"""
    read = subprocess.run([python, "-c", code], cwd="recipe", capture_output=True, text=True)
    assert read.returncode == 0, read.stderr[-2000:]
