"""The pruner alone gives the masks and gates that the model uses."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sparseflow.pruning.compaction.saved_model import load_model, save_model
from sparseflow.pruning.model.ast_pruner import ASTPruner
from sparseflow.pruning.model.config import ASTConfig
from sparseflow.pruning.model.video_vit import VideoViT

CONFIG = ASTConfig(stages={1: 0.25}, keep={"head": 0.5, "channel": 0.5, "block": 1.0})


def make_pruner() -> ASTPruner:
    torch.manual_seed(0)
    return ASTPruner(CONFIG, grid=(4, 3, 3), depth=2, num_heads=4, mlp_channels=8)


def make_model(config: ASTConfig) -> VideoViT:
    torch.manual_seed(0)
    return VideoViT(24, 4, 5, 16, 2, 4, 2, 8, in_chans=1, use_ast_prune=True, ast_cfg=config).eval()


def test_masks_keep_the_highest_scores() -> None:
    pruner = make_pruner()
    assert pruner.score is not None
    x = torch.randn(2, 4, 9, 16)
    soft = pruner.train()(x, 0.25)
    hard = pruner.eval()(x, 0.25)
    assert hard.shape == soft.shape == (2, 4, 9) and set(hard.unique().tolist()) == {0.0, 1.0}
    assert torch.equal(soft > 0.5, hard == 1.0) and (hard.flatten(1).sum(1) == 9).all()
    score = pruner.score(x)
    assert score[hard == 1.0].amin() > score[0].amin()
    retained = torch.rand(2, 4, 9) < 0.5
    masked = pruner(x, 0.25, retained)
    assert not (masked * ~retained).any()
    assert torch.equal(pruner.train()(x, 0.25, softness=0.0), hard)


def test_model_uses_the_masks_of_its_pruner() -> None:
    model = make_model(CONFIG)
    assert model.pruner is not None and model.score is model.pruner.score
    clips = torch.randn(3, 4, 1, 24, 24)
    _, info = model(clips, return_intermediate=True)
    assert torch.equal(info["kept_tokens"], model.pruner(info["token_feat"], 0.25) == 1.0)
    torch.testing.assert_close(info["ast_stats"]["L_AST"], model.pruner.compute_loss({}))


def test_loss_depends_on_gates_and_masks() -> None:
    pruner = make_pruner()
    assert pruner.gates is not None
    mask = torch.full((2, 36), 0.5)
    torch.testing.assert_close(pruner.compute_loss({1: mask}), pruner.gates.loss() + (0.5 - 0.25) ** 2)
    assert {name: tuple(value.shape) for name, value in pruner.compute_gates(hard=True).items()} == {
        "head": (2, 4), "channel": (2, 8), "block": (2,),
    }  # fmt: skip


def test_files_of_models_without_a_pruner_are_read(tmp_path: Path) -> None:
    for config in (CONFIG, ASTConfig(stages={1: 0.5}, selector="random")):
        model, path = make_model(config), tmp_path / f"{config.selector}.safetensors"
        save_model(model, path)
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        weights = {name.removeprefix("pruner."): value for name, value in load_file(path).items()}
        assert len(weights) == len(model.state_dict()) and not any("pruner" in name for name in weights)
        save_file(weights, path, metadata)
        loaded = load_model(path)
        for name, value in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], value)
