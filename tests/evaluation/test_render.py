"""The report's three forms, on an invented report: no number here was ever measured."""

import copy
import io
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from spectrain.evaluation.render import parse_report, render_html, render_markdown, terminal_table, write_report

DOMAINS = ["code", "code_edit", "math", "chat", "summary", "translation"]
ARMS = {  # name: acceptance of one draft by domain (invented), depth, cost of its drafter
    "n-gram": ([0.42, 0.83, 0.38, 0.21, 0.61, 0.12], 5, 0.004),
    "head chain": ([0.66, 0.71, 0.63, 0.52, 0.57, 0.44], 4, 0.171),
    "head tree": ([0.74, 0.78, 0.71, 0.61, 0.65, 0.53], 5, 0.262),
}


def invented_tau(alpha: float, depth: int, share: float = 1.0) -> dict[str, Any]:
    """A cell whose numbers fit together."""
    survival = [round(alpha ** (i + 1) * (1 - 0.01 * i), 4) for i in range(depth)]
    before = [1.0, *survival]
    rounds = int(1531 * share)
    tau = 1 + sum(survival)
    return {
        "tau": tau,
        "lo": tau - 0.13,
        "hi": tau + 0.147,
        "tokens": round(rounds * tau),
        "rounds": rounds,
        "prompts": round(24 * share),
        "acceptance": survival,
        "conditional": [round(survival[i] / before[i], 4) for i in range(depth)],
    }


def invented_speed(tau: float, v: float, draft: float, share: float = 1.0) -> dict[str, Any]:
    """A cell whose speed-up is nearly what its costs predict."""
    break_even = v + draft + 0.03
    speedup = 0.97 * tau / break_even
    tokens = int(3072 * share)
    return {
        "tokens": tokens,
        "seconds": tokens / (31.7 * speedup),
        "tokens_per_s": 31.7 * speedup,
        "speedup": speedup,
        "lo": speedup - 0.08,
        "hi": speedup + 0.085,
        "tau": tau,
        "v": v,
        "draft": draft,
        "other": 0.03,
        "break_even": break_even,
        "prompts": round(12 * share),
    }


def invented_report() -> dict[str, Any]:
    """TEST DATA in the report's schema: three arms, six domains, everything optional present."""
    plain = {"tau": 1.0, "lo": 1.0, "hi": 1.0, "tokens": 4096, "rounds": 4096, "prompts": 24, "acceptance": [], "conditional": []}
    same = {"speedup": 1.0, "lo": 1.0, "hi": 1.0, "tau": 1.0, "v": 1.0, "draft": 0.0, "other": 0.0, "break_even": 1.0, "prompts": 12}
    still = {"tokens": 3072, "seconds": 96.9, "tokens_per_s": 31.7, **same}
    tau: dict[str, Any] = {"plain": {key: plain for key in [*DOMAINS, "all (macro)", "all (micro)"]}}
    speed: dict[str, Any] = {"plain": {key: still for key in [*DOMAINS, "all"]}}
    for name, (alphas, depth, draft) in ARMS.items():
        cells = {domain: invented_tau(alpha, depth) for domain, alpha in zip(DOMAINS, alphas, strict=True)}
        mean = invented_tau(sum(alphas) / len(alphas), depth, share=6)
        tau[name] = {**cells, "all (macro)": mean, "all (micro)": {**mean, "tau": mean["tau"] - 0.041}}
        v = 1.9 if name == "head tree" else 1.36
        speed[name] = {domain: invented_speed(cell["tau"], v, draft) for domain, cell in cells.items()}
        speed[name]["all"] = invented_speed(mean["tau"] - 0.041, v, draft, share=6)
    steps = [
        {
            "step": 50 * (i + 1),
            "minutes": 1.7 * (i + 1),
            "loss": 4.2 / (1 + 0.3 * i) + 1.1,
            "alpha": [0.7 - 0.4 / (i + 1), 0.62 - 0.4 / (i + 1)],
            "measured_tau": 2.2 - 0.9 / (i + 1) if i % 3 == 2 else None,
        }
        for i in range(12)
    ]
    shapes = {"n-gram": ("chain 5", 5, 1, 5), "head chain": ("chain 4", 4, 1, 4), "head tree": ("tree 12", 5, 3, 12)}
    return {
        "title": "Is speculation worth it? (invented test data)",
        "made": "2001-02-03T04:05:06Z",
        "target": "invented/Target-135M-Instruct",
        "suite": {"name": "six-domains", "sha256": "ab" * 32},
        "settings": {
            "max_new_tokens": 128,
            "temperature": 0.0,
            "dtype": "float32",
            "threads": 2,
            "machine": "2-core CPU",
            "speed_max_new_tokens": 96,
        },
        "versions": {"torch": "9.8.7", "transformers": "6.5.4", "spectrain": "0.0.test"},
        "arms": [
            {"name": "plain", "drafter": "none", "shape": "chain 0", "depth": 0, "width": 1, "budget": 0, "rule": "greedy"},
            *(
                {
                    "name": name,
                    "drafter": name.split()[0],
                    "shape": shape,
                    "depth": depth,
                    "width": width,
                    "budget": budget,
                    "rule": "greedy",
                }
                for name, (shape, depth, width, budget) in shapes.items()
            ),
        ],
        "domains": DOMAINS,
        "tau": tau,
        "speed": speed,
        "exactness": {name: {"prompts": 144, "equal": 143 - i, "ties": 1 + i, "failed": 0} for i, name in enumerate(ARMS)},
        "baseline": {
            "name": "transformers generate()",
            "tokens_per_s": 29.84,
            "plain_tokens_per_s": 31.71,
            "ratio": 1.063,
            "lo": 1.041,
            "hi": 1.088,
        },
        "coverage": {domain: 0.9912 - 0.013 * i for i, domain in enumerate(DOMAINS)},
        "training": {"steps": steps},
        "advice": [
            "Use the n-gram drafter for code_edit (1.96× [1.88, 2.05]) and summary; it costs nothing.",
            "Use the head chain for code and math. For translation nothing pays: decode plainly.",
        ],
        "notes": ["Every number in this report is invented."],
    }


