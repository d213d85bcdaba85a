"""Policies: which plan a request gets.

- `outcomes`: tables of accuracy and latency of every plan on every sample
- `policies`: controllers, baselines and the oracle
- `selector`: plan selection for requests with a latency budget
- `evaluation`: accuracy, attainment and regret of policies
"""
