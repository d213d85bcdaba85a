"""Evaluation: accuracy by clips and videos, throughput, and a latency model."""
