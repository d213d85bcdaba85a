r"""Plans on small random models of five families: what runs is the plan, exactly (line 1).

::

    export PYTHONPATH=src:.
    python benchmarks/adaptive/exact.py --out results/adaptive/exact.json

For every plan of a six-block model of each family, and for some plans of sixteen-block ones, in float64:

- logits token by token with a cache against one forward without;
- logits against a model that was built anew from its configuration, with the kept blocks only and the plan's
  top-k (Qwen3-VL adds pixels behind its first blocks, so there the skipped ones are replaced by nothing);
- greedy tokens of `generate` against one forward over all of them;
- calls of each block's attention and rows that its experts multiplied, counted deep inside, against the plan;
- that another plan in mid-request is refused, and that the request goes on unharmed.

At last the knobs are removed, and weights, outputs and all attributes of all modules compared with before.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.claims import Claim, record_claims
from sparseflow.adaptive.adapters import get_adapter
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan, PlanSpace
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_atomic
from sparseflow.errors import PlanError
from tests.adaptive import tiny
from tests.adaptive.counting import counted

TOLERANCE = 1e-10
"""Largest difference of logits, which are up to about 7."""

SPECIAL = [tiny.VISION_START, tiny.VISION_END, tiny.VIDEO, tiny.IMAGE]
"""What a random model must not say: an answer with a placeholder would be an image without pixels."""

COLUMNS = ("plan", "cached", "rebuilt", "generated", "attention", "experts", "refused")
"""Of samples: two differences of logits, and whether tokens, calls, rows and refusals were as they must "
"be."""


class Nothing(nn.Module):
    """In place of a block."""

    def forward(self, hidden_states: Tensor, **named: Any) -> Tensor:
        return hidden_states


def rebuilt(model: Any, plan: Plan) -> Any:
    """A model that is the plan from the start."""
    config = copy.deepcopy(model.config)
    text: Any = config.get_text_config()
    text.num_experts_per_tok = plan.top_k
    weights, kept = model.state_dict(), {block: at for at, block in enumerate(plan.blocks)}
    if config.model_type != "qwen3_vl_moe":
        text.num_hidden_layers = len(kept)
        weights = {
            renamed: value for name, value in weights.items() if (renamed := _renamed(name, kept)) is not None
        }
    found = type(model)(config).to(model.dtype).eval()
    found.load_state_dict(weights)
    found.set_experts_implementation("eager")
    layers: Any = get_adapter(found).decoder.layers
    for block in range(plan.insertion_position):
        layers[block].mlp.gate.top_k = model.config.get_text_config().num_experts_per_tok
    for block in set(range(len(layers))) - set(kept) if config.model_type == "qwen3_vl_moe" else ():
        layers[block] = Nothing()
    return found


def _renamed(name: str, kept: dict[int, int]) -> str | None:
    """A weight's name where only some blocks are left; None where its block is not."""
    for stack in ("model.layers.", "model.language_model.layers."):
        if name.startswith(stack):
            block, _, rest = name.removeprefix(stack).partition(".")
            return f"{stack}{kept[int(block)]}.{rest}" if int(block) in kept else None
    return name


