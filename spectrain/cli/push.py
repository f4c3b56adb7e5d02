"""The command push: a head's files, its report and its model card as one folder, which goes to the Hub or stays here to be looked at."""

import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

import spectrain
from spectrain.cli.card import UNSERVED, Origin, model_card
from spectrain.cli.export import DRAFTS, of_target
from spectrain.cli.joint import check_merged
from spectrain.cli.start import check_no_run, weights_hash
from spectrain.data.formats import read_jsonl
from spectrain.export.engines import export_head, serve_command
from spectrain.export.hub import CARD, CONFIG, HEAD_FILES, OPTIONAL, REPORT, licence_of, push_folder
from spectrain.heads.base import kind_of, load_head

REPORT_FILES = ("report.json", "report.md", "report.html", "*.png")
SOURCES = "SOURCES.md"  # beside a file of prompts: a table with the names of its sources first, and their licences in the column so named
REPO = re.compile(r"^[\w.-]+/[\w.-]+$")
LOCAL = re.compile(r"(?<![\w:/.])/(?:[\w.@+-]+/)+[\w.@+-]*")  # an absolute path


@dataclass(frozen=True)
class Wanted:
    """What goes along. report: folder of `spectrain evaluate`. formats: of `export_head`. base_model, licence, data: what the head's files
    do not say (a Hub name; a licence by the Hub's name; a Markdown file). target: where the target is, for formats that take rows of it."""

    report: Path | None = None
    formats: Sequence[str] = ()
    base_model: str | None = None
    licence: str | None = None
    data: Path | None = None
    target: str | None = None


def push(
    head: Path, repo: str, wanted: Wanted, *, public: bool, revision: str | None, dry_run: Path | None, say: Any, as_json: bool = False
) -> None:
    """Upload a head, or write what would go to `dry_run`. ValueError for a damaged head, another head's report, an unknown licence."""
    if not REPO.match(repo):
        raise ValueError(f"{repo!r} is no name of a repository; needed: user/name")
    if dry_run is not None and dry_run.exists() and (not dry_run.is_dir() or any(dry_run.iterdir())):
        raise ValueError(f"{dry_run} is there already; choose another folder for --dry-run, or remove it")
    tell = (lambda *_: None) if as_json else say
    if dry_run is not None:
        dry_run.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=dry_run.parent if dry_run else None, prefix=".push-") as temporary:
        folder = Path(temporary) / "head"
        origin = write_repository(head, repo, wanted, folder)
        tell(f"licence {origin.licence['license']}, as of {origin.base_model}" + (" (as told)" if wanted.licence else ""))
        for line in _listing(folder):
            tell(line)
        if paths := local_paths(folder):
            tell(f"names of this machine that are in it: {', '.join(paths)}")
        visible = "public" if public else "private"
        if dry_run is not None:
            folder.replace(dry_run)  # an empty folder may be there
            say(json.dumps(_files(dry_run))) if as_json else say(f"nothing was uploaded; {dry_run} would go to {repo} ({visible})")
            return
        done = push_folder(folder, repo, public=public, revision=revision)
    if done.replaced and not done.same_weights:
        tell(f"{repo} held another head; it stays there as commit {done.replaced}")
    say(json.dumps(asdict(done))) if as_json else say(f"pushed {done.url} ({'private' if done.private else 'public'})")


def write_repository(head: Path, repo: str, wanted: Wanted, folder: Path) -> Origin:
    """Write all files of the repository to a new folder; returns what the card was told. Errors as of `push`."""
    check_no_run(head)
    found = load_head(head)
    report = _report(wanted.report, found) if wanted.report else None
    base_model = wanted.base_model or _hub_name(found.made_with)
    licence = {"license": wanted.licence} if wanted.licence else _licence(found.made_with, base_model)
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*HEAD_FILES, *OPTIONAL):
        if (head / name).is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(head / name, folder / name)
    if wanted.report:
        (folder / REPORT).mkdir()
        for path in sorted(path for pattern in REPORT_FILES for path in wanted.report.glob(pattern)):
            shutil.copy(path, folder / REPORT / path.name)
    serve = {to: _export(head, found, to, folder / to, base_model, wanted.target) for to in wanted.formats}
    data = wanted.data.read_text(encoding="utf-8").strip() if wanted.data else data_used((head / "run.yaml").read_text())
    origin = Origin(repo, base_model, licence, data, serve)
    (folder / CARD).write_text(model_card(found, origin, report), encoding="utf-8")
    return origin


def _report(folder: Path, head: Any) -> dict[str, Any]:
    path = folder / "report.json"
    if not path.is_file():
        raise ValueError(f"no report.json in {folder}; `spectrain evaluate` writes one")
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged ({error}); `spectrain evaluate` writes it anew") from error
    made_of = report.get("made_of") if isinstance(report, dict) else None
    of, own = made_of.get("head") if isinstance(made_of, dict) else None, weights_hash(head)[:12]
    if of != own:
        raise ValueError(f"{path} is not of this head alone ({of or 'no head'}, needed {own}); evaluate it, or name its report")
    return report


