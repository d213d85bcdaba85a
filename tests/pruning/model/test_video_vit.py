"""VideoViT: inputs, outputs, stages and independence of samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sparseflow.errors import InputError, SampleError
from sparseflow.pruning import ASTConfig, VideoViT, compact
from sparseflow.pruning.model.blocks import TransformerBlock
from sparseflow.pruning.model.config import ATTENTION_SELECTORS, SELECTORS
from tests.pruning.models import SIZES, awake, check_static_shapes, clips, far, tiny

TWO = {"stages": {1: 0.5, 3: 0.25}}


def test_positional_arguments_build_a_model() -> None:
    model = VideoViT(16, 4, 5, 16, 4, 2, 4.0, 8, 3, 0.1, 0.1, 0.1, True, {"stages": {2: 0.5}}).eval()
    logits, info = model(torch.zeros(2, 4, 3, 16, 16), return_intermediate=True)
    assert logits.shape == (2, 5) and info["token_feat"].shape == (2, 4, 4, 16)
    assert set(info["ast_stats"]) == {
        "L_AST", "sparsity_token", "sparsity_head", "sparsity_ch", "sparsity_block",
    }  # fmt: skip
    assert all(value.shape == () for value in info["ast_stats"].values())
    assert torch.equal(model(torch.zeros(2, 4, 3, 16, 16)), logits)


@pytest.mark.parametrize("pool", ["mean", "cls"])
@pytest.mark.parametrize("position", ["factored", "joint"])
@pytest.mark.parametrize("tubelet", [1, 2])
@pytest.mark.parametrize("ast", [None, TWO])
def test_forward_returns_documented_shapes(
    ast: dict[str, Any] | None, tubelet: int, position: str, pool: str
) -> None:
    model = awake(ast, tubelet_size=tubelet, position=position, pool=pool, in_chans=2)
    x = clips(model, 3)
    logits, info = model(x, return_intermediate=True)
    assert logits.shape == (3, 5) and info["token_feat"].shape == (3, 4 // tubelet, 16, 16)
    assert torch.equal(model(x.transpose(1, 2).contiguous(), layout="BCTHW"), logits)
    rebuilt = VideoViT(**model.to_dict())
    rebuilt.load_state_dict(model.state_dict())
    assert torch.equal(rebuilt.eval()(x), logits)
    assert hasattr(model, "position") == (position == "joint") and (model.cls is None) == (pool == "mean")


def test_patch_embedding_equals_convolution() -> None:
    model = awake(None, tubelet_size=2, depth=1).double()
    with torch.no_grad():
        model.position_time.zero_()
        model.position_space.zero_()
    block_inputs: list[Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: block_inputs.append(inputs[0]))
    x = clips(model)
    model(x)
    weight = model.patch.weight.view(16, 3, 2, 4, 4)
    expected = functional.conv3d(x.transpose(1, 2), weight, model.patch.bias, stride=(2, 4, 4))
    torch.testing.assert_close(block_inputs[0], expected.flatten(2).transpose(1, 2))


def test_position_embeddings_are_added() -> None:
    model = awake(None, depth=1)
    block_inputs: list[Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: block_inputs.append(inputs[0]))
    zero = torch.zeros(1, 4, 3, 16, 16)
    model(zero)
    grid = model.position_time.view(4, 1, 16) + model.position_space.view(1, 16, 16) + model.patch.bias
    torch.testing.assert_close(block_inputs[0], grid.view(1, 64, 16))


@pytest.mark.parametrize(
    ("shape", "layout", "message"),
    [
        ((4, 3, 16, 16), "BTCHW", r"\(4, 3, 16, 16\); .* \[B, T=4, C=3, H=16, W=16\]"),
        ((2, 3, 4, 16, 16), "BTCHW", r"\(2, 3, 4, 16, 16\); .* \[B, T=4, C=3, H=16, W=16\].*`layout`"),
        ((2, 4, 3, 16, 16), "BCTHW", r"\(2, 4, 3, 16, 16\); .* \[B, C=3, T=4, H=16, W=16\]"),
        ((2, 8, 3, 16, 16), "BTCHW", r"\(2, 8, 3, 16, 16\)"),
        ((2, 4, 3, 16, 17), "BTCHW", r"\(2, 4, 3, 16, 17\)"),
        ((3, 4, 16), "BCTHW", r"\(3, 4, 16\)"),
        ((2, 4, 3, 16, 16), "THWC", "`layout` .*'THWC'.* "),
    ],
)
def test_clips_of_another_shape_raise(shape: tuple[int, ...], layout: Any, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        tiny()(torch.zeros(shape), layout=layout)


def test_empty_and_integer_clips_raise() -> None:
    with pytest.raises(SampleError, match=r"0 clips of torch\.float32"):
        tiny()(torch.zeros(0, 4, 3, 16, 16))
    with pytest.raises(SampleError, match=r"2 clips of torch\.uint8"):
        tiny()(torch.zeros(2, 4, 3, 16, 16, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_clips_are_cast_to_the_dtype_of_weights(dtype: torch.dtype) -> None:
    model = awake(TWO)
    x = clips(model).to(dtype)
    logits = model(x)
    assert logits.dtype == torch.float32 and torch.equal(logits, model(x.float()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"depth": 0}, r"`depth` \(=0\)"),
        ({"num_frames": 4.0}, r"`num_frames` \(=4.0\)"),
        ({"num_heads": True}, r"`num_heads` \(=True\)"),
        ({"patch_size": 5}, r"`img_size` \(=16\) .*`patch_size` \(=5\)"),
        ({"tubelet_size": 3}, r"`num_frames` \(=4\) .*`tubelet_size` \(=3\)"),
        ({"num_heads": 3}, r"`embed_dim` \(=16\) .*`num_heads` \(=3\)"),
        ({"drop_rate": 1.0}, r"`drop_rate` \(=1.0\)"),
        ({"attn_drop": -0.1}, r"`attn_drop` \(=-0.1\)"),
        ({"drop_path_rate": float("nan")}, r"`drop_path_rate` \(=nan\)"),
        ({"mlp_ratio": 0.01}, r"`mlp_ratio` \(=0.01\)"),
        ({"mlp_ratio": -1.0}, "`mlp_ratio`"),
        ({"mlp_ratio": float("inf")}, "`mlp_ratio`"),
        ({"mlp_ratio": 1e308}, "at most 64"),
        ({"final_norm_eps": float("nan")}, "`final_norm_eps`"),
        ({"final_norm_eps": 0.0}, "`final_norm_eps`"),
        ({"mlp_ratio": "4"}, r"`mlp_ratio` \(='4'\)"),
        ({"norm_eps": 0.0}, r"`norm_eps` \(=0.0\)"),
        ({"norm_eps": float("nan")}, "`norm_eps`"),
        ({"drop_rate": True}, r"`drop_rate` \(=True\)"),
        ({"pool": "max"}, r"`pool` \(='max'\)"),
        ({"position": "none"}, r"`position` \(='none'\)"),
        ({"use_ast_prune": True, "ast_cfg": {"stages": {4: 0.5}}}, "`stages` .*4"),
        ({"ast_cfg": {"stagess": {}}}, "stagess"),
    ],
)
def test_invalid_architectures_raise(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        VideoViT(**SIZES | settings)


def test_without_pruning_a_config_is_not_used() -> None:
    model = tiny(None, ast_cfg=TWO | {"keep": {"head": 0.5}})
    assert model.ast is None and model.gates is None and model.score is None
    _, info = model(clips(model), return_intermediate=True)
    assert not any(info["ast_stats"].values())


def test_return_intermediate_reports_features_and_sparsity() -> None:
    ast = {"stages": {0: 0.75, 2: 0.5}, "keep": {"head": 0.5, "channel": 0.25, "block": 0.75}}
    model = awake(ast).double()
    x = clips(model)
    block_inputs: list[Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: block_inputs.append(inputs[0]))
    _, info = model(x, return_intermediate=True)
    # Features are from before the first stage.
    assert torch.equal(info["token_feat"].flatten(1, 2), block_inputs[0])
    assert model.gates is not None
    stats, units = info["ast_stats"], model.gates.compute_sparsity()
    assert stats["sparsity_token"].item() == 0.5
    for pruned_stats, grain in (("head", "head"), ("ch", "channel"), ("block", "block")):
        assert 0.0 < stats[f"sparsity_{pruned_stats}"] == units[grain]
    torch.testing.assert_close(stats["L_AST"], model.gates.loss())
    # In training L_AST includes the soft masks of stages.
    _, trained = model.train()(x, return_intermediate=True)
    assert trained["ast_stats"]["L_AST"] > stats["L_AST"]
    _, cut = compact(model)(x, return_intermediate=True)
    torch.testing.assert_close(cut["token_feat"], info["token_feat"])
    assert torch.equal(cut["kept_tokens"], info["kept_tokens"])
    assert (
        info["kept_tokens"].shape == info["token_feat"].shape[:3]
        and info["kept_tokens"].float().mean() == 0.5
    )
    pruned_stats = cut["ast_stats"]
    assert pruned_stats["sparsity_token"].item() == 0.5 and pruned_stats["L_AST"] == 0.0
    # Shares of heads and channels are those of the remaining blocks.
    gates = model.gates.compute_gates(hard=True)
    open_blocks = gates["block"] != 0.0
    assert 0 < int(open_blocks.sum()) < 4
    assert pruned_stats["sparsity_head"].item() == pytest.approx(
        (gates["head"][open_blocks] == 0.0).double().mean().item()
    )
    assert pruned_stats["sparsity_ch"].item() == pytest.approx(
        (gates["channel"][open_blocks] == 0.0).double().mean().item()
    )
    assert pruned_stats["sparsity_block"].item() == pytest.approx((~open_blocks).double().mean().item())


@pytest.mark.parametrize("grain", ["head", "channel"])
def test_compact_model_reports_removed_share(grain: str) -> None:
    model = awake({"stages": {}, "keep": {grain: 0.5}})
    pruned_stats, cut = (
        candidate(clips(model), return_intermediate=True)[1]["ast_stats"]
        for candidate in (model, compact(model))
    )
    assert pruned_stats[{"head": "sparsity_head", "channel": "sparsity_ch"}[grain]] > 0.1
    for name in ("sparsity_token", "sparsity_head", "sparsity_ch", "sparsity_block"):
        assert cut[name].item() == pytest.approx(pruned_stats[name].item(), abs=1e-6), name


def test_final_norm_eps_applies_to_last_norm_only() -> None:
    model, other = awake(norm_eps=1e-3), awake(norm_eps=1e-3, final_norm_eps=0.5)
    assert model.to_dict()["final_norm_eps"] is None and other.to_dict()["final_norm_eps"] == 0.5
    assert model.norm.eps == 1e-3 and other.norm.eps == 0.5
    for candidate in (model, other):
        assert {module.eps for module in candidate.blocks.modules() if isinstance(module, nn.LayerNorm)} == {
            1e-3
        }
    assert far(other(clips(model)), model(clips(model))) > 1e-3
    assert VideoViT(**other.to_dict()).norm.eps == 0.5
    assert far(compact(other)(clips(other)), other(clips(other))) < 1e-6


def test_mlp_channels_are_rounded() -> None:
    assert tiny(embed_dim=12, num_heads=4, mlp_ratio=0.65).config.mlp_channels == 8  # 7.8
    # 0.29 * 100 is a little less than 29.
    assert tiny(embed_dim=100, mlp_ratio=0.29).config.mlp_channels == 29


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("pool", ["mean", "cls"])
@pytest.mark.parametrize("merge", [False, True])
def test_stage_reduces_block_input(selector: str, pool: str, merge: bool) -> None:
    model = compact(awake(TWO | {"selector": selector, "merge": merge}, pool=pool))
    lengths: list[int] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    model(clips(model))
    extra = int(merge and selector != "tome")
    expected = [64, 32 + extra, 32 + extra, 16 + 2 * extra]
    assert lengths == [int(pool == "cls") + candidate for candidate in expected]


@pytest.mark.parametrize("selector", SELECTORS)
def test_share_of_one_keeps_all_tokens(selector: str) -> None:
    stages = {1: 1.0, 2: 1.0}
    model = awake({"stages": stages, "selector": selector}).double()
    plain = awake(None).double()
    plain.load_state_dict({name: model.state_dict()[name] for name in plain.state_dict()})
    x = clips(model)
    # ToMe reorders tokens although it merges none.
    torch.testing.assert_close(model(x), plain(x))
    torch.testing.assert_close(compact(model)(x), plain(x))


def test_order_does_not_matter_without_positions() -> None:
    model = awake().double()
    with torch.no_grad():
        model.position_space.zero_()
        model.position_time.zero_()
    x = clips(model)
    torch.testing.assert_close(model(x[:, [2, 0, 3, 1]]), model(x))
    patches = x.view(2, 4, 3, 4, 4, 4, 4)[:, :, :, [1, 3, 0, 2]][..., [3, 1, 2, 0], :]
    torch.testing.assert_close(model(patches.reshape(x.shape)), model(x))
    assert far(model(x.flip(-1)), model(x)) > 1e-3  # The order of pixels within a patch matters.


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("cut", [False, True])
def test_samples_are_independent(selector: str, cut: bool) -> None:
    model = awake(TWO | {"selector": selector, "merge": True}).double()
    model = compact(model) if cut else model
    x = clips(model, 4)
    full = model(x)
    for index in range(4):
        torch.testing.assert_close(model(x[index : index + 1])[0], full[index])
    torch.testing.assert_close(model(x.flip(0)).flip(0), full)


@pytest.mark.parametrize("selector", SELECTORS)
def test_evaluation_is_deterministic(selector: str) -> None:
    model = awake(TWO | {"selector": selector}, drop_rate=0.5, attn_drop=0.5, drop_path_rate=0.5)
    x = clips(model)
    assert torch.equal(model(x), model(x))


@pytest.mark.parametrize("rate", ["drop_rate", "attn_drop", "drop_path_rate"])
def test_dropout_acts_in_training_only(rate: str) -> None:
    arguments: dict[str, Any] = {rate: 0.5}
    plain, model = awake(), awake(**arguments)
    x = clips(model, 8)
    assert torch.equal(model(x), plain(x))
    model.train()
    plain.train()
    assert not torch.equal(model(x), model(x)) and torch.equal(plain(x), plain(x))


def test_stochastic_depth_increases_from_zero() -> None:
    rates = [
        block.drop_path for block in tiny(drop_path_rate=0.3).blocks if isinstance(block, TransformerBlock)
    ]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3])


def test_random_selector_is_fixed_in_evaluation() -> None:
    model = awake({"stages": {1: 0.5}, "selector": "random"})
    x = clips(model)
    assert not torch.equal(model.train()(x), model(x))
    cut = compact(model)
    same = clips(model, 1).expand(3, -1, -1, -1, -1)
    logits = cut(same)
    torch.testing.assert_close(logits, logits[:1].expand(3, -1))
    # The order of tokens is part of the state.
    other = awake({"stages": {1: 0.5}, "selector": "random"}, seed=1)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model.eval()(x))


@pytest.mark.parametrize(
    ("selector", "softness"),
    # A learned score needs soft masks.
    [*((name, 0.15) for name in SELECTORS), *((name, 0.0) for name in SELECTORS if name != "dynamic_vit")],
)
@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_gradients_reach_every_parameter(selector: str, pool: str, softness: float) -> None:
    keep = (
        {"channel": 0.5}
        if selector in ATTENTION_SELECTORS
        else dict.fromkeys(("head", "channel", "block"), 0.5)
    )
    ast = TWO | {"selector": selector, "keep": keep, "softness": softness, "merge": True}
    model = awake(ast, pool=pool, drop_path_rate=0.0).train()
    logits, info = model(clips(model, 4), return_intermediate=True)
    (functional.cross_entropy(logits, torch.arange(4)) + info["ast_stats"]["L_AST"]).backward()
    for name, candidate in model.named_parameters():
        assert candidate.grad is not None and candidate.grad.isfinite().all(), name
        assert candidate.grad.abs().max() > 0.0, name


def test_soft_masks_pass_gradients_to_score() -> None:
    """The loss depends on the masks only, so gradients of the clips pass through the score."""
    model = awake({"stages": {0: 0.5}, "softness": 0.2}).double().train()
    x = clips(model).requires_grad_()
    _, info = model(x, return_intermediate=True)
    (gradient,) = torch.autograd.grad(info["ast_stats"]["L_AST"], x)
    assert gradient.isfinite().all() and gradient.abs().max() > 0.0


def test_small_softness_approaches_hard_masks() -> None:
    model = awake({"stages": {1: 0.5}}).double()
    x = clips(model)
    hard = model(x)
    model.train()
    errors = []
    for softness in (1.0, 0.1, 1e-6):
        model.softness = softness
        errors.append(far(model(x), hard))
    assert errors[0] > errors[1] > 1e-2 and errors[2] < 1e-12
    model.softness = 0.0
    assert far(model(x), hard) < 1e-12


@pytest.mark.parametrize("stages", [{0: 0.7, 1: 0.5, 2: 0.5}, {1: 0.75, 2: 0.5, 3: 0.25}])
def test_three_soft_stages_are_differentiable_and_exact_in_the_limit(stages: dict[int, float]) -> None:
    model = awake({"stages": stages, "softness": 1.0}).double()
    x = clips(model)
    logits, info = model.train()(x, return_intermediate=True)
    (logits.square().sum() + info["ast_stats"]["L_AST"]).backward()
    assert logits.isfinite().all() and info["ast_stats"]["sparsity_token"] == 1.0 - stages[max(stages)]
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters()
    )
    model.softness = 1e-9
    assert far(model(x), model.eval()(x)) < 1e-12


def test_sparsity_in_training_equals_evaluation() -> None:
    model = awake({"stages": {1: 0.75, 2: 0.5}})
    x = clips(model, 4)
    pruned_stats = [
        model.train(training)(x, return_intermediate=True)[1]["ast_stats"] for training in (True, False)
    ]
    assert pruned_stats[0]["sparsity_token"] == pruned_stats[1]["sparsity_token"] == 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("training", [False, True])
def test_half_precision_and_autocast_are_finite(selector: str, dtype: torch.dtype, training: bool) -> None:
    keep = {"channel": 0.5}
    model = awake(
        {"stages": {1: 0.5, 2: 0.25}, "selector": selector, "keep": keep, "merge": True}, pool="cls"
    )
    model.train(training)
    x = clips(model)
    with torch.autocast("cpu", dtype=dtype):
        logits = model(x)
    assert logits.isfinite().all() and logits.dtype == dtype
    logits, info = model.to(dtype)(x.to(dtype), return_intermediate=True)
    assert logits.dtype == dtype and logits.isfinite().all() and info["ast_stats"]["L_AST"].isfinite()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close_to_float32(dtype: torch.dtype) -> None:
    model = awake({"stages": {1: 0.5}, "selector": "uniform", "merge": True})
    x = clips(model)
    exact = model(x)
    half = model.to(dtype)
    assert far(half(x.to(dtype)).float(), exact) < {torch.bfloat16: 0.1, torch.float16: 0.01}[dtype]


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("ast", [{"selector": "uniform", "merge": True}, {"selector": "tome"}])
def test_many_large_features_do_not_overflow_float16(ast: dict[str, Any], cut: bool) -> None:
    sizes = {"num_frames": 32, "img_size": 32, "depth": 2, "embed_dim": 8, "num_heads": 1}
    model = awake({"stages": {1: 0.5}} | ast, **sizes)
    with torch.no_grad():
        model.position_space[..., 0] = 150.0
    assert awake(None, **sizes).half()(clips(model).half()).isfinite().all()
    model = compact(model) if cut else model
    assert model.half()(clips(model)).isfinite().all()


@pytest.mark.parametrize("selector", ["random", "uniform"])
def test_token_order_has_no_ties_in_half_precision(selector: str) -> None:
    model = tiny({"selector": selector}, img_size=56, num_frames=8)
    before = model.get_buffer("pruner.order").clone()
    assert torch.equal(before.sort().values, torch.arange(model.config.num_tokens))
    assert torch.equal(model.bfloat16().get_buffer("pruner.order"), before)


def test_masked_key_tiles_match_compact_model() -> None:
    """Full tiles of keys are masked; a fused attention must not divide by zero."""
    model = awake({"stages": {1: 0.05}, "selector": "uniform"}, img_size=48, num_frames=8)
    for order in (torch.arange(1152), torch.arange(1152).flip(0)):
        model.get_buffer("pruner.order").copy_(order)
        x = clips(model, 1)
        assert far(model(x), compact(model)(x)) < 1e-5


def test_ast_config_object_is_accepted() -> None:
    config = ASTConfig(stages={2: 0.5}, selector="uniform")
    model = VideoViT(**SIZES, use_ast_prune=True, ast_cfg=config)
    assert model.ast is config


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("cut", [False, True])
def test_model_compiles_as_one_graph(selector: str, cut: bool) -> None:
    model = awake({"stages": {1: 0.5, 3: 0.25}, "selector": selector, "keep": {"channel": 0.5}})
    model = compact(model) if cut else model
    x = clips(model)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True)
        assert far(compiled(x), model(x)) < 1e-4
    torch.compiler.reset()


@torch.no_grad()
def test_compiled_models_with_other_shares_have_static_shapes() -> None:
    torch._dynamo.reset()
    for share in (0.5, 0.25):
        model = compact(awake({"stages": {1: share}}))
        x = clips(model)
        compiled = torch.compile(model, backend=check_static_shapes, fullgraph=True)
        assert far(compiled(x), model(x)) < 1e-6
