"""Rounds of vLLM on a GPU, measured: a target alone, with an EAGLE-3 head and with draft models.

    python benchmarks/vllm_rounds.py --output rounds.jsonl [--budget 540] [--only eagle3-3 alone]
    python benchmarks/vllm_rounds.py --output rounds.jsonl --compare h200   # beside predictions
    python benchmarks/vllm_rounds.py --output rounds.jsonl --compare PROFILE   # of one's own

Measuring runs in an environment that has vLLM and a CUDA GPU; archsearch need not be there. Weights
are random (`load_format=dummy`) and acceptance is synthetic, so only time is measured: with BATCH
requests that all decode, the seconds between the steps that the engine hands out, as a server
would. Prompts are random tokens, everything else is vLLM's default (asynchronous scheduling, CUDA
graphs, the model runner). One process a case; a row is written as soon as it is measured, and a
case whose rows are all there is left out. A head without weights of its own shares the target's
output rows, all of them, so heads are priced so too.

A row: case, batch, context (tokens cached when the timing began), gamma, tau, step_s (each one).
A row with `kernels`: names, calls and microseconds of the GPU's kernels over a few rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}
"""Llama-3.1-8B."""
QWEN = TARGET | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
"""Qwen3-32B."""
SMALL = QWEN | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
"""Qwen3-1.7B."""
MIXTURE = QWEN | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
"""Qwen3-30B-A3B."""
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "initial_context_length": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "hidden_act": "silu",
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "mlp_bias": True,
    "bos_token_id": 199998,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "eos_token_id": 200002,
    "pad_token_id": 199999,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
"""gpt-oss-120b."""
TARGETS = {
    "llama-3.1-8b": TARGET,
    "qwen3-32b": QWEN,
    "qwen3-1.7b": SMALL,
    "qwen3-30b-a3b": MIXTURE,
    "gpt-oss-120b": GPT_OSS,
}
DRAFTS: dict[str, dict[str, Any]] = {
    # EAGLE-3 as published for Llama-3.1-8B: one layer, 32,000 tokens
    "eagle3": {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "attention_bias": False,
        "draft_vocab_size": 32000,
    },
    # Llama-3.2-1B
    "deep": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "wide": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 3,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
    # Qwen3-1.7B
    "32b-deep": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
}
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
LONG = ((8, 8000), (32, 8000))
CONTEXT = 1000
STEPS = 40
WARM = 8
RATE = 0.7
LENGTH = 9600


def case(draft: str | None, gamma: int, **extra: Any) -> dict[str, Any]:
    """What one process measures."""
    return {"draft": draft, "gamma": gamma} | extra


V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
CASES: dict[str, dict[str, Any]] = {
    "alone": case(None, 0),
    "eagle3-3": case("eagle3", 3),
    "wide-3": case("wide", 3),
    "deep-3": case("deep", 3),
    "eagle3-6": case("eagle3", 6),
    "alone-fp8": case(None, 0, quantization="fp8"),
    "eagle3-3-fp8": case("eagle3", 3, quantization="fp8"),
    "eagle3-1": case("eagle3", 1),
    "wide-6": case("wide", 6),
    "eagle3-3-v1": case("eagle3", 3, environment=V1),
    "32b-alone": case(None, 0, target="qwen3-32b", batches=(1, 8, 32)),
    "32b-deep-3": case("32b-deep", 3, target="qwen3-32b", batches=(1, 8, 32)),
    "wide-3-async": case("wide", 3, async_scheduling=True),
    "alone-v1": case(None, 0, environment=V1),
    "wide-1": case("wide", 1),
    "deep-6": case("deep", 6),
    "1.7b-alone": case(None, 0, target="qwen3-1.7b"),
    "1.7b-eagle3-3": case("eagle3", 3, target="qwen3-1.7b"),
    "30b-a3b-alone": case(None, 0, target="qwen3-30b-a3b", batches=BATCHES[:7]),
    "30b-a3b-eagle3-3": case("eagle3", 3, target="qwen3-30b-a3b", batches=BATCHES[:7]),
    # steps of several requests hardly grow, so all tokens seem to choose the same experts
    "gpt-oss-alone": case(None, 0, target="gpt-oss-120b", batches=(1,)),
    "gpt-oss-eagle3-3": case("eagle3", 3, target="gpt-oss-120b", batches=(1,)),
}


def main() -> int:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--output", type=Path, required=True, help="JSON lines, appended to")
    made.add_argument("--budget", type=float, default=540.0, help="seconds for everything")
    made.add_argument("--only", nargs="*", choices=sorted(CASES), help="these cases alone")
    made.add_argument(
        "--compare",
        metavar="GPU",
        help="measure nothing; predict what --output holds: a GPU, or a profile",
    )
    made.add_argument("--host", help="of --compare, as archsearch takes it")
    made.add_argument("--case", help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.compare:
        return compare(options.output, options.compare, options.host)
    if options.case:
        measure(options.case, options.output)
        return 0
    end, failed = time.monotonic() + options.budget, False
    options.output.parent.mkdir(parents=True, exist_ok=True)
    for name in options.only or CASES:
        left = end - time.monotonic()
        if left < 30:
            print(f"{name}: no time left", flush=True)
            continue
        if any(row["case"] == name and "done" in row for row in rows(options.output)):
            continue
        started = time.monotonic()
        command = [sys.executable, __file__, "--case", name, "--output", str(options.output)]
        environment = os.environ | {
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
            "HF_HUB_OFFLINE": "1",
            **CASES[name].get("environment", {}),
        }
        log = options.output.with_name(f"{name}.log")
        with open(log, "w") as file:
            child = subprocess.Popen(
                command, env=environment, stdout=file, stderr=file, start_new_session=True
            )
            try:
                code = child.wait(timeout=left)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, 9)
                code = child.wait()
        print(f"{name}: ended {code} after {time.monotonic() - started:.0f} s", flush=True)
        failed = failed or bool(code)
        if code:
            print("".join(log.read_text(errors="replace").splitlines(keepends=True)[-25:]))
    for row in rows(options.output):
        if "step_s" in row:
            print(
                f"{row['case']:14} batch {row['batch']:4} context {row['context']:6.0f}"
                f" {1e3 * statistics.median(row['step_s']):8.3f} ms a step, tau {row['tau']:.2f}"
            )
    return int(failed)


def rows(path: Path) -> list[dict[str, Any]]:
    """What has been measured."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measure(name: str, output: Path) -> None:
    """All rows of a case, in this process."""
    from vllm import LLM, __version__

    asked = CASES[name]
    folder = Path(tempfile.mkdtemp())
    gamma, speculation = asked["gamma"], None
    target = TARGETS[asked.get("target", "llama-3.1-8b")]
    write_config(folder / "target", target)
    if asked["draft"]:
        write_config(folder / "draft", draft_config(target, asked["draft"]))
        speculation = {
            "method": "eagle3" if asked["draft"] == "eagle3" else "draft_model",
            "model": str(folder / "draft"),
            "num_speculative_tokens": gamma,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [RATE ** (place + 1) for place in range(gamma)],
        }
    begun = time.monotonic()
    limits = {key: asked[key] for key in ("quantization", "async_scheduling") if key in asked}
    llm = LLM(
        model=str(folder / "target"),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=LENGTH,
        max_num_seqs=max(BATCHES),
        speculative_config=speculation,
        enable_prefix_caching=False,
        **limits,
    )
    about = {"case": name, "gamma": gamma, "vllm": __version__}
    started = time.monotonic() - begun
    add(output, about | {"started_s": started, "facts": llm.collective_rpc(facts)[0]})
    places = [(batch, CONTEXT) for batch in asked.get("batches", BATCHES)]
    if asked["draft"] in (None, "eagle3") and not {"environment", "target"} & set(asked):
        places += LONG
    for batch, context in places:
        add(output, about | decode(llm, batch, context, gamma))
    for batch in (1, 32):
        try:
            add(output, about | traced(llm, batch, gamma))
        except Exception as error:  # the times are worth more than their trace
            add(output, about | {"failed": f"trace: {type(error).__name__}: {error}"[:500]})
    add(output, about | {"done": True})


