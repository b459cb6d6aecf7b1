"""Prompts to train on and prompts kept apart to measure on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from archsearch.errors import ArchsearchError
from archsearch.paths import package_dir

if TYPE_CHECKING:
    from archsearch.text.prompts import Prompt


HELDOUT_SHARE: Final = 0.05


@dataclass(frozen=True)
class PromptSet:
    """Prompts to train on and prompts kept apart to measure on."""

    train: list[Prompt]
    heldout: list[Prompt]
    source: str

    def check_apart(self) -> None:
        """Raise ArchsearchError where a prompt stands on both sides: what is measured on it would flatter the draft."""
        both = {prompt.text for prompt in self.heldout} & {prompt.text for prompt in self.train}
        if both:
            raise ArchsearchError(
                f"{len(both)} prompts are in both the training and the held-out file (one: {min(both)[:60]!r}); "
                "remove them from one"
            )


def load_prompt_set(prompts: Path | None, heldout: Path | None) -> PromptSet:
    """The user's prompts, or the demo's own where none are given. Without a held-out file every 20th prompt is held out."""
    from archsearch.text.prompts import read_prompts

    if prompts is None:
        folder = package_dir() / "demo"
        return PromptSet(
            read_prompts(folder / "train_prompts.jsonl"),
            read_prompts(heldout or folder / "heldout_prompts.jsonl"),
            "the prompts that ship with archsearch (customer requests to a shop and a travel agency)",
        )
    everything = read_prompts(prompts)
    if heldout is not None:
        return PromptSet(everything, read_prompts(heldout), f"{prompts}, held out: {heldout}")
    step = max(2, round(1 / HELDOUT_SHARE))
    if len(everything) < 2 * step:
        step = 4
    if len(everything) < 8:
        raise ArchsearchError(f"{prompts} has {len(everything)} prompts; give at least 8, or a second file with --heldout")
    kept = [prompt for number, prompt in enumerate(everything) if number % step]
    return PromptSet(kept, everything[::step], f"{prompts}, every {step}th prompt held out")
