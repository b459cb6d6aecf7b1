import json

from benchmarks import demo_prompts as prompts


def test_committed_files_are_what_the_generator_writes(tmp_path):
    train, heldout = tmp_path / "train.jsonl", tmp_path / "heldout.jsonl"
    prompts.write_prompt_files(train, heldout)
    assert train.read_bytes() == prompts.TRAIN_FILE.read_bytes()
    assert heldout.read_bytes() == prompts.HELDOUT_FILE.read_bytes()


def test_training_and_heldout_prompts_are_distinct_and_disjoint():
    train = [json.loads(line) for line in prompts.TRAIN_FILE.read_text().splitlines()]
    heldout = [json.loads(line) for line in prompts.HELDOUT_FILE.read_text().splitlines()]
    texts = [row["prompt"] for row in train + heldout]
    ids = [row["id"] for row in train + heldout]
    assert len(train) == 1500 and len(heldout) == 60
    assert len(set(texts)) == len(texts)
    assert len(set(ids)) == len(ids)
    assert {key for row in train + heldout for key in row} == {"prompt", "category", "id"}


def test_a_third_of_the_heldout_prompts_uses_templates_never_trained_on():
    train = prompts.training_prompts()
    heldout = prompts.heldout_prompts()
    trained_on = {row["id"].split("-", 2)[2] for row in train}
    new = [row for row in heldout if row["category"] == "new-template"]
    seen = [row for row in heldout if row["category"] == "seen-template"]
    assert len(new) == 20 and len(seen) == 40
    assert all(row["id"].split("-", 2)[2] not in trained_on for row in new)
    assert all(row["id"].split("-", 2)[2] in trained_on for row in seen)
    assert {row["category"] for row in heldout[:10]} == {"new-template", "seen-template"}


def test_every_template_leaves_no_field_open_and_the_seed_decides():
    assert not [row for row in prompts.training_prompts(300) if "{" in row["prompt"]]
    assert prompts.training_prompts(40, seed=1) != prompts.training_prompts(40, seed=2)
    # More prompts of the same seed only add to the list, so a smaller demo is a prefix of the
    # larger one.
    assert prompts.training_prompts(40) == prompts.training_prompts(80)[:40]
