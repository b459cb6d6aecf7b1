"""config.json read and written, checked against transformers itself: what it loads and how many
parameters it builds."""

import json

import pytest

import archsearch.architecture.catalogue as catalogue
from archsearch.architecture.architecture import Architecture
from archsearch.architecture.counts import parameters
from archsearch.architecture.hf_config import (
    from_hf_config,
    minimal_pattern,
    read_architecture,
    to_hf_config,
)
from archsearch.errors import ArchsearchError, InvalidShapeError

BASE = Architecture(
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=96,
)

DRAFTS = {
    "llama": BASE,
    "tied": BASE.replace(tie_word_embeddings=True),
    "mha": BASE.replace(num_key_value_heads=4),
    "mqa, head_dim apart from hidden/heads": BASE.replace(num_key_value_heads=1, head_dim=32),
    "hidden no multiple of heads": BASE.replace(num_attention_heads=6, num_key_value_heads=3),
    "trimmed": BASE.replace(draft_vocab_size=40),
    "trimmed and tied": BASE.replace(draft_vocab_size=40, tie_word_embeddings=True),
    "all sliding": BASE.replace(window_pattern="S", sliding_window=8),
    "mixed windows": BASE.replace(window_pattern="SSSL", sliding_window=8),
    "pattern longer than the layers": BASE.replace(
        window_pattern="SSSL", sliding_window=8, num_hidden_layers=2
    ),
    "window set but unused": BASE.replace(sliding_window=8),
    "qkv bias": BASE.replace(attention_bias=True),
    "qkv bias and windows": BASE.replace(
        attention_bias=True, window_pattern="SL", sliding_window=8
    ),
    "all biases": BASE.replace(attention_bias=True, attention_output_bias=True, mlp_bias=True),
    "qk norm": BASE.replace(qk_norm=True, rope_theta=1e6),
    "qwen2": BASE.replace(model_type="qwen2", attention_bias=True),
    "opt": Architecture(
        64,
        256,
        3,
        4,
        4,
        16,
        96,
        tie_word_embeddings=True,
        gated_mlp=False,
        rms_norm=False,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        learned_positions=130,
        max_position_embeddings=128,
        model_type="opt",
    ),
}


@pytest.mark.parametrize("arch", DRAFTS.values(), ids=DRAFTS.keys())
def test_round_trip_through_json(arch):
    assert from_hf_config(json.loads(json.dumps(to_hf_config(arch)))) == arch


