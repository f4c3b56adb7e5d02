"""The model card of a head: README.md with the Hub's metadata, figures among them, and the same in words.

tau: tokens that one verification pass commits in the mean (docs/definitions.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from spectrain.evaluation.schema import ALL, MICRO, Report, parse_report
from spectrain.export.engines import FORMATS
from spectrain.heads.base import kind_of
from spectrain.target.adapter import change_text

NAMES = {"eagle3": "EAGLE-3", "eagle": "EAGLE-1", "medusa": "Medusa", "hydra": "Hydra"}
UNSERVED = ("hydra",)  # kinds that no engine reads
DEPTH = 4  # of the chain that is shown
PAPERS = {"eagle3": "2503.01840", "eagle": "2401.15077", "medusa": "2401.10774", "hydra": "2402.05109"}


@dataclass(frozen=True)
class Origin:
    """repo: where the head goes. base_model: its target on the Hub. licence: of `licence_of`. data: what it was trained on, in Markdown.
    serve: by the folder of the repository that holds a format, the commands that serve it."""

    repo: str
    base_model: str
    licence: Mapping[str, str]
    data: str
    serve: Mapping[str, Sequence[str]]


def model_card(head: Any, origin: Origin, report: Mapping[str, Any] | None) -> str:
    """README.md of a head. report: of `spectrain evaluate`, of this head; None says that nothing was measured."""
    parsed = None if report is None else parse_report(dict(report))
    kind = kind_of(head)
    name = origin.repo.rpartition("/")[2]
    fields: dict[str, Any] = dict(origin.licence)
    if parsed is not None and (results := _results(parsed, head)):
        fields |= {"model_name": name, "eval_results": results}
    data = ModelCardData(
        base_model=origin.base_model, library_name="spectrain", pipeline_tag="text-generation",
        tags=["speculative-decoding", "draft-head", kind], **fields,
    )  # fmt: skip
    parts = [
        f"# {name}", _what(head, kind, origin), "## Acceptance", _acceptance(parsed, head), "## Use", _use(head, kind, origin),
        "## Training", _training(head, origin), "## Limits", _limits(head, origin, parsed), "## Licence", _licence(origin),
    ]  # fmt: skip
    return f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n"


def _what(head: Any, kind: str, origin: Origin) -> str:
    config, params = head.config, sum(p.numel() for p in head.parameters())
    states = ", ".join("last" if i < 0 else f"hs[{i}]" for i in head.layer_ids)
    depth = head.max_depth or "any"
    return "\n".join([
        f"A draft head ([{NAMES[kind]}](https://arxiv.org/abs/{PAPERS[kind]})) for speculative decoding of "
        f"[{origin.base_model}](https://huggingface.co/{origin.base_model}). It guesses the next tokens, the model checks all guesses in "
        "one pass: the text stays the model's own, and comes faster where enough guesses are right.",
        "",
        "| parameters | states of the model that it reads | draft vocabulary | drafts on a path |",
        "| --- | --- | --- | --- |",
        f"| {params:,} | {states} | {config.draft_vocab_size:,} of {config.vocab_size:,} | {depth} |",
    ])  # fmt: skip


def _arms(report: Report, head: Any) -> list[Any]:
    """The arms of a report that the head drafted."""
    return [arm for arm in report.drafted if arm.drafter == type(head).__name__]


def _results(report: Report, head: Any) -> list[EvalResult]:
    """tau and the acceptance of the first draft by arm and domain, in the Hub's form."""
    found = []
    for arm in _arms(report, head):
        for domain in report.rows:
            cell = report.tau_of(arm.name, domain)
            if cell is None or cell.tau is None:
                continue
            dataset = {
                "dataset_type": f"spectrain/{report.suite.name.replace(' ', '-')}", "dataset_name": f"{report.suite.name}, {domain}",
                "dataset_config": domain, "dataset_revision": report.suite.sha256,
            }  # fmt: skip
            args = {"shape": arm.shape, "rule": arm.rule, "temperature": report.temperature_of(arm), "prompts": cell.prompts}
            figures = [("tau", f"tau, {report.label(arm)}{_between(cell)}", cell.tau)]
            if cell.acceptance and cell.acceptance[0] is not None:
                figures.append(("acceptance", f"first draft accepted, {report.label(arm)}", cell.acceptance[0]))
            found += [
                EvalResult(task_type="text-generation", metric_type=of, metric_name=name, metric_value=round(value, 4), metric_args=args,
                           **dataset)
                for of, name, value in figures
            ]  # fmt: skip
    return found


