"""The kernels of draws and chains against their twins; as a script: under triton's interpreter, or with `cuda`; `long`: more of it.

New memory is NaN (torch's deterministic mode fills it), and so are laws that say nothing: those of padding, and q after the last draft.
Vocabularies are cut into chunks of 4, of which the last is not full.
"""

import itertools
import sys
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parents[1] / "laws")]

from conftest import Pair, Setting, Worlds, outcome  # noqa: E402
from test_exact import CHAIN, EXACT, hard_laws, states  # noqa: E402

from spectrain.decoding import rules, sampling  # noqa: E402
from spectrain.decoding.accept import Accepted, accept  # noqa: E402
from spectrain.decoding.sampling import ROLES, Coins, draw, draw_children  # noqa: E402
from spectrain.decoding.tree import DraftTree  # noqa: E402
from spectrain.kernels import draw_triton  # noqa: E402
from spectrain.kernels.chain_triton import verify_chain  # noqa: E402

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True, warn_only=True)
DEVICE = torch.device("cuda" if "cuda" in sys.argv else "cpu")
draw_triton.CHUNK = 4
HARDEST = [0, 2, 4, 5, 6, 7, 8, 9, 11]  # of `hard_laws`: random, p = q, zeros in p, in q, in both, disjoint, one-hot p, one-hot q, tiny


def on_device(p: Tensor, tree: DraftTree, tests: Tensor, ends: Tensor, rule: str) -> Accepted:
    assert tree.q_BNV is not None
    given = (t.to(DEVICE) for t in (p, tree.q_BNV, tree.tokens_BN, tree.num_B, tests, ends))
    return Accepted(*(t.cpu() for t in verify_chain(*given, whole=rule == "block")))


def same(found: Accepted, twin: Accepted) -> bool:
    fields = ("path_BK", "length_B", "next_B")
    return all(torch.equal(getattr(found, name), getattr(twin, name)) for name in fields)


def check_uniform() -> None:
    coins = Coins(torch.tensor([0, 5, -7, 2**62]), torch.tensor([1, 2, 3, 1000]))
    for nodes, role, number in itertools.product([1, 6], ROLES, [0, 1, 16, 40]):
        node_BX = torch.arange(4 * nodes).view(4, nodes) % 7
        seed_B, length_B = coins.seed_B.to(DEVICE), coins.length_B.to(DEVICE)
        found = draw_triton.uniform(seed_B, length_B, node_BX.to(DEVICE), ROLES[role], number)
        assert torch.equal(found.cpu(), coins.uniform(node_BX, role, number))
        found = draw_triton.uniform(seed_B, length_B, torch.arange(nodes, device=DEVICE), ROLES[role], number)
        assert torch.equal(found.cpu(), coins.uniform(nodes, role, number))


