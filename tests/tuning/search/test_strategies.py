"""What every way to search must do, that those that learn beat the one that does not, and what each adds."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from sparseflow.errors import InputError
from sparseflow.tuning.measure.evaluator import Trial
from sparseflow.tuning.model.cost_model import BoostedTrees, CostModel
from sparseflow.tuning.model.features import Features
from sparseflow.tuning.schedule.matrices import as_coo
from sparseflow.tuning.schedule.operators import OPERATORS
from sparseflow.tuning.schedule.presets import presets
from sparseflow.tuning.schedule.problem import Problem
from sparseflow.tuning.schedule.schedule import Mode, Schedule
from sparseflow.tuning.schedule.space import Space
from sparseflow.tuning.search.annealing import Annealing
from sparseflow.tuning.search.base import Strategy
from sparseflow.tuning.search.evolutionary import Evolutionary
from sparseflow.tuning.search.guided import Guided, GuidedEvolutionary, GuidedRandom
from sparseflow.tuning.search.qlearning import QLearning, changed, coarse
from sparseflow.tuning.search.registry import STRATEGIES, strategy

EXTENTS = {"spmm": {"i": 1000, "k": 700, "j": 100}, "spmv": {"i": 1000, "j": 700}}
EXTENTS["sddmm"] = {"i": 1000, "j": 700, "k": 100}

every = pytest.mark.parametrize("name", STRATEGIES)
screened = [name for name, one in STRATEGIES.items() if issubclass(one, Guided)]
learning = pytest.mark.parametrize("name", sorted({*STRATEGIES} - {*screened, "random"}))


def space_of(operator: str = "spmm") -> Space:
    return Space(OPERATORS[operator], EXTENTS[operator], threads=(1, 4))


class Table:
    """A model for tests: schedules of a kind are thought to be as fast as those of it that were seen."""

    def __init__(self) -> None:
        self.seen: dict[object, list[float]] = {}

    def scores(self, schedules: Sequence[Schedule]) -> np.ndarray:
        worst = min((min(each) for each in self.seen.values()), default=0.0)
        return np.array([statistics.mean(self.seen.get(self.kind(each), [worst])) for each in schedules])

    def observe(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            if trial.error is None:
                self.seen.setdefault(self.kind(trial.schedule), []).append(-math.log(trial.ratio))

    def kind(self, schedule: Schedule) -> object:
        inner = schedule.lsplit[0].inner if schedule.lsplit else None
        return schedule.vectorize is None, schedule.parallel == schedule.lreorder[0], inner


class Known:
    """A model that knows the cost, times a power: -1 gets everything wrong."""

    def __init__(self, power: float = 1.0) -> None:
        self.power = power
        self.told: list[Trial] = []

    def scores(self, schedules: Sequence[Schedule]) -> np.ndarray:
        return np.array([-self.power * math.log(made_up(each)) for each in schedules])

    def observe(self, trials: Sequence[Trial]) -> None:
        self.told += trials


def begun(name: str, seed: int = 0, space: Space | None = None) -> Strategy:
    one, rng = STRATEGIES[name], np.random.default_rng(seed)
    if issubclass(one, Guided):
        return one(space or space_of(), rng, Table(), proposals=8, generations=0)
    return one(space or space_of(), rng)


def guided(model: CostModel, seed: int = 0, one: type[Guided] = GuidedRandom, **options: float) -> Guided:
    settings = {"proposals": 32, "generations": 0, "batch": 1, "explore": 0.0} | options
    return one(space_of(), np.random.default_rng(seed), model, **settings)  # pyright: ignore[reportArgumentType]


def made_up(schedule: Schedule) -> float:
    """A cost with what real ones have: decisions that matter much, others little, and some together."""
    cost = 1.0
    cost *= 1.0 if schedule.parallel == schedule.lreorder[0] else 3.0
    cost *= 1.0 if schedule.vectorize is not None else 2.0
    inner = dict(schedule.sub_axes("j")).get("j1") or 1
    cost *= 1.0 + 0.3 * abs(math.log2(inner) - 5.0)
    cost *= 1.0 + 0.05 * abs(math.log2(schedule.chunk) - 6.0)
    cost *= 1.0 + 0.2 * sum(level.mode is not Mode.COMPRESSED for level in schedule.formats[0].modes)
    cost *= 1.0 if schedule.unroll_factor == 4 else 1.1
    rows = dict(schedule.sub_axes("i")).get("i1") or 1
    return cost * (1.0 + 0.1 * abs(math.log2(rows) - 3.0))


def told(schedule: Schedule, cost: float) -> Trial:
    return Trial(schedule=schedule, latency_ms=cost, ratio=cost)


def run(walk: Strategy, asks: int, cost: Callable[[Schedule], float] = made_up) -> list[Schedule]:
    asked = []
    for _ in range(asks):
        schedule = walk.ask()
        walk.tell(told(schedule, cost(schedule)))
        asked.append(schedule)
    return asked


def test_names() -> None:
    plain = {"random", "evolutionary", "annealing", "qlearning"}
    assert set(STRATEGIES) == plain | {f"guided-{name}" for name in plain}
    assert {name for name, one in STRATEGIES.items() if issubclass(one, Guided)} == set(STRATEGIES) - plain
    assert all(one.name == name for name, one in STRATEGIES.items())
    assert all(strategy(name) is one for name, one in STRATEGIES.items())


@pytest.mark.parametrize("name", ["", "Random", "bayes"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(InputError, match=f"method '{name}' is not known; choose one of: random, "):
        strategy(name)


@every
@pytest.mark.parametrize("operator", OPERATORS)
def test_asks_what_can_run(name: str, operator: str) -> None:
    space = space_of(operator)
    for schedule in run(begun(name, space=space), 100):
        assert schedule.problems(space.operator, space.shape) == []
        assert schedule.canonical(space.operator, space.shape) == schedule
        assert schedule.threads in space.threads


@every
def test_depends_on_the_seed_only(name: str) -> None:
    np.random.seed(3)  # what is global must not matter
    first = run(begun(name, 5), 100)
    np.random.seed(4)
    assert run(begun(name, 5), 100) == first
    assert run(begun(name, 6), 100) != first


@every
def test_time_taken_does_not_matter(name: str) -> None:
    walks = [begun(name), begun(name)]
    for number in range(60):
        schedules = [walk.ask() for walk in walks]
        assert schedules[0] == schedules[1]
        for walk, disturbed in zip(walks, (False, True), strict=True):
            walk.tell(
                Trial(
                    schedule=schedules[0],
                    latency_ms=1.0 + number * disturbed,
                    ratio=made_up(schedules[0]),
                    disturbed=disturbed,
                    seconds={"build": float(number * disturbed)},
                )
            )


@every
def test_failures_only(name: str) -> None:
    space, walk = space_of(), begun(name)
    asked = []
    for _ in range(100):
        asked.append(walk.ask())
        walk.tell(Trial(schedule=asked[-1], error="it broke"))
    assert all(schedule.problems(space.operator, space.shape) == [] for schedule in asked)
    assert len(set(asked)) > 50, "it goes on looking"


@every
def test_failures_among_successes(name: str) -> None:
    space, walk = space_of(), begun(name)
    for number in range(100):
        schedule = walk.ask()
        assert schedule.problems(space.operator, space.shape) == []
        failed = number % 3 == 0 or schedule.vectorize is None
        walk.tell(Trial(schedule=schedule, error="it broke") if failed else told(schedule, made_up(schedule)))


@every
def test_never_told(name: str) -> None:
    space, walk = space_of(), begun(name)
    asked = [walk.ask() for _ in range(100)]
    assert all(schedule.problems(space.operator, space.shape) == [] for schedule in asked)
    assert len(set(asked)) > 50


@every
@pytest.mark.parametrize("operator", OPERATORS)
def test_told_what_it_never_asked(name: str, operator: str) -> None:
    # By hand, and with sizes, threads and a level that the space does not hold.
    space = Space(OPERATORS[operator], EXTENTS[operator], threads=(1, 4), max_split=2)
    walk = begun(name, space=space)
    known = list(presets(space.operator, space.shape, 7).values())
    for number in range(100):
        walk.tell(told(known[number % len(known)], 1.0 + number))
        assert walk.ask().problems(space.operator, space.shape) == []


@every
def test_told_the_same_again_and_again(name: str) -> None:
    walk = begun(name)
    schedule = walk.ask()
    for _ in range(200):
        walk.tell(told(schedule, 1.0))
    assert len({walk.ask() for _ in range(60)}) > 20


@every
@pytest.mark.parametrize("cost", [1e-300, 1.0, 1e300])
def test_equal_and_extreme_costs(name: str, cost: float) -> None:
    assert len(set(run(begun(name), 100, lambda schedule: cost))) > 50


@every
def test_costs_far_apart(name: str) -> None:
    costs = iter([1e-200, 1e200] * 50)
    run(begun(name), 100, lambda schedule: next(costs))


@every
def test_a_space_of_one(name: str) -> None:
    space = Space(OPERATORS["spmv"], {"i": 1, "j": 1}, threads=(1,), max_split=1)
    asked = set(run(begun(name, space=space), 100, lambda schedule: 1.0 + len(str(schedule)) % 7))
    assert 1 < len(asked) <= space.size()


@learning
def test_better_than_random(name: str) -> None:
    def best(one: str, seed: int) -> float:
        return min(map(made_up, run(begun(one, seed), 100)))

    seeds = range(8)
    assert statistics.mean(best(name, seed) for seed in seeds) < 0.9 * statistics.mean(
        best("random", seed) for seed in seeds
    )


@pytest.mark.parametrize("name", screened)
def test_better_with_a_model_that_knows(name: str) -> None:
    def best(walk: Strategy) -> float:
        return min(map(made_up, run(walk, 20)))

    def known(seed: int) -> Strategy:
        one = STRATEGIES[name]
        assert issubclass(one, Guided)
        return guided(Known(), seed, one, batch=4)

    seeds = range(4)
    plain = statistics.mean(best(begun(name.removeprefix("guided-"), seed)) for seed in seeds)
    assert statistics.mean(best(known(seed)) for seed in seeds) < 0.9 * plain


@learning
def test_learns_from_what_is_told_before(name: str) -> None:
    """A search that is told of a good schedule asks for better ones than one that is not."""
    good = min(run(begun("random", 99), 500), key=made_up)
    informed, plain = [], []
    for seed in range(8):
        walk = begun(name, seed)
        walk.tell(told(good, made_up(good)))
        informed.append(statistics.median(map(made_up, run(walk, 20))))
        plain.append(statistics.median(map(made_up, run(begun(name, seed), 20))))
    assert statistics.mean(informed) < statistics.mean(plain)


def test_evolution_forgets_all_but_the_best() -> None:
    space = space_of()
    walk = Evolutionary(space, np.random.default_rng(0), parents=1, fresh=0.0, crossed=0.0)
    schedules = run(begun("random", 1), 30)
    for schedule in schedules:
        walk.tell(told(schedule, made_up(schedule)))
    best = min(schedules, key=made_up)

    def alike(others: list[Schedule]) -> float:
        return statistics.mean(other.lreorder == best.lreorder for other in others)

    assert alike([walk.ask() for _ in range(200)]) > 3 * alike(run(begun("random", 2), 200))


def test_evolution_of_fresh_draws_is_random() -> None:
    space = space_of()
    asked = run(Evolutionary(space, np.random.default_rng(0), fresh=1.0), 50)
    assert len(set(asked)) > 40


def test_annealing_takes_worse_steps_while_warm_and_none_when_cold() -> None:
    space = space_of()
    schedules = run(begun("random", 1), 400)

    def steps_taken(warmth: float) -> int:
        walk = Annealing(space, np.random.default_rng(0), warmth=warmth, cooling=1.0, patience=10**6)
        walk.tell(told(schedules[0], 1.0))
        taken = 0
        for schedule in schedules[1:]:
            before = walk._here
            walk.tell(told(schedule, 1.5 * (before.ratio if before else 1.0)))
            taken += walk._here is not before
            walk._here = before
        return taken

    cold, mild, hot = (steps_taken(warmth) for warmth in (1e-6, 0.5, 100.0))
    assert cold == 0
    # 1.5^(-1/0.5) = 0.44, and 1.5^(-1/100) = 0.996
    assert 0.35 < mild / 399 < 0.55 and hot / 399 > 0.97


def test_annealing_goes_back_to_the_best() -> None:
    space = space_of()
    walk = Annealing(space, np.random.default_rng(0), warmth=1e9, cooling=1.0, patience=5)
    first, *others = run(begun("random", 1), 6)
    walk.tell(told(first, 1.0))
    for schedule in others:
        walk.tell(told(schedule, 2.0))
    assert walk._here is not None and walk._here.schedule == first


def test_q_learning_finds_out_what_pays_off() -> None:
    """Where other splits are always faster, and every other change is slower, it splits more and more."""
    space = space_of()

    def share(explore: float) -> float:
        changes: Counter[bool] = Counter()
        for seed in range(5):
            walk = QLearning(space, np.random.default_rng(seed), explore=explore)
            walk.tell(told(space.sample(np.random.default_rng(seed)), 1.0))
            for at in range(60):
                schedule = walk.ask()
                start = walk._asked[schedule]
                split = changed(start.schedule, schedule, space.operator.axes).startswith("split")
                walk.tell(told(schedule, start.ratio * (0.8 if split else 1.25)))
                changes[split] += at >= 30
        return changes[True] / changes.total()

    assert share(explore=0.0) > 1.5 * share(explore=1.0)


def test_q_learning_goes_on_from_better_ones_the_cooler_it_is() -> None:
    space = space_of()
    schedules = run(begun("random", 1), 10)

    def starts(warmth: float) -> Counter[Schedule]:
        walk = QLearning(space, np.random.default_rng(0), warmth=warmth, cooling=1.0)
        for place, schedule in enumerate(schedules):
            walk.tell(told(schedule, 2.0**place))
        return Counter(walk._start().schedule for _ in range(300))

    assert starts(1e-9) == {schedules[0]: 300}
    assert len(starts(100.0)) == 10
    mild = starts(0.5)  # 2^(-1/0.5): each a quarter as often as the one before
    assert 0.15 < mild[schedules[1]] / mild[schedules[0]] < 0.4


def test_q_learning_learns_from_failures() -> None:
    walk = QLearning(space_of(), np.random.default_rng(0))
    start = space_of().default()
    walk.tell(told(start, 1.0))
    asked = walk.ask()
    state, action = coarse(start, walk._axes), changed(start, asked, walk._axes)
    before = walk._value(state, action)
    walk.tell(Trial(schedule=asked, error="it broke"))
    assert walk._value(state, action) < before


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_changed_is_what_was_decided_anew(operator: str) -> None:
    space, rng = space_of(operator), np.random.default_rng(0)
    axes, seen = space.operator.axes, Counter()
    for _ in range(400):
        before = space.sample(rng)
        after = space.mutate(before, rng)
        seen[changed(before, after, axes)] += 1
        assert changed(before, before, axes) == ""
    decisions = {
        *(f"split {axis}" for axis in axes),
        "order",
        "modes",
        "parallel",
        "vectorize",
        "unroll",
        "chunk",
    }
    assert decisions <= set(seen) and "" not in seen


def test_guided_passes_on_the_best_proposal() -> None:
    space = space_of()
    rng = np.random.default_rng(3)
    proposals = [space.sample(rng) for _ in range(32)]
    assert guided(Known(), seed=3).ask() == min(proposals, key=made_up)
    assert guided(Known(-1.0), seed=3).ask() == max(proposals, key=made_up)


def test_guided_breeds_what_it_ranks() -> None:
    def best(generations: int) -> float:
        return statistics.mean(
            min(map(made_up, run(guided(Known(), seed, generations=generations), 2))) for seed in range(4)
        )

    assert best(2) < 0.8 * best(0)


def test_guided_proposes_nothing_twice() -> None:
    walk = guided(Known(), batch=4, explore=0.2, one=GuidedEvolutionary)
    told_before = run(begun("random", 1), 20)
    for schedule in told_before:
        walk.tell(told(schedule, made_up(schedule)))
    asked = run(walk, 60)
    assert len({*asked, *told_before}) == len(set(told_before)) + 60


def test_guided_tells_both() -> None:
    model = Known()
    walk = guided(model, one=GuidedEvolutionary)
    asked = run(walk, 5)
    walk.tell(Trial(schedule=asked[0], error="it broke"))
    assert [trial.schedule for trial in model.told] == [*asked, asked[0]]
    assert isinstance(walk._inner, Evolutionary)
    assert {trial.schedule for trial in walk._inner._best} == set(asked)


def test_a_batch_differs_in_storage_or_loops() -> None:
    walk = guided(Known(), batch=8, proposals=256, one=GuidedEvolutionary)
    good = min(run(begun("random", 5), 300), key=made_up)
    walk.tell(told(good, made_up(good)))
    batch = [walk.ask() for _ in range(8)]
    assert len({(each.fsplit, each.formats, each.lsplit, each.lreorder) for each in batch}) == 8


def test_exploring_does_not_trust_the_model() -> None:
    def median(explore: float) -> float:
        walk = guided(Known(-1.0), explore=explore)
        return statistics.median(made_up(walk.ask()) for _ in range(100))

    blind = statistics.median(map(made_up, run(begun("random", 1), 100)))
    assert median(1.0) < 1.3 * blind < median(0.0)


def test_a_small_space_is_searched_to_its_end() -> None:
    space = Space(OPERATORS["spmv"], {"i": 1, "j": 1}, threads=(1,), max_split=1)
    walk = GuidedRandom(space, np.random.default_rng(0), Table(), proposals=16, generations=1)
    assert len({walk.ask() for _ in range(4 * space.size())}) == space.size()


def test_trees_find_more_with_fewer_measurements() -> None:
    matrix = as_coo((np.random.default_rng(0).random((1000, 700)) < 0.01).astype(np.float32))
    problem = Problem(operator=OPERATORS["spmm"], matrix=matrix, n_cols=100)
    space = space_of()

    def best(seed: int) -> float:
        model, rng = BoostedTrees(Features(problem, 4)), np.random.default_rng(seed)
        walk = GuidedEvolutionary(space, rng, model, proposals=48, generations=1, batch=8)
        return min(map(made_up, run(walk, 48)))

    seeds = range(2)
    plain = statistics.mean(min(map(made_up, run(begun("evolutionary", seed), 96))) for seed in range(8))
    assert statistics.mean(best(seed) for seed in seeds) < plain
