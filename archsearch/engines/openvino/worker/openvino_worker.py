"""Runs OpenVINO GenAI for archsearch, in OpenVINO's own environment: JSON requests on stdin, JSON answers on the original stdout.

Imports nothing of archsearch. Folders are converted once to OpenVINO's own format (IR) and kept in a cache by content.
The functions above `Worker` are pure and tested without OpenVINO.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "child"))  # where `loop` is; siblings are found beside the script

from loop import Failed, UserError, claim_stdout, serve

CONVERTER = 1
"""Part of the cache key: raise it when the same folder must be converted again."""

PACKAGES = ("openvino-genai", "openvino", "optimum-intel", "transformers", "torch")
NO_TOKEN = 2**31 - 1
"""An id that no vocabulary has."""

KV_BLOCK = 32
"""Tokens in one block of the KV cache on a CPU."""


# ------------------------------------------------------------------------------------------------------ rounds and passes


def asked(written: int, gamma: int, max_new_tokens: int) -> int:
    """Draft tokens that OpenVINO GenAI asks for in the round after `written` tokens: the last token is always the target's."""
    return max(0, min(gamma, max_new_tokens - written - 1))


def whole_rounds(lengths: Sequence[int], gamma: int, max_new_tokens: int, ended: bool) -> list[int]:
    """The rounds that were asked for gamma tokens and not cut by the end of the text.

    `lengths`: tokens of each hand-over. The first is the target's own token after the prompt, no round.
    """
    whole: list[int] = []
    written = lengths[0] if lengths else 0
    last = len(lengths) - 1
    for index, length in enumerate(lengths[1:], 1):
        if asked(written, gamma, max_new_tokens) == gamma and not (ended and index == last):
            whole.append(length)
        written += length
    return whole


def draft_passes(durations: Sequence[float], lengths: Sequence[int], gamma: int, max_new_tokens: int) -> list[list[float]] | None:
    """The draft's passes by hand-over, out of all of them one after the other; None where they do not add up.

    Each step notes one entry at least: an empty one where nothing was drafted (the first step, and a round for the last token).
    """
    split: list[list[float]] = []
    position = written = 0
    for index, length in enumerate(lengths):
        count = asked(written, gamma, max_new_tokens) if index else 0
        split.append(list(durations[position : position + count]))
        position += max(count, 1)
        written += length
    return split if position == len(durations) else None


def draft_pass_tokens(passes: int, first: bool, prompt: int, previous_whole: bool) -> list[int]:
    """Tokens in each pass of one request's draft. The first pass of a round also takes what the draft has not seen: the prompt
    in the first round, its own last token after a round that was accepted whole."""
    if not passes:
        return []
    return [prompt + 1 if first else 2 if previous_whole else 1] + [1] * (passes - 1)


def trimmed(lengths: Sequence[int], total: int) -> list[int]:
    """`lengths` cut so that they add up to `total`: tokens that the engine counted behind the end of the text are dropped."""
    kept: list[int] = []
    left = total
    for length in lengths:
        if left <= 0:
            break
        kept.append(min(length, left))
        left -= kept[-1]
    return kept


def precision(dtype: str, capabilities: Sequence[str]) -> tuple[str, str]:
    """(weights in the IR, INFERENCE_PRECISION_HINT) for `dtype` on a device that can do `capabilities`.

    float32 is float32 throughout. The 16-bit types keep weights in fp16 and compute in what the device does natively: the type
    itself, else the other 16-bit type, else float32.
    """
    if dtype == "float32":
        return "fp32", "f32"
    native = {"bfloat16": ("BF16", "FP16"), "float16": ("FP16", "BF16")}.get(dtype)
    if native is None:
        raise UserError(f"OpenVINO GenAI runs bfloat16, float16 or float32, got dtype {dtype!r}")
    names = {"BF16": "bf16", "FP16": "f16"}
    return "fp16", next((names[kind] for kind in native if kind in capabilities), "f32")


