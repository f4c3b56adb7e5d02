"""What `import spectrain as st` offers. Each name is imported when it is first used; importing spectrain imports no torch."""

import importlib
from typing import Any

NAMES: dict[str, str] = {
    "load_target": "spectrain.target.model:load_target",
    "load_head": "spectrain.cli.wiring:load_head",
    "generate": "spectrain.cli.wiring:generate",
    "NGram": "spectrain.drafters.lookup:NGram",
    "Scripted": "spectrain.drafters.scripted:Scripted",
    "Suffix": "spectrain.drafters.suffix:Suffix",
    "SmallModel": "spectrain.drafters.small_model:SmallModel",
    "Hybrid": "spectrain.cli.wiring:hybrid",
    "Adaptive": "spectrain.decoding.policies:Adaptive",
    "load_policy": "spectrain.evaluation.policy:load_policy",
    "greedy_audit": "spectrain.decoding.audit:greedy_audit",
    "measure_costs": "spectrain.cli.wiring:measure_costs",
    "acceptance": "spectrain.decoding.optimum:acceptance",
    "optimal_acceptance": "spectrain.decoding.optimum:optimal_acceptance",
    "Costs": "spectrain.yields:Costs",
    "expected_tau": "spectrain.decoding.shapes:expected_tau",
    "Chain": "spectrain.decoding.shapes:Chain",
    "Tree": "spectrain.decoding.shapes:Tree",
    "DraftTree": "spectrain.decoding.tree:DraftTree",
    "Coins": "spectrain.decoding.sampling:Coins",
    "accept": "spectrain.decoding.accept:accept",
    "encode_chat": "spectrain.data.masking:encode_chat",
    "encode_turns": "spectrain.data.masking:encode_turns",
    "draft_vocabulary": "spectrain.heads.targets:draft_vocabulary",
    "align": "spectrain.heads.targets:align",
    "expected_tokens": "spectrain.yields:expected_tokens",
    "speedup": "spectrain.yields:speedup",
}


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"spectrain has no {name!r}; it offers {', '.join(sorted(NAMES))}")
    module, attribute = NAMES[name].split(":")
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value