def compare(output: Path, gpu: str, host: str | None) -> int:
    """Every row beside what `archsearch estimate` says of it, and the figures of both; the exit
    status."""
    from archsearch.errors import ArchsearchError
    from archsearch.hardware.device import load_device
    from strangers import Case, Row, answers, text

    measured = {
        (row["case"], row["batch"], round(row["context"], -3)): row
        for row in rows(output)
        if "step_s" in row and row["batch"] in CASES[row["case"]].get("batches", BATCHES)
    }
    try:
        if not Path(gpu).is_dir():
            load_device(gpu)
    except ArchsearchError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    if not measured:
        print(f"Error: {output} holds no measured rows", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp())
    found = []
    for (name, batch, near), row in measured.items():
        asked = CASES[name]
        target = asked.get("target", "llama-3.1-8b")
        draft = asked["draft"] or "eagle3"
        own = folder / f"{draft} of {target}"
        if not own.exists():
            config = draft_config(TARGETS[target], draft)
            if draft == "eagle3":
                config["draft_vocab_size"] = config["vocab_size"]
            write_config(own, config)
        seconds = statistics.median(row["step_s"])
        middle = row["context"] + STEPS / 2 * row["tau"]
        case = Case(
            source=f"{name}, vLLM {row['vllm']}",
            target=target,
            draft=str(own),
            gpu=gpu,
            engine="vllm",
            version=row["vllm"],
            gamma=row["gamma"] or 3,
            batch=batch,
            context=round(middle),
            tau=row["tau"],
            dtype="float8_e4m3fn" if "quantization" in asked else "bfloat16",
            host=host,
            skew=0.0 if target == "qwen3-30b-a3b" else None,  # random weights choose evenly
            options=(
                *(f"{key}={value}" for key, value in asked.get("environment", {}).items()),
                *(["async_scheduling=1"] if "async_scheduling" in asked else []),
            ),
        )
        if not row["gamma"]:
            found.append(Row(case, "step", 1e3 * seconds, group="alone"))
            continue
        group = "head" if draft == "eagle3" else "draft model"
        found.append(Row(case, "round", 1e3 * seconds, group=group))
        same = [asked.get("target"), asked.get("quantization"), None, None]
        keys = ("target", "quantization", "environment", "draft")
        alone = next(key for key, each in CASES.items() if [*map(each.get, keys)] == same)
        plain = measured.get((alone, batch, near))
        if plain:
            gain = row["tau"] * statistics.median(plain["step_s"]) / seconds
            found.append(Row(case, "speedup", gain, group=f"{group}, speed-up"))
    print(text(list(answers(found))))
    return 0