def end_tokens(folder: Path) -> list[int]:
    """The tokens that end a text: generation_config.json first, then config.json."""
    for name in ("generation_config.json", "config.json"):
        with contextlib.suppress(OSError, ValueError):
            value = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
            if value is not None:
                return [int(token) for token in (value if isinstance(value, list) else [value])]
    return []


def last_line(error: BaseException) -> str:
    """The line of an error that says most: OpenVINO writes where it was thrown first and what is wrong last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]


# ------------------------------------------------------------------------------------------------------------ conversion


def weight_files(folder: Path) -> list[Path]:
    """The weights of a model folder, sorted by name."""
    return sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")])


def content_key(folder: Path, weights: str, dummy: bool) -> str:
    """A name for what the conversion of `folder` gives: its config, its weights, their format and the converter's version."""
    digest = hashlib.blake2b(digest_size=16)
    versions = [_version(package) for package in ("openvino", "optimum-intel")]
    digest.update(json.dumps([CONVERTER, weights, dummy, versions]).encode())
    for file in [folder / "config.json", *([] if dummy else weight_files(folder))]:
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def converted(folder: Path, cache: Path, weights: str, dummy: bool) -> Path:
    """The IR of `folder`, made in `cache` unless it is there. It appears by rename, so what is there is whole."""
    target = cache / f"{content_key(folder, weights, dummy)}-{weights}"
    if (target / "openvino_model.xml").is_file():
        return target
    for module in ("optimum.intel", "torch"):
        with contextlib.suppress(ModuleNotFoundError):
            if importlib.util.find_spec(module) is not None:
                continue
        raise UserError(
            f"{sys.executable} has no {module}, which converts models for OpenVINO; run: archsearch engine install openvino"
        )
    try:
        cache.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=cache, prefix=".building."))
    except OSError as error:
        raise UserError(
            f"cannot write the cache {cache}: {error.strerror or error}; set ARCHSEARCH_CACHE to another folder"
        ) from error
    try:
        _convert(folder, work / "source", work / "ir", weights, dummy)
        stub_tokenizer(work / "ir")
        try:
            (work / "ir").rename(target)
        except OSError:  # another process was first: its copy is as good
            if not (target / "openvino_model.xml").is_file():
                raise
    except (UserError, Failed, MemoryError):
        raise
    except OSError as error:
        raise Failed(f"cannot convert {folder} for OpenVINO: {last_line(error)}") from error
    except Exception as error:
        raise Failed(f"cannot convert {folder} for OpenVINO: {type(error).__name__}: {last_line(error)}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _convert(folder: Path, source: Path, ir: Path, weights: str, dummy: bool) -> None:
    """optimum-intel's export of config and weights alone: tokenizers and generation defaults of a folder must not matter."""
    # A torchvision built for another torch (pip picks one for optimum-intel) breaks the import; language models need none.
    sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    source.mkdir()
    if dummy:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).save_pretrained(source)
    else:
        files = weight_files(folder)
        if not files:
            raise UserError(f"no weights in {folder}; train the model first, or give a folder with model.safetensors")
        indices = [file for file in folder.glob("*.index.json") if not file.name.startswith("openvino")]
        for file in [folder / "config.json", *files, *indices]:
            (source / file.name).symlink_to(file.resolve())
    main_export(
        str(source),
        str(ir),
        task="text-generation-with-past",
        ov_config=OVConfig(dtype=weights),
        convert_tokenizer=False,
        local_files_only=True,
        library_name="transformers",
        stateful=True,
    )


def stub_tokenizer(folder: Path) -> None:
    """A tokenizer that answers token 0 to everything. OpenVINO GenAI insists on one, and on equal ones for target and draft; all
    that is asked here is token ids."""
    import numpy as np
    import openvino as ov
    from openvino import opset13 as op

    text = op.parameter([-1], ov.Type.string, name="text")
    shape = op.concat([op.shape_of(text, output_type="i64"), op.constant(np.array([1], np.int64))], 0)
    ids = op.broadcast(op.constant(np.array(0, np.int64)), shape)
    mask = op.broadcast(op.constant(np.array(1, np.int64)), shape)
    ids.output(0).set_names({"input_ids"})
    mask.output(0).set_names({"attention_mask"})
    model = ov.Model([op.result(ids), op.result(mask)], [text], "tokenizer")
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        model.set_rt_info(0, name)
    ov.save_model(model, str(folder / "openvino_tokenizer.xml"))


