"""Passes of several models in llama.cpp, in turn; runs in llama.cpp's own interpreter (see
llamacpp_passes.py).

    python llamacpp_turns.py ASK.json ANSWER.json

ASK: `folders` (of archsearch's workers), `files` (GGUFs, the target first), `seconds`, `contexts`,
`gammas`. ANSWER: for each round the number of its draft, gamma, context, and seconds of its passes:
the draft's of one token, the target's over gamma + 1, the draft's over the same.

Seconds are those of this thread's processor, so that who else runs on the core counts little.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

ask = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
sys.path[:0] = ask["folders"]

import passes  # noqa: E402
import xllamacpp  # noqa: E402

passes.time.perf_counter = time.thread_time
ends = time.monotonic() + ask["seconds"]
functions = passes.library(str(next(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so"))))
target, *drafts = (passes.Model(functions, path, 512, 1) for path in ask["files"])
chance, rounds = random.Random(1), []
ids = [chance.randrange(10, 1000) for _ in range(512)]
pairs = [(draft, gamma) for draft in range(len(drafts)) for gamma in ask["gammas"]]
sweep = 0
while time.monotonic() < ends:
    at = ask["contexts"][sweep % len(ask["contexts"])]
    for number, gamma in chance.sample(pairs, len(pairs)):
        if time.monotonic() > ends:
            break
        draft, tokens = drafts[number], ids[: gamma + 1]
        draft.fill(ids, at)
        draft.pass_s(tokens[:1], at, True)  # into the cache: another model ran
        singles = [draft.pass_s(tokens[k : k + 1], at + k, True) for k in range(gamma)]
        target.fill(ids, at)
        verify = target.pass_s(tokens, at, True)
        behind = draft.pass_s(tokens, at, False)
        plain = target.pass_s(tokens[:1], at, True) if gamma == 1 else None
        rounds.append((number, gamma, at, singles, verify, behind, plain))
    sweep += 1
Path(sys.argv[2]).write_text(json.dumps(rounds), encoding="utf-8")
os._exit(0)  # the library's own end takes its time
