"""Hours of each stage from products and bytes, at a stated share of the device's peaks; and what a head costs where it is served.

Legend: B rows answered together, K test-time steps.
"""

from dataclasses import dataclass

from spectrain.planning.head_work import attention_flops, constant_inputs, layer_flops, loss_flops
from spectrain.planning.sizes import FILL, Batch, Case
from spectrain.planning.terms import Term, product, short, total

BACKWARD = 2.0  # products of a backward pass for one of the forward pass; attention makes its scores anew: 2.5
UPDATE = 8  # numbers read or written a trained weight in a step: gradient made, its norm, both moments, the weight
USABLE = 0.9  # of a device's memory, as engines take it


@dataclass(frozen=True)
class Hours:
    """A stage's hours on all devices together. devices: of one copy of the target."""

    stage: str
    hours: float
    terms: list[Term]
    note: str = ""


def regeneration(case: Case) -> Hours:
    """Answers made anew by servers, which fill the place of a row that ends: a pass reads the weights that its rows need and their caches,
    or is bound by products where B is large."""
    t, m, d, B = case.target, case.machine, case.data, case.decode_batch
    answer, prompt = d.supervised / d.rows, max(0.0, d.length - d.supervised / d.rows)
    copies, devices = replicas(case)
    context = prompt + answer / 2
    by_bytes, by_products = _pass_parts(case, B, context, devices)
    a_pass = pass_seconds(case, B, context, devices)
    rate = m.rate(t.bytes_a_weight) * m.efficiency.capture * devices
    prefill = t.pass_flops(prompt, 1, prompt / 2) / rate
    seconds = d.rows * (answer / B * a_pass + prefill) / copies
    bound = f"bound by {'bandwidth' if by_bytes >= by_products else 'products'}" if m.kind == "cuda" else "one after the other"
    caches = f"{B} rows × {context:,.0f} tokens × {short(t.kv_bytes)}B"
    one = short(t.pass_flops(1, 1, context))
    joined = "or" if m.kind == "cuda" else "and"
    terms = [
        Term("a pass", a_pass, f"({short(bytes_read(case, B))}B weights + {caches}) ÷ bandwidth, {joined} {B} × {one} products: {bound}"),
        Term("all answers", d.supervised / B * a_pass / copies, f"{short(d.supervised)} tokens ÷ {B} rows × a pass ÷ {copies} copies"),
        Term("all prompts", d.rows * prefill / copies, f"{short(d.rows)} × {prompt:,.0f} tokens ÷ {copies} copies"),
    ]  # fmt: skip
    note = f"{copies} copies of the target on {devices} device(s) each, as servers of `regenerate --endpoint`"
    if t.weight_bytes > USABLE * m.memory * devices:
        note += "; it does not fit there, so these are hours of a larger device with the same peaks"
    return Hours("regeneration", seconds / 3600, terms, note)


def pass_seconds(case: Case, rows: float, context: float, devices: int) -> float:
    """Of a pass over one token of each of so many rows, whose caches hold `context` tokens: a GPU reads while it multiplies, a CPU does
    one after the other (docs/scaling.md)."""
    by_bytes, by_products = _pass_parts(case, rows, context, devices)
    return max(by_bytes, by_products) if case.machine.kind == "cuda" else by_bytes + by_products


def _pass_parts(case: Case, rows: float, context: float, devices: int) -> tuple[float, float]:
    """Seconds for the bytes of such a pass, and for its products."""
    t, m = case.target, case.machine
    by_bytes = (bytes_read(case, rows) + rows * context * t.kv_bytes) / (m.bandwidth * m.efficiency.decode * devices)
    return by_bytes, rows * t.pass_flops(1, 1, context) / (m.rate(t.bytes_a_weight) * m.efficiency.answers * devices)


def bytes_read(case: Case, rows: float) -> float:
    """Bytes of the weights that a pass over one token of each of so many rows reads: of a mixture the experts that any of them needs."""
    t = case.target
    inside_all = t.params - t.embedding * (1 if t.tied else 2)
    touched = 1.0 if t.experts == 1 else 1 - (1 - t.experts) ** rows
    return t.inside_bytes + (t.embedding + (inside_all - t.inside) * touched) * t.bytes_a_weight


