from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from archsearch.drafters.forms import VLLM, vllm_config
from archsearch.errors import ArchsearchError
from archsearch.export.engines import Serving, Setup, check_engines, export_names, serving

OPTIONS: dict[str, Any] = yaml.safe_load(
    (Path(__file__).parent / "engine_options.yaml").read_text()
)
RANGES = ((1, 2, 4), (3, 16, 1), (17, 256, 0))


def setup(**changes: Any) -> Setup:
    return Setup(
        **{
            "folder": Path("/d/my draft"),
            "target": "org/target",
            "gamma": 3,
            "dtype": "bfloat16",
            **changes,
        }
    )


def options_of(each: Serving) -> dict[str, str]:
    """The options of a command; checks program, names, kinds and that none is missing, against what
    the engine documents."""
    documented = OPTIONS[each.engine]
    program = len(documented["program"])
    assert list(each.command[:program]) == documented["program"]
    words = list(each.command[program:])
    if each.engine == "tensorrt-llm":
        assert words.pop(0) == "org/target"
    found = dict(zip(words[::2], words[1::2], strict=True))
    assert set(found) <= set(documented["options"]), set(found) - set(documented["options"])
    for name, rule in documented["options"].items():
        if name not in found:
            assert not rule.get("required"), name
        elif rule["kind"] == "choice":
            assert found[name] in rule["of"]
        elif rule["kind"] in ("int", "float"):
            {"int": int, "float": float}[rule["kind"]](found[name])
    return found


def test_commands_switch_an_engine_as_it_was_priced() -> None:
    texts = "VLLM_USE_V2_MODEL_RUNNER=0 kv_cache_dtype=fp8 disable_overlap_schedule=1"
    words = shlex.join(serving("vllm", setup(switches=texts)).command)
    begins = "VLLM_USE_V2_MODEL_RUNNER=0 vllm serve org/target --dtype bfloat16 --kv-cache-dtype"
    assert words.startswith(f"{begins} fp8 --speculative-config")
    words = shlex.join(serving("sglang", setup(switches=texts)).command)
    assert " --disable-overlap-schedule --spec" in words and "VLLM" not in words


def test_engine_names() -> None:
    assert check_engines(["vllm", "transformers", "vllm"]) == ("transformers", "vllm")
    with pytest.raises(ArchsearchError) as error:
        check_engines(["vllm", "ollama"])
    assert "'ollama'" in str(error.value) and all(
        name in str(error.value) for name in export_names()
    )
    assert len(export_names()) == 6
    with pytest.raises(ArchsearchError, match="not independent draft models.*--for vllm"):
        check_engines(["speculators"])


def test_vllm_config() -> None:
    assert vllm_config("independent", "d", 3) == {
        "method": "draft_model",
        "model": "d",
        "num_speculative_tokens": 3,
    }
    config = vllm_config("independent", "d", 3, RANGES, 2)
    assert config["num_speculative_tokens"] == 4 and config["draft_tensor_parallel_size"] == 2
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 2, 4], [3, 16, 1], [17, 256, 0]]
    one = vllm_config("independent", "d", 3, ((1, 256, 5),))
    assert one["num_speculative_tokens"] == 5 and "num_speculative_tokens_per_batch_size" not in one
    off = vllm_config("independent", "d", 3, ((1, 256, 0),))
    assert off["num_speculative_tokens"] == 3 and off["num_speculative_tokens_per_batch_size"] == [
        [1, 256, 0]
    ]


@pytest.mark.parametrize("family", VLLM)
def test_drafts_are_sampled_where_requests_and_the_engine_sample(family: str) -> None:
    """What has no probabilities is not asked for any (draft_sample_method of vLLM 0.22 on)."""
    sampled = family in ("independent", "eagle3", "eagle", "mtp")
    config = vllm_config(family, "d", 3)
    asked = {"draft_sample_method": "probabilistic"} if sampled else {}
    assert vllm_config(family, "d", 3, temperature=0.7) == {**config, **asked}
    assert "draft_sample_method" not in config


@pytest.mark.parametrize("family", ["independent", "eagle3"])
def test_engines_serve_at_the_temperature_that_was_priced(family: str) -> None:
    option, note = "--speculative-use-rejection-sampling", "For a temperature above 0"
    for temperature in (0.0, 0.7):
        vllm, sglang = (
            serving(engine, setup(family=family, temperature=temperature, schedule=RANGES))
            for engine in ("vllm", "sglang")
        )
        served = '"draft_sample_method": "probabilistic"'
        assert (served in vllm.command[-1]) == bool(temperature)
        assert (served in vllm.files["speculative_config.json"]) == bool(temperature)
        assert (note in " ".join(vllm.notes)) != bool(temperature)
        # server_args.py of SGLang refuses it for STANDALONE
        assert (option in sglang.command) == (temperature > 0 and family == "eagle3")
        greedy = temperature > 0 and family == "independent"
        assert ("drafts greedily" in " ".join(sglang.notes)) == greedy


def test_vllm_command_holds_the_config_of_its_file() -> None:
    each = serving("vllm", setup(schedule=RANGES, tensor_parallel=2))
    words = list(each.command)
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config == json.loads(each.files["speculative_config.json"])
    assert config["model"] == "/d/my draft" and config["draft_tensor_parallel_size"] == 2
    assert words[words.index("--tensor-parallel-size") + 1] == "2"
    assert "still runs one pass" in " ".join(each.notes)
    assert "without CUDA graphs" in " ".join(
        each.notes
    ) and "`VLLM_USE_V2_MODEL_RUNNER=0`" in " ".join(each.notes)
    assert "--tensor-parallel-size" not in serving("vllm", setup()).command


