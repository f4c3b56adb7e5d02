"""Heads that go to the Hub and come back, through huggingface_hub's own client and a server on this machine."""

import hashlib
import json
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
import yaml
from click.testing import Result
from huggingface_hub import ModelCard
from typer.testing import CliRunner

import spectrain as st
from spectrain.cli import app
from spectrain.cli.push import data_used
from spectrain.cli.start import weights_hash
from spectrain.config import HeadConfig
from spectrain.heads.base import adapter_hash, save_head
from spectrain.heads.tokens import pack_tokens
from spectrain.target.model import Target
from spectrain.training.setup import new_head

SERVER = runpy.run_path(str(Path(__file__).with_name("hub_server.py")))
TOKEN, Commit, Hub, Repo, running = (SERVER[name] for name in ("TOKEN", "Commit", "Hub", "Repo", "running"))
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")  # huggingface_hub's LFS uploads
BASE = "people/base-135m"
CARD = "---\nlicense: other\nlicense_name: base-licence\nlicense_link: LICENSE\n---\n\n# Base\n"
PUSHED = {"README.md", "config.json", "made_with.json", "model.safetensors", "run.yaml", "tokens.json.gz"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A Hub with a base model's card, to which huggingface_hub goes with the right token and an empty cache."""
    with running() as hub:
        constants = huggingface_hub.constants
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        found = {"ENDPOINT": hub.url, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_DISABLE_XET": True, "HF_HUB_OFFLINE": False}
        for name, value in {**found, "HF_HUB_CACHE": str(tmp_path / "cache")}.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        hub.repos[BASE] = Repo(private=False)
        hub.repos[BASE].add("main", Commit({"README.md": CARD.encode()}))
        yield hub


@pytest.fixture
def save(make_head: Callable[..., Any], target: Target, tmp_path: Path) -> Callable[..., Path]:
    """save(name="head", seed=0, trained_for=BASE, draft_vocab=40): a head directory as training leaves it."""

    def make(name: str = "head", *, seed: int = 0, trained_for: str = BASE, draft_vocab: int = 40) -> Path:
        head = make_head(target, seed=seed, draft_vocab=draft_vocab)
        head.tokens = pack_tokens(target.tokenizer.get_vocab())
        made_with = {"target": trained_for, "target_revision": None, "versions": {"torch": "2"}, **target.fingerprints}
        run = {"name": name, "data": {"rows": "/home/somebody/rows"}}
        save_head(head, tmp_path / name, run_yaml=yaml.safe_dump(run), made_with=made_with)
        return tmp_path / name

    return make


@pytest.fixture
def push() -> Callable[..., Result]:
    """push(head, *arguments): the command, to me/head."""

    def run(head: Path, *arguments: Any) -> Result:
        result = CliRunner().invoke(app, ["push", str(head), "me/head", *map(str, arguments)])
        assert TOKEN not in result.output + str(result.exception)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


def cell(tau: float, prompts: int) -> dict[str, Any]:
    return {
        "tau": tau, "lo": tau - 0.1, "hi": tau + 0.1, "tokens": 100, "rounds": 60, "prompts": prompts, "acceptance": [0.52, 0.21],
        "conditional": [0.52, 0.4],
    }  # fmt: skip


def write_report(folder: Path, head: Path, tau: float = 1.7321) -> Path:
    """A report of two domains in the form of `spectrain evaluate`; the figures are invented."""
    zeros = dict.fromkeys("seconds tokens_per_s lo hi tau v draft other break_even".split(), 1.0)
    chain = {"shape": "chain 2", "rule": "greedy", "depth": 2, "width": 1, "budget": 2}
    arms = [{**chain, "name": name, "drafter": drafter} for name, drafter in (("n-gram", "n-gram"), ("head chain", "Eagle3"))]
    arms = [{"name": "plain", "drafter": "none", "shape": "", "rule": "greedy", "depth": 0, "width": 0, "budget": 0}, *arms]
    taus = {"plain": 1.0, "n-gram": 1.2, "head chain": tau}
    settings = {"dtype": "float32", "machine": "m", "max_new_tokens": 16, "speed_max_new_tokens": 8, "threads": 1, "temperature": 0.0}
    report = {
        "title": "t", "made": "2026-01-01T00:00:00+0000", "target": "folder", "suite": {"name": "tiny v1", "sha256": "ab" * 32},
        "made_of": {"head": weights_hash(st.load_head(head))[:12]}, "settings": settings, "versions": {"torch": "2"}, "arms": arms,
        "domains": ["red", "blue"], "exactness": {}, "baseline": None, "advice": ["Use head chain for red (1.30×)."], "notes": [],
        "tau": {name: {d: cell(tau, 5) for d in ("red", "blue", "all (micro)", "all (macro)")} for name, tau in taus.items()},
        "speed": {name: {d: {**zeros, "speedup": 1.3, "tokens": 9, "prompts": 2} for d in ("red", "blue", "all")} for name in taus},
    }  # fmt: skip
    folder.mkdir()
    (folder / "report.json").write_text(json.dumps(report))
    (folder / "report.html").write_text("<p>figures</p>")
    (folder / "records.jsonl").write_text("{}\n")
    return folder


def same_weights(a: Any, b: Any) -> bool:
    theirs = b.state_dict()
    return a.state_dict().keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in a.state_dict().items())


def files(hub: Hub, branch: str = "main") -> dict[str, bytes]:
    repo = hub.repos["me/head"]
    return repo.commits[repo.branches[branch]].files


def test_what_is_loaded_is_what_was_pushed(hub: Hub, save: Any, push: Any, target: Target, tmp_path: Path) -> None:
    head = save()
    result = push(head, "--report", write_report(tmp_path / "evaluation", head), "--with-format", "vllm")
    assert result.exit_code == 0, result.output
    repo, commit = hub.repos["me/head"], hub.repos["me/head"].branches["main"]
    assert repo.private and len(repo.commits) == 2 and f"/commit/{commit} (private)" in result.output
    exported = {"vllm/config.json", "vllm/model.safetensors"}
    assert files(hub).keys() == PUSHED | exported | {".gitattributes", "report/report.json", "report/report.html"}
    assert TOKEN.encode() not in b"".join(files(hub).values())
    repo.commits[commit].files.update({"modeling.py": b"raise SystemExit", "optimizer.pt": b"pickle"})
    hub.log.clear()
    found = st.load_head("me/head", target)
    assert same_weights(found, st.load_head(head)) and found.made_with["hub"] == f"me/head@{commit}"
    assert {line.removeprefix("GET ") for line in hub.log} == PUSHED - {"README.md"}
    plain, drafted = (st.generate(target, [[7, 8, 9]], drafter=d, max_new_tokens=8, ignore_eos=True).rows[0].tokens for d in (None, found))
    assert plain == drafted


def test_card_says_figures_licence_and_limits_in_the_hubs_form(hub: Hub, save: Any, push: Any, tmp_path: Path) -> None:
    head = save()
    result = push(head, "--report", write_report(tmp_path / "evaluation", head), "--dry-run", tmp_path / "out", "--with-format", "vllm")
    assert result.exit_code == 0 and "nothing was uploaded" in result.output and "me/head" not in hub.repos, result.output
    assert "licence other, as of people/base-135m" in result.output and "/home/somebody/rows" in result.output
    card = ModelCard.load(tmp_path / "out/README.md")
    data, text = card.data, card.text
    assert (data.license, data.license_name, data.license_link) == ("other", "base-licence", "LICENSE")
    assert (data.base_model, data.library_name, data.pipeline_tag) == (BASE, "spectrain", "text-generation")
    assert {"speculative-decoding", "eagle3"} <= set(data.tags)
    found = {(r.dataset_config, r.metric_type): r for r in data.eval_results}
    assert found.keys() == {(domain, of) for domain in ("red", "blue", "all") for of in ("tau", "acceptance")}
    assert found["red", "tau"].metric_value == 1.7321 and "[1.63, 1.83]" in found["red", "tau"].metric_name
    assert found["red", "tau"].metric_args["shape"] == "chain 2"
    assert "| red | 5 | 1.20 [1.10, 1.30] | 1.73 [1.63, 1.83] |" in text and "| speed-up, all | | 1.30×" in text
    assert "> Use head chain for red" in text and "accepted the first i drafts, over all domains: head chain: 0.52, 0.21" in text
    assert f"vllm serve {BASE} --speculative-config" in text and '"model": "head/vllm"' in text and 'st.load_head("me/head"' in text
    assert "hs[1], hs[2]" in text and "40 of 100" in text and "licences are not recorded" in text and "as few as 5 prompts" in text
    there = {path.relative_to(tmp_path / "out").as_posix(): path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert set(there) == PUSHED | {"vllm/config.json", "vllm/model.safetensors", "report/report.json", "report/report.html"}
    assert all(f"{size:>14,}  {name}" in result.output for name, size in there.items())
    again = push(head, "--dry-run", tmp_path / "out")
    assert again.exit_code == 1 and "is there already" in again.output


def test_card_without_a_report_says_so(hub: Hub, save: Any, push: Any, tmp_path: Path) -> None:
    assert push(save(), "--dry-run", tmp_path / "out", "--json").exit_code == 0
    card = ModelCard.load(tmp_path / "out/README.md")
    assert "Not measured" in card.text and card.data.eval_results is None


def test_card_shows_calls_that_fail(hub: Hub, push: Any, target: Target, tmp_path: Path) -> None:
    """A chain deeper than the head drafts, a target in other bits, the name of a folder of this machine; and what a format changes."""
    made_with = {"target": str(tmp_path / "model"), "versions": {}, "quantization": "8bit", **target.fingerprints}
    medusa = new_head(HeadConfig(kind="medusa", num_heads=2, draft_vocab_size=None), target, [], seed=0)
    save_head(medusa, tmp_path / "head", run_yaml="", made_with={**made_with, "target_revision": None, "template_sha256": ""})
    asked = ("--base-model", BASE, "--license", "mit", "--with-format", "medusa")
    result = push(tmp_path / "head", *asked, "--dry-run", tmp_path / "é")
    assert result.exit_code == 0, result.output
    text = (tmp_path / "é/README.md").read_text()
    assert "st.Chain(2)" in text and f'st.load_target("{BASE}", quantization="8bit")' in text and '"model": "head/medusa"' in text
    assert json.loads((tmp_path / "é/medusa/config.json").read_text())["base_model_name_or_path"] == BASE


def test_dry_run_that_fails_leaves_a_part(hub: Hub, save: Any, push: Any, tmp_path: Path) -> None:
    head = save()
    assert push(head, "--dry-run", tmp_path / "out", "--with-format", "medusa").exit_code == 1
    assert {path.name for path in tmp_path.iterdir()} - {"cache"} == {"head"}  # the cache is huggingface_hub's
    (tmp_path / "out").mkdir()
    assert push(head, "--dry-run", tmp_path / "out").exit_code == 0 and (tmp_path / "out/README.md").is_file()
    (head / "run.yaml").write_text("a: [")
    assert "run.yaml of the head is damaged" in push(head).output


def test_card_of_a_head_with_an_adapter_forgets_it(hub: Hub, save: Any, push: Any, tmp_path: Path) -> None:
    head = save()
    made = json.loads((head / "made_with.json").read_text())
    (head / "adapter").mkdir()
    (head / "adapter/adapter_config.json").write_text("{}")
    (head / "adapter/adapter_model.safetensors").write_bytes(b"weights")
    change = {"kl": 0.02, "kl_nats": 2.0, "agreement": 0.9, "agree": 90, "tokens": 100, "rows": "4 rows that were kept out"}
    (head / "made_with.json").write_text(json.dumps({**made, "adapter_sha256": adapter_hash(head / "adapter"), "target_change": change}))
    refused = push(head, "--with-format", "vllm", "--dry-run", tmp_path / "out")
    assert refused.exit_code == 1 and "leave --with-format out" in refused.output
    assert push(head, "--dry-run", tmp_path / "out").exit_code == 0
    text = (tmp_path / "out/README.md").read_text()
    assert f'st.load_target("{BASE}", adapter=folder)' in text and "st.load_head(folder, target)" in text
    assert f"export head --to merged --target {BASE} --out merged\nspectrain export head --to FORMAT --target merged" in text
    assert (tmp_path / "out/adapter/adapter_model.safetensors").is_file() and "the frozen model" not in text
    assert "0.0200 nats a token (2.00 over 100 tokens), greedy agreement 90.00% (90/100), on 4 rows that were kept out" in text


def test_branch_and_commit_are_loaded_as_named(hub: Hub, save: Any, push: Any) -> None:
    one, two = save("one"), save("two", seed=1)
    first = json.loads(push(one, "--json").stdout)["commit"]
    assert push(two, "--revision", "wider").exit_code == 0
    assert same_weights(st.load_head("me/head"), st.load_head(one))
    assert same_weights(st.load_head("me/head", revision="wider"), st.load_head(two))
    with pytest.raises(ValueError, match="is a folder here, which has no revision 'wider'"):
        st.load_head(one, revision="wider")
    result = push(two)
    assert result.exit_code == 0 and f"me/head held another head; it stays there as commit {first}" in result.output
    assert same_weights(st.load_head("me/head"), st.load_head(two))
    assert same_weights(st.load_head("me/head", revision=first), st.load_head(one))
    assert "held another head" not in push(two).output
    with pytest.raises(ValueError, match="me/head has no branch, tag or commit narrow"):
        st.load_head("me/head", revision="narrow")


def test_files_of_the_head_before_stay_beside_another_one(hub: Hub, save: Any, push: Any, tmp_path: Path) -> None:
    one = save("one")
    assert push(one, "--with-format", "vllm", "--report", write_report(tmp_path / "evaluation", one)).exit_code == 0
    assert push(save("two", seed=1)).exit_code == 0
    assert files(hub).keys() == PUSHED | {".gitattributes"}


def test_upload_that_stops_goes_on(hub: Hub, save: Any, push: Any) -> None:
    head = save(draft_vocab=100)  # whose export has no tables, so another file
    hub.cut, hub.refuse = 1, 1  # one connection breaks and is taken up again by itself; then nothing more is taken
    result = push(head, "--with-format", "vllm")
    assert result.exit_code == 1 and "what has arrived is kept, the same command goes on" in result.output, result.output
    assert (hub.count("CUT"), hub.count("PUT"), hub.count("COMMIT")) == (1, 1, 0) and files(hub).keys() == {".gitattributes"}
    hub.refuse = None
    assert push(head, "--with-format", "vllm").exit_code == 0
    sent = [line for line in hub.log if line.startswith("PUT")]
    assert len(sent) == len(set(sent)) == 2 and hub.count("COMMIT") == 1
    assert same_weights(st.load_head("me/head"), st.load_head(head))


def test_large_files_go_by_xet_where_it_is_there(
    hub: Hub, save: Any, push: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", False)
    hub.xet, hub.refuse = tmp_path / "xet", 0
    result = push(save())
    assert result.exit_code == 1 and "the transfer of me/head stopped" in result.output and "403" in result.output
    hub.refuse = None
    assert push(save(), "--with-format", "vllm").exit_code == 0
    repo = hub.repos["me/head"]
    commit = repo.commits[repo.branches["main"]]
    assert commit.large["model.safetensors"] == hashlib.sha256((tmp_path / "head/model.safetensors").read_bytes()).hexdigest()
    assert commit.large.keys() == {"model.safetensors", "vllm/model.safetensors"} and hub.count("COMMIT") == 1 and not hub.count("PUT")


@pytest.mark.parametrize("token", ["hf_wrong" + "y" * 25, None])
def test_refused_token_is_not_repeated(hub: Hub, save: Any, push: Any, token: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    head = save()
    if token is None:
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", "/nowhere/token")
    else:
        monkeypatch.setenv("HF_TOKEN", token)
    result = push(head, "--license", "mit")
    said = "no token for me/head" if token is None else "the Hub did not accept the token for me/head"
    assert result.exit_code == 1 and said in result.output and "hf auth login" in result.output
    assert "hf_wrong" not in result.output and "me/head" not in hub.repos


def test_repository_of_something_else_is_left_alone(hub: Hub, save: Any, push: Any) -> None:
    head = save()
    hub.repos["me/head"] = Repo(private=True)
    hub.repos["me/head"].add("main", Commit({"pytorch_model.bin": b"x", "config.json": b"{}"}))
    result = push(head)
    assert result.exit_code == 1 and "holds something that is no head of spectrain (config.json, pytorch_model.bin)" in result.output
    with pytest.raises(ValueError, match=r"there is no folder me/head, and from the Hub: me/head holds no head .*spectrain import"):
        st.load_head("me/head")
    hub.repos["me/head"] = Repo(private=False)
    hub.repos["me/head"].add("main", Commit({}))
    result = push(head)
    assert result.exit_code == 1 and "me/head is public; add --public" in result.output and not hub.count("COMMIT")
    assert push(head, "--public").exit_code == 0 and files(hub).keys() >= PUSHED


def test_unknown_licence_base_and_foreign_report_are_asked_for(hub: Hub, save: Any, push: Any, tmp_path: Path) -> None:
    local = save(trained_for=str(tmp_path / "model"))
    assert "say which model of the Hub that is: --base-model NAME" in push(local).output
    hub.repos[BASE].add("main", Commit({"README.md": b"# Base\n"}))
    assert f"the licence of {BASE} is not known" in push(local, "--base-model", BASE).output
    (tmp_path / "model").mkdir()
    (tmp_path / "model/README.md").write_text("---\nlicense: mit\n---\n")
    assert "licence mit, as of" in push(local, "--base-model", BASE, "--dry-run", tmp_path / "out").output
    assert "said to be people/base-135m" in (tmp_path / "out/README.md").read_text()
    report = write_report(tmp_path / "evaluation", save("other", seed=1))
    assert "is not of this head alone" in push(local, "--base-model", BASE, "--report", report).output
    for text in ("[]", '{"made_of": {"target": "x"}}'):  # of no head at all
        (report / "report.json").write_text(text)
        assert "is not of this head alone (no head" in push(local, "--base-model", BASE, "--report", report).output
    assert "me/head" not in hub.repos


def test_hub_that_cannot_be_reached_is_told(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="there is no folder runs/eagel3, and from the Hub: the Hub shows no repository runs/eagel3"):
        st.load_head("runs/eagel3")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="there is no folder me/head, and from the Hub: .*HF_HUB_OFFLINE"):
        st.load_head("me/head")


def test_shipped_prompts_are_listed_by_licence() -> None:
    root = Path(st.__file__).parents[1]
    text = data_used((root / "recipes/eagle3_smollm2.yaml").read_text())
    assert "answers to 794 prompts (code 150," in text and "not recorded" not in text
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    counted = sum(int(part.rpartition(" ")[2]) for row in rows for part in row.strip("| ").split(" | ")[1].split(", "))
    assert counted == 794 and any(row.startswith("| MIT |") and "svamp" in row for row in rows)
