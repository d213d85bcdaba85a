"""Report pages and figures of a co-design."""