@pytest.mark.parametrize("arch", DRAFTS.values(), ids=DRAFTS.keys())
def test_transformers_builds_what_the_architecture_says(arch, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    (tmp_path / "config.json").write_text(
        json.dumps(to_hf_config(arch, bos_token_id=1, eos_token_id=2))
    )
    config = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    loaded = arch.replace(
        draft_vocab_size=None, tie_word_embeddings=arch.tie_word_embeddings and not arch.trimmed
    )
    assert sum(p.numel() for p in model.parameters()) == parameters(loaded)
    assert config.bos_token_id == 1
    # What the modelling code will slide over, layer by layer.
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * arch.num_hidden_layers
    assert [window if kind == "sliding_attention" else None for kind in kinds] == arch.windows()
    if not arch.learned_positions:
        assert config.rope_parameters["rope_theta"] == arch.rope_theta
    # A config that transformers saved (defaults dropped, rope_theta moved) reads the same.
    config.save_pretrained(tmp_path / "saved")
    assert read_architecture(tmp_path / "saved") == arch


def test_windows_change_what_the_model_computes():
    """A window written as `mixed windows` really cuts attention: far tokens stop mattering only in
    sliding layers."""
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    def last_logits_differ(pattern):
        arch = BASE.replace(window_pattern=pattern, sliding_window=3, num_hidden_layers=2)
        config = to_hf_config(arch)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
        tokens = torch.arange(12)[None]
        changed = tokens.clone()
        changed[0, 0] = 90
        with torch.no_grad():
            return not torch.allclose(
                model(tokens).logits[0, -1], model(changed).logits[0, -1], atol=1e-7
            )

    assert last_logits_differ("L")
    assert last_logits_differ("SL")
    assert not last_logits_differ("S")  # two layers reach 4 tokens back, token 0 lies 11 back


@pytest.mark.parametrize(
    ("arch", "model_type"),
    [
        ("llama", "llama"),
        ("all sliding", "mistral"),
        ("mixed windows", "ministral"),
        ("hidden no multiple of heads", "mistral"),
        ("qkv bias", "qwen2"),
        ("qk norm", "qwen3"),
        ("opt", "opt"),
    ],
)
def test_family_written(arch, model_type):
    assert to_hf_config(DRAFTS[arch])["model_type"] == model_type


def test_trimmed_head_is_written_full_and_untied():
    config = to_hf_config(DRAFTS["trimmed and tied"])
    assert config["vocab_size"] == 96 and config["tie_word_embeddings"] is False
    assert config["archsearch"]["architecture"]["draft_vocab_size"] == 40
    assert "archsearch" not in to_hf_config(BASE)


def test_extra_fields_are_written():
    config = to_hf_config(BASE, rms_norm_eps=1e-6, eos_token_id=5)
    assert config["rms_norm_eps"] == 1e-6 and config["eos_token_id"] == 5


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def test_llama_defaults():
    arch = from_hf_config({"model_type": "llama", **SMALL})
    assert (arch.num_key_value_heads, arch.head_dim, arch.tie_word_embeddings, arch.rope_theta) == (
        4,
        16,
        False,
        10000.0,
    )
    assert arch.max_position_embeddings == 2048


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "ministral"])
@pytest.mark.parametrize("sparse", [False, True])
def test_defaults_are_those_of_transformers(model_type, sparse):
    """An independent reading: the config class fills the gaps, then both are compared field by
    field."""
    pytest.importorskip("torch")
    from transformers import AutoConfig

    given = {**SMALL, "num_attention_heads": 32, "hidden_size": 256}
    if not sparse:
        given |= {"use_sliding_window": True, "max_window_layers": 2, "rope_theta": 5e5}
        given |= (
            {} if "stral" in model_type else {"num_key_value_heads": None}
        )  # their config classes refuse null
    arch = from_hf_config({"model_type": model_type, **given})
    config = AutoConfig.for_model(model_type, **given)
    assert arch.num_key_value_heads == config.num_key_value_heads
    assert arch.head_dim == (getattr(config, "head_dim", None) or 256 // 32)
    assert arch.tie_word_embeddings == config.tie_word_embeddings
    assert arch.max_position_embeddings == config.max_position_embeddings
    assert arch.rope_theta == config.rope_parameters["rope_theta"]
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    expected = (
        [window if kind == "sliding_attention" else None for kind in kinds]
        if kinds
        else [window] * 4
    )
    assert arch.windows() == expected


def test_rope_theta_in_any_place():
    for place in (
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "rope_theta": 5e5},
    ):
        assert from_hf_config({"model_type": "llama", **SMALL, **place}).rope_theta == 5e5