def _between(cell: Any) -> str:
    return "" if cell.lo is None or cell.hi is None else f" [{cell.lo:.2f}, {cell.hi:.2f}]"


def _acceptance(report: Report | None, head: Any) -> str:
    if report is None:
        return "Not measured: this head was pushed without a report (`spectrain evaluate`, then `spectrain push --report FOLDER`)."
    parts = [
        f"tau: tokens that one pass of the model commits in the mean (1: plain decoding); in brackets 95 % over prompts. Suite "
        f"{report.suite.name}, {report.settings.max_new_tokens} new tokens at most, {report.settings.dtype}, {report.settings.machine}.",
    ]
    for temperature in report.temperatures:
        parts += ["", *_table(report, report.at(temperature))]
    accepted = [(arm, report.tau_of(arm.name, MICRO)) for arm in _arms(report, head)]
    told = [f"{report.label(arm)}: {', '.join(f'{a:.2f}' for a in cell.acceptance if a is not None)}" for arm, cell in accepted if cell]
    if told:
        parts += ["", "Share of passes that accepted the first i drafts, over all domains: " + "; ".join(told) + "."]
    if report.advice:
        parts += ["", "\n>\n".join(f"> {sentence}" for sentence in report.advice)]
    return "\n".join(parts)


def _table(report: Report, arms: Sequence[Any]) -> list[str]:
    rows = [
        "| domain | prompts | " + " | ".join(map(report.label, arms)) + " |",
        "| --- | --- |" + " --- |" * len(arms),
    ]
    for domain in report.rows:
        cells = [report.tau_of(arm.name, domain) for arm in arms]
        prompts = next((cell.prompts for cell in cells if cell is not None), "–")
        rows.append(f"| {domain} | {prompts} | " + " | ".join(_cell(cell) for cell in cells) + " |")
    speeds = [report.speed_of(arm.name, ALL) for arm in arms]
    if any(speeds):  # of a temperature that was timed
        rows.append("| speed-up, all | | " + " | ".join(_cell(cell, "speedup", "×") for cell in speeds) + " |")
    return rows


def _cell(cell: Any, key: str = "tau", unit: str = "") -> str:
    value = None if cell is None else getattr(cell, key)
    return "–" if value is None else f"{value:.2f}{unit}{_between(cell)}"


def _loading(head: Any, origin: Origin) -> list[str]:
    """The lines that load head and target."""
    refused = "# refused where the target is another one than the head was trained for"
    if head.adapter is not None:
        return [
            "from huggingface_hub import snapshot_download",
            f'folder = snapshot_download("{origin.repo}")',
            f'target = st.load_target("{origin.base_model}", adapter=folder)  # merged into its weights',
            f"head = st.load_head(folder, target)  {refused}",
        ]
    bits = f', quantization="{bits}"' if (bits := head.made_with.get("quantization")) else ""
    return [f'target = st.load_target("{origin.base_model}"{bits})', f'head = st.load_head("{origin.repo}", target)  {refused}']


