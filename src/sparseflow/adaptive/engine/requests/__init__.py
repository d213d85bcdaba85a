"""Requests to an engine.

- `request`: requests, plan decisions and results
- `plan_request`: one request's exchange with the policy that decides its plan
- `handle`: the caller's view of a running request
- `sampling`: sampling of tokens
"""