def longer(inputs: dict[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
    """Inputs with more text behind them."""
    more = ids.shape[1] - inputs["input_ids"].shape[1]
    found = {**inputs, "input_ids": ids}
    for name, value in (("attention_mask", 1), ("mm_token_type_ids", 0)):
        if name in inputs:
            found[name] = nn.functional.pad(inputs[name], (0, more), value=value)
    return found


def token_by_token(model: Any, inputs: dict[str, Tensor], last: int) -> tuple[Tensor, Any]:
    """Logits of a prompt without its last tokens and then of these one by one, and the cache."""
    ids = inputs["input_ids"]
    count = ids.shape[1] - last
    first = {
        name: value[:, :count] if value.shape[:2] == ids.shape else value for name, value in inputs.items()
    }
    found = model(**first, use_cache=True)
    logits = [found.logits]
    for at in range(count, ids.shape[1]):
        found = model(input_ids=ids[:, at : at + 1], past_key_values=found.past_key_values)
        logits.append(found.logits)
    return torch.cat(logits, 1), found.past_key_values


def refused(
    model: Any, runtime: PlanRuntime, plan: Plan, others: Sequence[Plan], inputs: Any, cache: Any
) -> bool:
    """Whether every other plan is refused in mid-request, and the request goes on as if nothing had been."""
    token = inputs["input_ids"][:, :1]
    twin = copy.deepcopy(cache)
    for other in others:
        try:
            with runtime.use_plan(other):
                model(input_ids=token, past_key_values=cache)
        except PlanError:
            continue
        return False
    with runtime.use_plan(plan):
        found, expected = (model(input_ids=token, past_key_values=each).logits for each in (cache, twin))
    return torch.equal(found, expected)


def sample(
    model: Any, runtime: PlanRuntime, plan: Plan, others: Sequence[Plan], inputs: Any
) -> tuple[Any, ...]:
    """One plan's row of `COLUMNS`."""
    adapter = runtime.adapter
    whole = adapter.geometry.top_k
    reduced = adapter.reduce_to_tier(inputs, plan.tier)
    tokens = reduced["input_ids"].numel()
    with runtime.use_plan(plan):
        with counted(adapter.blocks) as counts:
            expected = model(**reduced, use_cache=False).logits
        calls = counts.attention == dict.fromkeys(plan.blocks, 1)
        rows = {
            block: tokens * (whole if block < plan.insertion_position else plan.top_k)
            for block in plan.blocks
        }
        experts = counts.rows == rows
        found, cache = token_by_token(model, reduced, last=5)
        ids = model.generate(**reduced, max_new_tokens=4, do_sample=False, suppress_tokens=SPECIAL)
        start = reduced["input_ids"].shape[1]
        logits = model(**longer(reduced, ids[:, :-1]), use_cache=False).logits
        logits[..., SPECIAL] = -torch.inf
        generated = torch.equal(logits[:, start - 1 :].argmax(-1), ids[:, start:])
    reference = rebuilt(model, plan)(**reduced, use_cache=False).logits
    return (
        plan.id, float((found - expected).abs().max()), float((reference - expected).abs().max()), generated,
        calls, experts, refused(model, runtime, plan, others, reduced, cache),
    )  # fmt: skip


def insides(model: nn.Module) -> dict[str, Any]:
    """All attributes of all modules; parameters and buffers by identity."""

    def of(value: Any) -> Any:
        if isinstance(value, dict):
            return [(key, of(each)) for key, each in value.items()]
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            return value.tolist()
        return value if isinstance(value, int | float | str | bool | None) else id(value)

    return {name: of(vars(module)) for name, module in model.named_modules()}


def block_0_refused(depth: int) -> bool:
    """Whether no plan can skip block 0, at any insertion."""
    for position in range(1, min(6, depth)):
        try:
            Plan(tier=None, insertion_position=position, top_k=1, blocks=tuple(range(1, depth)))
        except PlanError:
            continue
        return False
    return True


def case(family: str, depth: int, top_k: int, experts: int, seed: int, limit: int) -> dict[str, Any]:
    """All plans of one model, or as many as asked, drawn by the seed."""
    model = tiny.FAMILIES[family](depth=depth, top_k=top_k, experts=experts, seed=seed)
    adapter = get_adapter(model)
    generator = torch.Generator().manual_seed(seed)
    space = PlanSpace.from_importance(adapter.geometry, torch.rand(depth, generator=generator).tolist())
    inputs = tiny.prompt(model, images=2, rows=1, seed=seed)
    before, weights = (
        model(**inputs).logits,
        {name: each.clone() for name, each in model.state_dict().items()},
    )
    was = insides(model)
    runtime = PlanRuntime(adapter)
    order = torch.randperm(len(space), generator=generator).tolist()
    plans = space.plans if not limit else [space.plans[at] for at in sorted(order[:limit])]
    rows = []
    for at, plan in enumerate(plans):
        others = [
            other for other in (space.plans[order[at]], space.plans[-1], space.plans[0]) if other != plan
        ]
        rows.append(sample(model, runtime, plan, others, inputs))
    runtime.remove()
    after = model(**inputs).logits
    detached = {
        "outputs": torch.equal(after, before),
        "weights": all(torch.equal(each, weights[name]) for name, each in model.state_dict().items()),
        "attributes": insides(model) == was,
    }
    return {
        "family": family, "model": type(model).__name__, "depth": depth, "top_k": top_k, "plans": len(space),
        "samples": rows, "detached": detached, "block_0_refused": block_0_refused(depth),
        "largest_logit": float(before.abs().max()),
    }  # fmt: skip


def good(found: dict[str, Any]) -> bool:
    """Whether all of a case is as it must be."""
    exact = all(row[1] < TOLERANCE and row[2] < TOLERANCE and all(row[3:]) for row in found["samples"])
    return exact and all(found["detached"].values()) and found["block_0_refused"]


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: exactness of plans on random models."""
    command = "python benchmarks/adaptive/exact.py --out results/adaptive/exact.json"
    cases, columns = record["cases"], record["columns"]
    rows = [dict(zip(columns, row, strict=True)) for case in cases for row in case["samples"]]
    yield Claim(
        id="adaptive/1-logits",
        claim="Largest relative difference between the float64 logits of a plan with a cache and without "
        "one, or of a rebuilt model.",
        value=max(max(row["cached"], row["rebuilt"]) for row in rows),
        unit="relative",
        target="<= 1e-10",
        baseline="the model without a cache",
        command=command,
        details={"plans": len(rows), "families": ", ".join(sorted({case["family"] for case in cases}))},
    )
    yield Claim(
        id="adaptive/1-calls",
        claim=f"Plans of {len(rows)} whose tokens, executed block calls and expert assignments match the "
        "plan.",
        value=sum(row["generated"] and row["attention"] and row["experts"] for row in rows),
        unit="plans",
        target=f">= {len(rows)}",
        command=command,
    )
    yield Claim(
        id="adaptive/1-refusals",
        claim=f"Plans of {len(rows)} for which a plan change within a request or a skipped block 0 raises a "
        "typed error.",
        value=sum(row["refused"] for row in rows) * all(case["block_0_refused"] for case in cases),
        unit="plans",
        target=f">= {len(rows)}",
        command=command,
    )
    yield Claim(
        id="adaptive/1-detached",
        claim=f"Models of {len(cases)} that are bit-identical after `detach`.",
        value=sum(all(case["detached"].values()) for case in cases),
        unit="models",
        target=f">= {len(cases)}",
        command=command,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--families", nargs="+", choices=tuple(tiny.FAMILIES), default=list(tiny.FAMILIES))
    parser.add_argument("--some", type=int, default=24, help="plans of each sixteen-block model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    cases = []
    with torch.no_grad():
        for family in asked.families:
            for depth, top_k, experts, limit in ((6, 6, 8, 0), (16, 8, 12, asked.some)):
                began = time.perf_counter()
                found = case(family, depth, top_k, experts, asked.seed, limit)
                cases.append(found)
                rows = found["samples"]
                print(
                    f"{family:13s} {depth:2d} blocks, {len(rows):3d} of {found['plans']:3d} plans: cached "
                    f"differs by {max(row[1] for row in rows):.1e}, a model built so by "
                    f"{max(row[2] for row in rows):.1e}; tokens {sum(row[3] for row in rows)}, calls "
                    f"{sum(row[4] for row in rows)}, experts {sum(row[5] for row in rows)}, refusals "
                    f"{sum(row[6] for row in rows)}; detached "
                    f"{'bit-identical' if all(found['detached'].values()) else found['detached']}; "
                    f"{time.perf_counter() - began:.0f} s",
                    flush=True,
                )
    record = {
        "environment": collect_environment("cpu", seed=asked.seed),
        "transformers": metadata.version("transformers"),
        "settings": {name: value for name, value in vars(asked).items() if name != "out"},
        "tolerance": TOLERANCE, "columns": COLUMNS, "cases": cases,
    }  # fmt: skip
    if asked.out is not None:
        write_atomic(asked.out, json.dumps(record) + "\n")
        record_claims(make_claims(record), record, asked.out)
    return 0 if all(good(found) for found in cases) else 1


if __name__ == "__main__":
    sys.exit(main())
