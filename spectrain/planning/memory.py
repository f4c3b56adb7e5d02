"""Memory of a device, stage by stage: what is there at once, each figure with the numbers that were multiplied.

A sharded target (`fsdp2`, `tp`, `zero3`) and a sharded head are counted as `spectrain train` makes them, by arithmetic: on GPUs nothing of
it was measured.

Legend: W target width, H head width, V target vocabulary, Vd draft vocabulary, K test-time steps, F width of the states read.
"""

from spectrain.planning.head_work import saved_bytes
from spectrain.planning.sizes import QUANTISED, Case
from spectrain.planning.terms import Term, product, short, total

WORKING = 2  # layers gathered at a time: the one at work and the next
CPU_LOGITS, GPU_LOGITS = 2**22, 2**28  # bytes of float32 logits whose best token and log-sum-exp are taken at once


def stages(case: Case) -> dict[str, list[Term]]:
    """The terms of each stage, by its name; a stage's memory is their sum, the run's the largest."""
    base, head = resident(case), head_terms(case)
    found = {} if case.online else {"capture": [*base, *capture_terms(case)]}
    training = [*base, *head, *batch_terms(case), *loss_terms(case)]
    found["training"] = [*training, *(capture_terms(case) if case.online else [])]
    if case.probe[0]:
        found["measuring acceptance"] = [*base, *head, *measuring_terms(case)]
    return found


def peak(case: Case) -> float:
    """Bytes of the largest stage."""
    return max(total(terms) for terms in stages(case).values())


def resident(case: Case) -> list[Term]:
    """There from beginning to end."""
    what = "context, workspaces, allocator" if case.machine.kind == "cuda" else "Python, torch, transformers, tokenizer, allocator"
    return [Term("reserve", case.machine.reserve, f"{what}: stated, not computed"), *target_terms(case), *packed(case)]


def target_terms(case: Case) -> list[Term]:
    """Weights of the target on one device."""
    t, gpus = case.target, case.gpus
    size = (t.bytes_a_weight, "bytes")
    if t.quantization:
        each, rest = QUANTISED[t.quantization], t.params - t.linear
        how = f"{short(t.linear)} in linear layers × {each:g} bytes ({t.quantization}) + {short(rest)} × {t.bytes_a_weight} bytes"
        return [Term("target's weights", t.weight_bytes, how)]
    if case.placement == "rank" or gpus == 1:
        return [product("target's weights", (t.params, "parameters, whole on every device"), size)]
    rows = product("target's embedding and output rows, whole", (t.embedding * (1 if t.tied else 2), "parameters"), size)
    if case.placement == "tp":
        inside = t.params - t.embedding * (1 if t.tied else 2)
        told = f"parameters of {short(inside)} by {case.split}"
        return [product("target's layers, split", (inside / case.split, told), size), rows]
    shard = product("target's weights, sharded", (t.params / gpus, f"parameters of {short(t.params)} by {gpus}"), size)
    return [shard, product("layers gathered to compute", (WORKING, "layers"), (t.unit, "parameters"), size), rows]


def packed(case: Case) -> list[Term]:
    """A second copy of the linear weights, in the order of oneDNN."""
    if not case.packed:
        return []
    t = case.target
    copied = t.params - (0 if t.tied else t.embedding)
    return [product("target's linear weights, packed", (copied, "parameters, a copy for its passes"), (t.bytes_a_weight, "bytes"))]


def head_terms(case: Case) -> list[Term]:
    """The head and what its optimizer holds; float32 whatever the precision of the products. A sharded head is gathered whole for its pass,
    and its gradients are whole until that ends."""
    h, over = case.head, case.shards
    by = f" by {over}" if over > 1 else ""
    adam = h.trained - h.muon
    found = [
        Term("head's weights", 4 * h.params / over + h.tables, f"{short(h.params)} parameters × 4 bytes{by} + {short(h.tables)}B, tables"),
        product("gradients", (h.trained / over, f"trained parameters{by}"), (4, "bytes")),
        product("moments of Adam", (adam / over, f"trained parameters{by}"), (8, "bytes")),
    ]
    if h.muon:
        found.append(product("momentum of Muon", (h.muon / over, f"parameters{by}"), (4, "bytes")))
    if case.ema:
        found.append(product("averaged weights", (h.params / over, f"parameters{by}"), (4, "bytes")))
    if over > 1:
        found.append(product("the same weights gathered for a pass", (h.params, "parameters"), (4, "bytes")))
        found.append(product("gradients before they are sharded", (h.trained, "trained parameters"), (4, "bytes")))
    elif case.gpus > 1:
        found.append(product("buckets of DDP", (h.trained, "trained parameters"), (4, "bytes")))
    if case.mixed:
        found.append(product("16-bit copies of the weights", (h.params, "parameters"), (2, "bytes")))
    found.append(product("target's rows of the draft vocabulary", (h.draft_vocab, "rows"), (h.target_width, "wide"), (4, "bytes")))
    return found


