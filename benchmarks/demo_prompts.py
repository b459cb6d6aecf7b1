"""The demo's prompts: customer requests to a shop and a travel agency, the project's own, made by a
seeded generator.

A narrow service domain is where a small draft pays: requests differ in people, things, places and
numbers, replies share their tone. Nothing asks for constant output. Held-out prompts come in two
kinds, so that one can see what the draft learnt: `seen-template` (fresh people, things and numbers
in a wording that the training prompts use too) and `new-template` (requests of kinds that no
training prompt makes).

    python benchmarks/demo_prompts.py    writes train_ and heldout_prompts.jsonl of archsearch/demo
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from archsearch.files import write_text
from archsearch.paths import PACKAGE

TRAIN_FILE: Final = PACKAGE / "demo" / "train_prompts.jsonl"
HELDOUT_FILE: Final = PACKAGE / "demo" / "heldout_prompts.jsonl"
TRAIN_COUNT: Final = 1500
HELDOUT_COUNT: Final = 60
SEED: Final = 2024

# Of the wordings tried on SmolLM2-135M-Instruct, this one gives replies of 40 to 90 tokens that end
# by themselves.
FRAME: Final = (
    "Customer request: {request} Write a short, polite reply to the customer in two or three"
    " sentences."
)

NAMES: Final = (
    "Ada Ben Carla David Emma Farid Grace Hugo Ines Jack Kira Liam Maria Noah Olga Paul Rosa Sam "
    "Tina Victor Wendy Yusuf Zoe Anna Carlos Julia Leo Mia Oscar Sofia"
).split()
GOODS: Final = (
    "apples, oranges, lemons, notebooks, pencils, candles, cups, plates, books, stickers, "
    "muffins, cookies, lamps, bars of soap, light bulbs, postcards, toy cars, balloons, socks, "
    "flower pots, bags of rice, towels, boxes of tea, jars of honey, headphones, T-shirts, garden "
    "chairs, packs of batteries, blankets, backpacks"
).split(", ")
PLACES: Final = (
    "Lisbon Oslo Rome Vienna Paris Dublin Prague Athens Berlin Madrid Warsaw Geneva Naples Porto "
    "Bergen Hamburg Krakow Valencia Bruges Zagreb"
).split()
VEHICLES: Final = "bus, train, ferry, night train, coach, flight".split(", ")
DAYS: Final = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
COLOURS: Final = "red blue green white black yellow grey brown".split()


@dataclass(frozen=True, slots=True)
class Template:
    """One kind of request; the fields in braces are drawn afresh for every prompt."""

    name: str
    topic: str
    text: str

    def fill(self, rng: random.Random) -> str:
        """The whole prompt: {a} counts things (2 to 24), {b} is an amount or number (25 to 499)."""
        request = self.text.format(
            name=rng.choice(NAMES),
            goods=rng.choice(GOODS),
            place=rng.choice(PLACES),
            vehicle=rng.choice(VEHICLES),
            day=rng.choice(DAYS),
            colour=rng.choice(COLOURS),
            a=rng.randint(2, 24),
            b=rng.randint(25, 499),
        )
        return FRAME.format(request=request)


def _templates(table: str) -> tuple[Template, ...]:
    return tuple(Template(*line.split(" | ")) for line in table.strip().splitlines())


TRAIN_TEMPLATES: Final = _templates(
    """