def replicas(case: Case) -> tuple[int, int]:
    """How many copies of the target answer side by side, and the devices of one: the fewest, doubling, that hold weights and caches."""
    t, m, d = case.target, case.machine, case.data
    needed = t.weight_bytes + case.decode_batch * d.length * t.kv_bytes
    devices = 1
    while devices < case.gpus and needed > USABLE * m.memory * devices:
        devices *= 2
    devices = min(devices, case.gpus)
    return max(1, case.gpus // devices), devices


def capture(case: Case) -> Hours:
    """One causal pass over everything."""
    flops, d, m = _pass(case), case.data, case.machine
    rate = m.rate(case.target.bytes_a_weight) * m.efficiency.capture
    seconds = flops / rate / case.gpus
    written = d.tokens * case.store[0] + d.supervised * case.store[1]
    layers = f"{short(d.tokens)} tokens × 2 × {short(case.target.inside)} parameters, attention"
    rows = f"{short(d.supervised)} × 2 × {short(case.target.embedding)} in output rows"
    how = f"{short(flops)} ({layers}, {rows}) ÷ {short(rate)} a second ÷ {case.gpus}"
    terms = [Term("products", seconds, how), *exchange(case, d.tokens / case.gpus / case.capture_tokens, case.capture_tokens)]
    return Hours("capture", total(terms) / 3600, terms, f"writes {short(written / total(terms))}B a second in all")


def exchange(case: Case, passes: float, tokens: float) -> list[Term]:
    """What a target that is no whole one on every device sends for so many passes of `tokens` tokens a device, none of it hidden: all
    weights gathered in every pass, or two sums a layer of every token's stream over the devices of a node."""
    t, m, g = case.target, case.machine, case.gpus
    if case.placement == "rank" or g == 1:
        return []
    if case.placement == "tp":
        share = case.split
        each = 2 * t.layers * 2 * (share - 1) / share * t.width * t.bytes_a_weight
        told = f"{short(passes)} passes × {share} × {short(tokens)} tokens × {short(each)}B ÷ {short(m.link)}B/s"
        return [Term("sums between the parts of layers", passes * share * tokens * each / m.link, told)]
    gathered, between = (t.params - t.embedding * (1 if t.tied else 2)) * t.bytes_a_weight * (g - 1) / g, m.between(g)
    told = f"{short(passes)} passes of {short(tokens)} tokens × {short(gathered)}B ÷ {short(between)}B/s; larger passes gather less often"
    return [Term("weights gathered", passes * gathered / between, told)]


def _pass(case: Case) -> float:
    d = case.data
    return case.target.pass_flops(d.tokens, d.supervised, d.length / 2)


def step_terms(case: Case) -> list[Term]:
    """Seconds of a training step on one device, one after the other: nothing is taken to overlap."""
    h, m, n = case.head, case.machine, case.accumulation
    rows = case.data.supervised / case.data.batches if case.data.batches else FILL * case.tokens_per_step
    batch = Batch(rows, rows / case.data.share, rows / case.data.share)
    rate = m.rate(case.narrow) * m.efficiency.training
    forward, attention = layer_flops(h, batch, case.steps), attention_flops(h, batch, case.steps, case.data.length / 2)
    again = 1.0 if case.checkpointing else 0.0
    layers = forward * (1 + BACKWARD + again) - constant_inputs(h, batch) + attention * (3.5 + again)
    law, logits = loss_flops(case, batch)
    a_batch = f"{n} × {rows:,.0f} counted rows, {case.steps} steps"
    into = "rows and output layer" if h.output_trained else "rows"
    update = f"{short(h.trained / case.shards)} weights × {UPDATE} numbers × 4 bytes ÷ {short(m.bandwidth)}B/s"
    terms = [
        Term("head, forward and backward", n * layers / rate, f"{short(n * layers)} products ÷ {short(rate)} a second ({a_batch})"),
        Term("output layer", n * logits / rate, f"{short(n * logits)} products: logits, and gradients into {into}"),
        Term("target's law", n * law / (m.rate(4) * m.efficiency.training), f"{short(n * law)} products in float32"),
        Term("optimizer", UPDATE * 4 * h.trained / case.shards / m.bandwidth, update),
        Term("calls and launches", n * m.step_seconds, f"{n} × {m.step_seconds} s (stated)"),
    ]
    if case.gpus > 1:
        between = m.between(case.gpus)
        ring = f"2 × {case.gpus - 1}/{case.gpus} × {short(h.trained)} × 4 bytes"
        how = f"{ring} ÷ {short(between)}B/s, none of it hidden behind the backward pass"
        name = "weights and gradients between devices" if case.head_sharded else "gradients between devices"
        terms.append(Term(name, 2 * (case.gpus - 1) / case.gpus * 4 * h.trained / between, how))
    if case.online:
        each = case.target.pass_flops(batch.tokens, batch.rows, case.data.length / 2)
        rate = m.rate(case.target.bytes_a_weight) * m.efficiency.capture
        terms.append(Term("target's pass (online)", n * each / rate, f"{short(n * each)} products ÷ {short(rate)} a second"))
        terms += exchange(case, n, batch.tokens)
    return terms


def training(case: Case) -> Hours:
    """All steps of all epochs."""
    terms, steps = step_terms(case), case.optimizer_steps
    a_step, d = total(terms), case.data
    all_terms = [*terms, product("all steps", (steps, "steps"), (a_step, "s a step"))]
    states = 0.0 if case.online else case.epochs * (d.tokens * case.store[0] + d.supervised * case.store[1]) / (steps * a_step)
    note = f"{d.supervised * case.epochs / (steps * a_step):,.0f} supervised tokens a second in all"
    note += f"; reads {short(states)}B of states a second in all" if states else ""
    return Hours("training", steps * a_step / 3600, all_terms, note)


@dataclass(frozen=True)
class Served:
    """The head in an engine, in the target's precision: bytes of its weights (its own embedding is the target's), bytes a token of both
    caches; tokens of cache that a device (or the devices of one copy) holds without and with it; bytes that a draft step reads by those
    that a pass of the target reads, which is c of a draft at batch 1."""

    weights: float
    kv_target: int
    kv_head: int
    tokens_without: float
    tokens_with: float
    c: float
    devices: int


def served(case: Case) -> Served:
    """What the head takes from the cache of the target that it serves."""
    t, h = case.target, case.head
    _, devices = replicas(case)
    weights = h.params * t.bytes_a_weight + h.tables
    kv_head = h.kv_bytes(t.bytes_a_weight)
    room = max(0.0, USABLE * case.machine.memory * devices - t.weight_bytes)
    # A draft step reads one output layer and, of heads side by side, one head.
    one = (h.params - h.output_params) / (1 if h.unrolled else case.steps) + h.output_params / h.outputs
    read = one * t.bytes_a_weight
    return Served(
        weights, t.kv_bytes, kv_head, room / t.kv_bytes, max(0.0, room - weights) / (t.kv_bytes + kv_head),
        read / (t.inside_bytes + t.embedding * t.bytes_a_weight), devices,
    )  # fmt: skip
