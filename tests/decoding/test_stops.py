"""Where answers end, and what is streamed."""

import pytest

from spectrain.decoding.stops import StopRule, TextStream

WORDS = {1: "<e>", 2: "moon", 3: " sea", 4: " sky", 5: "s", 6: "ea", 7: " moon", 8: "\ufffd", 9: "é"}


def decode(tokens) -> str:
    """Tokens 8, 8 together are one character, as the bytes of an emoji are."""
    text = "".join(WORDS[t] for t in tokens)
    return text.replace("\ufffd\ufffd", "é")


def rule(eos=(), stop=(), limit: int = 100) -> StopRule:
    return StopRule(eos_ids=frozenset(eos), stop=tuple(stop), max_new_tokens=limit, decode=decode)


@pytest.mark.parametrize(
    ("given", "kept", "reason"),
    [
        (rule(), [2, 3, 1, 4, 1], None),
        (rule(eos=[1]), [2, 3, 1], "stop"),
        (rule(eos=[1, 3]), [2, 3], "stop"),
        (rule(eos=[9]), [2, 3, 1, 4, 1], None),
        (rule(limit=4), [2, 3, 1], "length"),
        (rule(limit=1), [2], "length"),
        (rule(eos=[1], limit=4), [2, 3, 1], "stop"),
        (rule(stop=["moon sea"]), [2, 3], "stop"),
        (rule(stop=["a<"]), [2, 3, 1], "stop"),
        (rule(stop=["sky", "n s"]), [2, 3], "stop"),
    ],
)
def test_answer_ends_elsewhere(given: StopRule, kept: list[int], reason: str | None) -> None:
    done = [7] if given.max_new_tokens == 4 else []
    assert given.cut(done, [2, 3, 1, 4, 1]) == (kept, reason)


def test_stop_string_over_two_rounds_is_missed() -> None:
    assert rule(stop=["moon sea"]).cut([4, 2], [5, 3]) == ([5, 3], None)
    assert rule(stop=["moon sea"]).cut([4, 2], [3, 4]) == ([3], "stop")
    assert rule(stop=["sea"]).cut([4, 2, 5], [6, 4]) == ([6], "stop")


def test_text_holds_the_end() -> None:
    assert rule(eos=[1]).text([2, 3, 1]) == "moon sea"
    assert rule(stop=["sea"]).text([2, 3]) == "moon "
    assert rule(stop=["sea", "oon"]).text([2, 3]) == "m"
    assert rule().text([]) == ""


@pytest.mark.parametrize("stop", [(), ("a s",), ("sea", "sky"), ("moon sea s",), ("never", " seal")])
@pytest.mark.parametrize("tokens", [[2, 3, 4, 5, 6], [2, 8, 8, 5, 6, 4, 1], [8, 8], [2, 8], [4, 2, 3, 4, 2]])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_streamed_pieces_are_not_the_text(tokens: list[int], stop: tuple[str, ...], size: int) -> None:
    given, done, pieces = rule(eos=[1], stop=stop, limit=len(tokens)), [], []
    stream, reason = TextStream(given), None
    while reason is None:
        kept, reason = given.cut(done, tokens[len(done) : len(done) + size])
        done += kept
        pieces.append(stream.push(done, final=reason is not None))
        assert given.text(tokens).startswith("".join(pieces))
    assert "".join(pieces) == given.text(done)
    assert not any(s in "".join(pieces) for s in stop)


def test_run_of_bytes_is_streamed_and_taken_back() -> None:
    """A tokenizer with byte fallback turns a whole run of bytes into marks when its last character stays unfinished."""
    pieces = {1: b"a", 2: b"\xc3", 3: b"\xa9", 4: b"\xe2", 5: b"\x82", 6: b"z"}

    def decode(ids):
        out, run = "", b""
        for i in [*ids, None]:
            if i in (2, 3, 4, 5):
                run += pieces[i]
                continue
            try:
                out += run.decode()
            except UnicodeDecodeError:
                out += "\ufffd" * len(run)
            out, run = out + (pieces[i].decode() if i else ""), b""
        return out

    rule = StopRule(frozenset(), (), 99, decode, byte_ids=frozenset((2, 3, 4, 5)))
    for ids in ([1, 2, 3, 4, 5], [2, 3, 1, 2, 3, 6], [4, 5, 6, 2, 3]):
        stream = TextStream(rule)
        parts = [stream.push(ids[:n], final=n == len(ids)) for n in range(1, len(ids) + 1)]
        assert "".join(parts) == decode(ids)


def test_stop_strings_read_the_whole_answer_for_every_token() -> None:
    lengths: list[int] = []

    def decode(ids):
        lengths.append(len(ids))
        return "".join(chr(97 + i % 26) for i in ids)

    rule, done = StopRule(frozenset(), ("0stop", "1"), 10**6, decode), [3] * 5000
    assert rule.cut(done, [4] * 8) == ([4] * 8, None)
    assert max(lengths) < 100
    rule = StopRule(frozenset(), ("dde",), 10**6, decode)
    assert rule.cut(done, [3, 4, 5, 6]) == ([3, 4], "stop")
