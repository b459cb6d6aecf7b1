"""vLLM under requests that arrive at given times; runs in vLLM's own interpreter (see poisson.py).

    python poisson_worker.py ASK.json ANSWERS.json

ASK: `worker` (folder of archsearch's vllm_worker.py), `start` (what that worker's `start` takes),
`loads` (lists of requests with arrival_s, prompt_tokens, output_tokens), `seed`. ANSWERS: for each
load its requests (seconds after its start) and its steps.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    ask = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.path.insert(0, ask["worker"])
    from vllm_worker import Worker

    worker = Worker()
    told = worker.start(ask["start"])
    chance = random.Random(ask["seed"])
    warm = [{"arrival_s": 0.1 * i, "prompt_tokens": 64, "output_tokens": 24} for i in range(8)]
    run(worker, warm, chance)
    loads = [run(worker, load, chance) for load in ask["loads"]]
    Path(sys.argv[2]).write_text(
        json.dumps({"version": told["version"], "loads": loads}), encoding="utf-8"
    )


def run(worker: Any, load: list[dict[str, Any]], chance: random.Random) -> dict[str, Any]:
    """Serve one load: a step after the other while requests are there, asleep while none is."""
    from synthetic import CHANCES
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    CHANCES.begin(0)
    engine = worker.llm.llm_engine
    prompts = [
        [chance.randrange(100, 1000) for _ in range(request["prompt_tokens"])] for request in load
    ]
    served: dict[str, dict[str, Any]] = {}
    steps: list[list[float]] = []
    waiting = list(enumerate(load))
    began = time.perf_counter()
    while waiting or engine.has_unfinished_requests():
        now = time.perf_counter() - began
        while waiting and waiting[0][1]["arrival_s"] <= now:
            number, request = waiting.pop(0)
            params = SamplingParams(
                max_tokens=request["output_tokens"],
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            worker.calls += 1
            key = f"{worker.calls}-{number}"
            engine.add_request(key, {"prompt_token_ids": prompts[number]}, params)
            served[key] = {**request, "tokens": 0, "first_s": None, "done_s": None}
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, waiting[0][1]["arrival_s"] - (time.perf_counter() - began)))
            continue
        worker.planned.clear()
        started = time.perf_counter()
        outputs = engine.step()
        ended = time.perf_counter() - began
        for output in outputs:
            tokens = len(output.outputs[0].token_ids)
            answer = served[output.request_id]
            if tokens and answer["first_s"] is None:
                answer["first_s"] = ended
            answer["tokens"] += tokens
            answer["done_s"] = ended
        plan = worker.planned[-1] if worker.planned else None
        if plan is not None and plan.total_num_scheduled_tokens:
            new = sum(plan.num_scheduled_tokens[each.req_id] for each in plan.scheduled_new_reqs)
            steps.append(
                [
                    round(started - began, 6),
                    round(ended, 6),
                    len(plan.num_scheduled_tokens),
                    plan.total_num_scheduled_tokens,
                    len(plan.scheduled_new_reqs),
                    new,
                ]
            )
    return {"requests": list(served.values()), "steps": steps}


if __name__ == "__main__":
    main()
