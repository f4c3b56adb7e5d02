"""Heads on the Hugging Face Hub, by huggingface_hub: its token, its cache, its resumed transfers.

The token is huggingface_hub's own (`hf auth login`, or HF_TOKEN); it is neither asked for nor written here. Only files that a head
consists of are fetched, none of which can hold code.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import HfApi, ModelCard, get_token, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from spectrain.export.engines import FORMATS
from spectrain.heads.base import ADAPTER, TOKENS

CONFIG, WEIGHTS, MADE_WITH, RUN, CARD = "config.json", "model.safetensors", "made_with.json", "run.yaml", "README.md"
HEAD_FILES = (CONFIG, WEIGHTS, MADE_WITH, RUN)
OPTIONAL = (TOKENS, f"{ADAPTER}/adapter_config.json", f"{ADAPTER}/adapter_model.safetensors")
REPORT = "report"  # folder of the repository
OURS = [TOKENS, *(f"{folder}/*" for folder in (REPORT, ADAPTER, *FORMATS))]  # what an earlier push may have left there
LICENCE = ("license", "license_name", "license_link")  # fields of a model card
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token that may do so"


@dataclass(frozen=True)
class Pushed:
    """What a push did. commit, url: of the head in the repository. replaced: commit of what was there before, "" for a new repository or
    branch. same_weights: whether that held this head's weights already."""

    repo: str
    commit: str
    url: str
    private: bool
    replaced: str
    same_weights: bool


def push_folder(folder: Path, repo: str, *, public: bool, revision: str | None) -> Pushed:
    """Upload a folder made by `spectrain.cli.push` as one commit. A repository that is not there is made, private unless `public`.

    A commit before it stays in the repository's history. ValueError for a refused token, a public repository without `public`, and one
    that holds anything but a head; an upload that was stopped goes on when it is called again.
    """
    api = HfApi()
    with _told(repo, revision):
        found = _look(api, repo, None)
        if found is None:
            api.create_repo(repo, private=not public)
            found = api.model_info(repo)
        elif not found.private and not public:
            raise ValueError(f"{repo} is public; add --public to push there, or name another repository")
        if revision is not None and _look(api, repo, revision) is None:
            api.create_branch(repo, branch=revision)
        before = api.model_info(repo, revision=revision, files_metadata=True)
        earlier = _head_there(before, repo)
        done = api.upload_folder(
            repo_id=repo, folder_path=folder, revision=revision, parent_commit=before.sha, delete_patterns=OURS,
            commit_message="Upload a draft head with spectrain",
        )  # fmt: skip
    there = {file.rfilename: file for file in before.siblings or ()}
    weights = there.get(WEIGHTS)
    same = weights is not None and weights.lfs is not None and weights.lfs.sha256 == sha256_of(folder / WEIGHTS)
    return Pushed(repo, done.oid, done.commit_url, bool(found.private), str(before.sha) if earlier else "", same)


def _look(api: HfApi, repo: str, revision: str | None) -> Any:
    """model_info; None where there is no such repository (that this token may see), or no such branch."""
    try:
        return api.model_info(repo, revision=revision)
    except (RepositoryNotFoundError, RevisionNotFoundError):
        return None


def _head_there(info: Any, repo: str) -> bool:
    """Whether there is a head; ValueError where there is anything else, which is not to be written over."""
    names = {file.rfilename for file in info.siblings or ()} - {".gitattributes", CARD}
    if names and not {CONFIG, WEIGHTS, MADE_WITH} <= names:
        some = ", ".join(sorted(names)[:5])
        raise ValueError(f"{repo} holds something that is no head of spectrain ({some}); name another repository")
    return bool(names)


def sha256_of(path: Path) -> str:
    """Hash of a file, as the Hub names large files."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_head(repo: str, revision: str | None = None) -> tuple[Path, str]:
    """A head directory from the Hub, in huggingface_hub's cache, and the commit that it is of.

    revision: branch, tag or commit. ValueError where there is no such repository, no head in it, or no way to ask.
    """
    with _told(repo, revision):
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=[*HEAD_FILES, *OPTIONAL]))
    if missing := [name for name in (CONFIG, WEIGHTS, MADE_WITH) if not (folder / name).is_file()]:
        way_out = f"a head of another program is downloaded (hf download {repo} --local-dir FOLDER) and taken over by `spectrain import`"
        raise ValueError(f"{repo} holds no head of spectrain ({', '.join(missing)} missing); {way_out}")
    return folder, folder.name


def licence_of(where: str | Path) -> dict[str, str]:
    """The licence in the model card of a Hub repository or a README.md; empty where there is none or it cannot be read."""
    try:
        data = ModelCard.load(where).data.to_dict()
    except (OSError, ValueError, httpx2.TransportError):  # no card, no repository, no connection; a card whose metadata are damaged
        return {}
    return {key: data[key] for key in LICENCE if isinstance(data.get(key), str)}


@contextmanager
def _told(repo: str, revision: str | None) -> Iterator[None]:
    """What goes wrong on the way to the Hub as a ValueError in words of our own: a server may repeat anything, the token among it."""
    try:
        yield
    except HFValidationError as error:
        raise ValueError(f"{repo!r} is no name of a repository; needed: user/name") from error
    except LocalEntryNotFoundError as error:
        raise ValueError(f"{repo} is not in the cache, and the Hub cannot be asked (no connection, or HF_HUB_OFFLINE is set)") from error
    except (OfflineModeIsEnabled, httpx2.TransportError) as error:
        raise ValueError(f"no way to the Hub for {repo} ({type(error).__name__}); give the same command again when there is") from error
    except HfHubHTTPError as error:
        raise ValueError(_refused(error, repo, revision)) from error
    except (RuntimeError, ConnectionError, TimeoutError) as error:  # of a transfer under way
        cause = error.__cause__
        why = _refused(cause, repo, revision) if isinstance(cause, HfHubHTTPError) else _without_token(f"{error} {cause or ''}".strip())
        raise ValueError(f"the transfer of {repo} stopped: {why}; what has arrived is kept, the same command goes on from there") from error


def _refused(error: HfHubHTTPError, repo: str, revision: str | None) -> str:
    if isinstance(error, RevisionNotFoundError):
        return f"{repo} has no branch, tag or commit {revision}"
    if isinstance(error, RepositoryNotFoundError):
        return f"the Hub shows no repository {repo}; if it is private, {LOG_IN}"
    code = error.response.status_code
    told = {
        401: f"the Hub did not accept the token for {repo}; {LOG_IN}" if get_token() else f"no token for {repo}; {LOG_IN}",
        403: f"the token may not write to {repo}; {LOG_IN}",
        409: f"there is a repository {repo} that this token may not see; {LOG_IN}",
        412: f"{repo} was changed by somebody else meanwhile; look at it, then push again",
    }  # fmt: skip
    return told.get(code, f"the Hub answered {code} for {repo}; try again later")


def _without_token(text: str) -> str:
    return text.replace(get_token() or "\0", "…")