def batch_terms(case: Case) -> list[Term]:
    """States of a batch, and what its backward pass needs."""
    b, h = case.batch, case.head
    state, answer = case.store
    width = h.states * h.target_width
    saved, how = saved_bytes(case, b)
    return [
        Term(
            "states of a batch, as stored", b.padded * state + b.rows * answer,
            f"{b.padded:,.0f} tokens × {state:,.0f} bytes + {b.rows:,.0f} × {answer:,.0f} ({case.store_name})",
        ),
        product("states of a batch, decoded", (b.padded, "tokens"), (width, "wide"), (2, "copies"), (4, "bytes")),
        Term("activations for the backward pass", saved, how),
    ]  # fmt: skip


def loss_terms(case: Case) -> list[Term]:
    """Logits in pieces: of the draft at all steps that share their output rows, and the target's law; the output layer's own gradient."""
    h, b = case.head, case.batch
    piece = case.pieces(max(1, int(b.rows)), h.draft_vocab, case.steps)
    together = case.steps if h.outputs == 1 else 1
    matrices = together * (1.5 if case.mixed else 1) + 1 + case.logs
    tokens, wide = (piece, f"of {b.rows:,.0f} tokens"), (h.draft_vocab, "draft tokens")
    found = [product("logits in pieces", tokens, wide, (matrices, "matrices"), (4, "bytes"))]
    if h.output_trained:
        found.append(product("gradient of the output layer, being made", (h.output_params, "parameters"), (4, "bytes")))
    if case.mixed:
        found.append(product("16-bit output rows of the loss", (h.output_params, "parameters"), (2, "bytes")))
    return found


def capture_terms(case: Case) -> list[Term]:
    """A pass of the target over prepared rows: activations of one layer at a time, states kept, logits of supervised tokens."""
    t, h, d = case.target, case.head, case.data
    tokens = max(case.capture_tokens, d.longest)
    asked = tokens * d.share
    at_once = min(GPU_LOGITS if case.machine.kind == "cuda" else CPU_LOGITS, asked * t.vocab * 4)
    return [
        product("target's activations", (tokens, "tokens"), (_activation(case), "numbers (one layer)"), (t.bytes_a_weight, "bytes")),
        product("states taken", (tokens, "tokens"), (2 * h.states * t.width, "numbers"), (t.bytes_a_weight, "bytes")),
        Term(
            "target's logits of supervised tokens", asked * t.vocab * t.bytes_a_weight + 2 * at_once,
            f"{asked:,.0f} tokens × {t.vocab:,} × {t.bytes_a_weight} bytes + 2 × {short(at_once)}B of float32",
        ),
    ]  # fmt: skip


def measuring_terms(case: Case) -> list[Term]:
    """The generator on the prompts that were kept out: caches of target and head, and the pass over all prompts."""
    t, h = case.target, case.head
    rows, prompt, positions = case.probe
    return [
        product("target's cache", (rows, "rows"), (positions, "positions"), (t.kv_bytes, "bytes")),
        product("head's cache", (rows, "rows"), (positions, "positions"), (h.kv_bytes(4), "bytes")),
        product("states of the answers, kept", (rows, "rows"), (positions, "positions"), (h.states * h.target_width, "wide"), (4, "bytes")),
        product("target's activations", (rows, "rows"), (prompt, "tokens"), (_activation(case), "numbers"), (t.bytes_a_weight, "bytes")),
    ]


def _activation(case: Case) -> int:
    """Numbers a token of a layer at work: gate, up and their product, or queries, keys, values and their sums; and the stream."""
    t = case.target
    return 4 * t.width + max(3 * t.inner, (2 * t.heads + 2 * t.kv_heads) * t.head_dim)
