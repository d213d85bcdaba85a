"""Kernels that replace modules during a capture."""

from __future__ import annotations

import threading
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
from tests.adaptive.engine.serving import SHALLOW, copy_state, is_unchanged, words

# Triton's interpreter turns its one-element arrays into loop bounds this way; numpy below 2.4 allows it.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.build_olmoe(depth=3, dtype=torch.float32)


@pytest.fixture(scope="module")
def kernel_patcher(model: Any) -> KernelPatcher:
    return KernelPatcher(get_adapter(model), kernels=True)


def test_patcher_finds_replaceable_modules(model: Any, kernel_patcher: KernelPatcher) -> None:
    assert len(kernel_patcher.experts) == 3
    # Two of each block, two of its attention, and the final one.
    assert len(kernel_patcher.norms) == 3 * 4 + 1
    assert list(kernel_patcher.routers.values()) == [False] * 3
    (rotary_module,) = kernel_patcher.rotary_modules
    assert rotary_module.__name__.endswith("modeling_olmoe")


def test_patcher_on_cpu_uses_no_kernels_by_default(model: Any) -> None:
    default = KernelPatcher(get_adapter(model))
    assert not (default.experts or default.norms or default.routers or default.rotary_modules)


def test_patcher_of_float64_model_keeps_norms() -> None:
    # The kernel has no float64 norms.
    wide = KernelPatcher(get_adapter(tiny.build_olmoe(depth=2)), kernels=True)
    assert len(wide.experts) == 2 and not wide.norms


def test_patch_matches_model_and_restores_it(model: Any, kernel_patcher: KernelPatcher) -> None:
    adapter, ids = get_adapter(model), words(3)["input_ids"]
    before, inside = copy_state(model), {id(module): dict(vars(module)) for module in model.modules()}
    (file,) = kernel_patcher.rotary_modules
    rotary_function, runtime = file.apply_rotary_pos_emb, PlanRuntime(adapter)
    try:
        with runtime.use_plan(SHALLOW_OF_THREE) as running:
            expected = model(input_ids=ids).logits
            with kernel_patcher.patch(3, running):
                assert running.route_override is not None and file.apply_rotary_pos_emb is not rotary_function
                output = model(input_ids=ids).logits
                assert running.executed_routers == {0, 2}
            assert running.route_override is None and file.apply_rotary_pos_emb is rotary_function
            second_logits = model(input_ids=ids).logits
    finally:
        runtime.remove()
    assert torch.equal(second_logits, expected)
    assert not torch.equal(output, expected)
    torch.testing.assert_close(output, expected, rtol=TOLERANCE[torch.float32], atol=1e-4)
    assert is_unchanged(model, before) and inside == {
        id(module): dict(vars(module)) for module in model.modules()
    }


SHALLOW_OF_THREE = type(SHALLOW)(tier=None, insertion_position=1, top_k=3, blocks=(0, 2))


def test_patch_leaves_rotary_of_other_threads(
    kernel_patcher: KernelPatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file,) = kernel_patcher.rotary_modules
    query = torch.randn(1, 2, 3, 8).transpose(1, 2)
    angles = torch.randn(1, 2, 8)
    calling_threads: list[int] = []

    def rotate(*args: Tensor) -> tuple[Tensor, ...]:
        calling_threads.append(threading.get_ident())
        return args[:2]

    monkeypatch.setattr("sparseflow.adaptive.kernels.rotary.triton.rotate", rotate)
    expected = file.apply_rotary_pos_emb(query, query, angles, angles)
    with kernel_patcher.patch(1), ThreadPoolExecutor(1) as pool:
        output = pool.submit(file.apply_rotary_pos_emb, query, query, angles, angles).result()
        assert not calling_threads
        file.apply_rotary_pos_emb(query, query, angles, angles)
    assert calling_threads == [threading.get_ident()]
    assert all(torch.equal(*pair) for pair in zip(output, expected, strict=True))


def test_overlapping_patches_restore_rotary_function(kernel_patcher: KernelPatcher) -> None:
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


def test_patch_is_removed_after_error(kernel_patcher: KernelPatcher) -> None:
    original_forward = kernel_patcher.experts[0].forward
    kernel_patcher.experts[0].forward = original_forward
    with pytest.raises(ZeroDivisionError), kernel_patcher.patch(1):
        assert kernel_patcher.experts[0].forward != original_forward
        raise ZeroDivisionError
    # A forward that stood on the instance stands there again.
    assert vars(kernel_patcher.experts[0])["forward"] == original_forward
    assert all(
        "forward" not in vars(module) for module in (*kernel_patcher.experts[1:], *kernel_patcher.norms)
    )
    del kernel_patcher.experts[0].forward


def test_patch_with_many_tokens_keeps_experts(kernel_patcher: KernelPatcher) -> None:
    with kernel_patcher.patch(1000):
        assert all("forward" not in vars(expert) for expert in kernel_patcher.experts)
        assert all("forward" in vars(expert) for expert in kernel_patcher.norms)


def test_patcher_skips_modules_that_differ() -> None:
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


@pytest.mark.parametrize(("family", "experts"), [("mixtral", 2), ("qwen3_vl_moe", 2), ("llava_dense", 0)])
def test_patcher_finds_modules_of_other_families(family: str, experts: int) -> None:
    build = tiny.build_llava_dense if family == "llava_dense" else tiny.FAMILIES[family]
    patcher = KernelPatcher(get_adapter(build(depth=2, dtype=torch.float32)), kernels=True)
    assert len(patcher.experts) == experts and len(patcher.norms) >= 5
    # These routers normalize their weights.
    assert list(patcher.routers.values()) == [True] * experts and len(patcher.rotary_modules) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_patch_on_gpu_matches_model(dtype: torch.dtype) -> None:
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
