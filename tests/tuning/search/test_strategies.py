"""Conformance of every search method, and the properties of each."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from sparseflow.tuning.measure.evaluator import Trial
from sparseflow.tuning.model.cost_model import BoostedTrees, CostModel
from sparseflow.tuning.model.features import ScheduleFeatures
from sparseflow.tuning.schedule.matrices import as_coo
from sparseflow.tuning.schedule.operators import OPERATORS
from sparseflow.tuning.schedule.parser import LevelMode
from sparseflow.tuning.schedule.presets import build_presets
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.schedule.space import ScheduleSpace
from sparseflow.tuning.search.annealing import SimulatedAnnealing
from sparseflow.tuning.search.base import Strategy
from sparseflow.tuning.search.evolutionary import EvolutionarySearch
from sparseflow.tuning.search.guided import GuidedSearch
from sparseflow.tuning.search.methods import GUIDED_PREFIX, METHODS, STRATEGIES
from sparseflow.tuning.search.qlearning import QLearningSearch, compute_state, find_first_change

EXTENTS = {"spmm": {"i": 1000, "k": 700, "j": 100}, "spmv": {"i": 1000, "j": 700}}
EXTENTS["sddmm"] = {"i": 1000, "j": 700, "k": 100}

NUM_TRIALS = 40
"""Trials in the conformance tests."""

every_method = pytest.mark.parametrize("name", METHODS)
learning_method = pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "random"])


def space_of(operator: str = "spmm") -> ScheduleSpace:
    return ScheduleSpace(OPERATORS[operator], EXTENTS[operator], threads=(1, 4))


class Table:
    """A model that scores schedules by the mean of observed schedules of the same kind."""

    def __init__(self) -> None:
        self.observed: dict[object, list[float]] = {}

    def score(self, schedules: Sequence[Schedule]) -> np.ndarray:
        worst = min((min(schedule) for schedule in self.observed.values()), default=0.0)
        return np.array(
            [statistics.mean(self.observed.get(self.kind(schedule), [worst])) for schedule in schedules]
        )

    def observe(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            if trial.error is None:
                self.observed.setdefault(self.kind(trial.schedule), []).append(-math.log(trial.ratio))

    def kind(self, schedule: Schedule) -> object:
        inner = schedule.lsplit[0].inner_size if schedule.lsplit else None
        return schedule.vectorize is None, schedule.parallel == schedule.lreorder[0], inner


class Known:
    """A model that knows the cost to a power; -1 reverses the ranking."""

    def __init__(self, power: float = 1.0) -> None:
        self.power = power
        self.trials: list[Trial] = []

    def score(self, schedules: Sequence[Schedule]) -> np.ndarray:
        return np.array([-self.power * math.log(made_up(schedule)) for schedule in schedules])

    def observe(self, trials: Sequence[Trial]) -> None:
        self.trials += trials


def started(name: str, seed: int = 0, space: ScheduleSpace | None = None) -> Strategy:
    strategy = STRATEGIES[name.removeprefix(GUIDED_PREFIX)](space or space_of(), np.random.default_rng(seed))
    if name.startswith(GUIDED_PREFIX):
        return GuidedSearch(strategy, Table(), num_proposals=8, num_generations=0)
    return strategy


def guided(model: CostModel, seed: int = 0, name: str = "random", **options: float) -> GuidedSearch:
    settings = {"num_proposals": 32, "num_generations": 0, "batch_size": 1, "exploration": 0.0} | options
    return GuidedSearch(started(name, seed), model, **settings)  # pyright: ignore[reportArgumentType]


def made_up(schedule: Schedule) -> float:
    """A cost with strong, weak and interacting decisions."""
    cost = 1.0
    cost *= 1.0 if schedule.parallel == schedule.lreorder[0] else 3.0
    cost *= 1.0 if schedule.vectorize is not None else 2.0
    inner = dict(schedule.sub_axes("j")).get("j1") or 1
    cost *= 1.0 + 0.3 * abs(math.log2(inner) - 5.0)
    cost *= 1.0 + 0.05 * abs(math.log2(schedule.chunk or 64) - 6.0)
    cost *= 1.0 + 0.2 * sum(level.mode is not LevelMode.COMPRESSED for level in schedule.formats[0].modes)
    cost *= 1.0 if schedule.unroll_factor == 4 else 1.1
    rows = dict(schedule.sub_axes("i")).get("i1") or 1
    return cost * (1.0 + 0.1 * abs(math.log2(rows) - 3.0))


def make_trial(schedule: Schedule, cost: float) -> Trial:
    return Trial(schedule=schedule, latency_ms=cost, ratio=cost)


def run(strategy: Strategy, count: int, cost: Callable[[Schedule], float] = made_up) -> list[Schedule]:
    proposals = []
    for _ in range(count):
        schedule = strategy.propose()
        strategy.observe(make_trial(schedule, cost(schedule)))
        proposals.append(schedule)
    return proposals


@every_method
@pytest.mark.parametrize("operator", OPERATORS)
def test_propose_valid_schedules(name: str, operator: str) -> None:
    space = space_of(operator)
    for schedule in run(started(name, space=space), NUM_TRIALS):
        assert schedule.find_violations(space.operator, space.shape) == []
        assert schedule.canonicalize(space.operator, space.shape) == schedule
        assert schedule.threads in space.threads


@every_method
def test_depends_on_seed_only(name: str) -> None:
    np.random.seed(3)  # the global generator must not matter
    first = run(started(name, 5), NUM_TRIALS)
    np.random.seed(4)
    assert run(started(name, 5), NUM_TRIALS) == first
    assert run(started(name, 6), NUM_TRIALS) != first


@every_method
def test_is_independent_of_timing(name: str) -> None:
    walks = [started(name), started(name)]
    for number in range(NUM_TRIALS):
        schedules = [strategy.propose() for strategy in walks]
        assert schedules[0] == schedules[1]
        for strategy, disturbed in zip(walks, (False, True), strict=True):
            strategy.observe(
                Trial(
                    schedule=schedules[0],
                    latency_ms=1.0 + number * disturbed,
                    ratio=made_up(schedules[0]),
                    disturbed=disturbed,
                    seconds={"build": float(number * disturbed)},
                )
            )


@every_method
def test_observe_failures_only(name: str) -> None:
    space, strategy = space_of(), started(name)
    proposals = []
    for _ in range(NUM_TRIALS):
        proposals.append(strategy.propose())
        strategy.observe(Trial(schedule=proposals[-1], error="it broke"))
    assert all(schedule.find_violations(space.operator, space.shape) == [] for schedule in proposals)
    assert len(set(proposals)) > NUM_TRIALS / 2, "the search continues"


@every_method
def test_observe_some_failures(name: str) -> None:
    space, strategy = space_of(), started(name)
    for number in range(NUM_TRIALS):
        schedule = strategy.propose()
        assert schedule.find_violations(space.operator, space.shape) == []
        failed = number % 3 == 0 or schedule.vectorize is None
        strategy.observe(
            Trial(schedule=schedule, error="it broke") if failed else make_trial(schedule, made_up(schedule))
        )


@every_method
def test_propose_without_observations(name: str) -> None:
    space, strategy = space_of(), started(name)
    proposals = [strategy.propose() for _ in range(NUM_TRIALS)]
    assert all(schedule.find_violations(space.operator, space.shape) == [] for schedule in proposals)
    assert len(set(proposals)) > NUM_TRIALS / 2


@every_method
@pytest.mark.parametrize("operator", OPERATORS)
def test_observe_foreign_trials(name: str, operator: str) -> None:
    # Sizes, threads and a level are outside of the space.
    space = ScheduleSpace(OPERATORS[operator], EXTENTS[operator], threads=(1, 4), max_split=2)
    strategy = started(name, space=space)
    known = list(build_presets(space.operator, space.shape, 7).values())
    for number in range(NUM_TRIALS):
        strategy.observe(make_trial(known[number % len(known)], 1.0 + number))
        assert strategy.propose().find_violations(space.operator, space.shape) == []


@every_method
def test_observe_repeated_trials(name: str) -> None:
    strategy = started(name)
    schedule = strategy.propose()
    for _ in range(200):
        strategy.observe(make_trial(schedule, 1.0))
    assert len({strategy.propose() for _ in range(NUM_TRIALS)}) > NUM_TRIALS / 3


@every_method
@pytest.mark.parametrize("cost", [1e-300, 1.0, 1e300])
def test_observe_equal_and_extreme_ratios(name: str, cost: float) -> None:
    assert len(set(run(started(name), NUM_TRIALS, lambda schedule: cost))) > NUM_TRIALS / 2


@every_method
def test_observe_distant_ratios(name: str) -> None:
    costs = iter([1e-200, 1e200] * NUM_TRIALS)
    run(started(name), NUM_TRIALS, lambda schedule: next(costs))


@every_method
def test_space_of_one_schedule(name: str) -> None:
    space = ScheduleSpace(OPERATORS["spmv"], {"i": 1, "j": 1}, threads=(1,), max_split=1)
    proposals = set(
        run(started(name, space=space), NUM_TRIALS, lambda schedule: 1.0 + len(str(schedule)) % 7)
    )
    assert 1 < len(proposals) <= space.count_schedules()


@learning_method
def test_learning_beats_random(name: str) -> None:
    def best(item: str, seed: int) -> float:
        return min(map(made_up, run(started(item, seed), 100)))

    seeds = range(6)
    assert statistics.mean(best(name, seed) for seed in seeds) < 0.9 * statistics.mean(
        best("random", seed) for seed in seeds
    )


@pytest.mark.parametrize("name", STRATEGIES)
def test_guided_with_oracle_beats_unguided(name: str) -> None:
    def best(strategy: Strategy) -> float:
        return min(map(made_up, run(strategy, 20)))

    seeds = range(4)
    plain = statistics.mean(best(started(name, seed)) for seed in seeds)
    known = statistics.mean(best(guided(Known(), seed, name, batch_size=4)) for seed in seeds)
    assert known < 0.9 * plain


@learning_method
def test_learns_from_earlier_trials(name: str) -> None:
    """A search that observes a good schedule finds better ones than a search that does not."""
    good = min(run(started("random", 99), 500), key=made_up)
    informed, plain = [], []
    for seed in range(8):
        strategy = started(name, seed)
        strategy.observe(make_trial(good, made_up(good)))
        informed.append(statistics.median(map(made_up, run(strategy, 20))))
        plain.append(statistics.median(map(made_up, run(started(name, seed), 20))))
    assert statistics.mean(informed) < statistics.mean(plain)


def test_evolutionary_keeps_best_parents() -> None:
    space = space_of()
    strategy = EvolutionarySearch(
        space, np.random.default_rng(0), num_parents=1, random_fraction=0.0, crossover_fraction=0.0
    )
    schedules = run(started("random", 1), 30)
    for schedule in schedules:
        strategy.observe(make_trial(schedule, made_up(schedule)))
    best = min(schedules, key=made_up)

    def equal(other_items: list[Schedule]) -> float:
        return statistics.mean(other.lreorder == best.lreorder for other in other_items)

    assert equal([strategy.propose() for _ in range(200)]) > 3 * equal(run(started("random", 2), 200))


def test_evolutionary_random_fraction_one_is_random() -> None:
    space = space_of()
    proposed = run(EvolutionarySearch(space, np.random.default_rng(0), random_fraction=1.0), 50)
    assert len(set(proposed)) > 40


def test_annealing_accepts_by_temperature() -> None:
    space = space_of()
    schedules = run(started("random", 1), 400)

    def steps_taken(t: float) -> int:
        strategy = SimulatedAnnealing(
            space, np.random.default_rng(0), temperature=t, cooling=1.0, patience=10**6
        )
        strategy.observe(make_trial(schedules[0], 1.0))
        selected = 0
        for schedule in schedules[1:]:
            before = strategy._current
            strategy.observe(make_trial(schedule, 1.5 * (before.ratio if before else 1.0)))
            selected += strategy._current is not before
            strategy._current = before
        return selected

    cold, mild, hot = (steps_taken(t) for t in (1e-6, 0.5, 100.0))
    assert cold == 0
    # 1.5^(-1/0.5) = 0.44, and 1.5^(-1/100) = 0.996
    assert 0.35 < mild / 399 < 0.55 and hot / 399 > 0.97


def test_annealing_returns_to_best() -> None:
    space = space_of()
    strategy = SimulatedAnnealing(space, np.random.default_rng(0), temperature=1e9, cooling=1.0, patience=5)
    first, *other_items = run(started("random", 1), 6)
    strategy.observe(make_trial(first, 1.0))
    for schedule in other_items:
        strategy.observe(make_trial(schedule, 2.0))
    assert strategy._current is not None and strategy._current.schedule == first


def test_qlearning_learns_action_values() -> None:
    """If only changes of splits are faster, the search learns to change splits."""
    space = space_of()

    def share(explore: float) -> float:
        changes: Counter[bool] = Counter()
        for seed in range(5):
            strategy = QLearningSearch(space, np.random.default_rng(seed), exploration=explore)
            strategy.observe(make_trial(space.sample(np.random.default_rng(seed)), 1.0))
            for index in range(60):
                schedule = strategy.propose()
                start = strategy._pending[schedule]
                split = find_first_change(start.schedule, schedule, space.operator.axes).startswith("split")
                strategy.observe(make_trial(schedule, start.ratio * (0.8 if split else 1.25)))
                changes[split] += index >= 30
        return changes[True] / changes.total()

    assert share(explore=0.0) > 1.5 * share(explore=1.0)


def test_qlearning_start_depends_on_temperature() -> None:
    space = space_of()
    schedules = run(started("random", 1), 10)

    def starts(t: float) -> Counter[Schedule]:
        strategy = QLearningSearch(space, np.random.default_rng(0), temperature=t, cooling=1.0)
        for index, schedule in enumerate(schedules):
            strategy.observe(make_trial(schedule, 2.0**index))
        return Counter(strategy._sample_start().schedule for _ in range(300))

    assert starts(1e-9) == {schedules[0]: 300}
    assert len(starts(100.0)) == 10
    mild = starts(0.5)  # 2^(-1/0.5): each a quarter as often as the previous one
    assert 0.15 < mild[schedules[1]] / mild[schedules[0]] < 0.4


def test_qlearning_learns_from_failures() -> None:
    space = space_of()
    strategy = QLearningSearch(space, np.random.default_rng(0))
    start = space.sample(np.random.default_rng(1))
    strategy.observe(make_trial(start, 1.0))
    proposals = strategy.propose()
    state, action = compute_state(start, strategy._axes), find_first_change(start, proposals, strategy._axes)
    before = strategy._get_value(state, action)
    strategy.observe(Trial(schedule=proposals, error="it broke"))
    assert strategy._get_value(state, action) < before


@pytest.mark.parametrize("operator", OPERATORS)
def test_first_change_is_mutated_decision(operator: str) -> None:
    space, rng = space_of(operator), np.random.default_rng(0)
    axes, observed = space.operator.axes, Counter()
    for _ in range(400):
        before = space.sample(rng)
        after = space.mutate(before, rng)
        observed[find_first_change(before, after, axes)] += 1
        assert find_first_change(before, before, axes) == ""
    decisions = {
        *(f"split {axis}" for axis in axes),
        "order",
        "modes",
        "parallel",
        "vectorize",
        "unroll",
        "chunk",
    }
    assert decisions <= set(observed) and "" not in observed


def test_guided_proposes_best_candidate() -> None:
    space = space_of()
    rng = np.random.default_rng(3)
    proposals = [space.sample(rng) for _ in range(32)]
    assert guided(Known(), seed=3).propose() == min(proposals, key=made_up)
    assert guided(Known(-1.0), seed=3).propose() == max(proposals, key=made_up)


def test_guided_generations_improve() -> None:
    def best(generations: int) -> float:
        return statistics.mean(
            min(map(made_up, run(guided(Known(), seed, num_generations=generations), 2))) for seed in range(4)
        )

    assert best(2) < 0.8 * best(0)


def test_guided_never_repeats() -> None:
    strategy = guided(Known(), batch_size=4, exploration=0.2, name="evolutionary")
    earlier = run(started("random", 1), 20)
    for schedule in earlier:
        strategy.observe(make_trial(schedule, made_up(schedule)))
    proposed = run(strategy, 60)
    assert len({*proposed, *earlier}) == len(set(earlier)) + 60


def test_guided_observes_model_and_strategy() -> None:
    model = Known()
    strategy = guided(model, name="evolutionary")
    proposed = run(strategy, 5)
    strategy.observe(Trial(schedule=proposed[0], error="it broke"))
    assert [trial.schedule for trial in model.trials] == [*proposed, proposed[0]]
    assert isinstance(strategy._strategy, EvolutionarySearch)
    assert {trial.schedule for trial in strategy._strategy._best} == set(proposed)


def test_guided_batch_is_diverse() -> None:
    strategy = guided(Known(), batch_size=8, num_proposals=256, name="evolutionary")
    good = min(run(started("random", 5), 300), key=made_up)
    strategy.observe(make_trial(good, made_up(good)))
    batch = [strategy.propose() for _ in range(8)]
    assert len({(item.fsplit, item.formats, item.lsplit, item.lreorder) for item in batch}) == 8


def test_guided_exploration_ignores_model() -> None:
    def median(explore: float) -> float:
        strategy = guided(Known(-1.0), exploration=explore)
        return statistics.median(made_up(strategy.propose()) for _ in range(100))

    blind = statistics.median(map(made_up, run(started("random", 1), 100)))
    assert median(1.0) < 1.3 * blind < median(0.0)


def test_guided_exhausts_small_space() -> None:
    space = ScheduleSpace(OPERATORS["spmv"], {"i": 1, "j": 1}, threads=(1,), max_split=1)
    strategy = GuidedSearch(started("random", space=space), Table(), num_proposals=16, num_generations=1)
    assert len({strategy.propose() for _ in range(4 * space.count_schedules())}) == space.count_schedules()


def test_guided_trees_need_fewer_trials() -> None:
    matrix = as_coo((np.random.default_rng(0).random((1000, 700)) < 0.01).astype(np.float32))
    problem = SparseProblem(operator=OPERATORS["spmm"], matrix=matrix, n_cols=100)

    def best(seed: int) -> float:
        model, parent = BoostedTrees(ScheduleFeatures(problem, 4)), started("evolutionary", seed)
        strategy = GuidedSearch(parent, model, num_proposals=48, num_generations=1, batch_size=8)
        return min(map(made_up, run(strategy, 48)))

    seeds = range(2)
    plain = statistics.mean(min(map(made_up, run(started("evolutionary", seed), 96))) for seed in range(4))
    assert statistics.mean(best(seed) for seed in seeds) < plain
