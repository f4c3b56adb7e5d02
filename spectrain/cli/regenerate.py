"""The command regenerate: answers by a target in process, or by an OpenAI-compatible server."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from rich.console import Console

from spectrain.config import RegenerateConfig, override, validate
from spectrain.data.answers import Answer, AnswerFile, Dialogue, Tally, beside
from spectrain.data.endpoint import Endpoint, answer_through, look
from spectrain.data.formats import Message, convert
from spectrain.data.masking import check_messages
from spectrain.data.questions import Question, question_of, settings_of
from spectrain.data.regenerate import Take, answer_in_batches, odd_answers, open_dialogues, split_reasoning
from spectrain.data.sources import Source, check_columns, check_formats, dialect_of, find_sources
from spectrain.data.templates import SWITCHES, Template
from spectrain.decoding.generate import generate
from spectrain.planning.batches import BATCHES
from spectrain.target.model import Target, load_target
from spectrain.training.setup import made_with

CUT_SHARE = 0.25
# what the text of an answer does not depend on
ELSEWHERE = {"format", "columns", "domain", "max_prompt_tokens", "max_rows", "batch_size", "concurrency", "retries", "timeout"}


def regenerate(
    inputs: Sequence[str], *, out: Path, target: str, endpoint: str, model: str, api_key_env: str, api_key_file: Path | None,
    dtype: str, revision: str | None, overrides: Sequence[str], as_json: bool,
) -> None:  # fmt: skip
    """Answer what the inputs ask into `out`; a second call makes what is missing."""
    if bool(target) == bool(endpoint):
        raise ValueError("give one of --target (answers in process) and --endpoint (the address of a server)")
    values: dict[str, Any] = {}
    override(values, overrides)
    config = validate(RegenerateConfig, values, where="--set")
    sources = find_sources(inputs, ours=(out, *beside(out)))  # before the target is loaded, which takes long
    console = Console(stderr=True, soft_wrap=True)
    if target:
        tally = _by_target(sources, load_target(target, dtype=dtype, revision=revision), config, out, console.print)
    else:
        server = Endpoint(
            endpoint, model, api_key(api_key_env, api_key_file), config.concurrency, config.retries, config.timeout,
            config.thinking_key or SWITCHES[0], config.extra_body,
        )  # fmt: skip
        tally = _by_server(sources, server, config, out, console.print)
    for line in summary(tally, out):
        console.print(line, highlight=False, markup=False)
    if as_json:
        print(json.dumps({"out": str(out), **vars(tally)}))
    if not tally.answered + tally.there:
        reason = max(tally.reasons, key=lambda r: tally.reasons[r], default="the inputs hold no rows")
        raise ValueError(f"nothing was answered ({reason}); every reason is in {out.with_suffix('.rejected.jsonl')}")


def _by_target(sources: Sequence[Source], target: Target, config: RegenerateConfig, out: Path, say: Callable[[str], None]) -> Tally:
    answerer = TargetAnswerer(target, config)
    settings = config.model_dump(mode="json", exclude=ELSEWHERE | {"extra_body"})
    made = made_with(target, {"command": "spectrain regenerate"})
    identity = {**target.fingerprints, **({"thinking_key": answerer.switch} if config.thinking != "default" else {})}
    with AnswerFile(out, {**settings, **target.fingerprints}, made) as file:
        file.check = lambda dialogue: odd_answers(answerer.template, dialogue)
        dialogues = _open(sources, config, identity, file, say)
        return answer_in_batches(
            dialogues, answer=answerer, file=file, batch_size=config.batch_size, batches=BATCHES, length=answerer.length, model=target.name
        )


def _by_server(sources: Sequence[Source], endpoint: Endpoint, config: RegenerateConfig, out: Path, say: Callable[[str], None]) -> Tally:
    server = look(endpoint)
    identity = {"model": server.model, "extra_body": config.extra_body, "thinking_key": endpoint.thinking_key}
    settings = {**config.model_dump(mode="json", exclude=ELSEWHERE), **identity}
    with AnswerFile(out, settings, {"command": "spectrain regenerate", "endpoint": endpoint.url, "server": server.own}) as file:
        dialogues = _open(sources, config, identity, file, say)
        return answer_through(dialogues, endpoint, file, total=len(dialogues)) if dialogues else file.tally


def _open(
    sources: Sequence[Source], config: RegenerateConfig, identity: Mapping[str, Any], file: AnswerFile, say: Callable[[str], None]
) -> list[Dialogue]:
    def settings(question: Question) -> Mapping[str, Any]:
        return settings_of(config, question, identity)

    dialogues = open_dialogues(read_questions(sources, config, file, say), settings, file, limit=config.max_rows)
    there = f", {file.tally.there} are there" if file.tally.there else ""
    say(f"{len(dialogues)} to answer{there}, {file.tally.rejected} rejected")
    return dialogues


def read_questions(
    sources: Sequence[Source], config: RegenerateConfig, file: AnswerFile, say: Callable[[str], None]
) -> Iterator[Question]:  # fmt: skip
    """What every usable row of the inputs asks; the others are rejected with file, row and reason."""
    check_columns(sources, config.columns)
    check_formats(sources, config.format)
    for source in sources:
        dialect = dialect_of(source, config.format, config.columns)
        say(f"{source.name}: {dialect or 'no row that can be read'}")
        stem = Path(source.name).stem
        for raw in source.rows():
            name, where = f"{stem}:{raw.number}", {"file": raw.source, "row": raw.number}
            if raw.value is None:
                file.reject(name, f"unreadable: {raw.fault}", **where)
                continue
            try:
                item = convert(raw.value, format=dialect, name=name, domain=config.domain or stem, columns=config.columns)
                name = item.id or name
                yield replace(question_of(item), place=where)
            except ValueError as error:
                file.reject(name, f"unusable: {error}", **where)


class TargetAnswerer:
    """Answers chats by the target: through its chat template, with its thinking switch, in a batch that is refilled as rows end."""

    def __init__(self, target: Target, config: RegenerateConfig) -> None:
        self._target, self._config = target, config
        self.template = Template(target.tokenizer, config.template_kwargs, frozenset(target.eos_ids))
        self.switch = config.thinking_key or self.template.switch or ""
        if config.thinking != "default" and not self.switch:
            raise ValueError(
                f"the chat template of {target.name} reads none of {', '.join(SWITCHES)}: it cannot turn thinking on or off; leave out "
                "`thinking`, or name its variable with --set thinking_key=NAME"
            )
        # A template that knows of no reasoning would not give it back.
        facts = self.template.facts
        self._splits = self.template.reasoning_key is not None or "</think>" in facts.literals

    def prompt_ids(self, chat: Sequence[Message], settings: Mapping[str, Any]) -> list[int]:
        """Ids of a prompt; ValueError when it cannot be asked."""
        template, kwargs = self.template, dict(self._config.template_kwargs)
        if settings["thinking"] != "default":
            kwargs[self.switch] = settings["thinking"] == "on"
        ready = template.prepare(check_messages(template, chat, None), spoken=-1)
        try:
            text = self._target.tokenizer.apply_chat_template(ready, tokenize=False, add_generation_prompt=True, **kwargs)
        except (TemplateError, TypeError, LookupError) as error:
            raise ValueError(f"refused by the chat template: {error}") from error
        ids = template.ids(str(text))
        most = min(self._config.max_prompt_tokens or self._target.max_length, self._target.max_length - 1)
        if len(ids) > most:
            raise ValueError(f"the prompt is too long: {len(ids)} tokens, the limit is {most}")
        return ids

    def length(self, chat: list[Message], settings: Mapping[str, Any]) -> int:
        """Tokens of a prompt."""
        return len(self.prompt_ids(chat, settings))

    def __call__(self, chats: Sequence[list[Message]], settings: Mapping[str, Any], seeds: Sequence[int], take: Take) -> None:
        """Answer the chats, in whose order they begin; take(n, answer) as chat n is answered."""
        prompts = [self.prompt_ids(chat, settings) for chat in chats]
        generate(
            self._target, prompts, temperature=settings["temperature"], top_p=settings["top_p"], max_new_tokens=settings["max_new_tokens"],
            seed=list(seeds), batch_size=self._config.batch_size,
            on_row=lambda n, row: take(n, self._answer(prompts[n], row.tokens, row.finish_reason)),
        )  # fmt: skip

    def _answer(self, prompt: Sequence[int], ids: Sequence[int], reason: str) -> Answer:
        tokenizer = self._target.tokenizer
        said = ids[:-1] if ids and ids[-1] in self._target.eos_ids else ids
        text, reasoning = tokenizer.decode(said, skip_special_tokens=False, clean_up_tokenization_spaces=False), ""
        if reason == "length":
            text = text.rstrip("\ufffd")  # half a character
        opened = tokenizer.decode(prompt[-8:]).rstrip().endswith("<think>")
        if opened or self._splits:
            reasoning, text = split_reasoning(text, opened=opened)
        return Answer(text, len(ids), reason, reasoning, tuple(ids), len(prompt))


def summary(tally: Tally, out: Path) -> list[str]:
    """What a run did, in a few lines."""
    speed = f", {tally.tokens / tally.seconds:.0f} tokens/s" if tally.seconds else ""
    there = f" ({tally.there} were there)" if tally.there else ""
    lines = [f"{out}: {tally.answered} answered{there}, {tally.rejected} rejected; {tally.tokens} tokens{speed}"]
    if tally.answered:
        lines.append("ended by " + ", ".join(f"{reason} {count}" for reason, count in sorted(tally.finish.items())))
    if (cut := tally.finish.get("length", 0)) > CUT_SHARE * tally.answered:
        lines.append(f"{cut} of {tally.answered} answers were cut off: no head learns from them how answers end; raise max_new_tokens")
    notes = {
        "conversations whose later turns were not asked (an answer was cut off, or the prompt too long)": tally.shortened,
        "answers cut off within their reasoning: raise max_new_tokens": tally.cut_reasoning,
        "empty answers": tally.empty,
        "answers whose text does not give their tokens back (their own ids are under answer_ids)": tally.odd,
    }
    lines += [f"{count} {note}" for note, count in notes.items() if count]
    lines += [f"rejected {count}: {reason}" for reason, count in sorted(tally.reasons.items(), key=lambda pair: -pair[1])[:5]]
    if tally.rejected:
        lines.append(f"every reason, row by row: {beside(out)[0]}")
    return lines


def api_key(env: str, file: Path | None) -> str:
    """The key for a server, from a file or an environment variable; "" without one. ValueError when what was named holds none."""
    if file is not None:
        text = file.read_text(encoding="utf-8").strip()
        if not text:
            raise ValueError(f"{file} holds no key")
        return text
    if env and not os.environ.get(env):
        raise ValueError(f"the environment variable {env} is not set; set it, or give --api-key-file")
    return os.environ.get(env, "") if env else ""
