"""Replacements for a recording: they give what the modules give, and leave nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="the kernels need triton")

from sparseflow.adaptive.adapters import get_adapter
from sparseflow.adaptive.engine.kernel_patcher import TOLERANCE, KernelPatcher
from sparseflow.adaptive.plan.runtime import PlanRuntime
from tests.adaptive import tiny
from tests.adaptive.engine.serving import SHALLOW, parameters, same, words

# Triton's interpreter turns its one-element arrays into loop bounds this way; numpy below 2.4 allows it.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.build_olmoe(depth=3, dtype=torch.float32)


def test_what_can_be_replaced(model: Any) -> None:
    kernel_patcher = KernelPatcher(get_adapter(model), kernels=True)
    assert len(kernel_patcher.experts) == 3
    # Two of each block, two of its attention, and the last one.
    assert len(kernel_patcher.norms) == 3 * 4 + 1
    assert list(kernel_patcher.routers.values()) == [False] * 3
    assert [rotary_module.__name__.split(".")[-1] for rotary_module in kernel_patcher.rotary_modules] == [
        "modeling_olmoe"
    ]
    single = KernelPatcher(get_adapter(model))
    assert not (single.experts or single.norms or single.routers or single.rotary_modules)
    # Normalisations compute in float32 whatever the model; only weights could be wider.
    wide = KernelPatcher(get_adapter(tiny.build_olmoe(depth=2)), kernels=True)
    assert len(wide.experts) == 2 and not wide.norms


def test_a_forward_with_replacements(model: Any) -> None:
    adapter = get_adapter(model)
    kernel_patcher, ids = KernelPatcher(adapter, kernels=True), words(3)["input_ids"]
    before, inside = parameters(model), {id(module): dict(vars(module)) for module in model.modules()}
    (file,) = kernel_patcher.rotary_modules
    rotary_modules, runtime = file.apply_rotary_pos_emb, PlanRuntime(adapter)
    try:
        with runtime.use_plan(SHALLOW_OF_THREE) as running:
            expected = model(input_ids=ids).logits
            with kernel_patcher.patch(3, running):
                assert running.route_override is not None and file.apply_rotary_pos_emb is not rotary_modules
                output = model(input_ids=ids).logits
                assert running.executed_routers == {0, 2}
            assert running.route_override is None and file.apply_rotary_pos_emb is rotary_modules
            second_logits = model(input_ids=ids).logits
    finally:
        runtime.remove()
    assert torch.equal(second_logits, expected)
    assert not torch.equal(output, expected)
    torch.testing.assert_close(output, expected, rtol=TOLERANCE[torch.float32], atol=1e-4)
    assert same(model, before) and inside == {id(module): dict(vars(module)) for module in model.modules()}


SHALLOW_OF_THREE = type(SHALLOW)(tier=None, insertion_position=1, top_k=3, blocks=(0, 2))


def test_other_threads_turn_as_before(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_patcher = KernelPatcher(get_adapter(model), kernels=True)
    (file,) = kernel_patcher.rotary_modules
    query = torch.randn(1, 2, 3, 8).transpose(1, 2)
    angles = torch.randn(1, 2, 8)
    turned: list[int] = []

    def rotate(*args: Tensor) -> tuple[Tensor, ...]:
        turned.append(threading.get_ident())
        return args[:2]

    monkeypatch.setattr("sparseflow.adaptive.kernels.rotary.triton.rotate", rotate)
    expected = file.apply_rotary_pos_emb(query, query, angles, angles)
    with kernel_patcher.patch(1), ThreadPoolExecutor(1) as pool:
        output = pool.submit(file.apply_rotary_pos_emb, query, query, angles, angles).result()
        assert not turned
        file.apply_rotary_pos_emb(query, query, angles, angles)
    assert turned == [threading.get_ident()]
    assert all(torch.equal(*pair) for pair in zip(output, expected, strict=True))


def test_engines_that_record_in_turns_leave_nothing_behind(model: Any) -> None:
    kernel_patcher = KernelPatcher(get_adapter(model), kernels=True)
    (file,) = kernel_patcher.rotary_modules
    function = file.apply_rotary_pos_emb
    another = KernelPatcher(get_adapter(tiny.build_olmoe(depth=2, dtype=torch.float32)), kernels=True)
    first, other = kernel_patcher.patch(1), another.patch(1)
    first.__enter__()
    other.__enter__()
    first.__exit__(None, None, None)
    assert file.apply_rotary_pos_emb is not function
    other.__exit__(None, None, None)
    assert file.apply_rotary_pos_emb is function


def test_families_of_routers() -> None:
    for family, normalized in (("mixtral", True), ("qwen3_vl_moe", True)):
        kernel_patcher = KernelPatcher(
            get_adapter(tiny.FAMILIES[family](depth=2, dtype=torch.float32)), kernels=True
        )
        assert (
            list(kernel_patcher.routers.values()) == [normalized] * 2
            and len(kernel_patcher.rotary_modules) == 1
        )


def test_taken_away_after_an_error(model: Any) -> None:
    kernel_patcher = KernelPatcher(get_adapter(model), kernels=True)
    original_forward = kernel_patcher.experts[0].forward
    kernel_patcher.experts[0].forward = original_forward
    with pytest.raises(ZeroDivisionError), kernel_patcher.patch(1):
        assert kernel_patcher.experts[0].forward != original_forward
        raise ZeroDivisionError
    # A forward that stood on the instance stands there again.
    assert vars(kernel_patcher.experts[0])["forward"] == original_forward
    assert all("forward" not in vars(item) for item in (*kernel_patcher.experts[1:], *kernel_patcher.norms))
    del kernel_patcher.experts[0].forward


def test_many_tokens_keep_the_experts(model: Any) -> None:
    kernel_patcher = KernelPatcher(get_adapter(model), kernels=True)
    with kernel_patcher.patch(1000):
        assert all("forward" not in vars(expert) for expert in kernel_patcher.experts)
        assert all("forward" in vars(expert) for expert in kernel_patcher.norms)


def test_what_differs_is_not_replaced() -> None:
    model = tiny.build_olmoe(depth=3, dtype=torch.float32)
    layers = model.model.layers
    layers[0].mlp.experts.act_fn = nn.GELU()
    layers[1].mlp.experts.is_transposed = True
    plus_one: Any = type(layers[0].input_layernorm)

    class OtherRMSNorm(plus_one):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states) + hidden_states

    layers[2].input_layernorm = OtherRMSNorm(tiny.WIDTH)
    kernel_patcher = KernelPatcher(get_adapter(model), kernels=True)
    assert kernel_patcher.experts == [layers[2].mlp.experts]
    assert layers[2].input_layernorm not in kernel_patcher.norms and len(kernel_patcher.norms) == 12


def test_families() -> None:
    for family, experts in (("mixtral", 2), ("qwen3_vl_moe", 2), ("llava_dense", 0)):
        build = tiny.build_llava_dense if family == "llava_dense" else tiny.FAMILIES[family]
        kernel_patcher = KernelPatcher(get_adapter(build(depth=2, dtype=torch.float32)), kernels=True)
        assert len(kernel_patcher.experts) == experts and len(kernel_patcher.norms) >= 5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    model = tiny.build_olmoe(depth=3, dtype=dtype).cuda()
    kernel_patcher = KernelPatcher(get_adapter(model))
    assert len(kernel_patcher.experts) == 3 and len(kernel_patcher.norms) == 13
    for tokens in (1, 5, 40):
        ids = words(tokens)["input_ids"].cuda()
        expected = model(input_ids=ids).logits.float()
        with kernel_patcher.patch(tokens):
            output = model(input_ids=ids).logits.float()
        largest = float(expected.abs().max())
        assert float((output - expected).abs().max()) <= 2 * TOLERANCE[dtype] * largest