def model_folder(source: str) -> Path:
    """`source` as a folder: itself, or the hub's copy of a model id."""
    if Path(source).is_dir():
        return Path(source)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(source, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:
        raise UserError(f"no folder {source}, and the hub does not give it: {last_line(error)}") from error


# ---------------------------------------------------------------------------------------------------------------- worker


class Request:
    """One prompt on its way: its tokens and the steps in which they came. Times are time.perf_counter() seconds."""

    def __init__(self, prompt: dict[str, Any], handle: Any, admitted: float) -> None:
        self.prompt_id, self.prompt, self.handle, self.admitted = prompt["id"], len(prompt["token_ids"]), handle, admitted
        self.token_ids: list[int] = []
        self.lengths: list[int] = []
        self.times: list[float] = []
        self.steps: list[int] = []


class Worker:
    """One started engine and its answers."""

    def __init__(self) -> None:
        self.pipeline: Any = None
        self.logits_model: Any = None
        self.gamma = 0
        self.ends: list[int] = []
        self.told: dict[str, Any] = {}
        self.request_number = 0

    def versions(self, _: dict[str, Any]) -> dict[str, Any]:
        found = {package: _version(package) for package in PACKAGES}
        if found["openvino-genai"] is None:
            raise UserError(f"{sys.executable} has no openvino-genai; run: archsearch engine install openvino")
        return {"version": found["openvino-genai"], "packages": found, **self.told}

    def start(self, request: dict[str, Any]) -> dict[str, Any]:
        self.versions(request)
        import openvino as ov
        import openvino_genai as genai

        core = ov.Core()
        weights, hint = precision(request["dtype"], core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"))
        cache, dummy = Path(request["cache"]), request["dummy_weights"]
        target = model_folder(request["target"])
        sources = [target] if request["draft"] is None else [target, model_folder(request["draft"])]
        started = time.perf_counter()
        folders = [str(converted(folder, cache, weights, dummy)) for folder in sources]
        converted_s = time.perf_counter() - started
        self.gamma, self.ends = (request["gamma"] if len(sources) == 2 else 0), end_tokens(target)
        # The KV cache holds the same type as the computation: OpenVINO's own default is 8 bits, which changes the text.
        properties: dict[str, Any] = {"INFERENCE_PRECISION_HINT": hint, "KV_CACHE_PRECISION": hint}
        if request.get("threads"):
            properties["INFERENCE_NUM_THREADS"] = int(request["threads"])
        self.concurrency, self.max_len = request["concurrency"], request["max_len"]
        scheduler = genai.SchedulerConfig()
        longest = self.max_len + self.gamma + 1
        scheduler.cache_size = 0
        scheduler.num_kv_blocks = self.concurrency * (longest // KV_BLOCK + 2)
        scheduler.max_num_batched_tokens = self.concurrency * longest  # no prompt is cut into pieces
        scheduler.max_num_seqs = max(self.concurrency, 1)
        scheduler.enable_prefix_caching = False
        helped = {} if not self.gamma else {"draft_model": genai.draft_model(folders[1], "CPU", **properties)}
        with openvino_errors("cannot load the models"):
            self.pipeline = genai.ContinuousBatchingPipeline(folders[0], scheduler, "CPU", {**properties, **helped})
            self.core, self.properties, self.target_ir, self.logits_model = core, properties, folders[0], None
            # The first steps are slow, and the draft's counters only begin to note empty steps after a first one.
            self.single({"id": "", "token_ids": [0, 0]}, self.config(self.gamma + 3, 0.0, 0, []), self.gamma + 3, True)
        self.told = {
            "weights": weights,
            "inference_precision": hint,
            "kv_cache_precision": hint,
            "device": core.get_property("CPU", "FULL_DEVICE_NAME"),
            "converted_s": converted_s,
        }
        return self.versions(request)

    def config(self, max_new_tokens: int, temperature: float, seed: int, ends: Sequence[int]) -> Any:
        import openvino_genai as genai

        config = genai.GenerationConfig()
        config.max_new_tokens = max_new_tokens
        config.do_sample = temperature > 0
        config.rng_seed = seed % 2**63
        if temperature > 0:
            config.temperature = temperature
        config.ignore_eos = not ends
        # Where nothing is set the model's own end token is taken, and the draft would stop at it whatever ignore_eos says.
        config.stop_token_ids, config.eos_token_id = set(ends or [NO_TOKEN]), (ends or [NO_TOKEN])[0]
        if self.gamma:
            config.num_assistant_tokens = self.gamma
            config.assistant_confidence_threshold = 0.0  # above 0 the draft would decide for itself when to stop
        return config

    def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        limit = request["max_new_tokens"]
        arguments = (limit, request["temperature"], request["seed"])
        prompts, ignore_end = request["prompts"], request["ignore_end"] or not self.ends
        with openvino_errors("generation failed"):
            if self.concurrency == 1 or len(prompts) == 1:
                pairs = [self.single(prompt, self.config(*arguments, []), limit, ignore_end) for prompt in prompts]
                return {"results": [pair[0] for pair in pairs], "steps": [step for pair in pairs for step in pair[1]]}
            return self.together(prompts, self.config(*arguments, [] if ignore_end else self.ends), limit)

    def stopper(self) -> Any:
        """A streamer that stops a request at an end token and keeps what it saw in `written`."""
        import openvino_genai as genai

        ends, go, stop = frozenset(self.ends), genai.StreamingStatus.RUNNING, genai.StreamingStatus.STOP

        class Stopper(genai.StreamerBase):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.written: list[int] = []

            def write(self, token: Any) -> Any:
                tokens = token if isinstance(token, list) else [token]
                self.written += tokens
                return stop if any(one in ends for one in tokens) else go

            def end(self) -> None:
                pass

        return Stopper()

    def tensor(self, token_ids: Sequence[int]) -> Any:
        import numpy as np
        import openvino as ov

        return ov.Tensor(np.array([list(token_ids)], np.int64))

    def single(
        self, prompt: dict[str, Any], config: Any, limit: int, ignore_end: bool
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """One request through `generate`, whose metrics tell the seconds of every pass of target and draft.

        The engine does not know the end tokens: a draft that proposes one would stop drafting there, and gamma would not be what
        was asked. A streamer stops the request instead.
        """
        tensor = self.tensor(prompt["token_ids"])
        streamer = None if ignore_end else self.stopper()
        started = time.perf_counter()
        (answer,) = self.pipeline.generate([tensor], [config], streamer)
        seconds = time.perf_counter() - started
        written = list(answer.m_generation_ids[0]) if answer.m_generation_ids else []
        if streamer is not None and streamer.written[: len(written)] == written:
            written = streamer.written  # a stopped answer lacks its last tokens
        if not written:
            raise Failed(
                f"no token was written for prompt {prompt['id']!r} of {len(prompt['token_ids'])} tokens (KV cache full?)"
            )
        raw = (answer.extended_perf_metrics if self.gamma else answer.perf_metrics).raw_metrics
        sizes, times = list(raw.m_batch_sizes), [time_ms / 1e3 for time_ms in raw.m_new_token_times]
        end = 0 if ignore_end else next((n for n, token in enumerate(written, 1) if token in self.ends), 0)
        if (sum(sizes) < end if end else sum(sizes) != len(written)) or len(times) != len(sizes):
            raise Failed(f"OpenVINO GenAI counted {sum(sizes)} tokens in {len(times)} steps but wrote {len(written)}")
        token_ids = written[:end] if end else written
        lengths = trimmed(sizes, len(token_ids))
        arrivals = times[: len(lengths)]
        seconds -= times[-1] - arrivals[-1]  # rounds behind the end, until it was noticed, are no part of the answer
        result = self.result(prompt["id"], token_ids, lengths, arrivals, seconds, limit, end > 0)
        first = seconds - (arrivals[-1] - arrivals[0])
        walls = [first, *(b - a for a, b in pairs_of(arrivals))]
        if self.gamma:
            metrics = answer.extended_perf_metrics
            targets = [value / 1e6 for value in metrics.main_model_metrics.raw_metrics.m_durations]
            drafts = [value / 1e6 for value in metrics.draft_model_metrics.raw_metrics.m_durations]
            passes = draft_passes(drafts, sizes, self.gamma, limit)
        else:
            forwards = list(raw.token_infer_durations)
            targets = [value / 1e6 for value in forwards] if len(forwards) >= len(lengths) else []
            passes = None
        steps: list[dict[str, Any]] = []
        written_before = 0
        prompt_tokens = len(prompt["token_ids"])
        for index, length in enumerate(lengths):
            wanted = asked(written_before, self.gamma, limit) if index else 0
            row = passes[index] if passes is not None else []
            whole = index > 1 and lengths[index - 1] == self.gamma + 1
            steps.append(
                {
                    "batch": 1,
                    "written": length,
                    "seconds": walls[index],
                    "gamma": wanted,
                    "target_tokens": prompt_tokens if index == 0 else wanted + 1,
                    "target_s": targets[index] if index < len(targets) else None,
                    "draft_s": row,
                    "draft_tokens": draft_pass_tokens(len(row), index == 1, prompt_tokens, whole),
                    "prefill": index == 0 or (index == 1 and self.gamma > 0),  # the draft reads the prompt in its first round
                    "context": float(prompt_tokens + written_before) if index else 0.0,
                }
            )
            written_before += length
        return result, steps

    def result(
        self,
        prompt_id: str,
        token_ids: list[int],
        lengths: list[int],
        arrivals: list[float],
        seconds: float,
        limit: int,
        ended: bool,
    ) -> dict[str, Any]:
        """With a draft the first hand-over ends with the first round: the draft reads the prompt in it."""
        merged = 2 if self.gamma and len(lengths) > 1 else 1
        kept = arrivals[merged - 1 :]
        decode = kept[-1] - kept[0]
        whole = whole_rounds(lengths, self.gamma, limit, ended) if self.gamma else []
        return {
            "prompt_id": prompt_id,
            "token_ids": token_ids,
            "seconds": seconds,
            "first_s": seconds - decode,
            "decode_seconds": decode,
            "decode_tokens": len(token_ids) - sum(lengths[:merged]),
            "rounds": len(whole),
            "drafted": self.gamma * len(whole),
            "accepted_by_position": [sum(length > position + 1 for length in whole) for position in range(self.gamma)],
            "round_lengths": whole,
            "gaps_s": [b - a for a, b in pairs_of(kept)],
        }

    def together(self, prompts: Sequence[dict[str, Any]], config: Any, limit: int) -> dict[str, Any]:
        """Many requests at once, step by step: which request wrote how many tokens in which step, and how long the step took.

        Here the engine knows the end tokens, so that a request leaves the batch at once. A draft that proposes one stops drafting
        there; what the round writes is the same, because the target refuses the token or the text ends.
        """
        waiting = list(prompts)
        active: list[Request] = []
        done: list[Request] = []
        steps: list[dict[str, Any]] = []
        while waiting or active:
            while waiting and len(active) < self.concurrency:
                prompt = waiting.pop(0)
                self.request_number += 1
                admitted = time.perf_counter()
                handle = self.pipeline.add_request(self.request_number, self.tensor(prompt["token_ids"]), config)
                active.append(Request(prompt, handle, admitted))
            before = time.perf_counter()
            self.pipeline.step()
            after = time.perf_counter()
            step: dict[str, Any] = {"batch": 0, "written": 0, "seconds": after - before, "gamma": 0, "target_tokens": 0}
            step |= {"target_s": None, "draft_s": [], "draft_tokens": [], "prefill": False, "context": 0.0}
            for request in active:
                new: list[int] = []
                while request.handle.can_read():
                    for output in request.handle.read().values():
                        new += output.generated_ids
                if not new:
                    continue
                first = not request.lengths
                wanted = 0 if first else asked(len(request.token_ids), self.gamma, limit)
                step["batch"] += 1
                step["written"] += len(new)
                step["gamma"] = max(step["gamma"], wanted)
                step["target_tokens"] += request.prompt if first else wanted + 1
                step["prefill"] |= first or (self.gamma > 0 and len(request.lengths) == 1)
                step["context"] += 0 if first else request.prompt + len(request.token_ids)
                request.token_ids += new
                request.lengths.append(len(new))
                request.times.append(after)
                request.steps.append(len(steps))
            if not step["batch"]:
                raise Failed(f"a step of {len(active)} requests wrote nothing (KV cache full?); lower --concurrency or --max-len")
            step["context"] /= step["batch"]
            steps.append(step)
            running = [request for request in active if str(request.handle.get_status()).endswith("RUNNING")]
            done += [request for request in active if request not in running]
            active = running
        results = {}
        for request in done:
            self.target_seconds(request, steps)
            ended = request.token_ids[-1] in config.stop_token_ids
            seconds = request.times[-1] - request.admitted
            results[request.prompt_id] = self.result(
                request.prompt_id, request.token_ids, request.lengths, request.times, seconds, limit, ended
            )
        return {"results": [results[prompt["id"]] for prompt in prompts], "steps": steps}

    def target_seconds(self, request: Request, steps: list[dict[str, Any]]) -> None:
        """Note the seconds of the target's passes that a finished request knows: each token has its share of its pass."""
        raw = request.handle.get_perf_metrics().raw_metrics
        sizes, shares = list(raw.m_batch_sizes), list(raw.token_infer_durations)
        if sum(sizes) != len(shares) or len(sizes) < len(request.steps):
            return
        position = 0
        for index, size in zip(request.steps, sizes, strict=False):
            steps[index]["target_s"] = sum(shares[position : position + size]) / 1e6
            position += size

    def logits(self, request: dict[str, Any]) -> dict[str, Any]:
        """The target's logits after `token_ids`: one pass of the same weights at the same precision, outside the pipeline."""
        import numpy as np

        if self.logits_model is None:
            plain = {name: value for name, value in self.properties.items() if name != "KV_CACHE_PRECISION"}
            self.logits_model = self.core.compile_model(
                self.target_ir + "/openvino_model.xml",
                "CPU",
                {**plain, "KV_CACHE_PRECISION": self.properties["KV_CACHE_PRECISION"]},
            ).create_infer_request()
        ids = np.array([request["token_ids"]], np.int64)
        inputs = {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "position_ids": np.arange(ids.shape[1], dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        self.logits_model.reset_state()
        with openvino_errors("the target's pass failed"):
            output = self.logits_model.infer(inputs)
        row = next(iter(output.values()))[0, -1]
        return {"logits": [float(row[token]) for token in request["candidates"]]}

    def stop(self, _: dict[str, Any]) -> dict[str, Any]:
        self.pipeline = self.logits_model = None
        return {}


def pairs_of(values: Sequence[float]) -> list[tuple[float, float]]:
    """Neighbours: (first, second), (second, third), ..."""
    return list(zip(values[:-1], values[1:], strict=True))


@contextlib.contextmanager
def openvino_errors(what: str) -> Iterator[None]:
    """OpenVINO throws RuntimeErrors of many lines; the last one says what is wrong."""
    try:
        yield
    except RuntimeError as error:
        line = last_line(error)
        if "allocate" in str(error).lower() or "out of memory" in str(error).lower():
            raise MemoryError(line) from error
        raise Failed(f"{what}: {line}") from error


def main() -> None:
    """Serve one parent until it closes our stdin."""
    answers = claim_stdout()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    worker = Worker()
    serve(
        {
            "versions": worker.versions,
            "start": worker.start,
            "generate": worker.generate,
            "logits": worker.logits,
            "stop": worker.stop,
        },
        answers,
    )


if __name__ == "__main__":
    main()