arrival | shop | {name} ordered {a} {goods} on {day} and asks when they will arrive.
damaged | shop | {name} received {a} {goods} that are damaged and wants a new delivery.
send-back | shop | {name} wants to send back {a} {goods} and asks how to do it.
stock | shop | {name} wants to know if {colour} {goods} are in stock.
address | shop | {name} asks to change the delivery address for an order of {a} {goods}.
discount | shop | {name} asks for a discount on {a} {goods}.
wrong-colour | shop | {name} ordered {colour} {goods} but got another colour.
missing | shop | {name} paid for {a} {goods}, but some of them are missing in the parcel.
cancel-order | shop | {name} wants to cancel the order of {a} {goods} placed on {day}.
twice | shop | {name} was charged twice for {goods} and wants {b} dollars back.
voucher | shop | {name} has a gift voucher of {b} dollars and asks how to use it for {goods}.
hours | shop | {name} asks if the shop is open on {day} and sells {goods}.
gift-wrap | shop | {name} wants {a} {goods} wrapped as a gift.
invoice | shop | {name} needs an invoice for {a} {goods} bought on {day}.
pick-up | shop | {name} wants to pick up {a} {goods} in the shop on {day}.
late | shop | {name} complains that the {goods} ordered on {day} are late.
thanks | shop | {name} is very happy with the {goods} and thanks the team.
missed | travel | {name} missed the {vehicle} to {place} on {day} and asks for a refund.
seats | travel | {name} wants to book {a} seats on the {vehicle} to {place}.
luggage | travel | {name} asks how much luggage is allowed on the {vehicle} to {place}.
change-day | travel | {name} wants to move the trip to {place} to {day}.
lost-bag | travel | {name} lost a {colour} bag on the {vehicle} to {place}.
price | travel | {name} asks for the price of {a} tickets for the {vehicle} to {place}.
hotel | travel | {name} is looking for a hotel in {place} for {a} nights from {day}.
delay | travel | {name} complains that the {vehicle} to {place} was late by {a} hours.
cancel-trip | travel | {name} is ill and has to cancel the trip to {place} on {day}.
group | travel | {name} plans a trip to {place} for a group of {a} people.
breakfast | travel | {name} asks if breakfast is included in the hotel in {place}.
departure | travel | {name} asks when the {vehicle} to {place} leaves on {day}.
advice | travel | {name} asks what to see in {place} on {day}.
"""
)

NEW_TEMPLATES: Final = _templates(
    """
allergy | shop | {name} asks what the {goods} are made of.
repair | shop | {name} bought {goods} for {b} dollars that no longer work and asks for a repair.
newsletter | shop | {name} no longer wants to get emails about {goods}.
bicycle | travel | {name} asks if a {colour} bicycle may be taken on the {vehicle} to {place}.
upgrade | travel | {name} would like a larger room with a view in {place} for {a} nights.
name-change | travel | {name}'s name is misspelt on the ticket to {place}.
"""
)


def training_prompts(count: int = TRAIN_COUNT, seed: int = SEED) -> list[dict[str, str]]:
    """`count` distinct training prompts, templates in turn; each is {"prompt", "category", "id"}
    with its topic as category."""
    prompts = _distinct(TRAIN_TEMPLATES, count, random.Random(f"train-{seed}"), taken=set())
    return [
        {"prompt": text, "category": t.topic, "id": f"train-{i:04d}-{t.name}"}
        for i, (t, text) in enumerate(prompts)
    ]


def heldout_prompts(
    count: int = HELDOUT_COUNT, seed: int = SEED, train_count: int = TRAIN_COUNT
) -> list[dict[str, str]]:
    """`count` prompts that are not among the training prompts; a third (rounded down) comes from
    templates never trained on."""
    taken = {row["prompt"] for row in training_prompts(train_count, seed)}
    new = count // 3
    rows = [
        (kind, *row)
        for kind, templates, wanted in (
            ("seen-template", TRAIN_TEMPLATES, count - new),
            ("new-template", NEW_TEMPLATES, new),
        )
        for row in _distinct(templates, wanted, random.Random(f"heldout-{kind[:-9]}-{seed}"), taken)
    ]
    # Mixed, so that a run over the first few prompts sees both kinds.
    random.Random(f"heldout-order-{seed}").shuffle(rows)
    return [
        {"prompt": text, "category": kind, "id": f"heldout-{i:03d}-{t.name}"}
        for i, (kind, t, text) in enumerate(rows)
    ]


def write_prompt_files(train_path: Path = TRAIN_FILE, heldout_path: Path = HELDOUT_FILE) -> None:
    """Write both files as JSON lines (atomically)."""
    for path, rows in ((train_path, training_prompts()), (heldout_path, heldout_prompts())):
        write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _distinct(
    templates: tuple[Template, ...], count: int, rng: random.Random, taken: set[str]
) -> list[tuple[Template, str]]:
    """`count` prompts that are not in `taken` (which grows), going through the templates in
    turn."""
    rows: list[tuple[Template, str]] = []
    attempts = 0
    while len(rows) < count:
        # By attempt, not by success: a template whose instances run out must not stop the others.
        template = templates[attempts % len(templates)]
        attempts += 1
        text = template.fill(rng)
        if text not in taken:
            taken.add(text)
            rows.append((template, text))
    return rows


if __name__ == "__main__":
    write_prompt_files()
