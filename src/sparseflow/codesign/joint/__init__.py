"""Joint."""
