"""The main job, shown on real input: a trained model that answers within budgets, on this machine.

Some plans are measured, a predictor is fitted, and questions about images that the model has not seen are
answered under several budgets; beside them, in random order, by the whole model and by its quickest plan.
What each request took is kept as a run (`run.json`, `samples.parquet`), with a page (`report.html`).

Requests of a large model take seconds on a CPU. So plans are measured in as many rounds, and by default as
many questions are asked, as there is time for: of a small model all, of a large one some minutes of them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparseflow.adaptive.api import Attached, attach
from sparseflow.adaptive.data import DEFAULT, IMPORTANCE, WORTH, model_folder, shipped_names
from sparseflow.adaptive.demo_page import QUICKEST, WHOLE, AdaptiveDemoResult, BudgetSummary, write_page
from sparseflow.adaptive.grid_vqa.dataset import VqaDataset, VqaSample
from sparseflow.adaptive.grid_vqa.images import Split
from sparseflow.adaptive.grid_vqa.model import load
from sparseflow.adaptive.grid_vqa.task import placed
from sparseflow.adaptive.plan.space import Plan, PlanSpace
from sparseflow.adaptive.predictor import PlanLatencyPredictor
from sparseflow.adaptive.profile import EagerRunner, PlanProfile, ProfileRunner, collect_profile, spread
from sparseflow.adaptive.profile.importance import space_of
from sparseflow.core.run import Run
from sparseflow.errors import InputError

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction of the demo that is over."""

_MEASURED, _KEPT, _FIRST = 12, 8, 32
_ROUNDS = (3, 8)
"""In which plans are measured: at least, and at most."""
_QUESTIONS = (10, 40)
"""That are asked where it is not said how many."""
_MEASURING_S, _FIRST_S, _ANSWERING_S = 90.0, 20.0, 180.0
"""What there is time for; the least of each is done however long it takes."""
_NEW_TOKENS = 2
"""Of an answer of one word, with its end."""
_HELD_UP = 4.0
"""Times what was predicted: a first request that takes as long would stretch every margin and budget."""
_ROOM = 1.25
"""The largest budget over what 99 of 100 requests of the dearest plan stay below."""


def run_demo(
    model: Path | str = DEFAULT,
    *,
    out: Path = Path("runs"),
    questions: int | None = None,
    budgets: int = 5,
    archives: Sequence[Path] = (),
    device: torch.device | str = "cpu",
    seed: int = 0,
    progress: Progress = lambda what, fraction: None,
) -> AdaptiveDemoResult:
    """Measure plans of a Grid-VQA model, answer questions within budgets, and write the run.

    Args:
        model: Name of a model that comes with SparseFlow (`shipped.shipped_names`), or the folder of one.
            `importance.json`, `worth.json` and `images.tar.gz` in it are used where they are there.
        out: Folder that gets the run's own folder.
        questions: How many to ask, each under every budget; by default 40, or fewer where these would take
            minutes.
        budgets: How many.
        archives: Of images, where they are elsewhere than in training, and not in the folder.
        device: Where to compute.
        seed: What orders are drawn from.
        progress: Told what is being done.

    Raises:
        InputError: A number is too small, there is no such model, the folder holds none of Grid-VQA, one that
            is asked about nothing with one word as its answer, or the importance or worth of another model.
        FileFormatError: A file of the folder is damaged.
        MissingExtraError: A package of the `adaptive` extra is missing.
    """
    if (questions is not None and questions < 1) or budgets < 2 or seed < 0:
        raise InputError(
            f"`questions` (={questions}) must be at least 1, `budgets` (={budgets}) at least 2 and `seed` "
            f"(={seed}) not negative"
        )
    folder = model_folder(model)
    progress("loading the model", 0.0)
    network, tokenizer, task = load(folder, device=device)
    data = VqaDataset(placed(task, archives, folder), device)
    samples, first = _asked(data, "test", questions or _QUESTIONS[1]), _asked(data, "val", 8)
    settings = {
        "model": str(model) if str(model) in shipped_names() else folder.name, "questions": questions,
        "budgets": budgets, "device": str(device),
    }  # fmt: skip
    with Run.start(out, "sparseflow adaptive demo", settings, seed=seed, device=device) as run:
        with attach(network) as bare:
            space = space_of(network, bare.adapter.geometry, _beside(folder, IMPORTANCE))
            lengths = _lengths(bare, samples)
            runner = EagerRunner(bare.knobs, device=device, example=samples[0].inputs, seed=seed)
            found = _measured(
                runner, space, run.path / "profile" / "profile.parquet", lengths, seed,
                lambda what, part: progress(f"measuring plans: {what}", 0.02 + 0.38 * part),
            )  # fmt: skip
        predictor = PlanLatencyPredictor.fit(found, seed=seed)
        with attach(network, profile=predictor, worth=_beside(folder, WORTH)) as attached:
            assert attached.chooser is not None
            size: dict[str, Any] = {"text_tokens": lengths[-1], "new_tokens": _NEW_TOKENS}
            attached.chooser = attached.chooser.few(_KEPT, **size)
            kept = list(attached.chooser.plans or ())
            places = [space.plans.index(plan) for plan in kept]
            ms, _ = predictor.predict_all(**size, images=1)
            progress("learning on from first requests", 0.4)
            if _learn_on(attached, first, ms[places]) > _HELD_UP:
                progress("learning on from first requests, once more: one of them was held up", 0.4)
                predictor.forget(1.0)
                _learn_on(attached, first, ms[places])
            ms, p99 = predictor.predict_all(**size, images=1)
            ladder = np.geomspace(p99[places].min(), _ROOM * p99[places].max(), budgets).tolist()
            fixed = {WHOLE: space.geometry.full(), QUICKEST: kept[int(ms[places].argmin())]}
            if questions is None:
                samples = samples[: _fitting(ms[places], ladder)]
            rows: list[dict[str, Any]] = []
            for row in _answered(attached, tokenizer, samples, ladder, fixed, seed, progress):
                rows.append(row)
                run.append(row)
        result = _result(folder, rows, ladder, predictor, run)
        run.update_results(
            **{name: value for name, value in result.to_dict().items() if name not in ("run", "report")}
        )
        progress("writing the report", 0.97)
        write_page(result, rows, run)
    progress("done", 1.0)
    return result