class Page(HTMLParser):
    """Collects what a browser would load, and checks that tags close."""

    VOID = {"meta", "link", "br", "img", "input", "hr"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for key, value in attrs if key in ("src", "href", "srcset", "data", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def read_page(html: str) -> Page:
    page = Page()
    page.feed(html)
    page.close()
    assert page.open == []
    return page


def shown_numbers(report: dict[str, Any]) -> set[str]:
    """Every number of the report as the pages write it."""
    found: set[str] = set()
    for arm in report["tau"]:
        for cell in report["tau"][arm].values():
            found |= {f"{cell['tau']:.2f}", f"[{cell['lo']:.2f}, {cell['hi']:.2f}]", f"{cell['tokens']:,}", f"{cell['rounds']:,}"}
            found |= {f"{100 * value:.1f} %" for value in [*cell["acceptance"], *cell["conditional"]]}
        for cell in report["speed"][arm].values():
            found |= {f"{cell[key]:.2f}" for key in ("speedup", "tau", "v", "draft", "other", "break_even")}
            found |= {
                f"[{cell['lo']:.2f}, {cell['hi']:.2f}]",
                f"{cell['seconds']:,.1f}",
                f"{cell['tokens_per_s']:,.1f}",
                f"{cell['tokens']:,}",
            }
    for cell in report["exactness"].values():
        found |= {str(cell["equal"]), str(cell["ties"]), str(cell["prompts"])}
    found |= {"29.8", "31.7", "1.06× [1.04, 1.09]", *(f"{100 * value:.1f} %" for value in report["coverage"].values())}
    return found | {str(value) for value in report["settings"].values()} | set(report["versions"].values())


def markdown_tables(text: str) -> list[list[list[str]]]:
    """Tables as rows of cells; escaped bars are not separators."""
    tables, current = [], []
    for line in [*text.split("\n"), ""]:
        if line.startswith("|"):
            assert line.startswith("| ") and line.endswith(" |")
            current.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line[1:-1])])
        elif current:
            tables.append(current)
            current = []
    return tables


def test_html_loads_nothing_and_closes_every_tag() -> None:
    html = render_html(invented_report())
    page = read_page(html)
    assert all(link.startswith("#") for link in page.loads)
    assert "http://" not in html and "https://" not in html and "url(" not in html and "@import" not in html
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert page.tags.count("figure") == 2 + 7 + 3  # τ and speed-up; acceptance overall and by domain; loss, α, measured τ


def test_every_number_is_on_the_page_and_in_the_markdown() -> None:
    report = invented_report()
    html, markdown = render_html(report), render_markdown(report)
    words = re.sub(r"<[^>]*>", "", html)
    for number in shown_numbers(report):
        assert number in words, number
        assert number in markdown, number


