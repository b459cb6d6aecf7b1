"""Drive a server with a load: requests at their arrivals, or so many in flight; what was measured,
request by request."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final

from archsearch.engines.openai.client import LOST, Answer, Lost, OpenAIServer
from archsearch.errors import RunFailed
from archsearch.progress import Progress, silent

MOST_IN_FLIGHT: Final = 512
FAILED: Final = 5  # requests in a row that fail before a server is given up


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: when (seconds after the start; None: as soon as one is done), with which prompt,
    how many tokens."""

    arrival_s: float | None
    prompt: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Measured:
    """What a load came to. Seconds; means over requests that were answered."""

    requests: int
    failed: int
    tpot_s: float
    tpot_median_s: float
    ttft_s: float
    ttft_median_s: float
    ttft_p99_s: float
    tokens_per_s: float
    running: float  # requests that were between their first and last token, mean over time
    tokens_per_piece: float  # about tau where a server hands over a round at a time
    prompt_tokens: float
    output_tokens: float


def drive(
    server: OpenAIServer,
    asks: Sequence[Ask],
    answers: list[Answer],
    *,
    in_flight: int | None,
    temperature: float = 0.0,
    kept: Callable[[], None] = lambda: None,
    progress: Progress = silent,
) -> None:
    """Send `asks`; each answer is put into `answers` as it ends, then `kept` is called.
    `in_flight`: at most so many at once.

    A request that fails is an answer with its error. Raises RunFailed after FAILED of them in a
    row. Whatever ends it early (Ctrl-C too), every answer that had come is in `answers`, and the
    others are hung up on.
    """
    stopped, ended = threading.Event(), SimpleQueue[Answer | Exception]()
    model = named_model(server)
    began = time.perf_counter()

    def one(ask: Ask) -> None:
        try:
            if not stopped.is_set():
                answer = server.complete(model, ask.prompt, ask.tokens, temperature, began)
                ended.put(answer)
        except Lost:  # hung up on
            pass
        except Exception as error:
            ended.put(error)

    def send() -> None:
        for ask in asks:
            wait = (ask.arrival_s or 0.0) - (time.perf_counter() - began)
            if stopped.wait(max(0.0, wait)):
                return
            pool.submit(one, ask)

    with ThreadPoolExecutor(
        max_workers=min(in_flight or MOST_IN_FLIGHT, max(1, len(asks)))
    ) as pool:
        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        try:
            _collect(server, len(asks), ended, answers, kept, progress)
        except BaseException:
            stopped.set()
            server.hang_up()
            raise
        finally:
            stopped.set()
            sender.join(timeout=5.0)
            while not ended.empty():  # what had come, but was not taken yet
                if isinstance(answer := ended.get(), Answer):
                    answers.append(answer)


def named_model(server: OpenAIServer) -> str:
    """The model that the server names. Raises RunFailed where nobody answers, ArchsearchError where
    it names none."""
    try:
        return server.model()
    except Lost as error:
        raise RunFailed(
            f"no server answers at {server.url} ({error}); start it, or correct the address"
        ) from error


def _collect(
    server: OpenAIServer,
    asked: int,
    ended: SimpleQueue[Answer | Exception],
    answers: list[Answer],
    kept: Callable[[], None],
    progress: Progress,
) -> None:
    failed = 0
    while len(answers) < asked:
        try:
            answer = ended.get(timeout=0.2)
        except Empty:
            continue
        if isinstance(answer, Exception):
            raise answer
        answers.append(answer)
        kept()
        progress("requests", len(answers), asked)
        failed = failed + 1 if answer.error else 0
        if failed >= FAILED:
            good = sum(not each.error for each in answers)
            if answer.error.startswith(LOST):
                why = answer.error.removeprefix(LOST)
                raise RunFailed(
                    f"the server at {server.url} stopped answering after {good} of {asked}"
                    f" requests ({why})"
                )
            raise RunFailed(
                f"the server at {server.url} refuses requests: {answer.error}; {good} of {asked}"
                " were answered"
            )


def summary(answers: Sequence[Answer]) -> Measured:
    """The figures of a load. Raises RunFailed where no request was answered."""
    good = [answer for answer in answers if not answer.error]
    if not good:
        raise RunFailed(
            f"none of {len(answers)} requests was answered"
            + (f": {answers[0].error}" if answers else "")
        )
    long = [answer.tpot_s for answer in good if answer.tokens > 1] or [0.0]
    ttft = sorted(answer.ttft_s for answer in good)
    span = max(answer.done_s for answer in good) - min(answer.sent_s for answer in good)
    pieces = sum(max(answer.pieces - 1, 0) for answer in good)
    return Measured(
        requests=len(answers),
        failed=len(answers) - len(good),
        tpot_s=statistics.fmean(long),
        tpot_median_s=statistics.median(long),
        ttft_s=statistics.fmean(ttft),
        ttft_median_s=statistics.median(ttft),
        ttft_p99_s=ttft[min(len(ttft) - 1, int(0.99 * len(ttft)))],
        tokens_per_s=sum(answer.tokens for answer in good) / max(span, 1e-9),
        running=sum(answer.done_s - answer.first_s for answer in good) / max(span, 1e-9),
        tokens_per_piece=sum(answer.tokens - 1 for answer in good) / pieces if pieces else 1.0,
        prompt_tokens=statistics.fmean(answer.prompt_tokens for answer in good),
        output_tokens=statistics.fmean(answer.tokens for answer in good),
    )
