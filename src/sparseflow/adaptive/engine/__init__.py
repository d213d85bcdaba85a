"""Serving engine with static key-value slots, CUDA graphs and plan-aware batches.

- `requests`: requests, handles, plan decisions and sampling
- `prefill`: prompts to logits of the first token
- `cache`, `decode`, `batch`: key-value slots, decode steps, and the requests that decode together
- `admission`, `scheduler`, `engine`: from the queue to a batch, and the thread that owns the model
- `graphs`, `kernel_patcher`: CUDA graphs, and kernels in place of modules while they are captured
- `generate`: generation without and with an engine
- `metrics`: counters and utilization
"""