def test_tau_of_draws_stands_without_rule_and_temperature() -> None:
    """Above temperature 0 every τ of a drafted arm is shown with its rule and temperature, and nothing is said to be exact."""
    report = invented_report()
    assert "T=" not in render_markdown(report) + render_html(report)
    report["settings"]["temperature"] = 0.8
    for arm, rule in zip(report["arms"][1:], ("point_mass", "block", "point_mass"), strict=True):
        arm["rule"] = rule
    report["exactness"] = {}
    text, page = render_markdown(report), re.sub(r"<[^>]*>", "", render_html(report))
    for table in markdown_tables(text)[:5]:
        arm = 1 if table[0][0] == "domain" else 0
        assert table[0][arm] == "arm"
        told = {"plain (T=0.8)", "n-gram (point_mass, T=0.8)", "head chain (block, T=0.8)", "head tree (point_mass, T=0.8)"}
        assert {row[arm] for row in table[2:]} <= told
    for words in (text, page):
        assert "Draws at temperature 0.8 are not compared with plain decoding" in words and "answers are those of plain" not in words
    assert page.count("block · T=0.8") == 1 and "Exactness" not in text
    console = Console(width=100, record=True, file=io.StringIO())
    for drawn in terminal_table(report):
        console.print(drawn)
    shown = console.export_text()
    assert shown.count("T=0.8") == 3 and shown.count("point_mass") == 2 and shown.count("block") == 1


def test_advice_comes_before_numbers() -> None:
    report = invented_report()
    for text in (render_html(report), render_markdown(report)):
        text = text.replace('<a href="#domains">By domain</a>', "")  # the way there
        places = [text.index(part) for part in (report["advice"][0], report["advice"][1], "By domain", "Tokens per pass", "Exactness")]
        assert places == sorted(places)


def test_colour_comes_with_a_sign() -> None:
    report = invented_report()
    cells = re.findall(r'<td class="(win|even|loss|none)"><div class="cell"><b class="x">(.)', render_html(report))
    assert len(cells) == 3 * 7
    assert set(cells) == {("win", "▲"), ("even", "≈"), ("loss", "▼")}
    report["speed"]["n-gram"]["math"].update(lo=1.0, hi=1.2)  # an interval that touches 1 decides nothing
    assert render_markdown(report).count("⚪ ≈") == 1 + render_markdown(invented_report()).count("⚪ ≈")


def test_markdown_tables_are_well_formed() -> None:
    tables = markdown_tables(render_markdown(invented_report()))
    assert len(tables) == 1 + 7 + 2
    for head, rule, *rows in tables:
        assert all(re.fullmatch(r"-{3,}|--:", cell) for cell in rule)
        assert {len(row) for row in (head, rule, *rows)} == {len(head)}
    assert [len(rows) - 2 for rows in tables[:2]] == [3 * 7, 4 * 8]


def test_text_is_escaped() -> None:
    report = invented_report()
    evil = "<script>alert('1')</script> \"x\" | a & b\n# no heading"
    report.update(title=evil, advice=[evil], notes=[evil], target=evil)
    report["arms"][1]["drafter"] = evil
    report["domains"] = [evil, *DOMAINS[1:]]
    for part in ("tau", "speed"):
        for cells in report[part].values():
            cells[evil] = cells.pop("code")
    html, markdown = render_html(report), render_markdown(report)
    assert "<script" not in html and "script" not in read_page(html).tags
    assert "<script" not in markdown and "\n# no heading" not in markdown
    for head, *rows in markdown_tables(markdown):
        assert {len(row) for row in rows} == {len(head)}
    with open(os.devnull, "w") as sink:
        Console(file=sink, width=100).print(*terminal_table(report))


REQUIRED = [
    (),
    ("suite",),
    ("settings",),
    ("arms", 1),
    ("tau", "n-gram", "code"),
    ("speed", "n-gram", "all"),
    ("exactness", "n-gram"),
    ("baseline",),
    ("training", "steps", 0),
]


@pytest.mark.parametrize("path", REQUIRED, ids=lambda path: ".".join(map(str, path)) or "top")
def test_a_missing_key_is_named(path: tuple[Any, ...]) -> None:
    def part(report: Any) -> Any:
        for key in path:
            report = report[key]
        return report

    for key in part(invented_report()):
        if path == () and key in ("coverage", "training"):
            continue
        report = copy.deepcopy(invented_report())
        del part(report)[key]
        with pytest.raises(ValueError, match=re.escape(f"'{'.'.join(map(str, (*path, key)))}' is missing")):
            parse_report(report)


def test_an_arm_without_numbers_is_named() -> None:
    report = invented_report()
    del report["speed"]["head tree"]
    with pytest.raises(ValueError, match=r"'speed\.head tree' is missing"):
        render_html(report)
    with pytest.raises(ValueError, match="'arms' is empty"):
        render_html({**invented_report(), "arms": []})