def _measured(
    runner: ProfileRunner, space: PlanSpace, file: Path, lengths: Sequence[int], seed: int, progress: Progress
) -> PlanProfile:
    """What some plans take, measured in as many rounds as there is time for."""
    least, most = _ROUNDS
    how: dict[str, Any] = {
        "buckets": lengths, "plans": spread(space, _MEASURED, seed=seed), "steps": _NEW_TOKENS, "seed": seed,
    }  # fmt: skip
    began = time.perf_counter()
    collect_profile(
        runner, space, file, repeats=1, **how,
        progress=lambda what, part: progress(what.replace("round 1/1", "first round"), part / most),
    )  # fmt: skip
    took_s = time.perf_counter() - began
    # Everything ran twice: what is run for the first time does not count.
    more = int((_MEASURING_S - took_s) / (took_s / 2))
    return collect_profile(
        runner, space, file, repeats=min(max(1 + more, least), most), warmup=0, **how, progress=progress
    )


def _learn_on(attached: Attached, first: Sequence[VqaSample], ms: np.ndarray) -> float:
    """Run some requests; what a profile does not time, deciding for one, is learnt from them as they end.

    Args:
        attached: The model.
        first: What to ask.
        ms: Median of each plan that may be chosen.

    Returns:
        What a request took over what was predicted, at most.
    """
    worst, began = 0.0, time.perf_counter()
    for number in range(_FIRST):
        if number >= len(ms) and time.perf_counter() - began > _FIRST_S:
            break
        found = attached.generate(
            latency_budget_ms=float(ms[number % len(ms)]) * _ROOM, max_new_tokens=_NEW_TOKENS,
            **first[number % len(first)].inputs,
        )  # fmt: skip
        if found.predicted_ms:
            worst = max(worst, found.measured_ms / found.predicted_ms)
    return worst


def _fitting(ms: np.ndarray, ladder: Sequence[float]) -> int:
    """How many questions there is time for.

    Args:
        ms: Median of each plan that may be chosen.
        ladder: Budgets.
    """
    # A budget is used up where a plan takes as long.
    each_ms = ms.max() + ms.min() + sum(min(budget_ms, ms.max()) for budget_ms in ladder)
    least, most = _QUESTIONS
    return min(max(int(_ANSWERING_S * 1e3 / each_ms), least), most)


