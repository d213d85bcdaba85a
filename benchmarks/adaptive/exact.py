"""Exactness of plans on small random models of five families (line 1).

::

    export PYTHONPATH=src:.
    python benchmarks/adaptive/exact.py --out results/adaptive/exact.json

For every plan of a six-block model of each family, and for some plans of sixteen-block models, in float64:

- logits token by token with a cache against one forward without a cache;
- logits against a model built from its configuration with the plan's blocks and top-k only (Qwen3-VL adds
  pixels after its first blocks, so its skipped blocks are replaced by identities);
- greedy tokens of `generate` against one forward over all of them;
- calls of each block's attention and rows of its experts, count_calls inside the modules, against the plan;
- a change of the plan within a request is refused, and the request continues unchanged.

Finally the runtime is removed, and weights, outputs and all attributes of all modules are compared with
those before.
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
from tests.adaptive.counting import count_calls

TOLERANCE = 1e-10
"""Maximum difference of logits, whose magnitude is up to about 7."""

SPECIAL = [tiny.VISION_START, tiny.VISION_END, tiny.VIDEO, tiny.IMAGE]
"""Tokens that a random model must not generate: a placeholder needs pixels."""

COLUMNS = ("plan", "cached", "rebuilt", "generated", "attention", "experts", "refused")
"""Columns of samples: two differences of logits, then whether tokens, calls, rows and refusals are
correct."""


class IdentityBlock(nn.Module):
    """Replaces a skipped block."""

    def forward(self, hidden_states: Tensor, **named: Any) -> Tensor:
        return hidden_states


def rebuild_model(model: Any, plan: Plan) -> Any:
    """Build a model that has only the blocks and top-k of the plan."""
    config = copy.deepcopy(model.config)
    text: Any = config.get_text_config()
    text.num_experts_per_tok = plan.top_k
    weights, new_index = model.state_dict(), {block: index for index, block in enumerate(plan.blocks)}
    if config.model_type != "qwen3_vl_moe":
        text.num_hidden_layers = len(new_index)
        weights = {
            renamed: value
            for name, value in weights.items()
            if (renamed := _rename_weight(name, new_index)) is not None
        }
    rebuilt = type(model)(config).to(model.dtype).eval()
    rebuilt.load_state_dict(weights)
    rebuilt.set_experts_implementation("eager")
    layers: Any = get_adapter(rebuilt).decoder.layers
    for block in range(plan.insertion_position):
        layers[block].mlp.gate.top_k = model.config.get_text_config().num_experts_per_tok
    for block in set(range(len(layers))) - set(new_index) if config.model_type == "qwen3_vl_moe" else ():
        layers[block] = IdentityBlock()
    return rebuilt


def _rename_weight(name: str, new_index: dict[int, int]) -> str | None:
    """Return the name of a weight after removing blocks; None for a removed block."""
    for stack in ("model.layers.", "model.language_model.layers."):
        if name.startswith(stack):
            block, _, suffix = name.removeprefix(stack).partition(".")
            return f"{stack}{new_index[int(block)]}.{suffix}" if int(block) in new_index else None
    return name


def extend_inputs(inputs: dict[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
    """Return inputs with text tokens appended."""
    num_added = ids.shape[1] - inputs["input_ids"].shape[1]
    extended = {**inputs, "input_ids": ids}
    for name, value in (("attention_mask", 1), ("mm_token_type_ids", 0)):
        if name in inputs:
            extended[name] = nn.functional.pad(inputs[name], (0, num_added), value=value)
    return extended


def token_by_token(model: Any, inputs: dict[str, Tensor], last: int) -> tuple[Tensor, Any]:
    """Run a prompt without its last tokens, then these one by one; returns logits and cache."""
    ids = inputs["input_ids"]
    count = ids.shape[1] - last
    prompt = {
        name: value[:, :count] if value.shape[:2] == ids.shape else value for name, value in inputs.items()
    }
    output = model(**prompt, use_cache=True)
    logits = [output.logits]
    for index in range(count, ids.shape[1]):
        output = model(input_ids=ids[:, index : index + 1], past_key_values=output.past_key_values)
        logits.append(output.logits)
    return torch.cat(logits, 1), output.past_key_values


def check_refusals(
    model: Any, runtime: PlanRuntime, plan: Plan, other_plans: Sequence[Plan], inputs: Any, cache: Any
) -> bool:
    """Whether every other plan is refused within a request, and the request continues unchanged."""
    token = inputs["input_ids"][:, :1]
    expected_cache = copy.deepcopy(cache)
    for other_plan in other_plans:
        try:
            with runtime.use_plan(other_plan):
                model(input_ids=token, past_key_values=cache)
        except PlanError:
            continue
        return False
    with runtime.use_plan(plan):
        logits, expected = (
            model(input_ids=token, past_key_values=past_key_values).logits
            for past_key_values in (cache, expected_cache)
        )
    return torch.equal(logits, expected)


def check_plan(
    model: Any, runtime: PlanRuntime, plan: Plan, other_plans: Sequence[Plan], inputs: Any
) -> tuple[Any, ...]:
    """Check one plan; returns a row of `COLUMNS`."""
    adapter = runtime.adapter
    full_top_k = adapter.geometry.top_k
    reduced = adapter.reduce_to_tier(inputs, plan.tier)
    tokens = reduced["input_ids"].numel()
    with runtime.use_plan(plan):
        with count_calls(adapter.blocks) as counts:
            expected = model(**reduced, use_cache=False).logits
        calls = counts.attention == dict.fromkeys(plan.blocks, 1)
        rows = {
            block: tokens * (full_top_k if block < plan.insertion_position else plan.top_k)
            for block in plan.blocks
        }
        experts = counts.rows == rows
        cached, cache = token_by_token(model, reduced, last=5)
        ids = model.generate(**reduced, max_new_tokens=4, do_sample=False, suppress_tokens=SPECIAL)
        start = reduced["input_ids"].shape[1]
        logits = model(**extend_inputs(reduced, ids[:, :-1]), use_cache=False).logits
        logits[..., SPECIAL] = -torch.inf
        generated = torch.equal(logits[:, start - 1 :].argmax(-1), ids[:, start:])
    reference = rebuild_model(model, plan)(**reduced, use_cache=False).logits
    return (
        plan.id, float((cached - expected).abs().max()), float((reference - expected).abs().max()), generated,
        calls, experts, check_refusals(model, runtime, plan, other_plans, reduced, cache),
    )  # fmt: skip


def snapshot_attributes(model: nn.Module) -> dict[str, Any]:
    """Return all attributes of all modules; parameters and buffers by identity."""

    def to_comparable(value: Any) -> Any:
        if isinstance(value, dict):
            return [(key, to_comparable(item)) for key, item in value.items()]
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            return value.tolist()
        return value if isinstance(value, int | float | str | bool | None) else id(value)

    return {name: to_comparable(vars(module)) for name, module in model.named_modules()}


def check_block_0_refused(depth: int) -> bool:
    """Whether no plan can skip block 0, at any insertion position."""
    for position in range(1, min(6, depth)):
        try:
            Plan(tier=None, insertion_position=position, top_k=1, blocks=tuple(range(1, depth)))
        except PlanError:
            continue
        return False
    return True


def check_model(family: str, depth: int, top_k: int, experts: int, seed: int, limit: int) -> dict[str, Any]:
    """Check all plans of one model, or `limit` random ones."""
    model = tiny.FAMILIES[family](depth=depth, top_k=top_k, experts=experts, seed=seed)
    adapter = get_adapter(model)
    generator = torch.Generator().manual_seed(seed)
    space = PlanSpace.from_importance(adapter.geometry, torch.rand(depth, generator=generator).tolist())
    inputs = tiny.make_prompt(model, images=2, rows=1, seed=seed)
    before, weights = (
        model(**inputs).logits,
        {name: weight.clone() for name, weight in model.state_dict().items()},
    )
    attributes = snapshot_attributes(model)
    runtime = PlanRuntime(adapter)
    order = torch.randperm(len(space), generator=generator).tolist()
    plans = space.plans if not limit else [space.plans[index] for index in sorted(order[:limit])]
    rows = []
    for index, plan in enumerate(plans):
        other_plans = [
            candidate
            for candidate in (space.plans[order[index]], space.plans[-1], space.plans[0])
            if candidate != plan
        ]
        rows.append(check_plan(model, runtime, plan, other_plans, inputs))
    runtime.remove()
    after = model(**inputs).logits
    detached = {
        "outputs": torch.equal(after, before),
        "weights": all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items()),
        "attributes": snapshot_attributes(model) == attributes,
    }
    return {
        "family": family, "model": type(model).__name__, "depth": depth, "top_k": top_k, "plans": len(space),
        "samples": rows, "detached": detached, "block_0_refused": check_block_0_refused(depth),
        "largest_logit": float(before.abs().max()),
    }  # fmt: skip


def is_exact(result: dict[str, Any]) -> bool:
    """Whether all checks of a model passed."""
    exact = all(row[1] < TOLERANCE and row[2] < TOLERANCE and all(row[3:]) for row in result["samples"])
    return exact and all(result["detached"].values()) and result["block_0_refused"]


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
    parser.add_argument("--some", type=int, default=24, help="number of plans of each sixteen-block model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cases = []
    with torch.no_grad():
        for family in args.families:
            for depth, top_k, experts, limit in ((6, 6, 8, 0), (16, 8, 12, args.some)):
                start_s = time.perf_counter()
                result = check_model(family, depth, top_k, experts, args.seed, limit)
                cases.append(result)
                rows = result["samples"]
                print(
                    f"{family:13s} {depth:2d} blocks, {len(rows):3d} of {result['plans']:3d} plans: cached "
                    f"difference {max(row[1] for row in rows):.1e}, rebuilt difference "
                    f"{max(row[2] for row in rows):.1e}; tokens {sum(row[3] for row in rows)}, calls "
                    f"{sum(row[4] for row in rows)}, experts {sum(row[5] for row in rows)}, refusals "
                    f"{sum(row[6] for row in rows)}; detached "
                    f"{'bit-identical' if all(result['detached'].values()) else result['detached']}; "
                    f"{time.perf_counter() - start_s:.0f} s",
                    flush=True,
                )
    record = {
        "environment": collect_environment("cpu", seed=args.seed),
        "transformers": metadata.version("transformers"),
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
        "tolerance": TOLERANCE, "columns": COLUMNS, "cases": cases,
    }  # fmt: skip
    if args.out is not None:
        write_atomic(args.out, json.dumps(record) + "\n")
        record_claims(make_claims(record), record, args.out)
    return 0 if all(is_exact(result) for result in cases) else 1


if __name__ == "__main__":
    sys.exit(main())