def test_opt_has_two_more_positions_biases_and_tied_embeddings():
    arch = from_hf_config(
        {
            "model_type": "opt",
            "hidden_size": 768,
            "ffn_dim": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
        }
    )
    assert (
        arch.learned_positions == 2050
        and arch.tie_word_embeddings
        and not arch.gated_mlp
        and not arch.rms_norm
    )
    assert parameters(arch) == 125_239_296  # facebook/opt-125m


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mamba", **SMALL}, "mamba"),
        ({**SMALL}, "None"),
        ({"model_type": "llama", **SMALL, "hidden_size": None}, "hidden_size"),
        ({"model_type": "llama", **SMALL, "vocab_size": "many"}, "vocab_size"),
        ({"model_type": "llama", **SMALL, "num_key_value_heads": 3}, "num_key_value_heads"),
        (
            {
                "model_type": "ministral",
                **SMALL,
                "num_key_value_heads": 4,
                "layer_types": ["chunked"] * 4,
            },
            "chunked",
        ),
        (
            {
                "model_type": "opt",
                "hidden_size": 1024,
                "ffn_dim": 4096,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "vocab_size": 50272,
                "word_embed_proj_dim": 512,
                "do_layer_norm_before": False,
            },
            "opt-350m",
        ),
        (
            {"model_type": "qwen3_moe", **SMALL, "num_experts": 8, "num_experts_per_tok": 2},
            "moe_intermediate_size",
        ),
        ({"model_type": "qwen3_moe", **SMALL, "decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        (
            {
                "model_type": "mixtral",
                **SMALL,
                "num_key_value_heads": 4,
                "num_local_experts": 2,
                "num_experts_per_tok": 3,
            },
            "2 experts need",
        ),
        ({"model_type": "llama4", "hidden_size": 64}, "text_config"),
        (
            {
                "model_type": "llama4_text",
                **SMALL,
                "num_key_value_heads": 4,
                "interleave_moe_layer_step": 0,
            },
            "interleave_moe_layer_step must be a whole number",
        ),
        ({"model_type": "deepseek_v3", **SMALL, "moe_intermediate_size": 64}, "qk_nope_head_dim"),
        ({"archsearch": {"architecture": {"hidden_size": 64}}}, "incomplete"),
        ({"archsearch": {"architecture": []}}, "list"),
        ({"archsearch": {"architecture": {**BASE.to_dict(), "colour": 1}}}, "colour"),
    ],
)
def test_bad_configs_name_the_culprit(config, words):
    with pytest.raises(InvalidShapeError, match=words):
        from_hf_config(config)


def test_no_family_for_a_chimera():
    with pytest.raises(InvalidShapeError, match="no Hugging Face"):
        to_hf_config(BASE.replace(mlp_bias=True, qk_norm=True))


def test_read_architecture(tmp_path):
    with pytest.raises(ArchsearchError, match="no config.json"):
        read_architecture(tmp_path)
    with pytest.raises(ArchsearchError, match="not found"):
        read_architecture(tmp_path / "nothing")
    file = tmp_path / "config.json"
    for text in ("[1]", "{broken"):
        file.write_text(text)
        with pytest.raises(ArchsearchError):
            read_architecture(tmp_path)
    file.write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(ArchsearchError, match="config.json"):
        read_architecture(tmp_path)
    file.write_text(json.dumps(to_hf_config(BASE)))
    assert read_architecture(tmp_path) == read_architecture(file) == BASE


def test_minimal_pattern():
    assert minimal_pattern([8, 8, 8, None, 8, 8]) == "SSSL"
    assert minimal_pattern([None, None]) == "L"
    assert minimal_pattern([None, None, 8]) == "LLS"


def test_what_experts_and_latents_add_is_written_only_where_it_is_there():
    assert (
        "num_experts" not in BASE.to_dict()
    )  # files of plain models stay as older versions wrote them
    for name in ("qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b", "gemma-3-27b"):
        arch = catalogue.load(name).architecture
        assert Architecture.from_dict(arch.to_dict()) == arch
        plain = arch.dense()
        assert (
            not plain.num_experts and not plain.kv_lora_rank and plain.vocab_size == arch.vocab_size
        )
        assert from_hf_config(to_hf_config(plain)) == plain  # a draft of it can be written


def test_windows_of_gemma_gpt_oss_and_scout():
    windows = {
        name: catalogue.load(name).architecture.windows()
        for name in ("gemma-3-12b", "gpt-oss-20b", "llama-4-scout")
    }
    assert windows["gemma-3-12b"][:6] == [1024] * 5 + [None]
    assert windows["gpt-oss-20b"][:2] == [128, None]
    assert windows["llama-4-scout"][:4] == [8192] * 3 + [None]


def test_routing_skew_of_a_config():
    config = {
        "model_type": "mixtral",
        **SMALL,
        "num_key_value_heads": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    assert from_hf_config({**config, "archsearch": {"routing_skew": 0.9}}).routing_skew == 0.9
    with pytest.raises(InvalidShapeError, match="routing_skew"):
        from_hf_config({**config, "archsearch": {"routing_skew": -1}})
