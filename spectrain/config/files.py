"""What every stage's settings are made of, and how they are read: unknown keys refused, YAML in and out, `--set a.b=c`."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Stage(BaseModel):
    """Base of all stages."""

    model_config = ConfigDict(frozen=True, extra="forbid")


S = TypeVar("S", bound=Stage)


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads `1e-4` as text; this loader reads it as the number it is."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)$|^[-+]?\d[\d_]*\.[\d_]*$|^[-+]?\.(inf|nan)$"),
    list("-+0123456789."),
)


def parse_yaml(text: str) -> Any:
    """YAML with numbers such as `1e-4` read as numbers."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader


def load_config(kind: type[S], path: str | Path, overrides: Iterable[str] = ()) -> S:
    """Read a YAML file and apply `a.b=c` overrides. Raises ValueError naming file, key and what was needed."""
    path = Path(path)
    if not path.is_file():
        near = sorted(str(p) for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        raise ValueError(f"no file {path}" + (f"; there are {', '.join(near)}" if near else ""))
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold keys and values, found {type(values).__name__}")
    override(values, overrides)
    return validate(kind, values, where=str(path))


def override(values: dict[str, Any], overrides: Iterable[str]) -> None:
    """Put `a.b=c` into values; ValueError for what is no key and value."""
    for text in overrides:
        key, found, value = text.partition("=")
        if not found or not key:
            raise ValueError(f"--set needs key=value, found {text!r}; for example --set training.epochs=2")
        try:
            _put(values, key.split("."), parse_yaml(value))
        except yaml.YAMLError as error:
            raise ValueError(f"--set {text}: the value is not valid YAML: {error}") from error


def _put(values: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        below = values.setdefault(key, {})
        if not isinstance(below, dict):
            raise ValueError(f"--set {'.'.join(keys)}: {key} holds a value, not further keys")
        values = below
    values[keys[-1]] = value


def validate(kind: type[S], values: Mapping[str, Any], *, where: str) -> S:
    """Check values against a stage; ValueError lists every fault with the key's full name and the keys that exist."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        lines = []
        for fault in error.errors():
            path = fault["loc"][:-1] if fault["loc"][-1:] == ("[key]",) else fault["loc"]  # a key that is wrong itself
            key = ".".join(str(part) for part in path)
            if fault["type"] == "extra_forbidden":
                lines.append(f"  {key}: unknown key; known here: {', '.join(_fields_at(kind, path[:-1]))}")
            elif fault["type"] == "model_type":
                lines.append(f"  {key}: needs keys below it ({', '.join(_fields_at(kind, path))}), found {fault.get('input')!r}")
            elif fault["type"] == "missing":
                lines.append(f"  {key}: {fault['msg']}")
            else:
                lines.append(f"  {key}: {fault['msg']} (found {fault.get('input')!r})")
        raise ValueError(f"{where}:\n" + "\n".join(lines)) from error


def _fields_at(kind: type[Stage], path: tuple[int | str, ...]) -> list[str]:
    for part in path:
        below = kind.model_fields[str(part)].annotation
        found = [t for t in (below, *get_args(below)) if isinstance(t, type) and issubclass(t, Stage)]
        if not found:
            return []
        kind = found[0]
    return sorted(kind.model_fields)


def dump_yaml(config: Stage) -> str:
    """The settings as YAML, every default written out."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
