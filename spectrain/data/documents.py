"""A JSON document of any size -> its rows, one at a time."""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from spectrain.data.dialects import kind
from spectrain.data.unpacking import CHUNK, DamagedFile

Read = tuple[dict[str, Any] | None, str, int]  # value or None, what is wrong, line (0: unknown)

LIMIT = 1 << 28  # bytes (or characters) of one row; a longer one is no row of a conversation file
WRAPPERS = ("data", "rows", "train", "examples", "items", "records", "instances", "samples")  # lists of rows inside an object
ROW_KEYS = ("messages", "conversations", "conversation", "prompt", "turns", "instruction", "question", "text", "input_ids")
NEAR_END = 16  # characters: a JSON fault this close to the end of what was read may be a value cut in two
_SPACE = re.compile("[ \t\r\n]*")
_DECODER = json.JSONDecoder(strict=False)  # a raw tab or carriage return in a text is text


def as_object(value: Any) -> tuple[dict[str, Any] | None, str]:
    """(value, "") of an object, or (None, what it is instead)."""
    return (value, "") if isinstance(value, dict) else (None, f"needed a JSON object, found {kind(value)}")


def parsed(data: bytes) -> tuple[dict[str, Any] | None, str]:
    """(object, "") of JSON text, or (None, what is wrong with it)."""
    try:
        return as_object(_DECODER.decode(data.decode()))
    except UnicodeDecodeError as error:
        return None, f"not UTF-8 (byte {data[error.start]:#04x} at byte {error.start + 1})"
    except json.JSONDecodeError as error:
        return None, f"not JSON ({error.msg.removesuffix(' at')} at character {error.pos + 1})"
    except ValueError as error:  # a whole number of more than 4300 digits
        return None, f"not usable JSON ({error})"
    except RecursionError:
        return None, "JSON nested too deeply"


class _JsonText:
    """A JSON document read in pieces. Bytes that are not UTF-8 become lone surrogates, by which their row is found."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="surrogateescape")
        self._text, self._at, self._ended = "", 0, False

    def _more(self) -> None:
        data = self._file.read(max(CHUNK, len(self._text) - self._at))
        self._ended = not data
        self._text = self._text[self._at :] + self._decoder.decode(data, final=self._ended)
        self._at = 0
        if len(self._text) > LIMIT:
            raise DamagedFile(f"a value of more than {LIMIT >> 20} MB; if this file is one object, write its rows as JSON lines")

    def peek(self) -> str:
        """The next character that is no space, "" at the end."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]  # it matches nothing, too
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._more()

    def opens_rows(self) -> bool:
        """Whether a list of objects begins here."""
        while self.peek() == "[":
            inside = self._text[self._at + 1 :][:CHUNK].lstrip()
            if inside or self._ended:
                return inside[:1] == "{"
            self._more()
        return False

    def take(self, wanted: str) -> str:
        """Move over the next character, one of `wanted`."""
        found = self.peek()
        if not found or found not in wanted:
            needed = " or ".join(wanted)
            raise DamagedFile(f"not JSON (needed {needed}, found {found!r})" if found else f"the file ends where {needed} was needed")
        self._at += 1
        return found

    def value(self) -> tuple[Any, str]:
        """(the next value, "" or what is wrong with its bytes)."""
        while True:
            self.peek()
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated") or error.pos + NEAR_END >= len(self._text)
                if self._ended or not cut:
                    raise DamagedFile("the file ends inside this value" if cut else f"not JSON ({error.msg})") from None
            except RecursionError:
                raise DamagedFile("JSON nested too deeply") from None
            except ValueError as error:
                raise DamagedFile(f"not usable JSON ({error})") from None
            else:
                if end < len(self._text) or self._ended:
                    start, self._at = self._at, end
                    return value, bad_byte(self._text[start:end])
            self._more()


def bad_byte(text: str) -> str:
    """What is wrong with text decoded with surrogateescape."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"not UTF-8 (byte {ord(text[error.start]) & 0xFF:#04x} at character {error.start + 1} of the row)"
    return ""


def read_document(file: BinaryIO) -> Iterator[Read]:
    """Rows of a JSON document: the elements of its list, or of the one list inside its object, or the object itself."""
    yield from _document(_JsonText(file))


def _document(text: _JsonText) -> Iterator[Read]:
    start = text.peek()
    if start == "[":
        yield from _elements(text)
    elif start == "{":
        yield from _members(text)
    elif start:
        yield *as_object(text.value()[0]), 0
    if left := text.peek():
        raise DamagedFile(f"not JSON ({left!r} behind the end of the document)")


def _elements(text: _JsonText) -> Iterator[Read]:
    text.take("[")
    if text.peek() == "]":
        text.take("]")
        return
    while True:
        value, bad = text.value()
        yield (None, bad, 0) if bad else (*as_object(value), 0)
        if text.take(",]") == "]":
            return


def _members(text: _JsonText) -> Iterator[Read]:
    """The elements of the one list of objects in an object that is no row itself, else the object as a row."""
    text.take("{")
    row: dict[str, Any] = {}
    faults, listed = "", ""
    more = text.peek() != "}" or text.take("}") != "}"
    while more:
        key, bad = text.value()
        faults = faults or bad
        text.take(":")
        if key in WRAPPERS and not listed and text.opens_rows():
            listed = key
            yield from _elements(text)
        else:
            row[str(key)], bad = text.value()
            faults = faults or bad
        more = text.take(",}") == ","
    lists = [key for key, value in row.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if listed and lists:
        yield None, f"the list `{lists[0]}` is left out: of an object only its first list (`{listed}`) is read", 0
    elif not listed and len(lists) == 1 and not any(key in row for key in ROW_KEYS):
        yield from ((None, faults, 0) if faults else (*as_object(value), 0) for value in row[lists[0]])
    elif not listed:
        yield (None, faults, 0) if faults else (row, "", 0)
