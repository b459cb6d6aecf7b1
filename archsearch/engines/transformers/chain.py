"""A candidate generator for transformers: a lookup drafts where it finds something, else the draft
model, which stops where it is unsure: behind that token, or before it.

transformers' own generator changes its confidence threshold as it goes where scikit-learn is
installed (`AssistedCandidateGenerator.update_candidate_strategy`); in a class derived from it the
threshold stays what was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation.candidate_generator import AssistedCandidateGenerator

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from archsearch.acceptance.chain import ChainRule
    from archsearch.acceptance.lookup import Reader


class ChainGenerator(AssistedCandidateGenerator):
    """`reader`: the lookup in the course of this answer, which has read the prompt; None: the draft
    alone. `rule`: what both draft; gamma and threshold are in the draft's own settings as well.
    `drafted`: draft tokens of every round so far."""

    def __init__(
        self, reader: Reader | None, rule: ChainRule, input_ids: Any, **arguments: Any
    ) -> None:
        super().__init__(input_ids=input_ids, **arguments)
        self.reader, self.rule = reader, rule
        self.assistant_kwargs.pop("position_ids", None)  # the prompt's; they follow from the mask
        self.read = int(input_ids.shape[1])
        self.drafted: list[int] = []

    def get_candidates(self, input_ids: Any, **arguments: Any) -> Any:
        # In every round: what the draft added and the target refused leaves the draft's cache while
        # it is the end of it. Tokens of the lookup are read with the draft's next pass.
        self._update_past_and_masks(input_ids)
        # also before it has a cache
        self.assistant_kwargs["attention_mask"] = torch.ones_like(input_ids)
        self.write(input_ids)
        tokens = self._found()
        if tokens:
            more = torch.tensor([tokens], dtype=input_ids.dtype, device=input_ids.device)
            candidates, logits = torch.cat([input_ids, more], dim=1), None
        else:
            candidates, logits = super().get_candidates(input_ids, **arguments)
            if (
                not self.rule.with_last
                and logits is not None
                and logits[0, -1].softmax(-1)[candidates[0, -1]] < self.rule.least
            ):
                candidates, logits = candidates[:, :-1], logits[:, :-1]
                logits = None if logits.shape[1] == 0 else logits
        self.drafted.append(int(candidates.shape[1] - input_ids.shape[1]))
        return candidates, logits

    def write(self, input_ids: Tensor) -> None:
        """The lookup reads the answer so far; after the last round too, where later answers are
        looked up in it."""
        if self.reader is not None:
            for token in input_ids[0, self.read :].tolist():
                self.reader.write(token)
        self.read = int(input_ids.shape[1])

    def _found(self) -> list[int]:
        room = min(self.rule.found, self.main_model_max_length - self.read - 1)
        return self.reader.propose([room])[room] if self.reader is not None and room > 0 else []


@contextmanager
def chained(
    target: PreTrainedModel, reader: Callable[[], Reader] | None, rule: ChainRule
) -> Iterator[list[ChainGenerator]]:
    """For one call of `target.generate` candidates come from a ChainGenerator, which is then in the
    list."""
    made: list[ChainGenerator] = []

    def generator(**arguments: object) -> ChainGenerator:
        for name in ("target_tokenizer", "assistant_tokenizer"):
            arguments.pop(name, None)
        made.append(ChainGenerator(reader() if reader is not None else None, rule, **arguments))
        return made[-1]

    target._get_candidate_generator = generator  # type: ignore[assignment]
    try:
        yield made
    finally:
        del target._get_candidate_generator