def draft_config(target: dict[str, Any], draft: str) -> dict[str, Any]:
    """A dense draft's config, with the target's dimensions where it has none of its own."""
    return {key: target[key] for key in TARGET} | DRAFTS[draft]


def write_config(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))


def add(output: Path, row: dict[str, Any]) -> None:
    with open(output, "a") as file:
        file.write(json.dumps(row) + "\n")


def facts(worker: Any) -> dict[str, Any]:
    """What of vLLM's this is: called in the process that runs the model."""
    import torch

    runner = worker.model_runner
    config = runner.vllm_config
    kind = type(runner)
    drafter = getattr(runner, "speculator", None) or getattr(runner, "drafter", None)
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "runner": f"{kind.__module__}.{kind.__name__}",
        "drafter": f"{type(drafter).__module__}.{type(drafter).__name__}",
        "async_scheduling": config.scheduler_config.async_scheduling,
        "graphs": str(config.compilation_config.cudagraph_mode),
        "largest_graph": config.compilation_config.max_cudagraph_capture_size,
        "batched_tokens": config.scheduler_config.max_num_batched_tokens,
    }


class Running:
    """BATCH requests of CONTEXT random tokens that all decode, from `with` until it ends."""

    count = 0

    def __init__(self, llm: Any, batch: int, context: int) -> None:
        self.engine, self.batch, self.context = llm.llm_engine, batch, context
        self.written = 0

    def __enter__(self) -> Running:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        rng = random.Random(self.batch)
        self.names = []
        for _ in range(self.batch):
            Running.count += 1
            params = SamplingParams(
                max_tokens=LENGTH - self.context - 16,
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            prompt = {
                "prompt_token_ids": [rng.randrange(1000, 100000) for _ in range(self.context)]
            }
            self.names.append(self.engine.add_request(str(Running.count), prompt, params))
        begun: set[str] = set()
        while len(begun) < self.batch:
            begun |= {
                output.request_id for output in self.engine.step() if output.outputs[0].token_ids
            }
        for _ in range(WARM):
            self.step()
        self.written = 0
        return self

    def step(self) -> None:
        """One step of the engine that wrote something."""
        while True:
            wrote = sum(len(output.outputs[0].token_ids) for output in self.engine.step())
            if wrote:
                self.written += wrote
                return

    def __exit__(self, *_: object) -> None:
        self.engine.abort_request(self.names, internal=True)
        time.sleep(0.5)
        while self.engine.has_unfinished_requests():
            self.engine.step()


def decode(llm: Any, batch: int, context: int, gamma: int) -> dict[str, Any]:
    """Seconds of each of STEPS steps."""
    with Running(llm, batch, context) as running:
        stamps = [time.perf_counter()]
        for _ in range(STEPS):
            running.step()
            stamps.append(time.perf_counter())
        tau = running.written / STEPS / batch
    seconds = [round(after - before, 7) for before, after in zip(stamps, stamps[1:], strict=False)]
    return {"batch": batch, "context": context + WARM * tau, "tau": tau, "step_s": seconds}


def traced(llm: Any, batch: int, gamma: int) -> dict[str, Any]:
    """Kernels of ten rounds."""
    with Running(llm, batch, CONTEXT) as running:
        llm.collective_rpc(trace_begin)
        for _ in range(10):
            running.step()
        found = llm.collective_rpc(trace_end)[0]
    return {"batch": batch, "context": CONTEXT, **found}


def trace_begin(worker: Any) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    worker.traced = profile(activities=[ProfilerActivity.CUDA])
    worker.traced.start()


def trace_end(worker: Any) -> dict[str, Any]:
    """[name, calls, microseconds] of the kernels, the longest in all first; `span_us`: from the
    first one's begin to the last one's end."""
    import torch

    torch.cuda.synchronize()
    worker.traced.stop()
    kernels: dict[str, list[float]] = {}
    begins, ends = [], []
    for event in worker.traced.events():
        if str(event.device_type).endswith("CUDA"):
            entry = kernels.setdefault(event.name[:160], [0, 0.0])
            entry[0] += 1
            entry[1] += event.time_range.elapsed_us()
            begins.append(event.time_range.start)
            ends.append(event.time_range.end)
    ranked = sorted(kernels.items(), key=lambda item: -item[1][1])
    return {
        "span_us": max(ends) - min(begins) if ends else None,
        "kernels_us": sum(entry[1] for _, entry in ranked),
        "kernels": [[name, *entry] for name, entry in ranked[:60]],
    }


if __name__ == "__main__":
    sys.exit(main())