def check_draw(V: int, dtype: torch.dtype) -> None:
    """Numbers on both sides of each border between two tokens, on the borders, and between them."""
    g = torch.Generator().manual_seed(V)
    p = (2 * torch.randn(6, V, generator=g)).softmax(-1)
    p[1], p[2, 1:], p[3, : V // 2], p[4] = 1 / V, 0, 0, p[4] * (torch.rand(V, generator=g) < 0.3)
    p[4, V // 3], p[5] = 1e-9, p[5] * 3  # laws need not sum to 1
    p = p.to(dtype)
    upper = p.double().cumsum(-1)
    border = upper / upper[:, -1:]
    near, u_end = V * 2.0**-52, 1 - 2.0**-53
    middle = (border + torch.cat([torch.zeros(6, 1), border[:, :-1]], dim=1)) / 2
    u = torch.cat([border - 2 * near, border, border + 2 * near, middle, torch.full((6, 1), u_end), torch.zeros(6, 1)], dim=1)
    u = u.clamp(0, u_end)
    law = p[:, None].expand(6, u.shape[1], V)
    found, twin = draw_triton.draw(law.to(DEVICE), u.to(DEVICE)).cpu(), draw(law, u)
    lower = torch.cat([torch.zeros(6, 1), border[:, :-1]], dim=1)
    assert (law.gather(-1, found[..., None]) > 0).all()
    assert ((lower.gather(1, found) - near <= u) & (u <= border.gather(1, found) + near)).all()
    clear = ((u[..., None] - border[:, None]).abs() > near).all(-1)
    assert torch.equal(found[clear], twin[clear]) and clear.sum() > 6 * V


@triton.jit
def _found_kernel(mass_ptr, goal_ptr, found_ptr, BLOCK: tl.constexpr):
    found, _ = draw_triton._first_beyond(tl.load(mass_ptr + tl.arange(0, BLOCK)), tl.load(goal_ptr), BLOCK)
    tl.store(found_ptr, found)


def check_borders() -> None:
    """Sums without rounding: the border belongs to the token above it. Goals that rounding brought below or above all there is: a token
    with mass. No mass, as at padding: any id of the vocabulary."""
    p = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0], device=DEVICE).expand(1, 5, 5)
    u = torch.tensor([[0.0, 0.2499999, 0.25, 0.5, 1 - 2.0**-53]], dtype=torch.float64, device=DEVICE)
    assert draw_triton.draw(p, u).tolist() == [[1, 1, 3, 3, 3]]
    mass = torch.tensor([0.0, 0.25, 0.75, 0.0], dtype=torch.float64, device=DEVICE)
    for goal, wanted in ((-1e-17, 1), (0.0, 1), (0.25, 2), (1.0, 2), (1.0 + 1e-15, 2)):
        found = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        _found_kernel[(1,)](mass, torch.tensor([goal], dtype=torch.float64, device=DEVICE), found, BLOCK=4)
        assert found.item() == wanted
    law = torch.tensor([[0.0] * 5, [float("nan")] * 5])
    found = draw_triton.draw(law[None].to(DEVICE), torch.full((1, 2), 0.5, device=DEVICE))
    assert ((found >= 0) & (found < 5)).all()


def drafted(rows: int, nodes: int, V: int, dtype: torch.dtype) -> tuple[Tensor, DraftTree, Coins]:
    """Chains of all lengths, drawn from q; every third row has p = q, every fifth p and q that share half of their ids."""
    g = torch.Generator().manual_seed(nodes + V)
    p, q = ((1.5 * torch.randn(rows, nodes, V, generator=g)).softmax(-1) for _ in range(2))
    p[1::2] = 0.5 * p[1::2] + 0.5 * q[1::2]
    p[::3] = q[::3]
    p[1::5, :, ::3], q[1::5, :, 1::3] = 0, 0
    p, q = p.to(dtype), q.to(dtype)
    coins = Coins(torch.arange(rows), torch.arange(rows) % 4)
    tokens = torch.full((rows, nodes), 10**9)
    for n in range(1, nodes):
        tokens[:, n] = draw_children(q[:, n - 1 : n], torch.full((rows, 1), n - 1), 1, "iid", coins)[0][:, 0, 0]
    num = 1 + torch.arange(rows) % nodes
    node = torch.arange(nodes)
    q = q.masked_fill((node >= num[:, None] - 1)[..., None], torch.nan)
    p = p.masked_fill((node >= num[:, None])[..., None], torch.nan)
    tokens = tokens.masked_fill(node >= num[:, None], 10**9)
    tokens[:, 0] = 0
    return p, DraftTree.chain(tokens, num, "iid", q), coins


def check_chain(rows: int, nodes: int, V: int, dtype: torch.dtype) -> None:
    p, tree, coins = drafted(rows, nodes, V, dtype)
    for rule in ("rejection", "block"):
        twin = accept(p, tree, rule, coins)
        found = on_device(p, tree, coins.uniform(nodes, "accept"), coins.uniform(nodes, "residual"), rule)
        assert same(found, twin), rule
        assert nodes < 4 or len(set(twin.length_B.tolist())) > 3