def test_lossy_arm_stands_beside_lossless_ones() -> None:
    report = invented_report()
    assert report["arms"][2]["name"] == "head chain"
    report["arms"][2]["rule"] = "typical"
    with pytest.raises(ValueError, match="the rule of 'head chain' is typical, which is lossy; leave the arm out"):
        render_markdown(report)


def test_passes_of_the_timed_arms_are_not_told() -> None:
    report = invented_report()
    assert "passes; " not in render_html(report)
    report["settings"]["passes"] = "compiled"
    for page in (render_html(report), render_markdown(report)):
        assert "; compiled passes; " in page


def test_bad_values_are_named() -> None:
    report = invented_report()
    report["tau"]["n-gram"]["code"]["tau"] = float("nan")
    report["settings"]["threads"] = "many"
    with pytest.raises(ValueError, match=r"'settings\.threads' is unfit.*'tau\.n-gram\.code\.tau' is unfit"):
        render_markdown(report)


def test_optional_parts_are_left_out() -> None:
    report = invented_report()
    del report["coverage"], report["training"]
    report.update(baseline=None, advice=[], notes=[], exactness={})
    html, markdown = render_html(report), render_markdown(report)
    read_page(html)
    for absent in ("Draft-vocabulary coverage", "Training", "independent decoder", "Notes"):
        assert f">{absent}<" not in html and absent not in markdown
    assert "Exactness was not checked" in html and "Exactness was not checked" in markdown


def test_what_was_not_measured_is_a_dash() -> None:
    report = invented_report()
    del report["tau"]["n-gram"]["code"], report["speed"]["n-gram"]["code"], report["tau"]["head chain"]["all (micro)"]
    report["speed"]["head chain"]["math"].update(speedup=None, lo=None, hi=None, break_even=None)
    report["tau"]["head chain"]["math"].update(lo=None, hi=None)
    read_page(render_html(report))
    rows = markdown_tables(render_markdown(report))[0]
    assert ["code", "n-gram", "–", "–", "–"] in rows
    macro = report["tau"]["head chain"]["all (macro)"]["tau"]
    assert rows[-2][2].startswith(f"{macro:.2f} ")
    assert re.search(r"code +– \| +– ", terminal_text(report))


@pytest.mark.parametrize("arms", [0, 1])
def test_few_arms(arms: int) -> None:
    report = invented_report()
    report["arms"] = report["arms"][: 1 + arms]
    read_page(render_html(report))
    assert len(terminal_table(report)) == arms
    render_markdown(report)


def test_a_failed_answer_is_loud() -> None:
    report = invented_report()
    report["exactness"]["head tree"] = {"prompts": 144, "equal": 140, "ties": 1, "failed": 3}
    for text in (render_html(report), render_markdown(report)):
        assert "▼ Not exact: 3 of 432 answers" in text and "▲ Exact" not in text
        assert "▼ 3" in text
    assert "▲ Exact: all 432 answers" in render_html(invented_report())


def terminal_text(report: dict[str, Any], width: int = 200) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(*terminal_table(report))
    return capture.get()


@pytest.mark.parametrize("copies", [1, 3])
def test_terminal_tables_fit_100_columns(copies: int) -> None:
    report = invented_report()
    for i in range(1, copies):
        for arm in report["arms"][1:4]:
            name = f"{arm['name']} with a longer name {i}"
            report["arms"].append({**arm, "name": name})
            report["tau"][name], report["speed"][name] = report["tau"][arm["name"]], report["speed"][arm["name"]]
    tables = terminal_table(report)
    assert len(tables) == (1 if copies == 1 else 3)
    text = terminal_text(report)
    assert max(map(len, text.split("\n"))) <= 100
    cell = report["speed"]["n-gram"]["code_edit"]
    line = next(line for line in text.split("\n") if "code_edit" in line)
    assert f"{report['tau']['n-gram']['code_edit']['tau']:.2f} | ▲ {cell['speedup']:.2f}×" in re.sub(" +", " ", line)
    assert sum(domain in text for domain in [*DOMAINS, "all"]) == 7


def test_write_report_writes_three_files(tmp_path: Path) -> None:
    report = invented_report()
    out = tmp_path / "runs" / "report"
    write_report(report, out)
    write_report(report, out)
    assert sorted(path.name for path in out.iterdir()) == ["report.html", "report.json", "report.md"]
    assert json.loads((out / "report.json").read_text(encoding="utf-8")) == report
    assert (out / "report.html").read_text(encoding="utf-8") == render_html(report)
    assert (out / "report.md").read_text(encoding="utf-8") == render_markdown(report)


def test_a_failed_write_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = invented_report()
    write_report(report, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError):
        write_report({**report, "title": None}, tmp_path)

    def full(source: object, target: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        write_report({**report, "title": "another"}, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
