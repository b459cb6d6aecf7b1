"""vLLM itself reads an export: its config classes take the speculative config and schedule, and it
serves with the draft."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from archsearch.architecture.architecture import Architecture
from archsearch.engines.environments.environment import find_python
from archsearch.errors import ArchsearchError
from archsearch.export.card import ExportSource, ExportTarget
from archsearch.export.folder import export
from archsearch.models.drafts import build_draft, save_draft
from archsearch.schedule import GammaSchedule

pytestmark = pytest.mark.slow

ARCH = Architecture(
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=512,
    max_position_embeddings=256,
)
RANGES = ((1, 1, 3), (2, 4, 1), (5, 64, 0))

PROGRAM = """
import json, sys

def main():
    command, target = json.loads(sys.argv[1]), sys.argv[2]
    speculative = json.loads(command[command.index("--speculative-config") + 1])
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    common = dict(model=target, dtype="float32", max_model_len=128, enforce_eager=True, skip_tokenizer_init=True,
                  max_num_seqs=8, disable_log_stats=False)
    found = EngineArgs(**common, speculative_config=speculative).create_engine_config().speculative_config
    lookup = build_dynamic_sd_schedule_lookup(
        [list(entry) for entry in found.num_speculative_tokens_per_batch_size], 128, found.num_speculative_tokens)
    answer = {"method": found.method, "gamma": found.num_speculative_tokens, "tp": found.draft_tensor_parallel_size,
              "lookup": lookup}
    prompt, sampling = {"prompt_token_ids": [3, 5, 7, 11]}, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True,
                                                                           detokenize=False)
    texts = []
    for config in (None, speculative):
        llm = LLM(**common, speculative_config=config)
        texts.append(list(llm.generate(prompt, sampling)[0].outputs[0].token_ids))
        counts = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
        llm.llm_engine.engine_core.shutdown()
    answer["same"] = texts[0] == texts[1]
    answer["tokens"] = len(texts[1])
    answer["drafted_a_round"] = counts["vllm:spec_decode_num_draft_tokens"] / counts["vllm:spec_decode_num_drafts"]
    print("ANSWER " + json.dumps(answer))

if __name__ == "__main__":
    main()
"""


def test_vllm_reads_and_serves_an_export(tmp_path: Path) -> None:
    try:
        python = find_python("vllm")
    except ArchsearchError as error:
        pytest.skip(str(error))
    torch.manual_seed(0)
    target, draft = tmp_path / "target", tmp_path / "draft"
    save_draft(build_draft(ARCH.replace(num_hidden_layers=2), torch.float32), target)
    save_draft(build_draft(ARCH, torch.float32), draft)
    output = export(
        ExportSource(draft, 2, GammaSchedule(RANGES), ExportTarget(str(target)), dtype="float32"),
        tmp_path / "out",
        ["vllm"],
    )
    command = json.loads((output / "export.json").read_text())["commands"]["vllm"]
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    done = subprocess.run(
        [python, str(program), json.dumps(command), str(target)],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=300,
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert done.returncode == 0 and answers, done.stderr[-3000:]
    answer = json.loads(answers[-1].removeprefix("ANSWER "))
    assert (answer["method"], answer["gamma"], answer["tp"]) == ("draft_model", 3, 1)
    expected = {batch: gamma for first, last, gamma in RANGES for batch in range(first, last + 1)}
    assert all(answer["lookup"][batch] == gamma for batch, gamma in expected.items())
    assert answer["lookup"][128] == 0, "above the schedule its last gamma goes on"
    assert answer["same"] and answer["tokens"] == 24
    assert answer["drafted_a_round"] == pytest.approx(3.0, abs=0.5), "gamma 3 at batch size 1"
