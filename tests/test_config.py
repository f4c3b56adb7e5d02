"""Settings: what is refused, what numbers mean, what is written back."""

from pathlib import Path

import pytest

from spectrain.config import (
    PrepareConfig,
    Recipe,
    RegenerateConfig,
    Suite,
    TrainingConfig,
    dump_yaml,
    load_config,
    override,
    parse_yaml,
    validate,
)

RECIPE = """
name: x
target: {name: tiny}
data: {answers: {prompts: p.jsonl, file: a.jsonl, mix: {chat: 3}}}
training:
  lr: 1e-4
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE)
    return path


def test_rate_arrives_as_text(recipe: Path) -> None:
    """UX1."""
    assert load_config(Recipe, recipe).training.lr == 0.0001
    assert load_config(Recipe, recipe, ["training.lr=3e-5"]).training.lr == 3e-5


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4), ("1E5", 1e5), ("2.5e3", 2500.0), ("-1e-4", -1e-4), (".5e1", 5.0), ("1.5", 1.5), ("7", 7), ("x1e4", "x1e4"),
        ("1e", "1e"), ("e4", "e4"), ("1e-4x", "1e-4x"), ("'1e-4'", "1e-4"), ("true", True), ("[1e-1, a]", [0.1, "a"]), ("12-3", "12-3"),
    ],
)  # fmt: skip
def test_yaml_value_is_read_as_something_else(text: str, value) -> None:
    got = parse_yaml(text)
    assert got == value and type(got) is type(value)


def test_override_goes_elsewhere(recipe: Path) -> None:
    got = load_config(
        Recipe, recipe, ["training.epochs=7", "head.layer_ids=[1, 2, 3]", "data.answers.mix.math=4", "note=a=b", "data.prepare.max_rows=5"]
    )
    assert got.training.epochs == 7 and got.training.lr == 0.0001 and got.head.layer_ids == (1, 2, 3)
    assert got.data.answers.mix == {"chat": 3, "math": 4} and got.note == "a=b" and got.data.prepare.max_rows == 5
    assert load_config(Recipe, recipe, ["data.prepare.max_rows=5", "data.prepare.max_rows=null"]).data.prepare.max_rows is None


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("training.epochs", "needs key=value"),
        ("=3", "needs key=value"),
        ("training.lr.x=3", "lr holds a value"),
        ("training.ttt_steps=0", r"training.ttt_steps: .*greater than or equal to 1 \(found 0\)"),
        ("training.ttt_steps=-1", "training.ttt_steps"),
        ("training.lr=0", "training.lr"),
        ("training.lr=fast", "training.lr.*'fast'"),
        ("training.lr=.nan", "training.lr"),
        ("training.decay=1.5", "training.decay"),
        ("head.draft_vocab_size=0", "head.draft_vocab_size"),
        ("evaluation.shapes.tree_top_k=0", "evaluation.shapes.tree_top_k"),
        ("data.answers.mix.chat=0", "data.answers.mix.chat"),
        ("data.answers.sampled=2", "data.answers.sampled"),
        ("data.prepare.validation=1", "data.prepare.validation"),
        ("data.prepare.near=0", "data.prepare.near"),
        ("data.prepare.format=xml", "data.prepare.format.*'xml'"),
        ("data.prepare.rows=both", "data.prepare.rows"),
        ("data.capture.states=int4", "data.capture.states"),
        ("data.capture.on_damage=ignore", "data.capture.on_damage"),
        ("data.online=maybe", "data.online"),
        ("training.domain_weights.chat=-1", "training.domain_weights.chat"),
        ("training.packing=0", "training.packing"),
        ("target.dtype=float8", "target.dtype"),
        ("training.epochs=1.5", "training.epochs"),
        ("training.mixed_precision=yes", "training.mixed_precision"),
        ("training.lr=[1", "--set training.lr"),
        ("head.layer_ids=[-2]", "head.layer_ids"),
        ("training.betas=[2,0.9]", "training.betas.0"),
        ("training.loss=kl", r"training.loss: needs keys below it \(decay, .*mix.*\), found 'kl'"),
        ("training.loss.mix=soft_cee", r"training.loss.mix.soft_cee: Input should be 'soft_ce', .*\(found 'soft_cee'\)"),
    ],
)
def test_value_out_of_range_is_taken(recipe: Path, setting: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(Recipe, recipe, [setting])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("training.learning_rate=1", "training.learning_rate: unknown key; known here: .*lr.*"),
        ("data.answers.promts=1", "data.answers.promts: unknown key; known here: .*prompts"),
        ("data.max_rows=5", "data.max_rows: unknown key; known here: answers, capture, online, prepare, rows, states"),
        ("data.prepare.max_row=5", "data.prepare.max_row: unknown key; known here: .*max_rows"),
        ("trainin.lr=1", "trainin: unknown key; known here: data, evaluation, head, name, note, target, training"),
    ],
)
def test_unknown_key_is_ignored(recipe: Path, setting: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(Recipe, recipe, [setting])


def test_run_without_data_is_found_later(recipe: Path) -> None:
    """Rows or answers: one of them must be named; with rows, answers may be left out."""
    with pytest.raises(ValueError, match=r"data: .*`rows` \(a folder of `spectrain prepare`\) or `answers`"):
        load_config(Recipe, recipe, ["data.answers=null"])
    config = load_config(Recipe, recipe, ["data.answers=null", "data.rows=rows"])
    assert config.data.answers is None and config.data.rows == "rows"


@pytest.mark.parametrize("kind", [PrepareConfig, RegenerateConfig])
def test_switch_is_read_as_a_truth_value(kind: type[PrepareConfig | RegenerateConfig]) -> None:
    """YAML 1.1 reads on and off as true and false; here they name a mode."""
    for word in ("on", "off", "mixed"):
        values: dict[str, object] = {}
        override(values, [f"thinking={word}"])
        assert validate(kind, values, where="--set").thinking == word
    with pytest.raises(ValueError, match="thinking"):
        validate(kind, {"thinking": "sometimes"}, where="--set")


def test_temperatures_are_text_or_none(recipe: Path) -> None:
    values: dict[str, object] = {}
    override(values, ["temperatures={0: 3, 0.7: 1}"])
    assert validate(RegenerateConfig, values, where="--set").temperatures == {0.0: 3.0, 0.7: 1.0}
    for wrong in ({}, {-1.0: 1.0}, {0.7: 0.0}):
        with pytest.raises(ValueError, match="temperatures"):
            validate(RegenerateConfig, {"temperatures": wrong}, where="--set")


def test_only_the_first_fault_is_told(recipe: Path) -> None:
    with pytest.raises(ValueError) as error:
        load_config(Recipe, recipe, ["training.epochs=0", "training.lr=-1", "nme=3"])
    assert all(part in str(error.value) for part in (str(recipe), "training.epochs", "training.lr", "nme"))


def test_file_fault_is_a_traceback(tmp_path: Path, recipe: Path) -> None:
    with pytest.raises(ValueError, match="no file .*none.yaml; there are .*r.yaml"):
        load_config(Recipe, tmp_path / "none.yaml")
    for text, message in (
        ("a: [1", "not valid YAML"),
        ("", "must hold keys"),
        ("- 1", "found list"),
        ("name: x", "target: Field required"),
    ):
        recipe.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_config(Recipe, recipe)


def test_settings_change_when_written_and_read(recipe: Path, tmp_path: Path) -> None:
    config = load_config(Recipe, recipe, ["head.layer_ids=[1,2]", "training.max_minutes=2.5"])
    (tmp_path / "again.yaml").write_text(dump_yaml(config))
    assert load_config(Recipe, tmp_path / "again.yaml") == config
    assert "ttt_steps: 3" in dump_yaml(config)


def test_settings_can_be_changed_in_place(recipe: Path) -> None:
    config = load_config(Recipe, recipe)
    with pytest.raises(ValueError, match="frozen"):
        config.training.lr = 1.0  # type: ignore[misc]


def test_suite_without_prompts_is_taken() -> None:
    values = {"name": "s", "version": 1, "folder": "f", "prompts": {}, "max_prompt_tokens": 5, "max_new_tokens": 5}
    with pytest.raises(ValueError, match="at least one domain"):
        validate(Suite, values, where="s.yaml")
    assert TrainingConfig().ttt_steps == 3
