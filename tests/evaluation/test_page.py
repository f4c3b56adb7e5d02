"""The page in a browser, on a report as large as they get: three temperatures, seven arms, eleven domains, every part present.

Its counts and seconds are drawn at random; the tables are made of them by the functions that a real evaluation uses.
"""

import random
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from spectrain.decoding.rows import StepRecord
from spectrain.evaluation.metrics import speed_cell, tau_table
from spectrain.evaluation.paired import pairs
from spectrain.evaluation.records import Record
from spectrain.evaluation.render import render_html, write_report
from spectrain.evaluation.slices import slices

DOMAINS = ["chat", "code", "code_edit", "creative", "math", "qa", "rag", "reasoning", "structured", "summarization", "translation"]
DRAFTERS = {"ngram chain:8": (8, 0.35, 0.01), "suffix chain:8": (8, 0.4, 0.01), "head chain:4": (4, 0.55, 0.18),
            "head chain:7": (7, 0.55, 0.3), "head tree:4x5x15": (5, 0.66, 0.26), "head tree:10x6x48": (6, 0.7, 0.3)}  # fmt: skip
NODES = {"head tree:4x5x15": 16, "head tree:10x6x48": 49}
ALL_OF = "[...document.querySelectorAll"
TEMPERATURES = (0.0, 0.7, 1.0)
PROMPTS, ROUNDS = 4, 12


def records_of(arm: str, depth: int, alpha: float, draft: float, mode: str) -> dict[str, list[Record]]:
    """Answers whose rounds accept drafts by chance, more in some domains than in others."""
    rng, found = random.Random(f"{arm}{mode}"), {}
    nodes = NODES.get(arm.split(" T=")[0], 1 + depth)
    for i, domain in enumerate(DOMAINS):
        rows = []
        for n in range(PROMPTS):
            rounds = []
            for _ in range(ROUNDS):
                accepted = 0
                while accepted < depth and rng.random() < alpha * (0.6 + 0.07 * i):
                    accepted += 1
                seconds = {"draft": 0.03 * draft, "verify": 0.03 * (1 + 0.02 * nodes) * (1 + 0.1 * rng.random()), "accept": 0.001}
                rounds.append(StepRecord(depth, accepted, accepted + 1, seconds, depth, nodes))
            seconds = sum(sum(r.seconds.values()) for r in rounds)
            tokens = list(range(1 + sum(r.committed for r in rounds)))
            rows.append(Record(arm, mode, f"{domain}:{n}", domain, tokens, seconds + 0.1, seconds, rounds, prompt_tokens=60 * (n + 1) ** 2,
                               think_tokens=10 if i % 2 else 0))  # fmt: skip
        found[domain] = rows
    return found