def _beside(folder: Path, name: str) -> Path | None:
    """A file of the folder, where it is there."""
    return folder / name if (folder / name).is_file() else None


def _asked(data: VqaDataset, split: Split, count: int) -> list[VqaSample]:
    """Questions of a split whose answer is one word."""
    found: list[VqaSample] = []
    for sample in data.samples(split, 8 * count + 64):
        if sample.kind != "list":
            found.append(sample)
        if len(found) == count:
            return found
    raise InputError(
        f"only {len(found)} of {8 * count + 64} questions have an answer of one word, and {count} were to be "
        "asked; its `test_shares` ask for lists"
    )


def _lengths(bare: Attached, samples: Sequence[VqaSample]) -> list[int]:
    """The fewest and the most text tokens of prompts, and one more where all have as many."""
    every = [each.inputs["input_ids"].shape[1] - bare.adapter.vision_tokens(each.inputs) for each in samples]
    return [min(every), max(max(every), min(every) + 1)]


def _answered(
    attached: Attached, tokenizer: Any, samples: Sequence[VqaSample], ladder: Sequence[float],
    fixed: dict[str, Plan], seed: int, progress: Progress,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row for each request."""
    ways: list[tuple[str, float | None]] = [
        *((name, None) for name in fixed),
        *(("budget", ms) for ms in ladder),
    ]
    random = np.random.default_rng(seed)
    for name in fixed:
        attached.generate(plan=fixed[name], max_new_tokens=_NEW_TOKENS, **samples[0].inputs)
    for number, sample in enumerate(samples):
        for at in random.permutation(len(ways)).tolist():
            way, budget_ms = ways[at]
            found = attached.generate(
                plan=fixed.get(way), latency_budget_ms=budget_ms, max_new_tokens=_NEW_TOKENS, **sample.inputs
            )
            text = tokenizer.decode(found.new_tokens[0], skip_special_tokens=True)
            yield {
                "question": number, "kind": sample.kind, "way": way, "budget_ms": budget_ms,
                "plan": found.plan.id, "measured_ms": found.measured_ms, "predicted_ms": found.predicted_ms,
                "right": text.strip() == sample.answer.strip(),
            }  # fmt: skip
        progress(
            f"answering: question {number + 1} of {len(samples)}", 0.4 + 0.56 * (number + 1) / len(samples)
        )


def _result(
    folder: Path,
    rows: Sequence[dict[str, Any]],
    ladder: Sequence[float],
    predictor: PlanLatencyPredictor,
    run: Run,
) -> AdaptiveDemoResult:
    fixed = {way: [row for row in rows if row["way"] == way] for way in (WHOLE, QUICKEST)}

    def share(rows: Sequence[dict[str, Any]], budget_ms: float | None = None, right: bool = True) -> float:
        hits = [
            (row["right"] or not right) and (budget_ms is None or row["measured_ms"] <= budget_ms)
            for row in rows
        ]
        return float(np.mean(hits))

    kept = []
    for budget_ms in ladder:
        mine = [row for row in rows if row["budget_ms"] == budget_ms]
        plans = Counter(row["plan"] for row in mine)
        kept.append(
            BudgetSummary(
                budget_ms=budget_ms, in_time=share(mine, budget_ms, right=False), right=share(mine),
                goodput=share(mine, budget_ms), p50_ms=float(np.median([row["measured_ms"] for row in mine])),
                plan=plans.most_common(1)[0][0], plans=len(plans), whole=share(fixed[WHOLE], budget_ms),
                quickest=share(fixed[QUICKEST], budget_ms),
            )
        )  # fmt: skip
    middle = {way: float(np.median([row["measured_ms"] for row in mine])) for way, mine in fixed.items()}
    return AdaptiveDemoResult(
        model=folder.name, questions=len(fixed[WHOLE]), budgets=tuple(kept),
        in_time=float(np.mean([each.in_time for each in kept])), whole_ms=middle[WHOLE],
        quickest_ms=middle[QUICKEST], whole_right=share(fixed[WHOLE]), quickest_right=share(fixed[QUICKEST]),
        held_out=predictor.held_out, run=run.path, report=run.path / "report.html",
    )  # fmt: skip