def check_refusals() -> None:
    """Refused although p = q, as rounding may: nothing is left of p, and the last token is drawn from p itself."""
    p, tree, coins = drafted(8, 3, 9, torch.float64)
    p = torch.where(p.isnan(), p, p[:1, :1])
    tree = DraftTree.chain(tree.tokens_BN, tree.num_B, "iid", p)
    ends = coins.uniform(3, "residual")
    for rule in ("rejection", "block"):
        found = on_device(p, tree, torch.ones_like(ends), ends, rule)
        assert found.length_B.eq(0).all() and torch.equal(found.next_B, draw(p[:, 0], ends[:, 0]))


def check_law(parents: tuple[int, ...], cases: list[int], chosen: tuple[str, ...] = ("rejection", "block")) -> None:
    """The kernels choose as the twin does at both ends of the interval of every coin, for every outcome of every coin: theirs is the
    twin's law, and that is the target's, up to the gap at the ends."""
    N = len(parents)
    worlds_seen = [0]

    def verify(p: Tensor, tree: DraftTree, rule: str, worlds: Worlds) -> Accepted:
        twin = accept(p, tree, rule, worlds)
        for end in (0, 1):
            numbers = []
            for role in ("accept", "residual"):
                low, high = (bound[:, :N] for bound in worlds.intervals[role, 0])
                gap = ((high - low) / 4).clamp(max=1e-12)
                numbers.append(high - gap if end else low + gap)
            assert same(on_device(p, tree, numbers[0], numbers[1], rule), twin), rule
        worlds_seen[0] += len(p)
        return twin

    p, q = (law[cases] for law in hard_laws(3))
    for rule in chosen:
        tv, _ = outcome(Pair(p, q), Setting(parents, "iid", rule, verify=verify))
        assert tv.max() <= EXACT
    assert p.shape[1] == states(3) and worlds_seen[0] > 10 * len(cases)


def check_dispatch() -> None:
    """The rules as the generator calls them, on tensors of a GPU, or as if these here were."""
    if DEVICE.type == "cpu":
        sampling.chosen = rules.chosen = lambda backend, device: "triton"
    p, tree, coins = drafted(9, 4, 11, torch.float32)
    assert tree.q_BNV is not None
    there = Coins(coins.seed_B.to(DEVICE), coins.length_B.to(DEVICE))
    fields = (tree.tokens_BN, tree.num_B, "iid", tree.q_BNV)
    moved = DraftTree.chain(*(f.to(DEVICE) if isinstance(f, Tensor) else f for f in fields))
    points = DraftTree(tree.tokens_BN, tree.parents_BN, tree.num_B, "point_mass")
    moved_points = DraftTree(moved.tokens_BN, moved.parents_BN, moved.num_B, "point_mass")
    found = {rule: accept(p.to(DEVICE), moved, rule, there) for rule in ("rejection", "block")}
    found["point_mass"] = accept(p.to(DEVICE), moved_points, "point_mass", there)
    node_BN = torch.arange(4, device=DEVICE).expand(9, 4)
    found["all at once"] = rules.follow(there.pick(p.to(DEVICE), node_BN, "choice"), moved_points)
    from spectrain.kernels.divergence import chosen

    sampling.chosen = rules.chosen = chosen
    for rule, got in found.items():
        twin = accept(p, tree, rule, coins) if rule in ("rejection", "block") else accept(p, points, "point_mass", coins)
        assert same(Accepted(got.path_BK.cpu(), got.length_B.cpu(), got.next_B.cpu()), twin), rule


def main() -> None:
    check_uniform()
    f32, f64 = torch.float32, torch.float64
    for V, dtype in ((1, f32), (2, f64), (4, f32), (5, f32), (11, f64)):
        check_draw(V, dtype)
    check_borders()
    for rows, nodes, V, dtype in ((16, 4, 9, f32), (12, 2, 3, f64), (12, 7, 4, f64)):
        check_chain(rows, nodes, V, dtype)
    check_dispatch()
    check_refusals()
    check_law(CHAIN[:2], [2, 5, 7])
    check_law(CHAIN[:3], [0], ("block",))
    if "long" in sys.argv:
        check_chain(20, 5, 21, f32)
        check_law(CHAIN[:2], HARDEST)
        check_law(CHAIN[:3], HARDEST)
    print("same")


if __name__ == "__main__":
    main()
