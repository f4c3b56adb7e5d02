"""What is measured beside the answers: costs of passes and rounds, and what one more pass over the answers tells. Each is made once and
kept in a file of the evaluation's folder, under a hash of all that it depends on."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from spectrain.data.formats import Prompt
from spectrain.evaluation.anatomy import Anatomy, Answer, examine
from spectrain.evaluation.arms import Named
from spectrain.evaluation.measure import Arm, Draws, context_of
from spectrain.evaluation.processes import Processes
from spectrain.evaluation.records import Records, whole_lines
from spectrain.evaluation.speed import measure_passes, with_rounds
from spectrain.evaluation.tokens_view import example
from spectrain.evaluation.trees import WIDTH
from spectrain.target.model import Target
from spectrain.yields import Costs

AT_ONCE = 16  # answers that are looked at before what they told is written
ROOM = 96  # positions that the timed rounds take behind their context


def kept(path: Path, key: str, make: Callable[[], Any], processes: Processes) -> Any:
    """What is in a JSON file under a key, or else made by `Processes.alike` and put there."""
    found = processes.on_main(lambda: json.loads(path.read_text(encoding="utf-8")) if path.exists() else {})
    if key in found:
        return found[key]
    value = processes.alike(make)
    if processes.leads:
        part = path.with_suffix(".part")
        part.write_text(json.dumps({**found, key: value}), encoding="utf-8")
        part.replace(path)
    return json.loads(json.dumps(value))  # as it will be read


def costs_of(
    target: Target, arms: Sequence[Arm], *, context: int, compile: bool | Literal["auto"], path: Path, key: str, processes: Processes
) -> dict[str, Costs]:
    """Costs of the arms with drafts by name: passes of the sizes that they need, and their rounds, all behind `context` tokens."""
    drafted = {arm.name: (arm.drafter, arm.shape) for arm in arms if arm.drafter is not None and arm.shape is not None}
    deepest = max(shape.depth for _, shape in drafted.values())
    sizes = sorted({*range(1, deepest + 2), *(1 + shape.budget for _, shape in drafted.values())})
    layer_ids = next((drafter.layer_ids for drafter, _ in drafted.values() if drafter.layer_ids), ())
    context = max(1, min(context, target.max_length - ROOM - 2 * sizes[-1]))

    def make() -> dict[str, Any]:
        passes = measure_passes(target, context=context, sizes=sizes, layer_ids=layer_ids, compile=compile)
        return {name: asdict(found) for name, found in with_rounds(target, drafted, passes, context=context, compile=compile).items()}

    return {name: Costs(**found) for name, found in kept(path, key, make, processes).items()}


def shown(
    target: Target, arm: Arm, prompt: Prompt, *, max_new_tokens: int, draws: Draws, path: Path, key: str, processes: Processes
) -> dict[str, Any]:  # fmt: skip
    """`tokens_view.example` of one answer."""
    make = partial(example, target, arm, prompt, max_new_tokens=max_new_tokens, draws=draws.of([prompt]))
    return kept(path, key, make, processes)  # type: ignore[no-any-return]


def answers_of(target: Target, plain: Arm, records: Records, prompts: Sequence[Prompt], template: Mapping[str, Any]) -> list[Answer]:
    """Plain decoding's answers with what they followed."""
    found = []
    for prompt in prompts:
        said = [r.tokens for r in records.of(plain.name, "tau", [prompt])]
        for turn, tokens in enumerate(said):
            found.append(Answer(prompt.id, turn, prompt.domain, context_of(target, prompt, said[:turn], template), tokens))
    return found


def anatomies(
    target: Target, answers: Sequence[Answer], drafters: Sequence[Named], *, temperature: float, depth: int, path: Path, key: str,
    processes: Processes,
) -> list[Anatomy]:  # fmt: skip
    """`anatomy.examine` of the answers that are long enough, of heads and of drafters that read tokens alone; ranks at temperature 0."""
    heads = {d.name: d.head for d in drafters if d.head is not None}
    others = {d.name: d.drafter for d in drafters if d.head is None and not d.drafter.layer_ids}
    found = {(a.id, a.turn): a for a in processes.on_main(lambda: _read(path, key))}
    todo = [answer for answer in answers if len(answer.tokens) > 1 and (answer.id, answer.turn) not in found]
    step, quiet = AT_ONCE * processes.number, None if processes.leads else True
    with tqdm(total=len(todo), desc=f"alpha and entropy, T = {temperature:g}", unit="answer", disable=quiet) as bar:
        for start in range(0, len(todo), step):
            part = processes.share(todo[start : start + step])
            own = examine(
                target, part, heads=heads, drafters=others, temperature=temperature, depth=depth,
                width=0 if temperature or not heads else WIDTH,
            )  # fmt: skip
            made = processes.gathered(list(own))
            if processes.leads:
                _write(path, key, made)
            found |= {(a.id, a.turn): a for a in made}
            bar.update(len(made))
    return [found[a.id, a.turn] for a in answers if (a.id, a.turn) in found]


def _read(path: Path, key: str) -> list[Anatomy]:
    rows = whole_lines(path) if path.exists() else ()
    return [Anatomy(**{name: value for name, value in row.items() if name != "key"}) for row in rows if row["key"] == key]


def _write(path: Path, key: str, made: Sequence[Anatomy]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({"key": key, **asdict(a)}) + "\n" for a in made)
