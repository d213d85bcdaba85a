"""AST configuration: invalid settings and round trips."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from sparseflow.core.config import list_configs
from sparseflow.errors import InputError
from sparseflow.pruning import ASTConfig, ScoreConfig
from sparseflow.pruning.config import read_config
from sparseflow.pruning.model.config import ATTENTION_SELECTORS, SELECTORS

OTHERS: dict[str, Any] = {
    "stages": {0: 0.9, 3: 0.5, 7: 0.5}, "score": ScoreConfig(time=0.5, levels=(1, 3), measure="divergence"),
    "softness": 0.0, "merge": True, "keep": {"head": 0.5, "channel": 1.0, "block": 0.75}, "strength": 2.5,
    "gate_init": 0.8, "threshold": 0.3,
}  # fmt: skip


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("arguments", [{}, OTHERS, {"stages": {}}])
def test_to_dict_round_trips(selector: str, arguments: dict[str, Any]) -> None:
    if selector in ATTENTION_SELECTORS:
        arguments = {name: value for name, value in arguments.items() if name != "keep"}
    if selector == "dynamic_vit":  # learns through soft masks only
        arguments = {name: value for name, value in arguments.items() if name != "softness"}
    config = ASTConfig(selector=selector, **arguments)
    assert ASTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert ASTConfig.from_dict(config.to_dict()) == config
    assert set(config.to_dict()) == set(ASTConfig.__dataclass_fields__)


def test_default_measure_is_the_divergence() -> None:
    assert ASTConfig().score.measure == ASTConfig.from_dict({"score": {}}).score.measure == "divergence"
    for name in list_configs("sparseflow.pruning"):
        assert read_config(name).ast.score.measure == "divergence"
    assert ASTConfig.from_dict({"score": {"measure": "entropy"}}).score.measure == "entropy"


def test_from_dict_fills_in_defaults() -> None:
    assert ASTConfig.from_dict({}) == ASTConfig()
    config = ASTConfig.from_dict({"stages": {"2": 0.5}, "score": {"levels": [2]}})
    assert config == ASTConfig(stages={2: 0.5}, score=ScoreConfig(levels=(2,)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"selector": "best"},
            r"`selector` \(='best'\) must be one of: ast, random, uniform, tome, attention",
        ),
        ({"stages": {-1: 0.5}}, "`stages` .*-1"),
        ({"stages": {"3": 0.5}}, "`stages` .*'3'"),
        ({"stages": {1.0: 0.5}}, "`stages` .*1.0"),
        ({"stages": {True: 0.5}}, "`stages` .*True"),
        ({"stages": {3: 0.0}}, "0.0 at block 3"),
        ({"stages": {3: 1.5}}, "1.5 at block 3"),
        ({"stages": {3: "half"}}, "'half' at block 3"),
        ({"stages": {3: math.nan}}, "nan at block 3"),
        ({"stages": {3: True}}, "True at block 3"),
        ({"stages": {5: 0.6, 2: 0.5}}, "0.6 at block 5.* 0.5"),
        ({"selector": "tome", "keep": {"head": 0.5}}, "`selector` .*'tome'"),
        ({"selector": "attention", "keep": {"block": 0.5}}, "`selector` .*'attention'"),
        ({"keep": {"token": 0.5}}, "`keep` .*token"),
        ({"keep": {"width": 0.5, "ch": 0.5}}, "`keep` .*ch, width"),
        ({"keep": {"head": 0.0}}, r"`keep` of head \(=0.0\) must be above 0 and at most 1"),
        ({"keep": {"channel": 1.1}}, r"`keep` of channel \(=1.1\)"),
        ({"keep": {"block": math.nan}}, r"`keep` of block \(=nan\)"),
        ({"keep": {"block": "half"}}, r"`keep` of block \(='half'\)"),
        ({"keep": {"block": True}}, r"`keep` of block \(=True\)"),
        ({"merge": 1}, r"`merge` \(=1\) must be true or false"),
        ({"threshold": 0.0}, r"`threshold` \(=0.0\)"),
        ({"threshold": 0.9}, "`gate_init`.*`threshold`"),
        ({"gate_init": 1.0}, r"`gate_init` \(=1.0\)"),
        ({"gate_init": math.nan}, r"`gate_init` \(=nan\)"),
        ({"softness": -0.1}, r"`softness` \(=-0.1\)"),
        ({"strength": -1.0}, r"`strength` \(=-1.0\)"),
    ],
)
def test_invalid_settings_raise(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ASTConfig(**settings)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"selctor": "ast"},
            "`ast` has the unknown setting 'selctor'; known: stages, selector, score, softness",
        ),
        ({"score": {"tme": 1.0}}, "`score` has the unknown setting 'tme'; known: time, space, .*measure"),
        ({"score": {"levels": 3}}, r"`levels` \(=3\)"),
        ({"score": None}, r"`score` \(=None\) must be a mapping"),
        ({"score": {"regions": 0}}, "`regions`"),
        ({"stages": [[3, 0.5]]}, "`stages` .*must be a mapping"),
        ({"stages": {"last": 0.5}}, "'last'; expected a number and a share"),
        ({"stages": {"1:0.5": None}}, "'1:0.5'.*with a space after the colon"),
        ({"stages": {"9" * 5000: 0.5}}, "^.{0,200}$"),
        ({"keep": None}, r"`keep` \(=None\) must be a mapping"),
        ({"keep": {1: 0.5, "token": 0.5}}, "`keep` .*1, token"),
        ({"stages": {3.7: 0.5}}, "`stages` .*3.7"),
        ({"stages": {True: 0.5}}, "`stages` .*True"),
        ({"softness": "much"}, r"`softness` \(='much'\) must be a finite number"),
        ({"merge": "yes"}, r"`merge` \(='yes'\)"),
        ({"keep": {"token": 0.5}}, "`keep` .*token"),
    ],
)
def test_invalid_dicts_raise(data: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ASTConfig.from_dict(data)


@pytest.mark.parametrize("name", ["softness", "strength", "gate_init", "threshold"])
@pytest.mark.parametrize("value", [math.nan, math.inf, True, "1", None])
def test_non_numbers_raise(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"`{name}` \(={value!r}\) must be a finite number"):
        ASTConfig.from_dict({name: value})
