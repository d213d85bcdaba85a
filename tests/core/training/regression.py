"""A small task for tests of the training loop."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparseflow.core.training.distributed import DistributedContext
from sparseflow.core.training.optimizer import check_finite


class Regression:
    """Linear regression on random data.

    Args:
        context: Ranks.
        num_steps: Steps of the full training.
        seed: Seed of weights and data.
        eval_every: Steps between evaluations.
        stop_after: Steps after which KeyboardInterrupt is raised.
    """

    def __init__(
        self,
        context: DistributedContext,
        *,
        num_steps: int = 6,
        seed: int = 0,
        eval_every: int | None = None,
        stop_after: int | None = None,
    ) -> None:
        self.num_steps, self.seed, self.step, self._context = num_steps, seed, 0, context
        self.eval_every, self._stop_after = eval_every, stop_after
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.evaluated: list[int] = []

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        return {"num_steps": self.num_steps, "data": {"seed": self.seed}}

    def train_step(self) -> Mapping[str, float]:
        if self.step == self._stop_after:
            raise KeyboardInterrupt
        x = torch.from_numpy(
            np.random.default_rng([self.seed, self.step, self._context.rank]).normal(size=(8, 3))
        ).float()
        self.optimizer.zero_grad()
        loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
        check_finite({"loss": float(loss.detach())}, step=self.step + 1)
        loss.backward()
        self._context.average_gradients(self.model.parameters())
        self.optimizer.step()
        self.step += 1
        return {"loss": float(loss.detach())}

    def evaluate(self) -> Mapping[str, float] | None:
        self.evaluated.append(self.step)
        return {"norm": float(self.model.weight.detach().norm())} if self.step != 2 else None

    def format_metrics(self, metrics: Mapping[str, float]) -> str:
        return f"step {self.step}"

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def finish(self, out_dir: Path) -> None:
        torch.save(self.model.state_dict(), out_dir / "model.pt")
