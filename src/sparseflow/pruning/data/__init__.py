"""What classifiers of video are trained and judged on: UCF-101 in its official layout, and moving digits."""
