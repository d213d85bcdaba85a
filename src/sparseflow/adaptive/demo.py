"""Demo: a pretrained model answers questions within latency budgets on this machine.

The demo measures some plans, fits a latency predictor, and answers questions about unseen images under
several budgets. The full model and the fastest plan answer the same questions, in random order, for
comparison. The requests are saved as a run (`run.json`, `samples.parquet`) with a page (`report.html`).

A request of a large model takes seconds on a CPU, so the number of measurement rounds and, by default, of
questions is limited by time: some minutes in total for a large model.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparseflow.adaptive.api import Attached, attach
from sparseflow.adaptive.data import (
    DEFAULT_MODEL,
    IMPORTANCE_FILE,
    PLAN_QUALITY_FILE,
    list_pretrained,
    resolve_model_dir,
)
from sparseflow.adaptive.demo_page import (
    FASTEST_PLAN,
    FULL_MODEL,
    AdaptiveDemoResult,
    BudgetSummary,
    write_page,
)
from sparseflow.adaptive.grid_vqa.dataset import VqaDataset, VqaSample
from sparseflow.adaptive.grid_vqa.images import Split
from sparseflow.adaptive.grid_vqa.model import load_vqa_model
from sparseflow.adaptive.grid_vqa.task import locate_archives
from sparseflow.adaptive.plan.space import Plan, PlanSpace
from sparseflow.adaptive.predictor import PlanLatencyPredictor
from sparseflow.adaptive.profile import (
    EagerRunner,
    PlanProfile,
    ProfileRunner,
    collect_profile,
    select_representative_plans,
)
from sparseflow.adaptive.profile.importance import load_plan_space
from sparseflow.core.checks import check_at_least
from sparseflow.core.progress import Progress, subrange
from sparseflow.core.run import Run
from sparseflow.errors import InputError

_NUM_MEASURED_PLANS, _NUM_CANDIDATE_PLANS = 12, 8
_MAX_WARMUP_REQUESTS = 32
_MIN_ROUNDS, _MAX_ROUNDS = 3, 8
_MIN_QUESTIONS, _MAX_QUESTIONS = 10, 40
"""Limits of the number of questions if the caller does not set it."""
_PROFILE_TIME_S, _WARMUP_TIME_S, _ANSWER_TIME_S = 90.0, 20.0, 180.0
"""Time limits of the phases; the minimum of each phase runs even if it takes longer."""
_NEW_TOKENS = 2
"""Length of a one-word answer, with its stop token."""
_OUTLIER_RATIO = 4.0
"""Ratio of measured to predicted latency above which the warm-up is repeated."""
_WARMUP_MARGIN = 1.25
"""Ratio of the budgets of the warm-up to the predicted median latency of a plan."""
_MIN_BUDGET_RATIO, _MAX_BUDGET_RATIO = 1.5, 4.0
"""Ratios of the smallest budget to the median latency of the fastest plan, and of the largest budget to that
of the full model. Stalls of a busy machine change medians little.
"""
_BASELINE_REQUESTS = 7
"""Requests of each baseline whose median sets the budgets."""
_LEVEL = 0.9
"""Quantile that has to meet a budget: a profile of minutes says little about rarer latencies."""


def run_demo(
    model: Path | str = DEFAULT_MODEL,
    *,
    out_dir: Path = Path("runs"),
    num_questions: int | None = None,
    num_budgets: int = 5,
    archives: Sequence[Path] = (),
    device: torch.device | str = "cpu",
    seed: int = 0,
    progress: Progress = lambda message, fraction: None,
) -> AdaptiveDemoResult:
    """Profile a Grid-VQA model, answer questions within budgets, and write the run.

    Args:
        model: Name of a pretrained model (see `data.list_pretrained`), or the directory of a Grid-VQA model.
            `importance.json`, `plan_quality.json` and `images.tar.gz` of the directory are used if present.
        out_dir: Directory in which the run's directory is created.
        num_questions: Number of questions per budget; by default 40, or fewer if they would take minutes.
        num_budgets: Number of budgets.
        archives: Image archives, if they are neither in the directory nor where the training found them.
        device: Device of the model.
        seed: Seed of plan selection, measurement order and request order.
        progress: Progress callback.

    Raises:
        InputError: A number is out of range; the directory contains no Grid-VQA model, or one without
            one-word answers, or files of another model.
        FileFormatError: A file of the directory is damaged.
        MissingExtraError: A package of the `adaptive` extra is missing.
    """
    check_at_least(1, num_questions=1 if num_questions is None else num_questions)
    check_at_least(2, num_budgets=num_budgets)
    check_at_least(0, seed=seed)
    model_dir = resolve_model_dir(model)
    progress("loading the model", 0.0)
    network, tokenizer, task = load_vqa_model(model_dir, device=device)
    data = VqaDataset(locate_archives(task, archives, model_dir), device)
    samples = _select_samples(data, "test", num_questions or _MAX_QUESTIONS)
    warmup_samples = _select_samples(data, "val", 8)
    settings = {
        "model": str(model) if str(model) in list_pretrained() else model_dir.name,
        "num_questions": num_questions,
        "num_budgets": num_budgets,
        "device": str(device),
    }
    with Run.start(out_dir, "sparseflow adaptive demo", settings, seed=seed, device=device) as run:
        with attach(network) as attached:
            space = load_plan_space(
                network, attached.adapter.geometry, _find_file(model_dir, IMPORTANCE_FILE)
            )
            prompt_lengths = _select_prompt_lengths(attached, samples)
            runner = EagerRunner(attached.runtime, device=device, example=samples[0].inputs, seed=seed)
            profile = _measure_plans(
                runner,
                space,
                run.path / "profile" / "profile.parquet",
                prompt_lengths,
                seed,
                subrange(progress, 0.02, 0.4, "measuring plans: ") or progress,
            )
        predictor = PlanLatencyPredictor.fit(profile, level=_LEVEL, seed=seed)
        # The network is attached again, because a selector needs the predictor, and the predictor a profile.
        with attach(
            network, profile=predictor, plan_quality=_find_file(model_dir, PLAN_QUALITY_FILE)
        ) as attached:
            p50_ms = _select_candidates(attached, max(prompt_lengths), warmup_samples, progress)
            assert attached.selector is not None and attached.selector.plans is not None
            baselines = {
                FULL_MODEL: space.geometry.full_plan(),
                FASTEST_PLAN: attached.selector.plans[int(p50_ms.argmin())],
            }
            median_ms = _measure_baselines(attached, baselines, warmup_samples)
            budgets_ms = np.geomspace(
                _MIN_BUDGET_RATIO * median_ms[FASTEST_PLAN], _MAX_BUDGET_RATIO * median_ms[FULL_MODEL],
                num_budgets,
            ).tolist()  # fmt: skip
            if num_questions is None:
                samples = samples[: _count_questions(p50_ms, budgets_ms)]
            rows: list[dict[str, Any]] = []
            for row in _answer_questions(attached, tokenizer, samples, budgets_ms, baselines, seed, progress):
                rows.append(row)
                run.append(row)
        result = _summarize(model_dir, rows, budgets_ms, predictor, run)
        run.update_results(
            **{name: value for name, value in result.to_dict().items() if name not in ("run", "report")}
        )
        progress("writing the report", 0.97)
        write_page(result, rows, run)
    progress("done", 1.0)
    return result


def _select_candidates(
    attached: Attached, text_tokens: int, samples: Sequence[VqaSample], progress: Progress
) -> np.ndarray:
    """Restrict the selector to few plans, and warm them up.

    Args:
        attached: Model, with a selector.
        text_tokens: Number of text tokens of the requests.
        samples: Questions of the warm-up.
        progress: Progress callback.

    Returns:
        Predicted median latency of each candidate plan, [num_candidates].
    """
    assert attached.selector is not None
    request_size: dict[str, Any] = {"text_tokens": text_tokens, "new_tokens": _NEW_TOKENS}
    attached.selector = selector = attached.selector.select_front(_NUM_CANDIDATE_PLANS, **request_size)
    indices = [selector.all_plans.index(plan) for plan in selector.plans or ()]

    def predict() -> np.ndarray:
        p50_ms, _ = selector.predictor.predict_all(**request_size, images=1)
        return p50_ms[indices]

    progress("warming up", 0.4)
    if _warm_up(attached, samples, predict()) > _OUTLIER_RATIO:
        progress("warming up again: a request was much slower than predicted", 0.4)
        selector.predictor.forget(1.0)
        _warm_up(attached, samples, predict())
    return predict()


def _measure_plans(
    runner: ProfileRunner,
    space: PlanSpace,
    path: Path,
    text_tokens: Sequence[int],
    seed: int,
    progress: Progress,
) -> PlanProfile:
    """Measure some plans, in as many rounds as the time limit allows."""
    collect = partial(
        collect_profile, runner, space, path, text_tokens=text_tokens,
        plans=select_representative_plans(space, _NUM_MEASURED_PLANS, seed=seed), decode_steps=_NEW_TOKENS,
        seed=seed,
    )  # fmt: skip
    start_s = time.perf_counter()
    collect(
        rounds=1,
        progress=lambda message, fraction: progress(
            message.replace("round 1/1", "first round"), fraction / _MAX_ROUNDS
        ),
    )
    elapsed_s = time.perf_counter() - start_s
    # The first round ran each cell twice, once of them to warm up.
    num_more_rounds = int((_PROFILE_TIME_S - elapsed_s) / (elapsed_s / 2))
    num_rounds = min(max(1 + num_more_rounds, _MIN_ROUNDS), _MAX_ROUNDS)
    return collect(rounds=num_rounds, warmup_runs=0, progress=progress)


def _warm_up(attached: Attached, samples: Sequence[VqaSample], p50_ms: np.ndarray) -> float:
    """Run requests so that the predictor learns the time that profiles exclude, such as plan selection.

    Args:
        attached: Model.
        samples: Questions.
        p50_ms: Predicted median latency of each candidate plan, [num_candidates].

    Returns:
        Maximum ratio of measured to predicted latency.
    """
    max_ratio, start_s = 0.0, time.perf_counter()
    for index in range(_MAX_WARMUP_REQUESTS):
        if index >= len(p50_ms) and time.perf_counter() - start_s > _WARMUP_TIME_S:
            break
        result = attached.generate(
            latency_budget_ms=float(p50_ms[index % len(p50_ms)]) * _WARMUP_MARGIN,
            max_new_tokens=_NEW_TOKENS,
            **samples[index % len(samples)].inputs,
        )
        if result.predicted_ms:
            max_ratio = max(max_ratio, result.measured_ms / result.predicted_ms)
    return max_ratio


def _measure_baselines(
    attached: Attached, baselines: dict[str, Plan], samples: Sequence[VqaSample]
) -> dict[str, float]:
    """Return the median latency of each baseline, in alternating order, just before the questions."""
    measured_ms: dict[str, list[float]] = {name: [] for name in baselines}
    for index in range(_BASELINE_REQUESTS):
        for name, plan in baselines.items():
            inputs = samples[index % len(samples)].inputs
            result = attached.generate(plan=plan, max_new_tokens=_NEW_TOKENS, **inputs)
            measured_ms[name].append(result.measured_ms)
    return {name: float(np.median(values)) for name, values in measured_ms.items()}


def _count_questions(p50_ms: np.ndarray, budgets_ms: Sequence[float]) -> int:
    """Return the number of questions that the time limit allows.

    Args:
        p50_ms: Predicted median latency of each candidate plan, [num_candidates].
        budgets_ms: Budgets.
    """
    # Both baselines, and one request per budget that takes at most its budget.
    question_ms = p50_ms.max() + p50_ms.min() + sum(min(budget_ms, p50_ms.max()) for budget_ms in budgets_ms)
    return min(max(int(_ANSWER_TIME_S * 1e3 / question_ms), _MIN_QUESTIONS), _MAX_QUESTIONS)


def _find_file(directory: Path, name: str) -> Path | None:
    path = directory / name
    return path if path.is_file() else None


def _select_samples(data: VqaDataset, split: Split, count: int) -> list[VqaSample]:
    """Return questions of a split with one-word answers."""
    num_searched = 8 * count + 64
    samples: list[VqaSample] = []
    for sample in data.iterate_samples(split, num_searched):
        if sample.kind != "list":
            samples.append(sample)
        if len(samples) == count:
            return samples
    raise InputError(
        f"expected {count} questions with a one-word answer, but only {len(samples)} of {num_searched} have "
        "one; reduce the share of lists in `test_shares` of the model"
    )


def _select_prompt_lengths(attached: Attached, samples: Sequence[VqaSample]) -> list[int]:
    """Return the minimum and the maximum number of text tokens; they differ by at least 1."""
    lengths = [
        sample.inputs["input_ids"].shape[1] - attached.adapter.count_vision_tokens(sample.inputs)
        for sample in samples
    ]
    return [min(lengths), max(max(lengths), min(lengths) + 1)]


def _answer_questions(
    attached: Attached,
    tokenizer: Any,
    samples: Sequence[VqaSample],
    budgets_ms: Sequence[float],
    baselines: dict[str, Plan],
    seed: int,
    progress: Progress,
) -> Iterator[dict[str, Any]]:
    """Answer each question with each baseline and budget, in random order; yield a row per request."""
    methods: list[tuple[str, float | None]] = [
        *((name, None) for name in baselines),
        *(("budget", budget_ms) for budget_ms in budgets_ms),
    ]
    rng = np.random.default_rng(seed)
    for question, sample in enumerate(samples):
        for index in rng.permutation(len(methods)).tolist():
            method, budget_ms = methods[index]
            result = attached.generate(
                plan=baselines.get(method),
                latency_budget_ms=budget_ms,
                max_new_tokens=_NEW_TOKENS,
                **sample.inputs,
            )
            text = tokenizer.decode(result.new_tokens[0], skip_special_tokens=True)
            yield {
                "question": question,
                "kind": sample.kind,
                "method": method,
                "budget_ms": budget_ms,
                "plan": result.plan.id,
                "measured_ms": result.measured_ms,
                "predicted_ms": result.predicted_ms,
                "correct": text.strip() == sample.answer.strip(),
            }
        num_answered = question + 1
        progress(
            f"answering: question {num_answered} of {len(samples)}", 0.4 + 0.56 * num_answered / len(samples)
        )


def _summarize(
    model_dir: Path,
    rows: Sequence[dict[str, Any]],
    budgets_ms: Sequence[float],
    predictor: PlanLatencyPredictor,
    run: Run,
) -> AdaptiveDemoResult:
    full_rows, fastest_rows = (
        [row for row in rows if row["method"] == method] for method in (FULL_MODEL, FASTEST_PLAN)
    )
    budgets = []
    for budget_ms in budgets_ms:
        budget_rows = [row for row in rows if row["budget_ms"] == budget_ms]
        plan_counts = Counter(row["plan"] for row in budget_rows)
        budgets.append(
            BudgetSummary(
                budget_ms=budget_ms,
                in_time=float(np.mean([row["measured_ms"] <= budget_ms for row in budget_rows])),
                accuracy=_compute_accuracy(budget_rows),
                goodput=_compute_goodput(budget_rows, budget_ms),
                p50_ms=_median_ms(budget_rows),
                plan=plan_counts.most_common(1)[0][0],
                num_plans=len(plan_counts),
                full_model_goodput=_compute_goodput(full_rows, budget_ms),
                fastest_plan_goodput=_compute_goodput(fastest_rows, budget_ms),
            )
        )
    return AdaptiveDemoResult(
        model=model_dir.name,
        num_questions=len(full_rows),
        budgets=tuple(budgets),
        in_time=float(np.mean([budget.in_time for budget in budgets])),
        full_model_ms=_median_ms(full_rows),
        fastest_plan_ms=_median_ms(fastest_rows),
        full_model_accuracy=_compute_accuracy(full_rows),
        fastest_plan_accuracy=_compute_accuracy(fastest_rows),
        held_out_error=predictor.held_out_error,
        run=run.path,
        report=run.path / "report.html",
    )


def _compute_accuracy(rows: Sequence[dict[str, Any]]) -> float:
    return float(np.mean([row["correct"] for row in rows]))


def _compute_goodput(rows: Sequence[dict[str, Any]], budget_ms: float) -> float:
    return float(np.mean([row["correct"] and row["measured_ms"] <= budget_ms for row in rows]))


def _median_ms(rows: Sequence[dict[str, Any]]) -> float:
    return float(np.median([row["measured_ms"] for row in rows]))
