"""DM3: a reply cut off by the length limit is stored as complete, and the template puts an end behind it that the model never said."""

import json
from collections.abc import Callable
from pathlib import Path

from spectrain.cli.regenerate import TargetAnswerer, summary
from spectrain.config import RegenerateConfig
from spectrain.data.answers import AnswerFile
from spectrain.data.formats import Prompt, read_conversations
from spectrain.data.masking import encode_conversation
from spectrain.data.questions import question_of, settings_of
from spectrain.data.regenerate import answer_in_batches, odd_answers, open_dialogues
from spectrain.target.model import Target


def test_reply_cut_by_length(make_target: Callable[..., Target], tmp_path: Path) -> None:
    """Of the answers to 40 prompts some end by themselves and some are cut off: a supervised end where there was one, and only there."""
    target, out = make_target(), tmp_path / "answers.jsonl"
    config = RegenerateConfig(max_new_tokens=12, batch_size=16, temperatures={1.5: 1})
    answerer = TargetAnswerer(target, config)
    prompts = [Prompt(f"p{i}", "d", (f"w{10 + i} w{50 - i}",), "") for i in range(40)]
    with AnswerFile(out) as file:
        file.check = lambda dialogue: odd_answers(answerer.template, dialogue)
        todo = open_dialogues(prompts, lambda p: settings_of(config, question_of(p), {}), file)
        tally = answer_in_batches(todo, answer=answerer, file=file, batch_size=config.batch_size, length=answerer.length)
    rows = {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}
    reasons = {name: row["finish_reason"] for name, row in rows.items()}
    assert set(reasons.values()) == {"stop", "length"} and len(rows) == 40
    end, compared = target.tokenizer.eos_token_id, 0
    for conversation in read_conversations(out):
        said = rows[conversation.id]["answer_ids"][0]
        if set(said) & {0, 2} or not conversation.messages[1]["content"].strip():
            continue  # this random model says control tokens too: such rows are refused
        row = encode_conversation(target.tokenizer, conversation)
        assert row.supervised_ids.tolist() == said
        assert (end in row.supervised_ids) == (reasons[conversation.id] == "stop")
        compared += 1
    assert compared >= 10
    cut = sum(reason == "length" for reason in reasons.values())
    assert tally.finish == {"stop": 40 - cut, "length": cut}
    assert any(f"length {cut}" in line for line in summary(tally, out)), "the number of such rows is printed"
    assert tally.odd <= 40 - compared
