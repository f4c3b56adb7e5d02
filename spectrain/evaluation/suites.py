"""Suites: which prompts are asked, by domain, where their files are, and whose they are."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from spectrain.config import EvaluationConfig, Suite, load_config, validate
from spectrain.data.formats import Prompt, read_prompts
from spectrain.target.model import Target

SUITES = "eval/suites"
SOURCES = "SOURCES.md"  # beside the folder of the prompts: a table of sources with a column `licence`
LATER = ("domains", "sources", "min_prompt_tokens", "turns", "template_kwargs", "skip")  # in a suite's hash only where they say something


def find_suite(name: str, folders: Sequence[Path]) -> Path:
    """The file of a suite: a path as it is, a name in eval/suites of the first folder that has it; ValueError with those there are."""
    path = Path(name)
    if path.is_file() or path.suffix or len(path.parts) > 1:
        return path
    places = [folder / SUITES for folder in folders]
    for place in places:
        if (place / f"{name}.yaml").is_file():
            return place / f"{name}.yaml"
    known = sorted({found.stem for place in places for found in place.glob("*.yaml")})
    there = f"there are {', '.join(known)}" if known else f"there is no {SUITES} here; name a file, or run this in a clone"
    raise ValueError(f"no suite {name!r}; {there}")


def suite_of(config: EvaluationConfig, root: Path) -> Suite:
    """The suite of the settings, or one that takes all of their file of prompts."""
    if config.prompts is None:
        return load_config(Suite, root / config.suite)
    path = root / config.prompts
    if not path.is_file():
        raise ValueError(f"no file {path} with prompts; needed JSONL rows with id, domain, and prompt or turns")
    rows = read_prompts(path)
    domains = dict.fromkeys(row.domain for row in rows)
    found: dict[str, Any] = {
        "name": path.stem, "folder": str(path.parent), "prompts": dict.fromkeys(domains, "all"),
        "domains": dict.fromkeys(domains, str(path)), "turns": max(len(row.turns) for row in rows),
    }  # fmt: skip
    return validate(Suite, found, where=str(path))


def suite_hash(suite: Suite) -> str:
    """Hash of a suite's settings; one that says nothing of what later versions can say has the hash it had before them."""
    plain = {key: type(suite).model_fields[key].default for key in LATER}
    told = {key: value for key, value in suite.model_dump(mode="json").items() if key not in LATER or getattr(suite, key) != plain[key]}
    return hashlib.sha256(yaml.safe_dump(told, sort_keys=False, allow_unicode=True).encode()).hexdigest()


def suite_prompts(suite: Suite, target: Target, root: Path) -> dict[str, list[Prompt]]:
    """The suite's prompts by domain: those whose first turn fits, chosen by a hash of id and seed, with as many turns as are asked.

    ValueError if a domain has no file or too few, or if two prompts have one id: records are found by it.
    """
    chosen: dict[str, list[Prompt]] = {}
    for domain, number in suite.prompts.items():
        every = [p for file in _files(suite, domain, root) for p in read_prompts(file)]
        every = [p for p in every if p.domain == domain] or every
        if wanted := suite.sources.get(domain):
            every = [p for p in every if p.source in wanted]
        least, most = suite.min_prompt_tokens, suite.max_prompt_tokens
        if target.model is not None:  # of one that an engine serves the tokenizer alone is here
            most = min(most, target.max_length - suite.max_new_tokens)
        fits = [p for p in every if least <= len(target.encode(p.chat, **suite.template_kwargs)) <= most]
        needed = 1 if number == "all" else number
        if len(fits) < suite.skip + needed:
            after = f" after the first {suite.skip}" if suite.skip else ""
            length = (f"at least {least} and " if least > 1 else "") + f"at most {most}"
            raise ValueError(f"suite {suite.name} wants {number} {domain} prompts{after} of {length} tokens, {len(fits)} fit")
        ordered = sorted(fits, key=lambda p: hashlib.sha256(f"{suite.seed}:{p.id}".encode()).digest())
        taken = ordered[suite.skip :] if number == "all" else ordered[suite.skip : suite.skip + number]
        chosen[domain] = [replace(p, domain=domain, turns=p.turns[: suite.turns]) for p in taken]
    numbers = Counter(p.id for rows in chosen.values() for p in rows)
    if twice := sorted(str(i) for i, number in numbers.items() if number > 1):
        raise ValueError(f"suite {suite.name}: several prompts have the id {', '.join(twice[:5])}; give each prompt an id of its own")
    return chosen


def too_long(config: EvaluationConfig, prompts: Mapping[str, Sequence[Prompt]], root: Path) -> int:
    """How many prompts of one's own file were not taken, which happens to those that do not fit; 0 for a suite, which takes a choice."""
    return 0 if config.prompts is None else len(read_prompts(root / config.prompts)) - sum(map(len, prompts.values()))


def _files(suite: Suite, domain: str, root: Path) -> list[Path]:
    given = suite.domains.get(domain, f"{suite.folder}/{domain}.jsonl")
    files = [root / name for name in ([given] if isinstance(given, str) else given)]
    for file in files:
        if not file.is_file():
            found = f"suite {suite.name} names the domain {domain}, and there is no {file}"
            raise ValueError(f"{found}; its files are looked for in {root}, two folders above that of the suite")
    return files


def speed_subset(
    prompts: Mapping[str, list[Prompt]], target: Target, *, number: int, max_tokens: int, template: Mapping[str, Any] | None = None
) -> dict[str, list[Prompt]]:
    """Of each domain the first `number` prompts of at most `max_tokens` tokens, or its shortest one when none is that short.

    Only first turns are timed. template: switches of the chat template.
    """
    first = {domain: [replace(p, turns=p.turns[:1]) for p in rows] for domain, rows in prompts.items()}
    lengths = {p.id: len(target.encode(p.chat, **(template or {}))) for rows in first.values() for p in rows}
    fits = {domain: [p for p in rows if lengths[p.id] <= max_tokens][:number] for domain, rows in first.items()}
    return {domain: rows or [min(first[domain], key=lambda p: lengths[p.id])] for domain, rows in fits.items()}


def told_of_suite(suite: Suite, prompts: Mapping[str, Sequence[Prompt]], target: Target, root: Path) -> dict[str, Any]:
    """What a report says of a suite: what was asked, how it was put to the target, and under which licences it stands."""
    texts = [(p.id, p.domain, p.turns) for rows in prompts.values() for p in rows]
    sources = sorted({p.source for rows in prompts.values() for p in rows if p.source})
    known = licences(root / suite.folder)
    return {
        "name": f"{suite.name} v{suite.version}", "version": suite.version, "sha256": suite_hash(suite),
        "prompts_sha256": hashlib.sha256(json.dumps(texts).encode()).hexdigest(),
        "prompts": {domain: len(rows) for domain, rows in prompts.items()},
        "turns": sum(len(p.turns) for rows in prompts.values() for p in rows),
        "template_sha256": target.fingerprints["template_sha256"], "template_kwargs": suite.template_kwargs,
        "licences": {source: known.get(source, "not known") for source in sources},
    }  # fmt: skip


def licences(folder: Path) -> dict[str, str]:
    """Licence by source, from the table of SOURCES.md beside a folder of prompts; empty where there is none."""
    path = folder.parent / SOURCES
    if not path.is_file():
        return {}
    found: dict[str, str] = {}
    columns: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if "source" in cells and "licence" in cells:
            columns = cells
        elif columns and len(cells) == len(columns):
            row = dict(zip(columns, cells, strict=True))
            found |= dict.fromkeys(re.findall(r"`([^`]+)`", row["source"]), row["licence"])
    return found
