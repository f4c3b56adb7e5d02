"""What training a head computes and keeps, from the names and shapes of its matrices.

An unrolled head runs its layers once a token for the keys of step 0 (and whole, for layers below the last), and at every test-time step
for the counted rows; the token's half of the first layer is made once a token. Heads side by side run once a counted row.

Legend: K test-time steps, R counted rows, T tokens of a batch, H head width, I inner width of an MLP, F width of the states read.
"""

import re

from spectrain.planning.sizes import Batch, Case, HeadSize, Matrix

BESIDE = {"eagle3": 7, "eagle": 5, "hydra": 5}  # vectors of width H that a decoder layer keeps a row beside its MLP's and attention's


def _layer(name: str) -> int | None:
    """Which decoder layer a matrix is of."""
    if name.startswith(("midlayer.", "prefix.")):
        return 0
    found = re.match(r"(above|layers)\.(\d+)\.", name)
    return None if found is None else int(found[2]) + (found[1] == "above")


def uses(head: HeadSize, matrix: Matrix, steps: int) -> tuple[float, float]:
    """How often a matrix is multiplied, (a token, a counted row), all steps together; the output layer apart."""
    number = _layer(matrix.name)
    if not head.unrolled:
        return (1, 0) if number is not None and re.search(r"[kv]_proj", matrix.name) else (0, 1)
    if number is None:
        return (1, (steps - 1) / 2 if head.kind == "eagle" and matrix.name.startswith("fc") else 0)
    keys, last = re.search(r"\.[kv]_proj", matrix.name) is not None, number == head.layers - 1
    own = (1, steps - 1) if keys or not last else (0, steps)
    if head.kind == "eagle3" and number == 0 and re.search(r"\.[qkv]_proj", matrix.name):  # half of it reads the token in hand
        own_tokens, own_rows = own
        token_tokens, token_rows = (1, 0) if keys or not last else (0, 1)
        return (own_tokens + token_tokens) / 2, (own_rows + token_rows) / 2
    return own


def layer_flops(head: HeadSize, batch: Batch, steps: int) -> float:
    """Of a forward pass up to what the output layer reads, attention left out."""
    of_rows = ((m, uses(head, m, steps)) for m in head.matrices if not m.name.startswith("lm_head"))
    return sum(2 * m.size * (tokens * batch.tokens + rows * batch.rows) for m, (tokens, rows) in of_rows)


def attention_flops(head: HeadSize, batch: Batch, steps: int, context: float) -> float:
    """Scores and sums of a forward pass; layers below the last ask for every token, too."""
    asks = (steps if head.unrolled else 1) * batch.rows * min(head.layers, 1)
    asks += max(0, head.layers - 1) * (batch.tokens + (steps - 1) * batch.rows)
    return 4 * head.heads * head.head_dim * context * asks


def constant_inputs(head: HeadSize, batch: Batch) -> float:
    """Products of a forward pass whose input is data: the backward pass makes the gradient of the weight alone."""
    if head.kind == "medusa":
        return sum(2 * m.size * batch.rows for m in head.matrices if _first_block(m))
    return sum(2 * m.size * batch.tokens for m in head.matrices if head.unrolled and m.name == "fc.weight")


def loss_flops(case: Case, batch: Batch) -> tuple[float, float]:
    """The target's law over the draft vocabulary, once a supervised token; logits of every step with their gradients into hidden states
    and, where it is trained, output layer."""
    head = case.head
    law = 2 * batch.rows * head.draft_vocab * head.target_width
    logits = 2 * batch.rows * case.steps * head.draft_vocab * head.width
    return law, logits * (3 if head.output_trained else 2)


def saved_bytes(case: Case, batch: Batch) -> tuple[float, str]:
    """What the backward pass of a batch needs of the forward pass, and how it is made up."""
    head, K = case.head, case.steps
    per_row, per_token, told = _inputs(case) if case.checkpointing else _kept(case)
    per_row += 4 * 2 * K * head.width  # what the output layer reads is held for the losses, and its gradient
    how = f"{batch.rows:,.0f} rows × {per_row:,.0f} bytes + {batch.padded:,.0f} tokens × {per_token:,.0f} bytes ({told})"
    found = batch.rows * per_row + batch.padded * per_token
    if not case.checkpointing:
        return found, how
    row, token = _again(case)
    again = batch.rows * row + batch.padded * token
    return found + again, f"{how} + {again:,.0f} bytes of the step at work"


def _layer_bytes(case: Case) -> float:
    """A row of one decoder layer: vectors of the stream, queries, sums, keys, values, and four of the MLP."""
    h = case.head
    attention = 2 * (h.heads + h.kv_heads) * h.head_dim + h.head_dim
    return 4 * (BESIDE.get(h.kind, 0) * h.width + attention) + case.narrow * 4 * h.inner


def _kept(case: Case) -> tuple[float, float, str]:
    """Bytes a counted row, bytes a token, and what they are."""
    head, K, layer = case.head, case.steps, _layer_bytes(case)
    H, W = head.width, head.target_width
    keys = 2 * head.kv_heads * head.head_dim
    enter = 4 * ((5 if head.kind == "eagle3" else 3) * H + keys + 3 * head.head_dim)
    states = (case.narrow if head.kind == "eagle3" else 4) * head.states * W
    if head.unrolled:
        below = head.layers - 1
        told = f"{K} steps, {head.layers} layer(s) of 4 × {head.inner} and some {BESIDE[head.kind]} × {H} numbers"
        return layer * (K * head.layers - below), states + enter + below * layer, told
    blocks = [m for m in head.matrices if m.name.endswith(".linear.weight")]
    joined = sum(m.inputs for m in head.matrices if ".res_connection." in m.name)
    deeper = sum(1 for m in blocks if not _first_block(m))
    rows = 4.0 * W + case.narrow * (joined + len(blocks) * W) + 4 * deeper * W
    if head.layers:
        return rows + layer, states + enter, f"{len(blocks)} blocks and a prefix layer of 4 × {head.inner} numbers"
    return rows, 0.0, f"{len(blocks)} blocks of {W} numbers"


def _inputs(case: Case) -> tuple[float, float, str]:
    """The same where the layers are computed again: their inputs, and the keys that later steps see."""
    head, K = case.head, case.steps
    H, F = head.width, head.states * head.target_width
    keys = 4 * 2 * head.kv_heads * head.head_dim * head.layers
    if head.kind == "eagle3":
        return 4 * 2 * K * H + keys * (K - 1), 4 * (F + 2 * H) + keys, f"inputs of {K} steps, layers computed again"
    if head.unrolled:
        return keys * (K - 1), 4 * (F + H) + keys, f"inputs of {K} steps, layers computed again"
    joined = sum(m.inputs for m in head.matrices if ".res_connection." in m.name)
    return 4 * (joined or H), 4 * F if head.layers else 0.0, "inputs of the blocks, computed again"


def _again(case: Case) -> tuple[float, float]:
    """Bytes a counted row and a token of the one step, or the one head, that is computed again."""
    head = case.head
    if head.unrolled:
        return _layer_bytes(case) * head.layers, _layer_bytes(case) * (head.layers - 1)
    return max(_kept(case)[0] / case.steps, _layer_bytes(case) if head.layers else 0.0), 0.0


def _first_block(matrix: Matrix) -> bool:
    """Whether it is of the first block of a head beside others."""
    return re.match(r"heads\.\d+\.0\.", matrix.name) is not None
