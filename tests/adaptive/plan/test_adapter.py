"""Adapter protocol, with a model unlike those of transformers, and entry points."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparseflow.adaptive.adapters import Adapter, get_adapter, register
from sparseflow.adaptive.plan.adapter import _ADAPTERS, ENTRY_POINT_GROUP
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import ModelGeometry, Plan
from sparseflow.adaptive.prompts.model_folder import open_folder
from sparseflow.errors import FileFormatError, ModelError, PlanError

WIDTH, EXPERTS = 8, 5


class Mixture(nn.Module):
    """Mixture that contains its router and does not return the selected experts."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k = 4
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.requested_experts: list[int] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.gate(x)
        weights, expert_ids = logits.softmax(-1).topk(self.top_k, -1)
        self.requested_experts.append(expert_ids.shape[-1])
        expert_outputs = torch.stack([expert(x) for expert in self.experts], -2)
        picked = expert_outputs.gather(-2, expert_ids[..., None].expand(*expert_ids.shape, WIDTH))
        return (weights[..., None] * picked).sum(-2), logits


class Block(nn.Module):
    """Block that returns hidden states and its cache, as older models do."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mixture = Mixture()

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Any]:
        key, value = self.key(x), self.value(x)
        if past is not None:
            key, value = torch.cat([past[0], key], 1), torch.cat([past[1], value], 1)
        observed = torch.ones(x.shape[1], key.shape[1], dtype=torch.bool).tril(key.shape[1] - x.shape[1])
        x = x + nn.functional.scaled_dot_product_attention(self.query(x), key, value, observed)
        return x + self.mixture(x)[0], (key, value)


class SimpleCache:
    """Keys and values per block, without the interface of transformers."""

    def __init__(self) -> None:
        self.entries: dict[int, Any] = {}


class Stack(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: Tensor, past_key_values: SimpleCache | None = None) -> tuple[Tensor, SimpleCache]:
        cache = SimpleCache() if past_key_values is None else past_key_values
        for index, block in enumerate(self.blocks):
            x, block_cache = block(x, cache.entries.get(index))
            if block_cache is not None:
                cache.entries[index] = block_cache
        return x, cache


class Remote(nn.Module):
    def __init__(self, depth: int = 5) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="remote")
        self.words = nn.Embedding(16, WIDTH)
        self.stack = Stack(depth)

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def forward(self, input_ids: Tensor, past_key_values: SimpleCache | None = None) -> Any:
        hidden, cache = self.stack(self.words(input_ids), past_key_values=past_key_values)
        return SimpleNamespace(logits=hidden @ self.words.weight.T, past_key_values=cache)


class RemoteAdapter(Adapter):
    """Adapter of `Remote`."""

    @property
    def geometry(self) -> ModelGeometry:
        return ModelGeometry(depth=len(self.blocks), top_k=4, tiers=())

    @property
    def decoder(self) -> nn.Module:
        stack: Any = self.model.stack
        return stack

    @property
    def blocks(self) -> Sequence[nn.Module]:
        blocks: Any = self.decoder.blocks
        return tuple(blocks)

    def router(self, block: nn.Module) -> nn.Module:
        return block.get_submodule("mixture")

    def measure_top_k(self, router: nn.Module) -> int:
        mixture: Any = router
        mixture(torch.zeros(1, WIDTH, dtype=torch.float64))
        return mixture.requested_experts.pop()

    def get_hidden_states(self, output: Any) -> Tensor:
        return output[0]

    def skip_block(self, hidden: Tensor) -> Any:
        return hidden, None

    def get_cache(self, output: Any) -> Any:
        return output[1] if isinstance(output, tuple) else output.past_key_values

    def get_kv_lengths(self, cache: Any) -> dict[int, int]:
        return {index: key.shape[1] for index, (key, _) in cache.entries.items()}


@pytest.fixture
def remote() -> Iterator[tuple[Any, PlanRuntime]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Remote().double().eval()
    register("remote", RemoteAdapter)
    try:
        with torch.no_grad():
            yield model, PlanRuntime(get_adapter(model))
    finally:
        del _ADAPTERS["remote"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Installed package with two adapter entry points, one of which cannot be imported."""
    metadata_dir = tmp_path / "remote_moe-1.0.dist-info"
    metadata_dir.mkdir()
    (metadata_dir / "METADATA").write_text("Metadata-Version: 2.1\nName: remote-moe\nVersion: 1.0\n")
    (metadata_dir / "entry_points.txt").write_text(
        f"[{ENTRY_POINT_GROUP}]\nplugged_moe = remote_moe:create\nbroken_moe = remote_moe.nowhere:create\n"
    )
    (tmp_path / "remote_moe.py").write_text("def create(model):\n    return model, 'created'\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    _ADAPTERS.pop("plugged_moe", None)
    sys.modules.pop("remote_moe", None)


def make_model_of_type(model_type: str) -> Any:
    model: Any = nn.Linear(1, 1)
    model.config = SimpleNamespace(model_type=model_type)
    return model


@pytest.mark.usefixtures("package")
def test_get_adapter_loads_entry_points() -> None:
    model = make_model_of_type("plugged_moe")
    assert get_adapter(model) == (model, "created")
    with pytest.raises(ModelError):
        get_adapter(make_model_of_type("broken_moe"))


@pytest.mark.usefixtures("package")
def test_open_folder_loads_entry_point_first(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "plugged_moe"}')
    with pytest.raises(FileFormatError):  # transformers does not know the model type
        open_folder(folder)
    assert "plugged_moe" in _ADAPTERS
    (folder / "config.json").write_text("[]")
    with pytest.raises(FileFormatError):
        open_folder(folder)


def test_get_adapter_unknown_model_type_is_refused() -> None:
    with pytest.raises(ModelError, match="`model_type`"):
        get_adapter(make_model_of_type("plugged_moe"))


IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def test_remote_model_runs_plan(remote: tuple[Any, PlanRuntime]) -> None:
    model, runtime = remote
    plan = Plan(tier=None, insertion_position=1, top_k=2, blocks=(0, 1, 3))
    with runtime.use_plan(plan) as running:
        expected = model(IDS).logits
        for block in model.stack.blocks:
            block.mixture.requested_experts.clear()
        output = model(IDS[:, :5])
        logits = [output.logits]
        for index in range(5, 8):
            output = model(IDS[:, index : index + 1], past_key_values=output.past_key_values)
            logits.append(output.logits)
        assert running.executed_blocks == [0, 1, 3]
    assert (torch.cat(logits, 1) - expected).abs().max() < 1e-10
    queries = [block.mixture.requested_experts for block in model.stack.blocks]
    assert queries == [[4] * 4, [2] * 4, [], [2] * 4, []]
    assert runtime.adapter.get_kv_lengths(output.past_key_values) == {0: 8, 1: 8, 3: 8}
    other = Plan(tier=None, insertion_position=1, top_k=3, blocks=(0, 1, 3))
    with runtime.use_plan(other), pytest.raises(PlanError):
        model(IDS[:, :1], past_key_values=output.past_key_values)


def test_decide_receives_hidden_states_of_remote_model(remote: tuple[Any, PlanRuntime]) -> None:
    model, runtime = remote
    plan = Plan(tier=None, insertion_position=2, top_k=1, blocks=(0, 1, 4))
    observed = []
    with runtime.use_decided_plan(None, 2, lambda hidden: observed.append(hidden) or plan):  # type: ignore[func-returns-value]
        output = model(IDS).logits
    with runtime.use_plan(plan):
        assert torch.equal(model(IDS).logits, output)
    assert observed[0].shape == (1, 8, WIDTH)


def test_cache_without_attributes_is_refused(remote: tuple[Any, PlanRuntime]) -> None:
    model, runtime = remote
    runtime.adapter.get_cache = lambda arguments: tuple(arguments[1].entries.values())  # type: ignore[method-assign]
    runtime.adapter.get_kv_lengths = lambda cache: {
        index: key.shape[1] for index, (key, _) in enumerate(cache)
    }  # type: ignore[method-assign]
    with (
        runtime.use_plan(runtime.geometry.full_plan()),
        pytest.raises(ModelError),
    ):
        model(IDS)


def test_adapter_defaults_are_for_text_models(remote: tuple[Any, PlanRuntime]) -> None:
    model, runtime = remote
    adapter = runtime.adapter
    assert torch.equal(adapter.embed(IDS), model.words(IDS))
    assert adapter.state == () and adapter.count_vision_tokens({"input_ids": IDS}) == 0
    with pytest.raises(PlanError):
        adapter.reduce_to_tier({"input_ids": IDS}, "low")
