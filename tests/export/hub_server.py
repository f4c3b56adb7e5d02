"""A Hub on this machine, as far as huggingface_hub asks: repositories, branches, large files by the LFS protocol, commits, downloads.

What is there is kept in memory; what was asked is written down in `Hub.log`.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from huggingface_hub.utils.sha import git_hash

TOKEN = "hf_secret" + "x" * 25


@dataclass
class Commit:
    """files: content by path. before: the commit that it was made on. large: hashes of the files that are kept apart, by path."""

    files: dict[str, bytes]
    before: str | None = None
    message: str = ""
    large: dict[str, str] = field(default_factory=dict)

    @property
    def oid(self) -> str:
        told = [self.before, self.message, *(f"{path}:{hashlib.sha1(data).hexdigest()}" for path, data in sorted(self.files.items()))]
        return hashlib.sha1(json.dumps(told).encode()).hexdigest()


@dataclass
class Repo:
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def add(self, branch: str, commit: Commit) -> str:
        self.commits[commit.oid] = commit
        self.branches[branch] = commit.oid
        return commit.oid


@dataclass
class Hub:
    """repos: by name. objects: what LFS holds, by hash. log: "PUT <hash>", "COMMIT <repo>", "GET <path>" as they came.

    cut: so many uploads lose their connection in the middle. refuse: uploads after so many are refused (None: none is).
    xet: where large files go that come by the Xet protocol, which are not given back (None: it is not spoken).
    """

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    cut: int = 0
    refuse: int | None = None
    xet: Path | None = None

    def count(self, what: str) -> int:
        return sum(line.startswith(what) for line in self.log)


class Refusal(Exception):
    """An answer that is no success."""

    def __init__(self, code: int, name: str = "", message: str = "") -> None:
        super().__init__(message)
        self.code, self.name, self.message = code, name, message


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None: ...

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_HEAD(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def do_PUT(self) -> None:
        self._answer(self._put)

    def _answer(self, method: Any) -> None:
        path = urlsplit(self.path)
        try:
            body, headers = method([unquote(part) for part in path.path.strip("/").split("/")], parse_qs(path.query))
            self._send(200, body, headers)
        except Refusal as no:
            told = {"X-Error-Code": no.name} if no.name else {}
            self._send(no.code, json.dumps({"error": no.message}).encode(), {**told, "X-Error-Message": no.message})

    def _send(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), "Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _allowed(self) -> bool:
        """Whether there is the right token; a wrong one is refused, and repeated in the message, as a careless server would."""
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if given and given != TOKEN:
            raise Refusal(401, message=f"Invalid credentials in Authorization header: {given}")
        return bool(given)

    def _repo(self, name: str) -> Repo:
        allowed = self._allowed()
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and not allowed):
            raise Refusal(404, "RepoNotFound", "Repository not found")
        return repo

    def _commit(self, name: str, revision: str) -> tuple[str, Commit]:
        repo = self._repo(name)
        oid = repo.branches.get(revision, revision)
        if oid not in repo.commits:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return oid, repo.commits[oid]

    def _get(self, parts: list[str], query: dict[str, list[str]]) -> tuple[bytes, dict[str, str]]:
        match parts:
            case ["api", "models", user, name]:
                return self._info(f"{user}/{name}", "main")
            case ["api", "models", user, name, "revision", revision]:
                return self._info(f"{user}/{name}", revision)
            case ["api", "models", user, name, "tree", revision]:
                _, commit = self._commit(f"{user}/{name}", revision)
                return json.dumps([_file(path, commit) for path in commit.files]).encode(), {}
            case ["api", "models", user, name, "xet-write-token", _] if self._allowed():
                if self.hub.refuse is not None:
                    raise Refusal(403, message=f"not with {self.headers['Authorization']}")
                return json.dumps({"accessToken": "x", "exp": 2**40, "casUrl": f"local://{self.hub.xet}"}).encode(), {}
            case [user, name, "resolve", revision, *path]:
                oid, commit = self._commit(f"{user}/{name}", revision)
                file = "/".join(path)
                if file not in commit.files:
                    raise Refusal(404, "EntryNotFound", "Entry not found")
                self.hub.log.append(f"GET {file}")
                return commit.files[file], {"X-Repo-Commit": oid, "ETag": f'"{_oid(file, commit)}"', "Accept-Ranges": "bytes"}
        raise Refusal(404, message="unknown path")

    def _info(self, name: str, revision: str) -> tuple[bytes, dict[str, str]]:
        oid, commit = self._commit(name, revision)
        files = [{"rfilename": path, **_file(path, commit)} for path in commit.files]
        return json.dumps({"id": name, "sha": oid, "private": self.hub.repos[name].private, "siblings": files}).encode(), {}

    def _post(self, parts: list[str], query: dict[str, list[str]]) -> tuple[bytes, dict[str, str]]:
        body = self._body()
        if parts == ["api", "validate-yaml"]:
            return b"{}", {}
        if not self._allowed():
            raise Refusal(401, message="Invalid username or password.")
        match parts:
            case ["api", "repos", "create"]:
                asked = json.loads(body)
                name = f"{asked['organization']}/{asked['name']}"
                self.hub.repos[name] = repo = Repo(private=asked["visibility"] == "private")
                repo.add("main", Commit({".gitattributes": b""}))
                return json.dumps({"url": f"{self.hub.url}/{name}"}).encode(), {}
            case ["api", "models", user, name, "preupload", revision]:
                _, commit = self._commit(f"{user}/{name}", revision)
                return json.dumps({"files": [self._mode(file, commit) for file in json.loads(body)["files"]]}).encode(), {}
            case [user, name, "info", "lfs", "objects", "batch"]:
                return json.dumps({"objects": [self._action(o) for o in json.loads(body)["objects"]]}).encode(), {}
            case ["api", "models", user, name, "branch", branch]:
                repo = self._repo(f"{user}/{name}")
                repo.branches[branch] = repo.branches["main"]
                return b"{}", {}
            case ["api", "models", user, name, "commit", revision]:
                return self._committed(f"{user}/{name}", revision, [json.loads(line) for line in body.splitlines()]), {}
        raise Refusal(404, message="unknown path")

    def _mode(self, file: dict[str, Any], commit: Commit) -> dict[str, Any]:
        path = file["path"]
        there = {"oid": _oid(path, commit)} if path in commit.files else {}
        return {"path": path, "uploadMode": "lfs" if path.endswith(".safetensors") else "regular", "shouldIgnore": False, **there}

    def _action(self, wanted: dict[str, Any]) -> dict[str, Any]:
        there = wanted["oid"] in self.hub.objects
        return wanted if there else {**wanted, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{wanted['oid']}"}}}

    def _put(self, parts: list[str], query: dict[str, list[str]]) -> tuple[bytes, dict[str, str]]:
        hub, oid = self.hub, parts[-1]
        if hub.cut:
            hub.cut -= 1
            hub.log.append(f"CUT {oid}")
            self.rfile.read(1000)
            self.close_connection = True
            self.connection.close()
            raise ConnectionAbortedError
        body = self._body()
        if hub.refuse is not None and hub.count("PUT") >= hub.refuse:
            raise Refusal(403, message="no more today")
        assert hashlib.sha256(body).hexdigest() == oid
        hub.log.append(f"PUT {oid}")
        hub.objects[oid] = body
        return b"", {}

    def _committed(self, name: str, revision: str, lines: list[dict[str, Any]]) -> bytes:
        before, commit = self._commit(name, revision)
        header = next(line["value"] for line in lines if line["key"] == "header")
        if header.get("parentCommit", before) != before:
            raise Refusal(412, message="The repository has changed")
        files, large = dict(commit.files), dict(commit.large)
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]] if self.hub.xet is None else b""
                large[value["path"]] = value["oid"]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
                large.pop(value["path"], None)
        oid = self.hub.repos[name].add(revision, Commit(files, before, header["summary"], large))
        self.hub.log.append(f"COMMIT {name}")
        return json.dumps({"commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid}).encode()


def _oid(path: str, commit: Commit) -> str:
    return commit.large.get(path) or git_hash(commit.files[path])


def _file(path: str, commit: Commit) -> dict[str, Any]:
    data = commit.files[path]
    oid = commit.large.get(path)
    large = {"lfs": {"oid": oid, "sha256": oid, "size": len(data), "pointerSize": 134}} if oid else {}
    return {"type": "file", "path": path, "oid": git_hash(data), "blobId": git_hash(data), "size": len(data), **large}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *args: Any) -> None: ...


@contextmanager
def running() -> Iterator[Hub]:
    """A Hub that answers at `Hub.url`."""
    hub = Hub()
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
