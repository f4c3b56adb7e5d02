"""How rows of a generation share passes: rules of the generator (decoding/prefill.py, decoding/generate.py), by which the plan counts."""

from collections.abc import Sequence

POSITIONS = 1024  # most of a pass over prompts, with padding; one prompt may be longer. Larger ones are slower on a CPU (docs/lab_log.md)
PASS = 64  # positions that cost about what a pass costs by itself
FREE = 0.125  # share of the places that are free before waiting rows take them: their prompts are read together
KEEPS = 0.75  # where no row waits, finished ones are let go once no more than this share of those that are held goes on
BATCHES = 8  # that a call is given to answer: its batch shrinks only at the end of them


def parts(lengths: Sequence[int], positions: int = POSITIONS) -> list[list[int]]:
    """Numbers of the prompts that are read in one pass each, those of like length together, the shortest first.

    A part ends where its padding would cost more than another pass, or where it would have more than `positions` with it.
    """
    found: list[list[int]] = []
    padding = 0
    for b in sorted(range(len(lengths)), key=lambda b: lengths[b]):
        part = found[-1] if found else []
        padding += len(part) * (lengths[b] - lengths[part[-1]]) if part else 0
        if part and padding <= PASS and (len(part) + 1) * lengths[b] <= positions:
            part.append(b)
        else:
            found.append([b])
            padding = 0
    return found
