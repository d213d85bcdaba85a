"""AutoSparse Net: dependence of its scores on tokens, context and batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from sparseflow.errors import InputError
from sparseflow.tuning.model.net.coarsen import coarsen
from sparseflow.tuning.model.net.network import AutoSparseNet, NetConfig, TokenBatch
from sparseflow.tuning.model.net.statistics import NUM_FEATURES
from sparseflow.tuning.model.net.tokenizer import ScheduleTokenizer
from sparseflow.tuning.schedule.operators import OPERATORS
from sparseflow.tuning.schedule.space import ScheduleSpace
from tests.tuning.synthetic_labels import NO_PATTERN, SMALL, pattern_of

CONFIGS = [
    item_value.model_copy(
        update={"context_mode": joined, "layers": 2 if joined in ("concat", "cross") else 1}
    )
    for item_value in (SMALL, NO_PATTERN)
    for joined in ("input", "concat", "cross", "mlp")
]
IDS = [f"{joined}{bare}" for bare in ("", "-bare") for joined in ("input", "concat", "cross", "mlp")]


def network(config: NetConfig) -> AutoSparseNet:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoSparseNet(config).double().eval()


def encoded(count: int = 9) -> tuple[np.ndarray, ScheduleTokenizer]:
    op, encoder = OPERATORS["spmm"], ScheduleTokenizer()
    extents = {"i": 60, "k": 40, "j": 32}
    space, random = ScheduleSpace(op, extents, threads=[1, 2]), np.random.default_rng(0)
    return encoder.encode([space.sample(random) for _ in range(count)], op, extents), encoder


def tokens_of(ids: np.ndarray, encoder: ScheduleTokenizer, task: np.ndarray | None = None) -> TokenBatch:
    result = TokenBatch.from_ids(ids, encoder.table, task=task)
    return replace(result, numbers=result.numbers.double())


def contexts(net: AutoSparseNet, tasks: int = 2) -> torch.Tensor:
    random = np.random.default_rng(1)
    statistics = torch.from_numpy(random.random((tasks, NUM_FEATURES)))
    if net.config.pattern is None:
        return net.build_context(statistics)
    patterns = [pattern_of(index) for index in range(tasks)]
    cells = [coarsen(pattern.rows, pattern.cols, pattern.shape, max_cells=64) for pattern in patterns]
    return net.build_context(statistics, net.embed_patterns(cells), torch.arange(tasks))


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_score_is_independent_of_padding_and_batch(config: NetConfig) -> None:
    net, (ids, encoder) = network(config), encoded()
    context = contexts(net, 1)
    scores = net(tokens_of(ids, encoder), context)
    wide = np.pad(ids, ((0, 0), (0, 5)))
    torch.testing.assert_close(net(tokens_of(wide, encoder), context), scores)
    for index in range(len(ids)):
        single = ids[index : index + 1, : (ids[index] > 0).sum()]
        torch.testing.assert_close(net(tokens_of(single, encoder), context), scores[index : index + 1])
    assert scores.unique().numel() == len(ids)


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_score_is_independent_of_token_order(config: NetConfig) -> None:
    net, (ids, encoder) = network(config), encoded()
    context = contexts(net, 1)
    mixed = np.random.default_rng(0).permuted(ids, axis=1)
    torch.testing.assert_close(net(tokens_of(mixed, encoder), context), net(tokens_of(ids, encoder), context))


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_score_mixed_tasks_match_single_tasks(config: NetConfig) -> None:
    net, (ids, encoder) = network(config), encoded()
    context = contexts(net)
    task = np.arange(len(ids)) % 2
    scores = net(tokens_of(ids, encoder, task), context)
    for index in (0, 1):
        single = net(tokens_of(ids[task == index], encoder), context[index : index + 1])
        torch.testing.assert_close(single, scores[torch.from_numpy(task == index)])
    swapped = net(tokens_of(ids, encoder, 1 - task), context)
    assert not torch.isclose(swapped, scores).any()


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_every_parameter_has_gradient(config: NetConfig) -> None:
    net, (ids, encoder) = network(config), encoded()
    context = contexts(net)
    if config.pattern is not None:
        unknown = net.build_context(torch.zeros(1, NUM_FEATURES, dtype=torch.float64))
        context = torch.cat([context, unknown])
    scores = net(tokens_of(ids, encoder, np.arange(len(ids)) % len(context)), context)
    (scores * torch.arange(len(ids))).sum().backward()
    still = [name for name, item in net.named_parameters() if item.grad is None or not item.grad.any()]
    assert not still


def test_unknown_pattern_has_embedding() -> None:
    net = network(SMALL).float()
    pattern = pattern_of(0)
    cells = coarsen(pattern.rows, pattern.cols, pattern.shape, max_cells=64)
    statistics = np.random.default_rng(0).random(NUM_FEATURES).astype(np.float32)
    known, unknown = net.embed_task(cells, statistics), net.embed_task(None, statistics)
    assert known.shape == unknown.shape == (1, 2, 16)
    torch.testing.assert_close(unknown[0, 1], net.unknown.detach())
    assert not torch.equal(known[0, 1], unknown[0, 1]) and torch.equal(known[0, 0], unknown[0, 0])
    torch.testing.assert_close(
        net.build_context(torch.from_numpy(statistics)[None], net.embed_patterns([]), torch.tensor([-1])),
        unknown,
    )


def test_network_without_patterns_ignores_them() -> None:
    net = network(NO_PATTERN).float()
    pattern = pattern_of(0)
    cells = coarsen(pattern.rows, pattern.cols, pattern.shape, max_cells=64)
    statistics = np.ones(NUM_FEATURES, np.float32)
    assert torch.equal(net.embed_task(cells, statistics), net.embed_task(None, statistics))
    with pytest.raises(InputError):
        net.embed_patterns([cells])


def test_token_batch_has_used_tokens_only() -> None:
    ids, encoder = encoded()
    result = TokenBatch.from_ids(ids[:1], encoder.table)
    assert len(result.fields) == 1 + len(np.unique(ids[0][ids[0] > 0])) < len(encoder.table.fields)
    np.testing.assert_array_equal(result.fields[result.ids].numpy(), encoder.table.fields[ids[:1]])
    np.testing.assert_array_equal(result.numbers[result.ids].numpy(), encoder.table.numbers[ids[:1]])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("context_mode", "side"),
        ("layers", 0),
        ("width", 2**20),
        ("heads", 3),
        ("dropout", 1.0),
        ("pattern", {"kind": "dense"}),
        ("depth", 2),
    ],
)
def test_config_invalid_value_raises(name: str, value: object) -> None:
    with pytest.raises(ValidationError, match=name):
        NetConfig.model_validate({name: value})


def test_concat_needs_a_second_layer() -> None:
    assert NetConfig(context_mode="concat", layers=2).layers == 2
    with pytest.raises(ValidationError, match="layers"):
        NetConfig(context_mode="concat", layers=1)
