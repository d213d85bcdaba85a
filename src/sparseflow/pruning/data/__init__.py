"""Datasets: video decoding, UCF-101, moving digits, and batches of clips."""
