"""Controllers: two small networks that choose a plan for a request.

- `budget_encoding`: a latency budget as a vector
- `language_features`: the mean word embedding of a prompt
- `plan_distribution`: the joint distribution over plans
- `networks`: the networks of both stages
- `controllers`: both stages as one module, with its file format
- `cpu_policy`: inference for one request on the CPU
"""
