"""Settings: what is refused, what numbers mean, what is written back."""

from pathlib import Path

import pytest

from spectrain.config import Recipe, Suite, TrainingConfig, dump_yaml, load_config, parse_yaml, validate

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
        Recipe, recipe, ["training.epochs=7", "head.layer_ids=[1, 2, 3]", "data.answers.mix.math=4", "note=a=b", "data.max_rows=5"]
    )
    assert got.training.epochs == 7 and got.training.lr == 0.0001 and got.head.layer_ids == (1, 2, 3)
    assert got.data.answers.mix == {"chat": 3, "math": 4} and got.note == "a=b" and got.data.max_rows == 5
    assert load_config(Recipe, recipe, ["data.max_rows=5", "data.max_rows=null"]).data.max_rows is None


@pytest.mark.parametrize(
    ("override", "message"),
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
        ("target.dtype=float8", "target.dtype"),
        ("training.epochs=1.5", "training.epochs"),
        ("training.mixed_precision=yes", "training.mixed_precision"),
        ("training.lr=[1", "--set training.lr"),
        ("head.layer_ids=[-1]", "head.layer_ids"),
    ],
)
def test_value_out_of_range_is_taken(recipe: Path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(Recipe, recipe, [override])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.learning_rate=1", "training.learning_rate: unknown key; known here: .*lr.*"),
        ("data.answers.promts=1", "data.answers.promts: unknown key; known here: .*prompts"),
        ("trainin.lr=1", "trainin: unknown key; known here: data, evaluation, head, name, note, target, training"),
    ],
)
def test_unknown_key_is_ignored(recipe: Path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(Recipe, recipe, [override])


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