def example() -> dict[str, Any]:
    words = "def mean ( values ) :\n    return sum ( values ) / len ( values )\n\nIt is the sum over their number .".split(" ")
    kinds = ["prefill", *("drafted" if i % 5 not in (0, 3) else "corrected" if i % 5 else "own" for i in range(1, len(words)))]
    tokens = [{"text": (" " if i else "") + word, "kind": kinds[i], "round": 1 + i // 3 if i else 0} for i, word in enumerate(words)]
    nodes = [{"text": "return", "parent": -1, "depth": 0, "rank": 0, "accepted": True}]
    for parent, accepted in ((0, True), (0, False), (1, True), (1, False), (3, False), (3, False), (4, False), (2, False)):
        rank = sum(node["parent"] == parent for node in nodes)
        text = f" word{len(nodes)}" if len(nodes) != 4 else "\n"
        nodes.append({"text": text, "parent": parent, "depth": nodes[parent]["depth"] + 1, "rank": rank, "accepted": accepted})
    return {"arm": "head tree:4x5x15", "domain": "code", "id": "code:3", "prompt": "Write a function that takes the mean of a list.",
            "tokens": tokens, "round": {"index": 4, "nodes": nodes}}  # fmt: skip


def bench() -> dict[str, Any]:
    """As `spectrain bench` writes it: drafting pays up to 8 rows."""
    rows = []
    for i, batch in enumerate((1, 2, 4, 8, 16, 32)):
        plain = 32.0 * batch / (1 + 0.03 * batch)
        gain = 1.5 - 0.14 * i
        rows.append({"batch": batch, "plain": plain, "speculative": plain * gain, "table": plain * max(gain, 0.99), "speedup": gain,
                     "adaptive": plain * max(0.98 * gain, 0.97), "k": 4 if i < 4 else 0, "tau": 2.1, "break_even": 2.1 / gain,
                     "predicted": gain * 1.03, "lo": gain * 0.95, "hi": gain * 1.06,
                     "mode": "packed"})  # fmt: skip
    policy = {"vllm": {"num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": [[1, 8, 4], [9, 32, 0]]},
              "sglang": {"1": {"candidate_steps": [2, 4]}, "9": {"candidate_steps": [0]}}}  # fmt: skip
    checked = {"slack": 0.05, "met": True, "rows": [{"batch": 1, "policy": "adaptive", "ratio": 0.98, "met": True}]}
    line = {"device": "H100", "bandwidth": 3.35e12, "flops": 9.89e14, "ridge": 295.2, "predicted_v": {"1": 1.02, "8": 1.03, "64": 1.09},
            "intensity": [{"batch": b, "positions": 5 * b, "intensity": 5.0 * b, "compute_bound": b > 59} for b in (1, 8, 64)]}  # fmt: skip
    return {"roofline": line, "drafters": {"head": {"rows": rows, "flips_at": 16, "policy": policy, "verified": checked}}}


def big_report() -> dict[str, Any]:
    """Every part of a report."""
    arms, tau, speed, counted = [], {}, {}, {}
    for temperature in TEMPERATURES:
        tail = f" T={temperature:g}" if temperature else ""
        for name, (depth, alpha, draft) in {"plain": (0, 0.0, 0.0), **DRAFTERS}.items():
            arm, base = name + tail, "plain" + tail
            plain = name == "plain"
            rule = "greedy" if plain or not temperature else "block" if "head chain" in name else "point_mass"
            kind = "none" if plain else {"ngram": "n-gram", "suffix": "suffix", "head": "EAGLE3"}[name.split()[0]]
            arms.append({"name": arm, "drafter": kind, "by": name.split()[0], "shape": "–" if plain else name.split()[1], "rule": rule,
                         "law": "point_mass", "depth": depth, "width": 4, "budget": NODES.get(name, depth + 1) - 1,
                         "temperature": temperature, "plain": base})  # fmt: skip
            rows = records_of(arm, depth, alpha * (1 - 0.2 * temperature), draft, "tau")
            tau[arm], counted[arm] = tau_table(rows, depth), [r for row in rows.values() for r in row]
            if not temperature:
                timed, plainly = (records_of(*who, "speed") for who in ((arm, depth, alpha, draft), ("plain", 0, 0.0, 0.0)))
                groups = {d: (timed[d], plainly[d]) for d in DOMAINS}
                groups["all"] = tuple([r for rows in found.values() for r in rows] for found in (timed, plainly))  # type: ignore[assignment]
                speed[arm] = {domain: speed_cell(*both) for domain, both in groups.items()}
    drafted = [arm["name"] for arm in arms if arm["depth"]]
    entropies = {(r.id, r.turn): (r.tokens, [random.Random(i).expovariate(1.2) for i in r.tokens]) for r in counted["plain"]}
    greedy = [name for name in drafted if "T=" not in name]
    ranks = [[0.55, 0.13, 0.06, 0.03], [0.48, 0.12, 0.05, 0.02], [0.41, 0.1, 0.05, 0.02]]
    return {
        "format": 2, "title": "Speculative decoding of Target-135M-Instruct", "made": "2001-02-03T04:05:06+0000",
        "target": "invented/Target-135M-Instruct",
        "suite": {"name": "results v1", "sha256": "ab" * 32, "prompts": dict.fromkeys(DOMAINS, PROMPTS)},
        "licences": {"HumanEval": "MIT", "MT-Bench": "Apache-2.0", "CNN/DailyMail": "Apache-2.0 (collection), texts of their publishers"},
        "made_of": {"target": "0123456789ab", "head": "ba9876543210", "suite": "results v1", "temperature": "0, 0.7, 1"},
        "settings": {"max_new_tokens": 128, "temperature": 0.0, "temperatures": list(TEMPERATURES), "dtype": "float32", "threads": 2,
                     "machine": "x86_64, 2 threads, AVX512", "speed_max_new_tokens": 64, "compile": "auto"},
        "versions": {"torch": "9.8.7", "transformers": "6.5.4", "spectrain": "0.0.test"}, "arms": arms, "domains": DOMAINS,
        "tau": tau, "speed": speed, "exactness": {n: {"prompts": 55, "equal": 53, "ties": 2, "failed": 0} for n in greedy},
        "baseline": {"name": "transformers generate()", "tokens_per_s": 29.84, "plain_tokens_per_s": 31.71, "ratio": 1.063, "lo": 1.041,
                     "hi": 1.088},
        "coverage": dict.fromkeys(DOMAINS, 0.97),
        "training": {"steps": [{"step": 50 * (i + 1), "minutes": 1.7 * i, "loss": 4.2 / (1 + 0.3 * i), "measured_tau": 2.2 - 0.9 / (i + 1),
                                "alpha": [0.7 - 0.4 / (i + 1), 0.62 - 0.4 / (i + 1)]} for i in range(12)]},
        "advice": ["Use head tree:4x5x15 for code (1.52×), math (1.61×); suffix chain:8 for code_edit (1.96×); no drafter pays for chat, "
                   "translation: decode plainly there.", "The head's tau lies above its break-even in code, math."],
        "service": ["Latency at batch 1: head tree:4x5x15, 1.42 times plain decoding.", "Full batch: decode plainly above 8 rows."],
        "notes": ["Every number in this report is invented.", "A head's tau depends on how long it was trained and on what."],
        "slices": {n: slices(counted[n], entropies=entropies if n in greedy else None) for n in drafted},
        "costs": {"seconds": 0.031, "v": [1.0, 1.02, 1.05, 1.08, 1.1], "c": 0.1,
                  "by_arm": {n: {"c": 0.1, "start": -0.05, "other": 0.03, "plain": 0.02} for n in greedy}},
        "alpha": {name: {d: {"value": 0.5, "lo": 0.45, "hi": 0.55, "by_depth": [0.5, 0.46, 0.42]} for d in [*DOMAINS, "all"]}
                  for name in ("ngram", "head")},
        "ranks": {"head": {"table": ranks, "denominator": [900, 610, 350]}},
        "pairs": pairs(counted, arms),
        "gap": {n: {"all": {"predicted": speed[n]["all"]["speedup"] * 1.04, "measured": speed[n]["all"]["speedup"],
                            "by": {"tau": 0.02, "draft": 0.01, "verify": -0.01, "other": 0.02}}} for n in greedy},
        "price": {n: {"flops_ratio": 2.3, "positions_per_token": 2.1, "wasted_positions_per_token": 1.1, "drafter_bytes": 5.2e7,
                      "kv_tokens_displaced": 1310.0} for n in greedy},
        "example": example(), "batch": bench(),
        "against": {"file": "runs/before/report.json", "note": "The same prompts are compared one by one.",
                    "rows": [{"arm": "head chain:4", "domain": d, "then": 1.8, "now": 1.9, "difference": 0.1, "lo": -0.02, "hi": 0.22,
                              "p": 0.08} for d in DOMAINS]},
        "gates": [{"expression": "tau.code>=1.5", "value": 1.73, "met": True, "arm": "head chain:4"},
                  {"expression": "speedup>=2", "value": 1.42, "met": False, "arm": "head chain:4"}],
        "served": {"engine": "vllm", "rule": "accepted before stops", "depth": 4, "notes": [],
                   "rows": [{"domain": d, "temperature": 0.0, "drafts": 210, "tau": 1.92, "own_tau": 1.93, "difference": -0.01,
                             "acceptance": [0.5, 0.25, 0.12, 0.05], "own_acceptance": [0.51, 0.25, 0.12, 0.05], "tokens_per_s": 88.0,
                             "equal": 8, "compared": 8} for d in DOMAINS]},
    }  # fmt: skip


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return big_report()


def everything_open(browser: Any) -> None:
    browser.value("document.querySelectorAll('details').forEach(d => d.open = true)")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [375, 1280])
def test_page_is_wider_than_the_screen_or_complains(report: dict[str, Any], browser: Any, tmp_path: Path, width: int, dark: bool) -> None:
    page = tmp_path / "report.html"
    page.write_text(render_html(report))
    assert browser.show(page, width=width, dark=dark) == []
    background = browser.value("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 3 * 128) == dark
    for opened in (False, True):
        if opened:
            everything_open(browser)
        assert browser.value("document.documentElement.scrollWidth") == width
        assert browser.value(f"{ALL_OF}('.scroll')].filter(e => e.getBoundingClientRect().right > innerWidth).length") == 0
    assert browser.value(f"{ALL_OF}('.verdicts b.x')].filter(e => e.getBoundingClientRect().height > 0).length") == 6 * 12


def test_small_print_stands_outside_its_chart(report: dict[str, Any], browser: Any, tmp_path: Path) -> None:
    """No figure or name in a chart is cut off by its card."""
    page = tmp_path / "report.html"
    page.write_text(render_html(report))
    for width in (375, 1280):
        browser.show(page, width=width)
        everything_open(browser)
        cut = """[...document.querySelectorAll('section.card svg text')].filter(t => {
            const text = t.getBoundingClientRect(), card = t.closest('.card').getBoundingClientRect();
            return text.right > card.right + 1 || text.left < card.left - 1;}).map(t => t.textContent)"""
        assert browser.value(cut) == []


def test_keyboard_reaches_what_scrolls(report: dict[str, Any], browser: Any, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(render_html(report))
    browser.show(page, width=375)
    everything_open(browser)
    hidden = "[...document.querySelectorAll('*')].filter(e => e.scrollWidth > e.clientWidth + 1 && ['auto', 'scroll'].includes("
    hidden += "getComputedStyle(e).overflowX) && e.tabIndex < 0).map(e => e.tagName + '.' + e.className)"
    assert browser.value(hidden) == []
    for _ in range(2):
        browser.ask("Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9)
    assert browser.value("document.activeElement.textContent") == "By domain"


class Outline(HTMLParser):
    """Headings, landmarks, ids, links, tables and pictures of a page, in their order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.headings, self.ids, self.links = list[int](), list[str](), list[str]()
        self.parts = dict[str, int]()
        self.faults = list[str]()
        self._table: dict[str, Any] | None = None
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.parts[tag] = self.parts.get(tag, 0) + 1
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if given.get("id"):
            self.ids.append(str(given["id"]))
        if tag == "a":
            self.links.append(str(given["href"]))
        if tag == "table":
            self._table = {"caption": False, "line": self.getpos()}
        if tag == "caption" and self._table is not None:
            self._table["caption"] = True
        if tag == "th" and given.get("scope") not in ("col", "row"):
            self.faults.append(f"th without scope at {self.getpos()}")
        if tag == "svg" and not (given.get("aria-hidden") or (given.get("role") == "img" and given.get("aria-label"))):
            self.faults.append(f"a picture without words at {self.getpos()}")
        if given.get("role") == "region" and not (given.get("aria-label") and given.get("tabindex") == "0"):
            self.faults.append(f"a box that scrolls without name or focus at {self.getpos()}")

    def handle_endtag(self, tag: str) -> None:
        if tag == "table" and self._table is not None and not self._table["caption"]:
            self.faults.append(f"table without caption at {self._table['line']}")


def test_screen_reader_finds_no_name_or_way(report: dict[str, Any]) -> None:
    found = Outline(render_html(report))
    assert found.faults == []
    assert found.headings[0] == 1 and found.headings.count(1) == 1
    assert all(below - above <= 1 for above, below in zip(found.headings, found.headings[1:], strict=False))
    assert len(set(found.ids)) == len(found.ids)
    assert {link.removeprefix("#") for link in found.links} <= set(found.ids)
    assert [found.parts[part] for part in ("main", "header", "nav", "footer")] == [1, 1, 1, 1]


def luminance(colour: str) -> float:
    whole = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
    parts = [int(whole[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_is_too_faint_for_its_ground(report: dict[str, Any], theme: int) -> None:
    block = re.findall(r":root \{(.*?)\}", render_html(report), re.S)[theme]
    colours = dict(re.findall(r"--([\w-]+): (#\w+)", block))
    pairs_ = [("ink", "page"), ("ink", "card"), ("soft", "page"), ("soft", "card"), ("link", "page"), ("link", "card"), ("win", "win-bg"),
              ("loss", "loss-bg"), ("even", "even-bg"), ("soft", "win-bg"), ("soft", "loss-bg"), ("soft", "even-bg"),
              ("ink", "fix-bg")]  # fmt: skip
    for text, ground in pairs_:
        light, dim = sorted((luminance(colours[text]), luminance(colours[ground])), reverse=True)
        assert (light + 0.05) / (dim + 0.05) >= 4.5, (text, ground)
    for i in range(6):
        light, dim = sorted((luminance(colours[f"c{i}"]), luminance(colours["card"])), reverse=True)
        assert (light + 0.05) / (dim + 0.05) >= 3, i


def test_every_part_is_on_the_page(report: dict[str, Any], tmp_path: Path) -> None:
    write_report(report, tmp_path)
    page, markdown = (tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()
    words = re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", "", page)))
    parts = ("By temperature", "By domain, T = 0.7", "Against another report", "Depth × rank: head", "Rounds by accepted drafts",
             "Speed-up predicted and measured", "Context, position, part, entropy", "Acceptance of one draft, α", "By batch", "Roofline",
             "Arms compared on the same prompts", "What speculation costs", "Served by an engine", "Licences of the prompts",
             "Policies by batch", "Costs measured apart", "head: both policies stay within 5 %", "not met: speedup>=2",
             "Latency at batch 1", "Passes: packed.", "head tree:4x5x15 (point_mass, T=0.7)")  # fmt: skip
    for part in parts:
        assert part in words and part in markdown, part
    assert "26 tokens in 10 passes" in words and "8 drafted nodes, at most 3 in a row; 2 accepted" in words
    assert page.count('class="corrected') == 5 and page.count('<li class="yes">') == 2


def test_arm_has_another_letter_at_another_temperature(report: dict[str, Any]) -> None:
    names = re.findall(r"<b>([A-Z])</b> ([\w:. ]+?)(?: <small>|</li>)", render_html(report))
    assert set(names) == {(chr(65 + i), name) for i, name in enumerate(DRAFTERS)}


def test_pictures_are_missing_or_too_many(report: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    names = ("plain", "head chain:4", "ngram chain:8")
    few = [arm for arm in report["arms"] if arm["temperature"] < 1 and arm["name"].split(" T=")[0] in names]
    small = {**report, "arms": few, "domains": DOMAINS[:2], "pairs": None}
    write_report(small, tmp_path, pictures=True)
    drawn = {path.name: path.read_bytes() for path in tmp_path.glob("*.png")}
    assert set(drawn) == {
        "tokens-per-pass-tau-temperature-0.png", "tokens-per-pass-tau-temperature-0.7.png",
        "speed-up-over-plain-decoding-temperature-0.png", "speed-up-predicted-and-measured-temperature-0.png",
        "acceptance-by-position-temperature-0.png", "batches.png", "training.png",
        "context-position-thinking-entropy-temperature-0.png", "depth-by-rank-head.png",
    }  # fmt: skip
    assert all(content.startswith(b"\x89PNG") and len(content) > 5000 for content in drawn.values())
    told = re.findall(r"!\[.*?\]\((.*?)\)", (tmp_path / "report.md").read_text())
    assert sorted(told) == sorted(drawn)
