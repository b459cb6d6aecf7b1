"""More text or more training: where the minutes of the last rung go, decided by the speeds that
were measured."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from archsearch.architecture.architecture import Architecture
from archsearch.progress import human_time, say
from archsearch.runs.state import FinalistsEntry, TextEntry
from archsearch.training.data_plan import Split, best_split, split_at

if TYPE_CHECKING:
    from archsearch.pipeline.climb.climb import Climb

LEAST_WRITING_S: Final = 15.0
LEAST_MORE: Final = (
    1.03  # times the new tokens that training alone is worth: what writing must promise
)


def split_minutes(climb: Climb, shape: Architecture, seconds: float) -> Split:
    """How `seconds` are divided between text and the training of `shape`."""
    trainer, speed = climb.trainer, climb.costs.speed(shape)
    there = {"epoch_tokens": float(trainer.text_tokens()), "tokens": float(trainer.spent(shape)[0])}
    supplies = trainer.supplies() if seconds > LEAST_WRITING_S else []
    best = best_split(seconds, supplies, speed, **there)
    alone = split_at(0.0, seconds, supplies, speed, **there)
    return (
        best
        if best.text_s >= LEAST_WRITING_S and best.effective > LEAST_MORE * alone.effective
        else alone
    )


def write_more(climb: Climb, entry: FinalistsEntry, split: Split) -> bool:
    """Write text for the `split`'s seconds; True where there is more than before. What a killed
    process had begun goes on."""
    file, trainer = climb.file, climb.trainer
    if entry.writing is None:
        if split.text_s <= 0:
            return False
        entry.writing = TextEntry(file.elapsed_s() + split.text_s, trainer.text_tokens())
        file.save()
        say(
            f"more text first, about {human_time(split.text_s)}: {split.epoch_tokens:.0f} tokens a"
            f" pass instead of {trainer.text_tokens()} teach more than further epochs"
        )
    start, before = file.clock(), entry.writing.before
    trainer.grow(max(0.0, entry.writing.ends_at_s - file.elapsed_s()))
    entry.texts = (*entry.texts, replace(entry.writing, after=trainer.text_tokens()))
    entry.writing = None
    file.step("more text", file.clock() - start)
    return trainer.text_tokens() > before
