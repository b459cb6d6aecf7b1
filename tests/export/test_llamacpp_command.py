"""The command that an export prints for llama.cpp, as it is printed (slow, in llama.cpp's own
environment): its flags by llama.cpp's parser, its files in llama.cpp's server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import urllib.request
from pathlib import Path

import pytest

from archsearch.architecture.hf_config import from_hf_config
from archsearch.engines.engine import EnginePrompt, EngineSettings, Sampling
from archsearch.engines.environments.environment import find_python
from archsearch.engines.llamacpp.engine import LlamaCppEngine, gguf_of
from archsearch.export.card import ExportSource, ExportTarget
from archsearch.export.folder import export
from archsearch.models.drafts import build_draft, save_draft
from archsearch.training.heads.eagle3 import initialise_eagle3
from archsearch.training.heads.folder import eagle3_config, save_eagle3, target_facts
from tests.engines.vllm.test_vllm_heads import AUX, engine_here, make_target

LLAMA_SERVER = """#!{python}
# The package has no llama-server, but all that makes one: the parser of its flags and the server.
import ctypes, pathlib, sys
import xllamacpp as llama

library = ctypes.CDLL(str(next(pathlib.Path(llama.__file__).parent.glob("xllamacpp*.so"))))
parse = library._Z19common_params_parseiPPcR13common_params13llama_examplePFviS0_E
pointer = ctypes.c_void_p
parse.restype, parse.argtypes = ctypes.c_bool, [ctypes.c_int, pointer, pointer, ctypes.c_int, pointer]
words = [word.encode() for word in [*sys.argv, "--port", "0"]]  # --port is the server's alone
given = (ctypes.c_char_p * (len(words) + 1))(*words, None)
params = llama.CommonParams()  # holds the C++ struct behind Python's two words of an object
at = id(params) + 16
if not any(parse(len(words), ctypes.addressof(given), at, kind, None) for kind in range(3, 13)):
    sys.exit("llama.cpp does not take " + " ".join(sys.argv))
server = llama.Server(params)
print("listening at", server.listening_address, flush=True)
sys.stdin.read()
"""


def printed(folder: Path) -> str:
    """The command of a model card."""
    blocks = re.findall(r"```\w*\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    return next(block for block in blocks if block.startswith("llama-server"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "q8_0"])
@pytest.mark.parametrize("family", ["independent", "eagle3"])
def test_the_printed_commands_serve_the_targets_text(
    family: str, dtype: str, tmp_path: Path
) -> None:
    engine_here("llama.cpp")
    model = make_target(tmp_path / "target")
    arch = from_hf_config(model.config.to_dict())
    if family == "eagle3":
        decoder = eagle3_config(arch.replace(num_hidden_layers=1), model)
        head = initialise_eagle3(model, decoder, AUX, tuple(range(arch.vocab_size)))
        save_eagle3(head, tmp_path / "draft", target_facts(arch, "tiny"))
    else:
        save_draft(build_draft(arch.replace(num_hidden_layers=1)), tmp_path / "draft")
    target = gguf_of(tmp_path / "target", "float16", into=tmp_path)
    source = ExportSource(
        tmp_path / "draft", 3, target=ExportTarget("mine", gguf=target), gguf_dtype=dtype
    )
    command = printed(export(source, tmp_path / "out", ["llama.cpp"]))
    script = tmp_path / "bin" / "llama-server"
    script.parent.mkdir()
    script.write_text(LLAMA_SERVER.format(python=find_python("llama.cpp")))
    script.chmod(0o755)
    prompt = tuple(range(1, 13))
    engine = LlamaCppEngine(EngineSettings(dtype="float16", max_len=64, threads=1))
    engine.start(target, None, 0)
    try:
        alone = engine.generate([EnginePrompt("p", prompt)], Sampling(24, ignore_end=True))
    finally:
        engine.stop()

    def served(command: str) -> str:
        """What the server answers, or why it did not start."""
        path = f"{script.parent}{os.pathsep}{os.environ['PATH']}"
        with subprocess.Popen(
            ["bash", "-c", command],
            env={**os.environ, "PATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as server:
            assert server.stdout is not None and server.stdin is not None
            lines = (re.search(r"listening at (\S+)", line) for line in server.stdout)
            at = next(filter(None, lines), None)
            if at is None:
                return ""
            asked = {"prompt": prompt, "n_predict": 24, "temperature": 0, "top_k": 1}
            body = json.dumps(asked | {"ignore_eos": True, "return_tokens": True}).encode()
            request = urllib.request.Request(
                f"{at[1]}/completion", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=120) as answer:
                found = answer.read().decode()
            server.kill()
            return found

    card = (tmp_path / "out" / "README.md").read_text()
    (chain,) = re.findall(r"`(--spec-type ngram-simple,[^`]+)`", " ".join(card.split()))
    with_lookup = re.sub(r"--spec-type \S+", chain, command)
    assert with_lookup != command
    for each in (command, with_lookup):
        answer = json.loads(served(each))
        assert tuple(answer["tokens"]) == alone[0].token_ids
        assert answer["timings"]["draft_n"] > 0
    assert served(command.replace("--spec-draft-n-max", "--spec-draft-most")) == ""
