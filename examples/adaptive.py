# %% [markdown]
# # Meet a latency budget per request
#
# A model that answers questions about images takes about the same time for every request, although some
# clients can wait and others cannot. SparseFlow runs a part of the model for each request, a *plan*: fewer
# image tokens, fewer experts per token, or fewer blocks. It predicts the latency of every plan and chooses
# the most accurate plan that meets the budget of the request.
#
# The model is `digits`, a small mixture of experts that the package contains. The image consists of
# handwritten digits of scikit-learn. The tutorial needs `pip install 'sparseflow[adaptive]' matplotlib`.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from transformers.utils import logging

from sparseflow import adaptive

logging.disable_progress_bar()
out_dir = Path(tempfile.mkdtemp())

# %% [markdown]
# ## Load the model and make requests
#
# `open_folder` reads a directory that transformers wrote. The image shows nine digits, and a request asks for
# one of them.

# %%
model_dir = adaptive.get_pretrained_dir("digits")
folder = adaptive.open_folder(model_dir)

pixels, labels = load_digits(return_X_y=True)
digits = pixels[10:19].reshape(3, 3, 8, 8).transpose(0, 2, 1, 3).reshape(24, 24)
Image.fromarray((digits / 16 * 255).astype(np.uint8)).resize((72, 72)).save(out_dir / "digits.png")

names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
answers = [names[label] for label in labels[10:19]]
requests = [
    folder.prompt(f"what is at row {row} column {column} ?", images=[out_dir / "digits.png"]).inputs
    for row in (1, 2, 3)
    for column in (1, 2, 3)
]
print(f"{len(requests)} requests of {requests[0]['input_ids'].shape[1]} tokens")

# %% [markdown]
# ## Measure plans
#
# `profile_model` measures some plans on this machine and fits a predictor of the latency of all plans. This
# profile is small; a server needs more plans and rounds. `importance.json` says which blocks can be skipped.

# %%
config = adaptive.ModelProfileConfig(
    importance=model_dir / "importance.json", num_plans=8, num_text_plans=0, rounds=3, decode_steps=2,
    loads=[0.0], batch_sizes=[1], max_batch_size=1,
)  # fmt: skip
profile = adaptive.profile_model(folder, out_dir / "profile.parquet", config)
print(f"{profile.requests} requests measured")
print(f"error of predicted medians on held-out plans and lengths: {profile.held_out_error:.0%}")

# %% [markdown]
# ## Answer within budgets
#
# `attach` adds the choice of plans to the model. `plan_quality.json` has the accuracy of each plan on other
# questions. Without a budget the full model runs, and its answer equals that of transformers. Then each
# question is asked with several budgets.

# %%
expected = folder.model.generate(**requests[0], max_new_tokens=2)
model = adaptive.attach(folder.model, profile=profile.predictor, plan_quality=model_dir / "plan_quality.json")
model.warm_up(**requests[0])
full = [model.generate(**request, max_new_tokens=2) for request in requests]
assert torch.equal(full[0].sequences, expected)

full_ms = float(np.median([result.measured_ms for result in full]))
results = {}
for budget_ms in (0.5 * full_ms, 0.75 * full_ms, full_ms, 1.5 * full_ms):
    results[budget_ms] = [
        model.generate(**request, latency_budget_ms=budget_ms, max_new_tokens=2) for request in requests
    ]
    texts = [
        folder.tokenizer.decode(result.new_tokens[0], skip_special_tokens=True)
        for result in results[budget_ms]
    ]
    in_time = sum(bool(result.budget_met) for result in results[budget_ms])
    correct = sum(text == answer for text, answer in zip(texts, answers, strict=True))
    plan = results[budget_ms][-1].plan
    print(
        f"budget {budget_ms:.0f} ms: {in_time} of 9 in time, {correct} of 9 correct; "
        f"last plan: {len(plan.blocks)} blocks, {plan.top_k} experts per token"
    )
model.detach()

# %% [markdown]
# Each point of the chart is a request. Requests below the dashed line meet their budget.

# %%
figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
for budget_ms, answered in results.items():
    axes.plot([budget_ms] * 9, [result.measured_ms for result in answered], "o", color="C0", alpha=0.5)
axes.plot([0, 1.6 * full_ms], [0, 1.6 * full_ms], color="gray", linestyle="--", label="budget")
axes.axhline(full_ms, color="C1", label="full model, median")
axes.set(xlabel="budget, ms", ylabel="latency, ms", ylim=(0, None))
axes.legend()
plt.show()

# %% [markdown]
# ## Your own model
#
# Replace `model_dir` by the directory of an OLMoE, Mixtral, Qwen3-MoE, Qwen3-VL-MoE or LLaVA model, and leave
# `importance` and `plan_quality` out until you have measured them with your own questions.
#
# ## What to read next
#
# - [Serve a model](../how-to/serve-a-model.md): your model, your questions, and an OpenAI client
# - [How adaptive inference works](../explanation/adaptive.md), and [its limits](../benchmarks/adaptive.md)
