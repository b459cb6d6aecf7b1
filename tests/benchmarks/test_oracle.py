"""The oracle's figures, on rows that are made up: a round costs what the search says, but for one
shape."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import yaml

import oracle
from oracle import GAMMAS, LEVELS, Setup, agenda, believed, judge, steady

SHAPES = ["1x64 ffn128 1h/1kv64 head512", "2x64 ffn128 1h/1kv64 head512"]
SHAPES += ["4x64 ffn128 1h/1kv64 head512", "2x576 ffn1536 9h/3kv64 head49152"]


def made_up(folder: Path, visits: tuple[int, ...] = (1, 101, 102, 103, 104)) -> Setup:
    """Four shapes, of which the second is measured at 0.8 of its predicted cost."""
    (folder / "registered.yaml").write_text(yaml.safe_dump({"shapes": {"smollm2-135m": SHAPES}}))
    setup = Setup("transformers", "smollm2-135m", folder)
    rows, lines = [], []
    for number, label in enumerate(SHAPES):
        for gamma in GAMMAS:
            cost = 1.1 + gamma * 0.05 * (number + 1)
            row = {"shape": label, "gamma": gamma, "parameters": 10**6 * (number + 1)}
            row |= {"alpha": 0.3 + 0.01 * number, "drift": 0.0, "dtype": "bfloat16", "threads": 1}
            rows.append(row | {name: cost for name in ("cost", "kernel_cost", "bytes_cost")})
            seen = cost * (0.8 if number == 1 else 1.0)
            for visit in visits:
                lines.append(
                    {"visit": visit, "shape": label, "gamma": gamma, "plain_s": [1.0, 1.0]}
                    | {"round_s": [seen] * 5}
                )
    pd.DataFrame(rows).to_csv(setup.predicted_file, index=False)
    setup.rows_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return setup


def test_regret_is_the_share_below_the_best_measured(tmp_path: Path) -> None:
    found = judge(made_up(tmp_path), oracle.HEADLINE)
    assert found["picks"]["search, top 1"][0][0] == SHAPES[0]
    assert found["best"]["shape"] == SHAPES[1]
    table = believed(Setup("transformers", "smollm2-135m", tmp_path), oracle.HEADLINE)
    own = max(v for (label, _), v in oracle.beliefs(table).items() if label == SHAPES[0])
    expected = 1.0 - own / found["best"]["speedup"]
    assert found["regret"]["search, top 1"] == pytest.approx(expected)
    assert found["regret"]["search, top 5"] >= 0.0
    assert found["noise"]["regret_of_the_oracle"] == pytest.approx(0.0)
    assert found["points"] == len(SHAPES) * len(GAMMAS)


def test_a_killed_run_goes_on_where_it_stopped_and_ends_with_the_finalists(tmp_path: Path) -> None:
    setup = made_up(tmp_path, visits=(1,))
    lines = setup.rows_file.read_text().splitlines()
    unsteady = json.dumps(json.loads(lines[1]) | {"plain_s": [1.0, 2.0]})
    setup.rows_file.write_text("\n".join([unsteady, *lines[2:]]) + "\n")
    plan = agenda(setup, 1)
    lost, again = json.loads(lines[0]), json.loads(lines[1])
    assert next(plan) == ((lost["shape"], lost["gamma"]), 1)
    with setup.rows_file.open("a") as file:
        file.write(lines[0] + "\n")
    assert next(plan) == ((again["shape"], again["gamma"]), 1)
    assert not steady(json.loads(unsteady))
    with setup.rows_file.open("a") as file:
        file.write(lines[1] + "\n")
    assert next(plan)[1] == 101


def test_what_was_registered_is_whole() -> None:
    for target in ("smollm2-135m", oracle.MADE_UP):
        assert len(Setup("transformers", target).shapes) >= 40
    assert set(LEVELS.values()) == {1.5, 0.0}
