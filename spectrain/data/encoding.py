"""Items -> rows in worker processes: the part of `spectrain prepare` that takes the time. Results come in the order of the input."""

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from spectrain.config import PrepareConfig
from spectrain.data.filters import Questions, asked_texts, key64
from spectrain.data.formats import Item, Prompt
from spectrain.data.masking import ChatEncoder, Encoded
from spectrain.data.rows import Row
from spectrain.data.sources import RawRow

MASK_RULE = 1  # raised whenever ids or mask of the same conversation change: what was prepared before is then made anew
AHEAD = 3  # chunks a worker that wait or are done: none is idle while the first is written


@dataclass(frozen=True)
class Outcome:
    """What became of one item: its rows with digest and key (a hash of the token ids), or the reason why there are none (a name of
    `coverage.REASONS`) and why. turns: assistant turns; taught: those supervised somewhere. not_compared: its text is not known."""

    reason: str = ""
    why: str = ""
    rows: list[Row] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    turns: int = 0
    taught: tuple[int, ...] = ()
    not_compared: bool = False


class Encoding:
    """Compares items with the evaluation prompts, then tokenises and masks them. Can be sent to another process."""

    def __init__(self, tokenizer: Any, config: PrepareConfig, questions: Questions, stop_ids: Sequence[int] = ()) -> None:
        """Raises ValueError when the chat template cannot be used."""
        self._made_from = (tokenizer, config, questions, stop_ids)
        self._questions = questions
        self._encoder = ChatEncoder(
            tokenizer, max_length=config.max_length, rows=config.rows, thinking=config.thinking, template_kwargs=config.template_kwargs,
            stop_ids=stop_ids,
        )  # fmt: skip

    def __reduce__(self) -> tuple[Any, ...]:
        return Encoding, self._made_from

    def __call__(self, items: Sequence[Item]) -> list[Outcome]:
        texts = [asked_texts(item) for item in items] if len(self._questions) else []
        faults = [self._questions.fault(turns) for turns in texts] or [""] * len(items)
        found = iter(self._encoder.encode([item for item, fault in zip(items, faults, strict=True) if not fault]))
        unknown = [not turns for turns in texts] or [False] * len(items)
        outcomes = []
        for item, fault, hidden in zip(items, faults, unknown, strict=True):
            outcomes.append(_asked(fault) if fault else _outcome(item, next(found), hidden))
        return outcomes


def _asked(fault: str) -> Outcome:
    if fault == "exact":
        return Outcome(reason="question", why="a turn asks what an evaluation prompt asks")
    return Outcome(reason="near question", why="a turn shares too many of its runs of eight words with an evaluation prompt")


def _outcome(item: Item, result: Encoded | ValueError, not_compared: bool) -> Outcome:
    if isinstance(result, ValueError):
        return Outcome(reason="unanswered" if isinstance(item, Prompt) else "refused", why=str(result), not_compared=not_compared)
    return Outcome(
        rows=result.rows, digests=[row.digest for row in result.rows], keys=[key64(row.ids_L.tobytes()) for row in result.rows],
        turns=result.turns, taught=result.taught, not_compared=not_compared,
    )  # fmt: skip


class HasItems(Protocol):
    """A chunk: items with where they come from."""

    @property
    def items(self) -> list[tuple[Item, RawRow]]: ...


C = TypeVar("C", bound=HasItems)


def encoded(chunks: Iterable[C], encoding: Encoding, workers: int) -> Iterator[tuple[C, list[Outcome]]]:
    """Every chunk with the outcomes of its items, in order."""
    if workers == 1:
        for chunk in chunks:
            yield chunk, encoding([item for item, _ in chunk.items])
        return
    # Forked processes share the libraries that are loaded already (some 300 MB); where there is no fork the encoding is sent.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(encoding,))
    waiting: deque[tuple[C, Future[list[Outcome]]]] = deque()
    try:
        for chunk in chunks:
            waiting.append((chunk, pool.submit(_work, [item for item, _ in chunk.items])))
            if len(waiting) > AHEAD * workers:
                first, result = waiting.popleft()
                yield first, result.result()
        while waiting:
            first, result = waiting.popleft()
            yield first, result.result()
    except BrokenProcessPool as error:
        raise ValueError("a worker process was killed (out of memory?); run the same command again, with fewer workers") from error
    finally:
        pool.shutdown(cancel_futures=True)


_mine: list[Encoding] = []  # of this worker process: the pool has no other way to keep something between two calls


def _start(encoding: Encoding) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker a core is enough
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops the run
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    _mine[:] = [encoding]


def _follow(parent: Any) -> None:
    """A killed parent leaves no orphan."""
    parent.join()
    os._exit(1)


def _work(items: list[Item]) -> list[Outcome]:
    return _mine[0](items)
