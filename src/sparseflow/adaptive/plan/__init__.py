"""Plans and how they run on a model.

- `space`: plans, and the space of all plans of a model
- `adapter`: interface that an architecture implements so that plans can run on it
- `execution`: the state of one forward pass under a plan, and of its key-value cache
- `runtime`: forward hooks that run a plan
"""
