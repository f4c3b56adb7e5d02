"""Items -> rows in worker processes: the part of `spectrain prepare` that takes the time. Results come in the order of the input."""

import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from spectrain.config import PrepareConfig
from spectrain.data.filters import Questions, asked_texts
from spectrain.data.formats import Item, Prompt
from spectrain.data.masking import ChatEncoder, Encoded, TooLong
from spectrain.data.rows import Columns, Row
from spectrain.data.sources import RawRow

MASK_RULE = 2  # raised whenever ids or mask of the same conversation change: what was prepared before is then made anew
AHEAD = 5  # chunks a worker that wait or are done: none is idle while a stretch is written


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one item: how many rows, or the reason why there are none (a name of `coverage.REASONS`) and why. turns: assistant
    turns; taught: those supervised somewhere. not_compared: its text is not known."""

    reason: str = ""
    why: str = ""
    rows: int = 0
    turns: int = 0
    taught: tuple[int, ...] = ()
    not_compared: bool = False


@dataclass(frozen=True)
class Outcomes:
    """What became of the items of a chunk, in order, and the rows of them all."""

    items: list[Outcome]
    rows: Columns


class Encoding:
    """Compares items with the evaluation prompts, then tokenises and masks them. Can be sent to another process."""

    def __init__(self, tokenizer: Any, config: PrepareConfig, questions: Questions, stop_ids: Sequence[int] = ()) -> None:
        """Raises ValueError when the chat template cannot be used."""
        self._made_from = (tokenizer, config, questions, stop_ids)
        self._questions = questions
        self._encoder = ChatEncoder(
            tokenizer, max_length=config.max_length, rows=config.rows, thinking=config.thinking, template_kwargs=config.template_kwargs,
            stop_ids=stop_ids, cut=config.too_long == "cut",
        )  # fmt: skip

    def __reduce__(self) -> tuple[Any, ...]:
        return Encoding, self._made_from

    def __call__(self, items: Sequence[Item]) -> Outcomes:
        texts = [asked_texts(item) for item in items] if len(self._questions) else []
        faults = [self._questions.fault(turns) for turns in texts] or [""] * len(items)
        found = iter(self._encoder.encode([item for item, fault in zip(items, faults, strict=True) if not fault]))
        unknown = [not turns for turns in texts] or [False] * len(items)
        outcomes: list[Outcome] = []
        rows: list[Row] = []
        for item, fault, hidden in zip(items, faults, unknown, strict=True):
            result = None if fault else next(found)
            outcomes.append(_outcome(item, result, hidden) if result else _asked(fault))
            rows += result.rows if isinstance(result, Encoded) else []
        return Outcomes(outcomes, Columns.of(rows))


def _asked(fault: str) -> Outcome:
    if fault == "exact":
        return Outcome(reason="question", why="a turn asks what an evaluation prompt asks")
    return Outcome(reason="near question", why="a turn quotes an evaluation prompt, or shares too many of its runs of eight words with one")


def _outcome(item: Item, result: Encoded | ValueError, not_compared: bool) -> Outcome:
    if isinstance(result, TooLong):
        return Outcome(reason="too long", why=str(result), not_compared=not_compared)
    if isinstance(result, ValueError):
        return Outcome(reason="unanswered" if isinstance(item, Prompt) else "refused", why=str(result), not_compared=not_compared)
    return Outcome(rows=len(result.rows), turns=result.turns, taught=result.taught, not_compared=not_compared)


class HasItems(Protocol):
    """A chunk: items with where they come from."""

    @property
    def items(self) -> list[tuple[Item, RawRow]]: ...


C = TypeVar("C", bound=HasItems)


def encoded(chunks: Iterable[C], encoding: Encoding, workers: int) -> Iterator[tuple[C, Outcomes]]:
    """Every chunk with the outcomes of its items, in order."""
    if workers == 1:
        for chunk in chunks:
            yield chunk, encoding([item for item, _ in chunk.items])
        return
    # Forked processes share the libraries that are loaded already (some 300 MB); where there is no fork the encoding is sent.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(encoding,))
    waiting: deque[tuple[C, Future[Outcomes]]] = deque()
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
    gc.freeze()  # what was there before is not searched, which would copy it
    _mine[:] = [encoding]


def _follow(parent: Any) -> None:
    """A killed parent leaves no orphan."""
    parent.join()
    os._exit(1)


def _work(items: list[Item]) -> Outcomes:
    return _mine[0](items)