def test_a_draft_with_windows_in_some_layers_gets_one_kind_of_cache() -> None:
    option, spec = "--disable-hybrid-kv-cache-manager", "--speculative-config"
    words = serving("vllm", setup(mixed=True)).command
    assert words.index(option) == words.index(spec) - 1
    assert option not in serving("vllm", setup()).command
    assert option not in serving("sglang", setup(mixed=True)).command


def test_a_precision_is_asked_for_in_the_engine_s_own_words() -> None:
    """No engine takes --dtype float8_e4m3fn."""

    def asked(engine: str, **changes: Any) -> str:
        each = serving(engine, setup(**changes))
        options_of(each) if engine == "sglang" else None
        return f"{' '.join(each.command)} | {' '.join(each.notes)}"

    fp8 = {"dtype": "float8_e4m3fn"}
    assert "org/target --dtype bfloat16 --spec" in asked("vllm")
    assert "org/target --spec" in asked("vllm", **fp8), "its weights say it"
    assert "--dtype" not in asked("vllm", dtype="q8_0"), "a file of llama.cpp's"
    assert "org/target --quantization fp8_per_tensor --spec" in asked(
        "vllm", **fp8, quantise="float8_e4m3fn"
    )
    assert "org/target --quantization fp8 --spec" in asked(
        "sglang", **fp8, quantise="float8_e4m3fn"
    )
    own = "--speculative-draft-model-quantization"
    assert f"{own} unquant" in asked("sglang", **fp8, quantise="float8_e4m3fn"), "priced so"
    assert f"{own} fp8" in asked("sglang", drafts="float8_e4m3fn") and own not in asked("sglang")
    assert '"quantization": "fp8_per_tensor"' in asked("vllm", drafts="float8_e4m3fn")
    for engine in ("vllm", "sglang", "tensorrt-llm"):
        words = asked(engine, quantise="nvfp4")
        assert "--quantization" not in words
        assert "In the place of org/target name its weights in nvfp4." in words


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm", "llama.cpp"])
def test_the_shell_text_is_the_command(engine: str) -> None:
    each = serving(engine, setup(schedule=RANGES, tensor_parallel=2, target="it's here"))
    assert tuple(shlex.split(each.shell().replace("\\\n", " "))) == each.command


def test_sglang() -> None:
    found = options_of(serving("sglang", setup(tensor_parallel=2)))
    assert (
        found["--speculative-num-steps"] == "3" and found["--speculative-num-draft-tokens"] == "4"
    )
    assert found["--speculative-eagle-topk"] == "1" and found["--tp-size"] == "2"
    assert "no gamma by batch size" in " ".join(serving("sglang", setup(schedule=RANGES)).notes)


def test_llama_cpp() -> None:
    found = options_of(serving("llama.cpp", setup(target_gguf="/t.gguf")))
    assert found["--spec-draft-n-max"] == "3" and float(found["--spec-draft-p-min"]) == 0.0
    assert found["--spec-draft-model"] == "/d/my draft/draft.gguf" and found["--model"] == "/t.gguf"


def tensorrt_file(**changes: Any) -> tuple[dict[str, Any], Serving]:
    """The YAML an export writes, checked by the rules of DecodingBaseConfig and
    DraftTargetDecodingConfig."""
    each = serving("tensorrt-llm", setup(**changes))
    assert options_of(each)["--extra_llm_api_options"] == "/d/my draft/tensorrt-llm.yaml"
    data = yaml.safe_load(each.files["tensorrt-llm.yaml"])
    assert set(data) <= set(OPTIONS["tensorrt-llm"]["file_fields"])
    speculative = data["speculative_config"]
    assert set(speculative) <= set(OPTIONS["tensorrt-llm"]["speculative_fields"])
    assert speculative["decoding_type"] == "Draft_Target" and speculative["max_draft_len"] > 0
    assert speculative["speculative_model"] == "/d/my draft"
    schedule = speculative.get("draft_len_schedule")
    if schedule is not None:
        assert all(
            isinstance(key, int) and key >= 1 and 0 <= value for key, value in schedule.items()
        )
        assert 1 in schedule and schedule[1] == speculative["max_draft_len"] == max(
            schedule.values()
        )
    return data, each


def test_tensorrt() -> None:
    plain, _ = tensorrt_file()
    assert (
        plain["speculative_config"]["max_draft_len"] == 3
        and "draft_len_schedule" not in plain["speculative_config"]
    )
    scheduled, _ = tensorrt_file(schedule=RANGES, tensor_parallel=4)
    assert scheduled["speculative_config"]["draft_len_schedule"] == {1: 4, 2: 4, 3: 1, 16: 1, 17: 0}
    assert (
        scheduled["speculative_config"]["max_draft_len"] == 4
        and scheduled["tensor_parallel_size"] == 4
    )
    rising, each = tensorrt_file(schedule=((1, 2, 1), (3, 8, 4)))
    assert "draft_len_schedule" not in rising["speculative_config"] and "left out" in " ".join(
        each.notes
    )