def _use(head: Any, kind: str, origin: Origin) -> str:
    shape = f"st.Chain({min(DEPTH, head.max_depth or DEPTH)})"
    parts = [
        "```python",
        "import spectrain as st",
        *_loading(head, origin),
        f'result = st.generate(target, [[{{"role": "user", "content": "Name three colours."}}]], drafter=head, shape={shape})',
        "```",
    ]
    if kind in UNSERVED:
        also = "".join(f" `{folder}/` is the folder of the original code." for folder in origin.serve)
        return "\n".join([*parts, "", f"No engine reads {NAMES[kind]} heads.{also}"])
    formats = [name for name, kinds in FORMATS.items() if kind in kinds]
    for folder, commands in origin.serve.items():
        download = f'hf download {origin.repo} --include "{folder}/*" --local-dir head'
        parts += ["", f"In an engine, from `{folder}/` of this repository:", "", "```bash", download, *commands, "```"]
    told = f"The folder of a format ({', '.join(formats)}; what cannot be said in one is refused), and the command that serves it:"
    parts += ["", told, "", "```bash", f"hf download {origin.repo} --local-dir head"]
    if head.adapter is not None:
        parts.append(f"spectrain export head --to merged --target {origin.base_model} --out merged")
    target = origin.base_model if head.adapter is None else "merged"
    parts += [f"spectrain export head --to FORMAT --target {target} --out exported", "```"]
    return "\n".join(parts)


def _training(head: Any, origin: Origin) -> str:
    made = head.made_with
    versions = ", ".join(f"{name} {version}" for name, version in made.get("versions", {}).items() if version)
    revision = f" at revision {made['target_revision']}" if made.get("target_revision") else ""
    frozen = "the model, which an adapter changed meanwhile" if made.get("adapter_sha256") else "the frozen model"
    told = f"On hidden states of {frozen}{revision}; settings in `run.yaml`. Made with {versions}."
    if folder := made.get("imported_from"):
        told = f"Taken over from `{folder}`, the folder of another program or of an engine, with {versions}."
    return f"{told} Versions and hashes are in `made_with.json`.\n\n{origin.data}"


def _limits(head: Any, origin: Origin, report: Report | None) -> str:
    made = head.made_with
    told = [
        "It drafts for the model it was trained for, as it was then: fine-tuned, merged or otherwise quantised copies accept less, and "
        "another tokenizer, or other embeddings, are refused.",
        "Acceptance depends on what is asked and in which language; prompts unlike those measured can be slower than plain decoding, and "
        "so can large batches. Measure your own: `spectrain evaluate`, `spectrain bench`.",
        "It knows nothing that the model does not say: what is wrong or harmful in the model's answers stays so.",
    ]
    if (trained := made.get("target")) != origin.base_model:
        copy = f"`{Path(str(trained)).name}`, said to be {origin.base_model}"
        told.append(f"It was trained on {copy}; a copy with other embeddings is refused.")
    if head.config.draft_vocab_size < head.config.vocab_size:
        told.append("It never drafts a token outside its draft vocabulary; texts full of rare tokens are accepted less.")
    if bits := made.get("quantization"):
        told.append(f"It was trained on states of the model with its weights in {bits}.")
    if made.get("adapter_sha256"):
        where = "an adapter (`adapter/`)" if head.adapter is not None else "an adapter, merged into the copy that it was trained on,"
        by = f" ({change_text(change)})" if (change := made.get("target_change")) else ""
        told.append(f"It was trained together with {where} that changes the model's answers{by}; both are used together.")
    cells = [] if report is None else [report.tau_of(arm.name, domain) for arm in _arms(report, head) for domain in report.domains]
    if few := min((cell.prompts for cell in cells if cell is not None), default=0):
        told.append(f"Measured on as few as {few} prompts a domain; figures of speed are of one machine.")
    return "\n".join(f"- {sentence}" for sentence in told)


def _licence(origin: Origin) -> str:
    named = origin.licence.get("license_name") or origin.licence["license"]
    link = f" ({origin.licence['license_link']})" if "license_link" in origin.licence else ""
    from_ = f"The head was made from weights and answers of {origin.base_model}, whose terms hold for it, too"
    return f"{named}{link}. {from_}; training data have licences of their own, see above."