def _hub_name(made_with: Mapping[str, Any]) -> str:
    target = str(made_with.get("target", ""))
    if REPO.match(target) and not target.endswith(".gguf") and not Path(target).exists():
        return target
    trained = f"the head was trained for {target or 'a target without a name'}"
    raise ValueError(f"{trained}; say which model of the Hub that is: --base-model NAME")


def _licence(made_with: Mapping[str, Any], base_model: str) -> dict[str, str]:
    own = Path(str(made_with.get("target"))) / CARD
    licence = (licence_of(own) if own.is_file() else {}) or licence_of(base_model)
    if "license" not in licence:
        why = f"the licence of {base_model} is not known (its model card names none, or could not be read)"
        raise ValueError(f"{why}; look it up and add it by the Hub's name: --license apache-2.0")
    return licence


def _export(head: Path, found: Any, to: str, out: Path, base_model: str, target: str | None) -> list[str]:
    """Write a format; returns the commands that serve it from where `hf download` puts it, none for a head that no engine reads."""
    if found.adapter is not None:
        found_here = f"{head} was trained together with an adapter, and engines serve it with a merged copy of its target"
        raise ValueError(f"{found_here}, which is not in the repository: leave --with-format out (the card says how to merge and export)")
    check_merged(head, target)
    rows = of_target(head, to, target)
    if "verifier" in rows:
        rows["verifier"]["name_or_path"] = base_model  # not the folder that it was trained from
    export_head(head, to, out, **rows)
    if kind_of(found) in UNSERVED:
        return []
    engine, number = "sglang" if to in ("sglang", "eagle") else "vllm", found.max_depth or DRAFTS
    command = serve_command(out, base_model, engine=engine, num_speculative_tokens=number, place=f"head/{to}")
    note = json.loads((out / CONFIG).read_text())["spectrain"].get("note")
    return [command, *([f"# {note}"] if note else [])]


def data_used(run_yaml: str) -> str:
    """What a head was trained on, by its run.yaml, and the licences where a SOURCES.md stands beside the prompts."""
    try:
        run = yaml.safe_load(run_yaml) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"run.yaml of the head is damaged ({error}); copy the head again, or add --data FILE") from error
    data = run.get("data") or {} if isinstance(run, dict) else {}
    unknown = "Sources and licences are not recorded; ask who trained it."
    if data.get("rows"):
        return f"Trained on rows of `spectrain prepare` (`{Path(data['rows']).name}`). {unknown}"
    if not (answers := data.get("answers")):
        return f"What it was trained on is not recorded. {unknown}"
    mix = ", ".join(f"{domain} {number}" for domain, number in answers["mix"].items())
    told = f"Trained on the model's own answers to {sum(answers['mix'].values()):,} prompts ({mix})."
    roots = (Path(), Path(spectrain.__file__).resolve().parents[1])
    file, sources = (
        next((root / path for root in roots if (root / path).is_file()), None)
        for path in (answers["file"], Path(answers["prompts"]).parent / SOURCES)
    )
    if file is None or sources is None:
        return f"{told} {unknown}"
    return f"{told}\n\n{_licences(file, sources.read_text(encoding='utf-8'))}"


def _licences(file: Path, sources: str) -> str:
    """A table of licences and how many of the prompts are under each; ids begin with the name of their source."""
    table, column = {}, None
    for line in sources.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if "licence" in [cell.lower() for cell in cells]:
            column = [cell.lower() for cell in cells].index("licence")
        elif column is not None and len(cells) > column:
            table.update({name: cells[column] for name in re.findall(r"`([^`]+)`", cells[0])})
        elif not cells:
            column = None
    counts: Counter[tuple[str, str]] = Counter()
    for _, row in read_jsonl(file):
        name = str(row.get("source") or str(row.get("id", "")).partition(":")[0])
        counts[table.get(name, "not recorded"), name] += 1
    rows: dict[str, list[str]] = {}
    for (licence, name), number in sorted(counts.items(), key=lambda item: -item[1]):
        rows.setdefault(licence, []).append(f"{name} {number}")
    lines = [f"| {licence} | {', '.join(names)} |" for licence, names in rows.items()]
    return "\n".join(["| licence | prompts by source |", "| --- | --- |", *lines])


def _files(folder: Path) -> dict[str, int]:
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}


def _listing(folder: Path) -> list[str]:
    return [f"{size:>14,}  {name}" for name, size in _files(folder).items()]


def local_paths(folder: Path) -> list[str]:
    """Absolute paths in the small files of a folder: they would be seen by whoever sees the repository."""
    texts = [(folder / name).read_text(encoding="utf-8") for name in ("run.yaml", "made_with.json") if (folder / name).is_file()]
    report = folder / REPORT / "report.json"
    texts += [json.dumps({"target": json.loads(report.read_text())["target"]})] if report.is_file() else []
    return sorted({match for text in texts for match in LOCAL.findall(text)})
